//! Bytes of the buffers of a step, computed before any of them is allocated: its inputs, and the
//! scratch memory of its operations.

use super::attention::{self, MAX_PARTIALS};
use crate::cuda::ExpertsShape;
use crate::{InputLimits, Span};

/// Sizes of a model on which the buffers of a step depend.
#[derive(Clone, Debug)]
pub struct WorkingShape<'a> {
    pub hidden: usize,
    /// Largest over all matrices.
    pub widest_input: usize,
    /// One for each layer with experts.
    pub experts: &'a [ExpertsShape],
}

/// Bytes of the buffers of the largest step, without tensors and weights. Memory that does not grow
/// with the step, a few KiB for each thread, is not counted.
pub fn working_bytes(shape: &WorkingShape<'_>, limits: &InputLimits) -> u64 {
    input_bytes(limits).saturating_add(scratch_bytes(shape, limits))
}

/// Bytes of [`super::inputs::Inputs`].
fn input_bytes(limits: &InputLimits) -> u64 {
    let InputLimits { rows, spans, outputs: _, table_entries, groups, ropes, rope_pairs } = *limits;
    let [rows, spans, entries] = [rows, spans, table_entries].map(|count| count as u64);
    // Tokens, positions, ancestors, outputs and sorted slots.
    let ids = (4 + 4 + 8 + 4 + 4) * rows + size_of::<Span>() as u64 * spans;
    let tables = groups as u64 * 4 * (rows + spans + entries);
    let angles = 8 * (ropes * rope_pairs) as u64 * rows;
    let [tile, item] = [size_of::<attention::Tile>(), size_of::<attention::Item>()].map(|bytes| bytes as u64);
    let attention = tile * rows + item * (rows + entries) + 4 * MAX_PARTIALS as u64;
    ids + tables + angles + attention
}

/// Bytes of rows packed for a product; with experts, rows of all chosen ones at once.
fn scratch_bytes(shape: &WorkingShape<'_>, limits: &InputLimits) -> u64 {
    let rows = limits.rows as u64;
    let dense = 4 * rows.max(limits.outputs as u64) * shape.widest_input as u64;
    let experts = shape.experts.iter().map(|experts| {
        let slot = experts.inter.max(shape.hidden) + 3 * experts.inter + shape.hidden;
        let routing = 4 * (2 * experts.experts + 4 * experts.top_k);
        rows * (4 * (experts.top_k * slot) + routing) as u64
    });
    dense + experts.max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;

    use folio_formats::{Format, Matrix};

    use super::super::{Cpu, CpuConfig, Isa};
    use super::*;
    use crate::{Activation, ExpertsSource, Memory, Operations, RouterScore, Routing, TensorKind};

    #[test]
    fn inputs_take_exactly_the_computed_bytes() {
        let small =
            InputLimits { rows: 7, spans: 3, outputs: 5, table_entries: 40, groups: 2, ropes: 1, rope_pairs: 16 };
        let large = InputLimits { rows: 513, spans: 65, table_entries: 9000, ropes: 2, rope_pairs: 64, ..small };
        let mut cpu = Cpu::new(CpuConfig { threads: 1, isa: Some(Isa::Scalar) }).unwrap();
        for limits in [small, large] {
            assert_eq!(cpu.inputs(limits).unwrap().bytes(), input_bytes(&limits), "{limits:?}");
        }
    }

    fn matrix(outputs: usize, inputs: usize) -> Matrix<'static> {
        let rows = (0..outputs).map(|_| Cow::Owned(vec![0u8; 4 * inputs]));
        Matrix::from_rows(Format::F32, inputs, rows.collect()).unwrap()
    }

    /// Scratch memory after the largest product of a step with plain weights.
    #[test]
    fn scratch_of_products_stays_within_the_computed_bytes() {
        let limits =
            InputLimits { rows: 96, spans: 3, outputs: 5, table_entries: 40, groups: 1, ropes: 1, rope_pairs: 16 };
        let (hidden, inter, top_k) = (128, 192, 2);
        let experts = [ExpertsShape { experts: 4, top_k, inter }];
        for isa in Isa::available() {
            let mut cpu = Cpu::new(CpuConfig { threads: 1, isa: Some(isa) }).unwrap();
            let weight = cpu.weight(&matrix(64, 4 * hidden)).unwrap();
            let x = cpu.tensor(limits.rows, 4 * hidden, TensorKind::Activation).unwrap();
            let mut out = cpu.tensor(limits.rows, 64, TensorKind::Activation).unwrap();
            cpu.linear(&mut out, &x, &weight, None, limits.rows);
            let dense = WorkingShape { hidden, widest_input: 4 * hidden, experts: &[] };
            check(&cpu, &dense, &limits, isa);

            let source = ExpertsSource {
                gate_up: (0..4).map(|_| matrix(2 * inter, hidden)).collect(),
                down: (0..4).map(|_| matrix(hidden, inter)).collect(),
                gate_up_bias: None,
                down_bias: None,
            };
            let weights = cpu.experts(source).unwrap();
            let x = cpu.tensor(limits.rows, hidden, TensorKind::Activation).unwrap();
            let logits = cpu.tensor(limits.rows, 4, TensorKind::Activation).unwrap();
            let mut out = cpu.tensor(limits.rows, hidden, TensorKind::Activation).unwrap();
            let routing = Routing::<Cpu> {
                score: RouterScore::Softmax,
                top_k,
                normalize: true,
                scale: 1.0,
                choice_bias: None,
                groups: 1,
                groups_kept: 1,
                activation: Activation::Silu,
            };
            cpu.experts_forward(&mut out, &x, &logits, &weights, routing, limits.rows);
            check(&cpu, &WorkingShape { experts: &experts, ..dense }, &limits, isa);
        }
    }

    /// The computed bytes are an upper bound, and no more than a quarter of them stays unused when
    /// activations are packed as f32.
    fn check(cpu: &Cpu, shape: &WorkingShape<'_>, limits: &InputLimits, isa: Isa) {
        let (taken, computed) = (cpu.scratch_bytes(), scratch_bytes(shape, limits));
        assert!(taken <= computed + FIXED, "{isa:?}: {taken} bytes of {computed}");
        assert!(isa != Isa::Scalar || 4 * taken >= 3 * computed, "{isa:?}: {taken} bytes of {computed}");
    }

    /// Memory that does not grow with the step: blocks of one thread, and the ends of buffers.
    const FIXED: u64 = 64 << 10;
}
