//! Bytes that the backend takes besides weights, tensors, and keys and values, computed before any
//! of them is allocated.
//!
//! Each part is counted as it is later requested, for the largest possible step. Not counted are
//! the driver's own context, recorded steps and the rounding of allocations, for which a plan
//! leaves a share of memory, and draws with more biases and penalties than usual.

use super::attention::partial_bytes;
use super::experts::{list_bytes, row_bytes};
use super::gemm90::Gemm90;
use super::inputs::device_bytes;
use super::kv::PAIR_BYTES;
use super::products::WIDENED_BYTES;
use super::{CudaConfig, Precision, blas, linear_coded, sampling};
use crate::InputLimits;

/// Sizes of a model that its working memory depends on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkingShape {
    pub hidden: usize,
    /// From the layer with the most heads times their width.
    pub heads: usize,
    pub head_dim: usize,
    /// Largest over all matrices.
    pub widest_input: usize,
    /// Memory for widened quantized matrices: the largest one, and each that was larger than all
    /// before it.
    pub widened: Widened,
    /// From the layer with the largest experts.
    pub experts: Option<ExpertsShape>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertsShape {
    pub experts: usize,
    pub top_k: usize,
    pub inter: usize,
}

/// Room for a matrix's widened values, which grows while weights are loaded; earlier buffers stay
/// allocated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Widened {
    largest: u64,
    all: u64,
}

impl Widened {
    /// Counts quantized weights of `values` values.
    pub fn add(&mut self, values: usize) {
        let bytes = 2 * values as u64;
        if bytes <= WIDENED_BYTES as u64 && bytes > self.largest {
            self.largest = bytes;
            self.all += bytes;
        }
    }
}

/// Bytes of all working memory, for steps of at most `limits`.
pub fn working_bytes(shape: &WorkingShape, limits: &InputLimits, config: &CudaConfig) -> u64 {
    let most_rows = limits.rows.max(limits.outputs);
    let narrow = config.activations == Precision::BF16;
    let mut parts = vec![
        device_bytes(limits) as u64,
        sampling::device_bytes(limits.outputs) as u64,
        (limits.groups * PAIR_BYTES) as u64,
        shape.widened.all,
    ];
    if narrow {
        parts.push(partial_bytes(limits, shape.heads, shape.head_dim) as u64);
        parts.push((most_rows * shape.hidden * 2) as u64);
        if shape.widened.all > 0 {
            // Rows rounded to eight bits, at the width of the stream and of the widest input, with
            // their scales.
            parts.push((most_rows * (shape.hidden + shape.widest_input + 4)) as u64);
            // The rows once more, in the order for products with codes.
            parts.push((2 * linear_coded::MOST_ROWS * (shape.hidden + shape.widest_input)) as u64);
        }
    }
    if narrow {
        let library = config.use_cublas && !config.batch_invariant;
        parts.push(if library { blas::WORKSPACE } else { Gemm90::PROMPT_BYTES } as u64);
    }
    if let Some(ExpertsShape { experts, top_k, inter }) = shape.experts {
        let pairs = most_rows.saturating_mul(top_k);
        parts.push(list_bytes(pairs, experts) as u64);
        parts.push((pairs as u64).saturating_mul(row_bytes(shape.hidden, inter, if narrow { 2 } else { 4 }) as u64));
    }
    parts.into_iter().fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_for_widened_weights_grows() {
        let mut widened = Widened::default();
        for values in [10, 4, 30, 20, WIDENED_BYTES] {
            widened.add(values);
        }
        assert_eq!(widened, Widened { largest: 60, all: 80 });
    }
}
