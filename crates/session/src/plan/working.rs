//! Bytes besides matrices, activations and keys and values: norms and biases, what the device hears
//! of a step, scratch of its kernels for the largest step and, on the CPU, the logits as they are
//! sampled from. Upper bounds.

use folio_device::cuda::{ExpertsShape, WorkingShape, working_bytes};
use folio_device::{InputLimits, cpu};
use folio_model::{DecoderLimits, FfnSpec, ModelSpec};

use super::weights::WeightBytes;
use crate::target::{Gpu, Target};

/// On the CPU, the weights' vectors not included.
fn on_cpu(spec: &ModelSpec, limits: &DecoderLimits, widest_input: usize) -> u64 {
    let experts: Vec<ExpertsShape> = experts(spec).collect();
    let shape = cpu::WorkingShape { hidden: spec.hidden, widest_input, experts: &experts };
    cpu::working_bytes(&shape, &input_limits(spec, limits)).saturating_add(host_logits(spec, limits))
}

/// The experts of each layer that has any.
fn experts(spec: &ModelSpec) -> impl Iterator<Item = ExpertsShape> {
    spec.layers.iter().filter_map(|layer| match &layer.ffn {
        FfnSpec::Dense { .. } => None,
        FfnSpec::Experts(e) => Some(ExpertsShape { experts: e.experts, top_k: e.top_k, inter: e.inter }),
    })
}

/// On a GPU, as its backend counts them.
fn on_gpu(spec: &ModelSpec, limits: &DecoderLimits, weights: &WeightBytes, gpu: &Gpu) -> u64 {
    let widest = spec.layers.iter().map(|layer| &layer.attention).max_by_key(|a| a.heads * (a.head_dim + 4));
    let shape = WorkingShape {
        hidden: spec.hidden,
        heads: widest.map_or(0, |a| a.heads),
        head_dim: widest.map_or(0, |a| a.head_dim),
        widest_input: weights.widest_input,
        widened: weights.widened,
        experts: experts(spec).max_by_key(|e| e.top_k * (2 * spec.hidden + 3 * e.inter)),
    };
    working_bytes(&shape, &input_limits(spec, limits), &gpu.config())
}

pub fn bytes(spec: &ModelSpec, limits: &DecoderLimits, weights: &WeightBytes, target: &Target) -> u64 {
    let step = match target {
        Target::Cpu(_) => on_cpu(spec, limits, weights.widest_input),
        Target::Cuda(gpu) => on_gpu(spec, limits, weights, gpu),
    };
    step.saturating_add(weights.vectors)
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

fn host_logits(spec: &ModelSpec, limits: &DecoderLimits) -> u64 {
    4 * (limits.outputs as u64) * spec.vocab_size as u64
}
