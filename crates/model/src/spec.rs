//! A decoder's computation, as numbers and switches. Families turn their configuration into a
//! [`ModelSpec`]; the decoder runs any of them and does not depend on the family.

use folio_device::{Activation, KvFormat, KvShape, NormSpan, RouterScore};

#[derive(Clone, Debug, PartialEq)]
pub struct ModelSpec {
    /// For display: `llama`, `qwen3_moe`, ...
    pub family: &'static str,
    pub vocab_size: usize,
    pub hidden: usize,
    /// The longest sequence, prompt and answer together.
    pub max_context: usize,
    pub layers: Vec<LayerSpec>,
    /// Distinct position encodings; layers name them by index.
    pub ropes: Vec<RopeSpec>,
    /// Token embeddings are multiplied by this.
    pub embed_scale: f32,
    pub norm_eps: f32,
    /// Added to every stored norm weight (Gemma stores `w - 1`).
    pub norm_offset: f32,
    /// Whether the output matrix is the embedding table.
    pub tied_head: bool,
    pub logit_scale: f32,
    pub logit_soft_cap: Option<f32>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct LayerSpec {
    pub attention: AttentionSpec,
    pub ffn: FfnSpec,
    pub norms: NormPlacement,
    /// Factor of a sub-layer's output before it is added to the residual stream.
    pub residual_scale: f32,
}

/// Which of the four norms around the two sub-layers exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NormPlacement {
    pub before_attention: bool,
    pub after_attention: bool,
    pub before_ffn: bool,
    pub after_ffn: bool,
}

impl NormPlacement {
    pub const PRE: Self = Self { before_attention: true, after_attention: false, before_ffn: true, after_ffn: false };
    pub const POST: Self = Self { before_attention: false, after_attention: true, before_ffn: false, after_ffn: true };
    pub const FOUR: Self = Self { before_attention: true, after_attention: true, before_ffn: true, after_ffn: true };
}

#[derive(Clone, Debug, PartialEq)]
pub struct AttentionSpec {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Attention scores are multiplied by this.
    pub scale: f32,
    /// Index into [`ModelSpec::ropes`], or none.
    pub rope: Option<usize>,
    /// Number of positions that a token sees, itself included.
    pub window: Option<usize>,
    pub soft_cap: Option<f32>,
    /// Whether each head has one learned logit that takes part in the softmax.
    pub sinks: bool,
    pub qk_norm: Option<NormSpan>,
    pub qkv_bias: bool,
    pub output_bias: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub enum FfnSpec {
    Dense { inter: usize, activation: Activation, bias: bool },
    Experts(ExpertsSpec),
}

#[derive(Clone, Debug, PartialEq)]
pub struct ExpertsSpec {
    pub experts: usize,
    pub top_k: usize,
    pub inter: usize,
    pub activation: Activation,
    pub score: RouterScore,
    pub normalize: bool,
    pub scale: f32,
    pub groups: usize,
    pub groups_kept: usize,
    pub router_bias: bool,
    /// Whether a stored bias affects the choice of experts, but not their weights.
    pub choice_bias: bool,
    pub expert_bias: bool,
    /// A dense expert that every token takes, in some models behind a sigmoid gate.
    pub shared: Option<SharedExpertSpec>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct SharedExpertSpec {
    pub inter: usize,
    pub gated: bool,
}

/// A table of inverse frequencies: every kind of scaling becomes one at load.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeSpec {
    /// One per rotated pair: `2 * inv_freq.len()` values of each head are rotated.
    pub inv_freq: Vec<f32>,
    /// Cosines and sines are multiplied by this.
    pub magnitude: f32,
}

/// Layers that share block tables: same window, same shape of keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvGroupSpec {
    pub layers: Vec<usize>,
    pub window: Option<usize>,
    pub kv_heads: usize,
    pub head_dim: usize,
}

impl KvGroupSpec {
    /// The group's paged storage.
    pub fn shape(&self, blocks: usize, format: KvFormat) -> KvShape {
        let (layers, kv_heads, head_dim) = (self.layers.len(), self.kv_heads, self.head_dim);
        KvShape { layers, blocks, kv_heads, head_dim, format }
    }
}

impl ModelSpec {
    /// The layer groups, in order of first appearance; every layer is in exactly one.
    pub fn kv_groups(&self) -> Vec<KvGroupSpec> {
        let mut groups: Vec<KvGroupSpec> = Vec::new();
        for (index, layer) in self.layers.iter().enumerate() {
            let a = &layer.attention;
            let same =
                |g: &&mut KvGroupSpec| g.window == a.window && g.kv_heads == a.kv_heads && g.head_dim == a.head_dim;
            match groups.iter_mut().find(same) {
                Some(group) => group.layers.push(index),
                None => groups.push(KvGroupSpec {
                    layers: vec![index],
                    window: a.window,
                    kv_heads: a.kv_heads,
                    head_dim: a.head_dim,
                }),
            }
        }
        groups
    }

    /// Bytes of keys and values a token adds: 2 x layers x kv_heads x bytes of a head, scales
    /// included.
    pub fn kv_bytes_per_token(&self, format: KvFormat) -> u64 {
        self.kv_groups().iter().map(|group| group.shape(1, format).token_bytes()).fold(0, u64::saturating_add)
    }
}
