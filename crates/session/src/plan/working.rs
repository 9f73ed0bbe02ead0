//! Bytes besides matrices, activations and keys and values: norms and biases, what the device hears
//! of a step, scratch of its kernels for the largest step and, on the CPU, the logits as they are
//! sampled from. Upper bounds.

use folio_device::InputLimits;
use folio_device::cuda::{ExpertsShape, WorkingShape, working_bytes};
use folio_model::{DecoderLimits, FfnSpec, ModelSpec};

use super::weights::WeightBytes;
use crate::target::{Gpu, Target};

/// Partial sums of attention over long contexts.
const ATTENTION_PARTIALS: u64 = 16 << 20;
/// Work lists of attention: a tile a row, an item a row and a table entry.
const ATTENTION_TILE: u64 = 32;
const ATTENTION_ITEM: u64 = 20;
const SPAN: u64 = 12;

/// On the CPU, the weights' vectors not included.
fn on_cpu(spec: &ModelSpec, limits: &DecoderLimits, widest_input: usize) -> u64 {
    let sums = [inputs(spec, limits), scratch(spec, limits, widest_input), host_logits(spec, limits)];
    sums.iter().fold(0, |sum: u64, &part| sum.saturating_add(part))
}

/// On a GPU, as its backend counts them.
fn on_gpu(spec: &ModelSpec, limits: &DecoderLimits, weights: &WeightBytes, gpu: &Gpu) -> u64 {
    let widest = spec.layers.iter().map(|layer| &layer.attention).max_by_key(|a| a.heads * (a.head_dim + 4));
    let experts = spec.layers.iter().filter_map(|layer| match &layer.ffn {
        FfnSpec::Dense { .. } => None,
        FfnSpec::Experts(e) => Some(ExpertsShape { experts: e.experts, top_k: e.top_k, inter: e.inter }),
    });
    let shape = WorkingShape {
        hidden: spec.hidden,
        heads: widest.map_or(0, |a| a.heads),
        head_dim: widest.map_or(0, |a| a.head_dim),
        widest_input: weights.widest_input,
        widened: weights.widened,
        experts: experts.max_by_key(|e| e.top_k * (2 * spec.hidden + 3 * e.inter)),
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

fn inputs(spec: &ModelSpec, limits: &DecoderLimits) -> u64 {
    let InputLimits { rows, spans, outputs: _, table_entries, groups, ropes, rope_pairs } = input_limits(spec, limits);
    let [rows, spans, entries] = [rows, spans, table_entries].map(|count| count as u64);
    let ids = 24 * rows + SPAN * spans;
    let tables = groups as u64 * 4 * (rows + spans + entries);
    let angles = 8 * (ropes * rope_pairs) as u64 * rows;
    let attention = ATTENTION_TILE * rows + ATTENTION_ITEM * (rows + entries) + ATTENTION_PARTIALS;
    ids + tables + angles + attention
}

/// Rows packed for a product; for experts, all rows of all chosen ones at once.
fn scratch(spec: &ModelSpec, limits: &DecoderLimits, widest_input: usize) -> u64 {
    let rows = limits.rows as u64;
    let picked = limits.outputs as u64;
    let dense = 4 * rows.max(picked) * widest_input as u64;
    let experts = spec.layers.iter().map(|layer| match &layer.ffn {
        FfnSpec::Dense { .. } => 0,
        FfnSpec::Experts(e) => {
            let slot = e.inter.max(spec.hidden) + 3 * e.inter + spec.hidden;
            let routing = 4 * (2 * e.experts + 4 * e.top_k);
            rows * (4 * (e.top_k * slot) + routing) as u64
        }
    });
    dense + experts.max().unwrap_or(0)
}

fn host_logits(spec: &ModelSpec, limits: &DecoderLimits) -> u64 {
    4 * (limits.outputs as u64) * spec.vocab_size as u64
}
