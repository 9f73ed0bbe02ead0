//! Arguments of operations that are made of several values and handles, generic over the handle
//! family.

use std::borrow::Borrow;

use crate::{Handles, Wraps};

/// A norm that stands before a product.
#[derive(Debug)]
pub struct Norm<'a, H: Handles> {
    pub weight: &'a H::Vector,
    pub eps: f32,
}

impl<'a, H: Handles> Norm<'a, H> {
    pub(super) fn inner<B: Handles>(self) -> Norm<'a, B>
    where
        H: Wraps<B>,
    {
        Norm { weight: self.weight.borrow(), eps: self.eps }
    }
}

/// The weight and the bias of a product.
#[derive(Debug)]
pub struct Product<'a, H: Handles> {
    pub weight: &'a H::Weight,
    pub bias: Option<&'a H::Vector>,
}

impl<'a, H: Handles> Product<'a, H> {
    pub(super) fn inner<B: Handles>(self) -> Product<'a, B>
    where
        H: Wraps<B>,
    {
        Product { weight: self.weight.borrow(), bias: self.bias.map(Borrow::borrow) }
    }
}

/// The values that a q or k norm runs over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormSpan {
    /// Each head by itself; one weight of `head_dim` shared by all heads.
    Head,
    /// All heads of the row together; a weight as wide as the projection.
    Row,
}

#[derive(Debug)]
pub struct PrepareQkv<'a, H: Handles> {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Layer group whose slots are written.
    pub group: usize,
    /// Rope number, or none for layers without positions. Rotates the first `2 * inv_freq.len()`
    /// values of each head, value `i` paired with value `i + inv_freq.len()`.
    pub rope: Option<usize>,
    pub q_norm: Option<&'a H::Vector>,
    pub k_norm: Option<&'a H::Vector>,
    pub norm_span: NormSpan,
    pub eps: f32,
}

impl<'a, H: Handles> PrepareQkv<'a, H> {
    pub(super) fn inner<B: Handles>(self) -> PrepareQkv<'a, B>
    where
        H: Wraps<B>,
    {
        let Self { heads, kv_heads, head_dim, group, rope, q_norm, k_norm, norm_span, eps } = self;
        let (q_norm, k_norm) = (q_norm.map(Borrow::borrow), k_norm.map(Borrow::borrow));
        PrepareQkv { heads, kv_heads, head_dim, group, rope, q_norm, k_norm, norm_span, eps }
    }
}

#[derive(Debug)]
pub struct Attention<'a, H: Handles> {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub group: usize,
    /// Scores are multiplied by this before cap and softmax.
    pub scale: f32,
    /// A row at position p sees positions p-window+1 ..= p.
    pub window: Option<usize>,
    /// Scores become `cap * tanh(score / cap)`.
    pub soft_cap: Option<f32>,
    /// One logit a head that takes part in the softmax and adds nothing.
    pub sinks: Option<&'a H::Vector>,
}

impl<'a, H: Handles> Attention<'a, H> {
    pub(super) fn inner<B: Handles>(self) -> Attention<'a, B>
    where
        H: Wraps<B>,
    {
        let Self { heads, kv_heads, head_dim, group, scale, window, soft_cap, sinks } = self;
        let sinks = sinks.map(Borrow::borrow);
        Attention { heads, kv_heads, head_dim, group, scale, window, soft_cap, sinks }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    Silu,
    Gelu,
    GeluTanh,
    /// gpt-oss: gate clamped above, up clamped both ways at `limit`; `(up + 1) * gate *
    /// sigmoid(alpha * gate)`.
    SwigluClamped {
        alpha: f32,
        limit: f32,
    },
}

/// How router logits become expert weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RouterScore {
    /// Softmax over all experts, then the best k.
    Softmax,
    /// The best k logits, then softmax over those.
    SoftmaxOfBest,
    /// Sigmoid of each logit.
    Sigmoid,
}

#[derive(Debug)]
pub struct Routing<'a, H: Handles> {
    pub score: RouterScore,
    pub top_k: usize,
    /// Divide the chosen weights by their sum.
    pub normalize: bool,
    /// Multiply the chosen weights.
    pub scale: f32,
    /// Added to the scores for the choice only, never to the weight.
    pub choice_bias: Option<&'a H::Vector>,
    /// Number of groups of experts; the best `groups_kept` of them (by the sum of their two
    /// best scores) compete.
    pub groups: usize,
    pub groups_kept: usize,
    pub activation: Activation,
}

impl<'a, H: Handles> Routing<'a, H> {
    pub(super) fn inner<B: Handles>(self) -> Routing<'a, B>
    where
        H: Wraps<B>,
    {
        let bias = self.choice_bias.map(Borrow::borrow);
        self.with_choice_bias(bias)
    }

    /// The same with another vector, of any backend.
    pub fn with_choice_bias<'b, B: Handles>(&self, choice_bias: Option<&'b B::Vector>) -> Routing<'b, B> {
        let &Self { score, top_k, normalize, scale, choice_bias: _, groups, groups_kept, activation } = self;
        Routing { score, top_k, normalize, scale, choice_bias, groups, groups_kept, activation }
    }
}
