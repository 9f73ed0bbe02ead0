//! Bytes besides matrices, activations and keys and values: norms and biases, what the device hears
//! of a step, scratch of its kernels for the largest step and, on the CPU, the logits as they are
//! sampled from. Upper bounds.

use folio_device::InputLimits;
use folio_device::cuda::ExpertsShape;
use folio_model::{DecoderLimits, FfnSpec, ModelSpec};

use super::weights::WeightBytes;
use crate::device::{Device, StepShape};

/// Bytes of the largest step on a device, and of the model's vectors.
pub fn bytes(spec: &ModelSpec, limits: &DecoderLimits, weights: &WeightBytes, device: &dyn Device) -> u64 {
    let widest = spec.layers.iter().map(|layer| &layer.attention).max_by_key(|a| a.heads * (a.head_dim + 4));
    let experts = spec.layers.iter().filter_map(|layer| match &layer.ffn {
        FfnSpec::Dense { .. } => None,
        FfnSpec::Experts(e) => Some(ExpertsShape { experts: e.experts, top_k: e.top_k, inter: e.inter }),
    });
    let shape = StepShape {
        hidden: spec.hidden,
        vocab_size: spec.vocab_size,
        heads: widest.map_or(0, |a| a.heads),
        head_dim: widest.map_or(0, |a| a.head_dim),
        widest_input: weights.widest_input,
        widened: weights.widened,
        experts: &experts.collect::<Vec<_>>(),
    };
    device.working_bytes(&shape, &input_limits(spec, limits)).saturating_add(weights.vectors)
}

fn input_limits(spec: &ModelSpec, limits: &DecoderLimits) -> InputLimits {
    InputLimits {
        rows: limits.rows,
        spans: limits.spans,
        outputs: limits.outputs,
        table_entries: limits.table_entries,
        groups: limits.blocks.len(),
        ropes: spec.ropes.len(),
        rope_pairs: spec.ropes.iter().map(|rope| rope.inv_freq.len()).max().unwrap_or(0),
    }
}
