//! Memory of a model in bytes, computed from its spec and never measured.

use folio_device::TensorKind;
use folio_formats::Format;

use crate::{DecoderLimits, FfnSpec, LayerSpec, ModelSpec, NormPlacement, Result, activations::Widths, decoder};

/// Bytes on the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    pub weights: u64,
    pub kv: u64,
    pub activations: u64,
}

impl MemoryUse {
    pub fn total(&self) -> u64 {
        self.weights + self.kv + self.activations
    }
}

/// Numbers of a model's learned parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parameters {
    /// A tied output matrix is counted once.
    pub total: u64,
    /// Parameters that take part in one token: only the chosen experts count.
    pub active: u64,
    /// Parameters in matrices, the only ones that a storage format affects.
    pub in_matrices: u64,
}

pub fn parameters(spec: &ModelSpec) -> Parameters {
    let vocabulary = (spec.vocab_size * spec.hidden) as u64;
    let outside = vocabulary * if spec.tied_head { 1 } else { 2 };
    let mut sum = Parameters { total: spec.hidden as u64, active: spec.hidden as u64, in_matrices: 0 };
    sum.add(outside, outside);
    for layer in &spec.layers {
        add_attention(&mut sum, spec, layer);
        add_ffn(&mut sum, spec, layer);
        let NormPlacement { before_attention, after_attention, before_ffn, after_ffn } = layer.norms;
        let norms = [before_attention, after_attention, before_ffn, after_ffn].iter().filter(|norm| **norm).count();
        sum.add_vector(norms * spec.hidden);
    }
    sum
}

impl Parameters {
    fn add(&mut self, matrices: u64, active: u64) {
        // The product of sizes in a configuration may be beyond any file.
        self.total = self.total.saturating_add(matrices);
        self.in_matrices = self.in_matrices.saturating_add(matrices);
        self.active = self.active.saturating_add(active);
    }

    fn add_vector(&mut self, values: usize) {
        self.add_vectors(values as u64, values as u64);
    }

    fn add_vectors(&mut self, total: u64, active: u64) {
        self.total = self.total.saturating_add(total);
        self.active = self.active.saturating_add(active);
    }
}

fn add_attention(sum: &mut Parameters, spec: &ModelSpec, layer: &LayerSpec) {
    let attention = &layer.attention;
    let matrices = (spec.hidden * (attention.qkv_width() + attention.q_width())) as u64;
    sum.add(matrices, matrices);
    sum.add_vector(if attention.qkv_bias { attention.qkv_width() } else { 0 });
    sum.add_vector(if attention.output_bias { spec.hidden } else { 0 });
    sum.add_vector(if attention.sinks { attention.heads } else { 0 });
    sum.add_vector(match attention.qk_norm {
        Some(folio_device::NormSpan::Head) => 2 * attention.head_dim,
        Some(folio_device::NormSpan::Row) => attention.q_width() + attention.kv_width(),
        None => 0,
    });
}

fn add_ffn(sum: &mut Parameters, spec: &ModelSpec, layer: &LayerSpec) {
    let three = |inter: usize| (3 * spec.hidden * inter) as u64;
    match &layer.ffn {
        FfnSpec::Dense { inter, bias, .. } => {
            sum.add(three(*inter), three(*inter));
            sum.add_vector(if *bias { 2 * inter + spec.hidden } else { 0 });
        }
        FfnSpec::Experts(experts) => {
            let router = (spec.hidden * experts.experts) as u64;
            sum.add(router, router);
            sum.add(three(experts.inter) * experts.experts as u64, three(experts.inter) * experts.top_k as u64);
            sum.add_vector(if experts.router_bias { experts.experts } else { 0 });
            sum.add_vector(if experts.choice_bias { experts.experts } else { 0 });
            if experts.expert_bias {
                let each = (2 * experts.inter + spec.hidden) as u64;
                sum.add_vectors(each * experts.experts as u64, each * experts.top_k as u64);
            }
            if let Some(shared) = &experts.shared {
                let matrices = three(shared.inter) + if shared.gated { spec.hidden as u64 } else { 0 };
                sum.add(matrices, matrices);
            }
        }
    }
}

/// Bytes of all weights with every matrix in one format, vectors in f32. Assumes that rows are
/// whole blocks.
pub fn weight_bytes(spec: &ModelSpec, format: Format) -> Result<u64> {
    // Every format's block divides 256, so this is its exact rate.
    let per_256 = format.bytes_for(256)?;
    let Parameters { total, in_matrices, .. } = parameters(spec);
    let matrices = u128::from(in_matrices) * u128::from(per_256) / 256;
    Ok(u64::try_from(matrices).unwrap_or(u64::MAX).saturating_add((total - in_matrices) * 4))
}

/// Bytes of a step's tensors, if a value of each kind takes `value` bytes.
pub fn activation_bytes(spec: &ModelSpec, limits: &DecoderLimits, value: impl Fn(TensorKind) -> usize) -> u64 {
    let per_output = (value(TensorKind::Stream) + value(TensorKind::Activation)) * spec.hidden
        + value(TensorKind::Scores) * spec.vocab_size;
    let per_token = Widths::of(spec).row_bytes(spec.hidden, value);
    limits.rows as u64 * per_token as u64 + limits.outputs as u64 * per_output as u64
}

/// Bytes of paged keys and values, all groups.
pub fn kv_bytes(spec: &ModelSpec, limits: &DecoderLimits) -> u64 {
    decoder::kv_shapes(spec, limits).map(|shape| shape.block_bytes().saturating_mul(shape.blocks as u64)).sum()
}
