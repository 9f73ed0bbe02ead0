//! The one decoder layer of an EAGLE head, with its own keys and values. Its sizes are those of its
//! tensors; the scaling and rotation of heads are the decoder's.

use folio_device::{Activation, Attention, Backend, KvShape, NormSpan, PrepareQkv, TensorKind};

use super::stored::{Room, Stored};
use crate::{AttentionSpec, DecoderLimits, Result, linear::Linear};

pub(super) struct DraftLayer<B: Backend> {
    spec: AttentionSpec,
    eps: f32,
    qkv: Linear<B>,
    output: Linear<B>,
    norm_before_ffn: B::Vector,
    gate_up: Linear<B>,
    down: Linear<B>,
    kv: B::Kv,
    acts: Acts<B>,
}

/// Tensors of a step, all of them `[rows, ...]`.
struct Acts<B: Backend> {
    qkv: B::Tensor,
    attended: B::Tensor,
    branch: B::Tensor,
    normed: B::Tensor,
    gate_up: B::Tensor,
    gated: B::Tensor,
}

/// Facts that a layer's sizes follow from, besides its tensors.
pub(super) struct LayerShape<'a> {
    /// Everything in front of the layer's own names.
    pub prefix: &'a str,
    pub hidden: usize,
    /// Width of the input of queries, keys and values.
    pub inputs: usize,
    pub eps: f32,
    /// Attention of the decoder's layers in the same group.
    pub like: &'a AttentionSpec,
}

impl<B: Backend> DraftLayer<B> {
    /// `limits` are the head's own: one group of blocks.
    pub fn load(
        room: &mut Room<'_, B>,
        stored: &Stored<'_>,
        shape: &LayerShape<'_>,
        limits: &DecoderLimits,
    ) -> Result<Self> {
        let LayerShape { prefix, hidden, inputs, eps, like } = *shape;
        let stem = |name: &str| format!("{prefix}{name}");
        let [q, k, v] = ["q_proj", "k_proj", "v_proj"].map(|name| stem(&format!("self_attn.{name}")));
        let num_heads = |stem: &str| -> Result<usize> {
            let (name, head_dim) = (format!("{stem}.weight"), like.head_dim);
            let rows = stored.outputs(&name)?;
            match rows > 0 && rows.is_multiple_of(head_dim) {
                true => Ok(rows / head_dim),
                false => Err(stored.shape_error(&name, &[head_dim, inputs], &[rows, inputs])),
            }
        };
        let (heads, kv_heads) = (num_heads(&q)?, num_heads(&k)?);
        if !heads.is_multiple_of(kv_heads) {
            return Err(stored.shape_error(&q, &[kv_heads * like.head_dim, inputs], &[heads * like.head_dim, inputs]));
        }
        let rope = like.rope.map(|_| 0);
        let spec = AttentionSpec { heads, kv_heads, rope, window: None, soft_cap: None, ..like.clone() };
        let inter = stored.outputs(&stem("mlp.gate_proj.weight"))?;

        let backend = &mut *room.backend;
        let rows = [(q, spec.q_width()), (k, spec.kv_width()), (v, spec.kv_width())];
        let qkv = stored.stacked(backend, &rows, inputs)?;
        let output = stored.linear(backend, &stem("self_attn.o_proj"), hidden, spec.q_width())?;
        let norm_before_ffn = stored.norm(backend, &stem("post_attention_layernorm"), hidden)?;
        let both = [(stem("mlp.gate_proj"), inter), (stem("mlp.up_proj"), inter)];
        let gate_up = stored.stacked(backend, &both, hidden)?;
        let down = stored.linear(backend, &stem("mlp.down_proj"), hidden, inter)?;
        let kv = backend.kv(kv_shape(&spec, limits))?;
        let mut tensor = |cols| room.tensor(limits.rows, cols, TensorKind::Activation);
        let acts = Acts {
            qkv: tensor(spec.qkv_width())?,
            attended: tensor(spec.q_width())?,
            branch: tensor(hidden)?,
            normed: tensor(hidden)?,
            gate_up: tensor(2 * inter)?,
            gated: tensor(inter)?,
        };
        Ok(Self { spec, eps, qkv, output, norm_before_ffn, gate_up, down, kv, acts })
    }

    /// `x` is the input of queries, keys and values, if it is not `state`, to which both branches
    /// are added.
    pub fn forward(
        &mut self,
        backend: &mut B,
        state: &mut B::Tensor,
        x: Option<&B::Tensor>,
        inputs: &B::Inputs,
        rows: usize,
    ) {
        let Self { spec, eps, kv, acts, .. } = self;
        let AttentionSpec { heads, kv_heads, head_dim, .. } = *spec;
        self.qkv.forward(backend, &mut acts.qkv, x.unwrap_or(&*state), rows);
        let prepare = PrepareQkv {
            heads,
            kv_heads,
            head_dim,
            group: 0,
            rope: spec.rope,
            q_norm: None,
            k_norm: None,
            norm_span: NormSpan::Head,
            eps: *eps,
        };
        backend.prepare_qkv(&mut acts.qkv, kv, 0, prepare, inputs);
        let (scale, window, soft_cap) = (spec.scale, spec.window, spec.soft_cap);
        let attention = Attention { heads, kv_heads, head_dim, group: 0, scale, window, soft_cap, sinks: None };
        backend.attention(&mut acts.attended, &acts.qkv, kv, 0, attention, inputs);
        self.output.forward(backend, &mut acts.branch, &acts.attended, rows);
        backend.add_rms_norm(&mut acts.normed, state, &acts.branch, 1.0, &self.norm_before_ffn, *eps, rows);
        let (gate_up, product) = (&mut acts.gate_up, self.gate_up.product());
        backend.linear_gated(&mut acts.gated, gate_up, &acts.normed, product, Activation::Silu, rows);
        self.down.forward(backend, &mut acts.branch, &acts.gated, rows);
        backend.add(state, &acts.branch, 1.0, rows);
    }

    pub fn kv(&mut self) -> &mut B::Kv {
        &mut self.kv
    }

    pub fn kv_bytes(&self, limits: &DecoderLimits) -> u64 {
        let shape = kv_shape(&self.spec, limits);
        shape.block_bytes() * shape.blocks as u64
    }

    pub fn weight_bytes(&self, backend: &B) -> u64 {
        [&self.qkv, &self.output, &self.gate_up, &self.down].iter().map(|linear| linear.bytes(backend)).sum()
    }
}

fn kv_shape(spec: &AttentionSpec, limits: &DecoderLimits) -> KvShape {
    let (blocks, format) = (limits.blocks[0], limits.kv_format);
    KvShape { layers: 1, blocks, kv_heads: spec.kv_heads, head_dim: spec.head_dim, format }
}
