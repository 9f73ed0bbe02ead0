//! Mixture of experts: rows are sorted by expert, then two products compute all chosen experts at
//! once.
//!
//! Rows that chose the same expert are computed together, so that an expert's weights are read once
//! a step. All experts share one fork for each product, so that a single token with two experts
//! costs as much as one layer. A row's outputs are added in ascending order of expert, whatever
//! else is in the batch.

use super::buffer::Grown;
use super::matmul::{self, Kernel, Product, RowTiles, Source};
use super::packed::Supply;
use super::pool::Disjoint;
use super::routing::{Choice, route};
use super::tensor::{Tensor, Vector};
use super::weight::Weight;
use super::{Cpu, Ctx, elementwise};
use crate::{Error, ExpertsSource, Result, Routing};

/// The experts of one layer, all of one shape and packing. If their formats differ, or a matrix has
/// several parts, reordered columns or outliers, all are converted to BF16.
pub struct Experts {
    /// Each expert's `[2 * inter, hidden]` weight, gate rows above up rows.
    gate_up: Vec<Weight>,
    /// Each expert's `[hidden, inter]` weight.
    down: Vec<Weight>,
    gate_up_bias: Option<Vec<Vector>>,
    down_bias: Option<Vec<Vector>>,
}

impl Experts {
    pub(crate) fn pack(ctx: Ctx<'_>, supply: &mut Supply, source: ExpertsSource<'_>) -> Result<Self> {
        Error::check("number of down projections", source.gate_up.len(), source.down.len())?;
        let gate_up = Weight::pack_uniform(ctx, supply, &source.gate_up)?;
        let down = Weight::pack_uniform(ctx, supply, &source.down)?;
        let (Some(first_up), Some(first_down)) = (gate_up.first(), down.first()) else {
            return Err(Error::Unsupported { backend: "cpu", what: "a layer without experts".into() });
        };
        for (gate_up, down) in gate_up.iter().zip(&down) {
            Error::check("inputs of an expert's gate and up", first_up.inputs(), gate_up.inputs())?;
            Error::check("rows of an expert's gate and up", 2 * first_down.inputs(), gate_up.outputs())?;
            Error::check("inputs of an expert's down", first_down.inputs(), down.inputs())?;
            Error::check("rows of an expert's down", first_up.inputs(), down.outputs())?;
        }
        let gate_up_bias = biases(source.gate_up_bias, &gate_up)?;
        let down_bias = biases(source.down_bias, &down)?;
        Ok(Self { gate_up, down, gate_up_bias, down_bias })
    }

    /// Bytes held, padding and biases included.
    pub fn bytes(&self) -> u64 {
        let weights = self.gate_up.iter().chain(&self.down).map(Weight::bytes);
        let biases = self.gate_up_bias.iter().chain(&self.down_bias).flatten().map(|bias| size_of_val(&**bias) as u64);
        weights.chain(biases).sum()
    }
}

fn biases(biases: Option<Vec<Vec<f32>>>, weights: &[Weight]) -> Result<Option<Vec<Vector>>> {
    let Some(biases) = biases else { return Ok(None) };
    Error::check("number of expert biases", weights.len(), biases.len())?;
    for (bias, weight) in biases.iter().zip(weights) {
        Error::check("width of an expert's bias", weight.outputs(), bias.len())?;
    }
    Ok(Some(biases.iter().map(|bias| Vector::new(bias)).collect::<Result<_>>()?))
}

/// Memory of one step: it grows to the largest step's size and is reused.
#[derive(Default)]
pub struct Scratch {
    /// The experts of each row, `[rows][top_k]`, in expert order.
    choices: Vec<Choice>,
    /// Scores while a row is routed: `[rows][2 * experts]`.
    scores: Vec<f32>,
    /// Row of `x` for every slot; slots are sorted by expert, then row.
    slot_rows: Vec<u32>,
    /// Next free slot of every expert while slots are assigned.
    next_slot: Vec<u32>,
    /// Experts with rows, ascending, and their slots in tiles of either product.
    busy: Vec<u32>,
    tiles: [Vec<RowTiles>; 2],
    /// Results of the two products, and the gated values between them, a row per slot.
    gate_up: Grown<f32>,
    inner: Grown<f32>,
    down: Grown<f32>,
}

#[cfg(test)]
impl Scratch {
    /// Bytes of all its memory.
    pub fn bytes(&self) -> u64 {
        let words = self.slot_rows.capacity() + self.next_slot.capacity() + self.busy.capacity();
        let lists = self.choices.capacity() * size_of::<Choice>() + 4 * (self.scores.capacity() + words);
        let tiles: usize = self.tiles.iter().map(|tiles| tiles.capacity() * size_of::<RowTiles>()).sum();
        (lists + tiles) as u64 + self.gate_up.bytes() + self.inner.bytes() + self.down.bytes()
    }
}

/// `out = sum_e w_e * down_e(act(gate_e(x)) * up_e(x))` over the experts that each row chooses.
pub(crate) fn experts_forward(
    ctx: Ctx<'_>,
    (activations, scratch): (&mut matmul::Scratch, &mut Scratch),
    out: &mut Tensor,
    x: &Tensor,
    router_logits: &Tensor,
    experts: &Experts,
    op: &Routing<'_, Cpu>,
    rows: usize,
) {
    let (first_up, first_down) = (&experts.gate_up[0], &experts.down[0]);
    let (hidden, inter) = (first_up.inputs(), first_down.inputs());
    assert_eq!(x.cols(), hidden, "inputs of the experts");
    assert_eq!(out.cols(), hidden, "outputs of the experts");
    assert_eq!(router_logits.cols(), experts.gate_up.len(), "router logits");
    let [up_kernel, down_kernel] = [first_up, first_down].map(|weight| weight.parts()[0].kernel());
    choose(ctx, scratch, router_logits, op, rows);
    sort_by_expert(scratch, [up_kernel, down_kernel], experts.gate_up.len(), op.top_k, rows);
    let slots = rows * op.top_k;
    let Scratch { choices, slot_rows, busy, tiles: [up_tiles, down_tiles], gate_up, inner, down, .. } = scratch;

    let matmul::Scratch { packed: packed_scratch, per_thread } = activations;
    let gate_up = gate_up.take(slots * 2 * inter);
    let columns = matmul::Columns::default();
    let source = Source { values: x.head(rows), cols: hidden, picked: Some(slot_rows), columns };
    let packed = matmul::pack(ctx, up_kernel.activations(), packed_scratch, source, slots, up_tiles);
    let product = |index| self::product(&experts.gate_up, &experts.gate_up_bias, busy[index], packed, up_tiles[index]);
    matmul::multiply(ctx, per_thread, busy.len(), product, gate_up, 2 * inter);

    let inner = inner.take(slots * inter);
    gate_rows(ctx, inner, gate_up, op, inter);

    let down = down.take(slots * hidden);
    let source = Source { values: inner, cols: inter, picked: None, columns };
    let packed = matmul::pack(ctx, down_kernel.activations(), packed_scratch, source, slots, down_tiles);
    let product = |index| self::product(&experts.down, &experts.down_bias, busy[index], packed, down_tiles[index]);
    matmul::multiply(ctx, per_thread, busy.len(), product, down, hidden);
    combine(ctx, out, down, choices, op.top_k, rows);
}

fn product<'a>(
    weights: &'a [Weight],
    biases: &'a Option<Vec<Vector>>,
    expert: u32,
    packed: &'a [u32],
    tiles: RowTiles,
) -> Product<'a> {
    let bias = biases.as_ref().map(|biases| &*biases[expert as usize]);
    let part = &weights[expert as usize].parts()[0];
    Product { main: matmul::operand(part, packed, tiles.first_row, tiles.rows), outliers: None, bias, first_column: 0 }
}

/// Fills `choices`, each row by itself.
fn choose(ctx: Ctx<'_>, scratch: &mut Scratch, router_logits: &Tensor, op: &Routing<'_, Cpu>, rows: usize) {
    let (experts, top_k) = (router_logits.cols(), op.top_k);
    scratch.choices.resize(rows * top_k, Choice::default());
    scratch.scores.resize(rows * 2 * experts, 0.0);
    let (choices, scores) = (Disjoint::new(&mut scratch.choices), Disjoint::new(&mut scratch.scores));
    ctx.pool.for_each_static(rows, 1 + 1024 / experts, |range| {
        for row in range {
            // SAFETY: each row has its own choices and scores and is routed by one thread.
            let (choices, scores) = unsafe {
                let scores = scores.part(row * 2 * experts..(row + 1) * 2 * experts);
                (choices.part(row * top_k..(row + 1) * top_k), scores)
            };
            route(router_logits.row(row), op, scores, choices);
        }
    });
}

/// Assigns a slot to every (row, choice): by expert, within an expert by row.
fn sort_by_expert(scratch: &mut Scratch, kernels: [&Kernel; 2], experts: usize, top_k: usize, rows: usize) {
    let Scratch { choices, slot_rows, next_slot, busy, tiles, .. } = scratch;
    next_slot.clear();
    next_slot.resize(experts, 0);
    for choice in choices.iter() {
        next_slot[choice.expert as usize] += 1;
    }
    busy.clear();
    tiles.iter_mut().for_each(Vec::clear);
    let mut first = 0;
    for (expert, next) in next_slot.iter_mut().enumerate() {
        let count = *next as usize;
        *next = first as u32;
        if count > 0 {
            busy.push(expert as u32);
            for (tiles, kernel) in tiles.iter_mut().zip(kernels) {
                tiles.push(kernel.tiles(first, count));
            }
        }
        first += count;
    }
    slot_rows.resize(rows * top_k, 0);
    for (index, choice) in choices.iter_mut().enumerate() {
        let next = &mut next_slot[choice.expert as usize];
        choice.slot = *next;
        slot_rows[*next as usize] = (index / top_k) as u32;
        *next += 1;
    }
}

fn gate_rows(ctx: Ctx<'_>, out: &mut [f32], gate_up: &[f32], op: &Routing<'_, Cpu>, inter: usize) {
    let (isa, activation, slots) = (ctx.isa, op.activation, gate_up.len() / (2 * inter).max(1));
    let out = Disjoint::new(out);
    ctx.pool.for_each_static(slots, 1 + 2048 / (inter + 1), |range| {
        for slot in range {
            // SAFETY: each slot is written by one thread.
            let out = unsafe { out.part(slot * inter..(slot + 1) * inter) };
            elementwise::gate_row(isa, out, &gate_up[slot * 2 * inter..(slot + 1) * 2 * inter], activation);
        }
    });
}

/// The weighted sum of each row's slots, in expert order.
fn combine(ctx: Ctx<'_>, out: &mut Tensor, down: &[f32], choices: &[Choice], top_k: usize, rows: usize) {
    let hidden = out.cols();
    let out = Disjoint::new(out.head_mut(rows));
    ctx.pool.for_each_static(rows, 1 + 2048 / (hidden * top_k + 1), |range| {
        for row in range {
            // SAFETY: each row is written by one thread.
            let out = unsafe { out.part(row * hidden..(row + 1) * hidden) };
            out.fill(0.0);
            for choice in &choices[row * top_k..(row + 1) * top_k] {
                let values = &down[choice.slot as usize * hidden..][..hidden];
                for (out, value) in out.iter_mut().zip(values) {
                    *out += choice.weight * value;
                }
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;

    use folio_formats::{Format, Matrix};

    use super::*;
    use crate::cpu::{CpuConfig, Isa};
    use crate::reference::Reference;
    use crate::{Activation, Handles, Memory, Operations, RouterScore, TensorKind};

    const EXPERTS: usize = 6;
    const HIDDEN: usize = 70;
    const INTER: usize = 45;

    fn noise(seed: usize, index: usize) -> f32 {
        let state = (seed * 1_000_003 + index) as u64;
        let state = (state ^ 0x5851_f42d).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        ((state ^ state >> 31).wrapping_mul(0x94d0_49bb_1331_11eb) >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn matrix(seed: usize, rows: usize, cols: usize) -> Matrix<'static> {
        let row = |row: usize| (0..cols).flat_map(move |col| (noise(seed, row * cols + col) / 4.0).to_le_bytes());
        Matrix::from_rows(Format::F32, cols, (0..rows).map(|r| Cow::Owned(row(r).collect())).collect()).unwrap()
    }

    fn source() -> ExpertsSource<'static> {
        let bias = |seed, len| (0..EXPERTS).map(|e| (0..len).map(|i| noise(seed + e, i)).collect()).collect();
        ExpertsSource {
            gate_up: (0..EXPERTS).map(|expert| matrix(10 + expert, 2 * INTER, HIDDEN)).collect(),
            down: (0..EXPERTS).map(|expert| matrix(20 + expert, HIDDEN, INTER)).collect(),
            gate_up_bias: Some(bias(30, 2 * INTER)),
            down_bias: Some(bias(40, HIDDEN)),
        }
    }

    fn routing<H: Handles>() -> Routing<'static, H> {
        Routing {
            score: RouterScore::Softmax,
            top_k: 2,
            normalize: true,
            scale: 1.5,
            choice_bias: None,
            groups: 1,
            groups_kept: 1,
            activation: Activation::Silu,
        }
    }

    /// Rows `range` of a fixed set of rows, as one step.
    fn forward(isa: Isa, threads: usize, range: std::ops::Range<usize>) -> Vec<f32> {
        let mut cpu = Cpu::new(CpuConfig { threads, isa: Some(isa) }).unwrap();
        let experts = cpu.experts(source()).unwrap();
        let rows = range.len();
        let mut out = cpu.tensor(rows, HIDDEN, TensorKind::Activation).unwrap();
        let (mut x, mut logits) = (
            cpu.tensor(rows, HIDDEN, TensorKind::Activation).unwrap(),
            cpu.tensor(rows, EXPERTS, TensorKind::Scores).unwrap(),
        );
        for (row, source) in range.enumerate() {
            x.row_mut(row).iter_mut().enumerate().for_each(|(i, v)| *v = noise(1, source * HIDDEN + i));
            logits.row_mut(row).iter_mut().enumerate().for_each(|(i, v)| *v = 3.0 * noise(2, source * EXPERTS + i));
        }
        cpu.experts_forward(&mut out, &x, &logits, &experts, routing(), rows);
        out.head(rows).to_vec()
    }

    #[test]
    fn a_row_has_the_same_bits_alone_and_among_others() {
        for isa in Isa::available() {
            let all = forward(isa, 2, 0..40);
            for (threads, range) in [(1, 0..40), (3, 0..17), (2, 39..40), (1, 5..6), (3, 12..29)] {
                let some = forward(isa, threads, range.clone());
                assert!(some == all[range.start * HIDDEN..range.end * HIDDEN], "{isa:?} {threads} {range:?}");
            }
        }
    }

    #[test]
    fn bytes_are_those_of_the_matrices_and_biases() {
        let mut cpu = Cpu::new(CpuConfig { threads: 1, isa: None }).unwrap();
        let experts = cpu.experts(source()).unwrap();
        let matrices =
            (0..EXPERTS).flat_map(|expert| [matrix(expert, 2 * INTER, HIDDEN), matrix(expert, HIDDEN, INTER)]);
        let packed: u64 = matrices.map(|matrix| cpu.weight(&matrix).unwrap().bytes()).sum();
        let biases = (4 * EXPERTS * (2 * INTER + HIDDEN)) as u64;
        assert_eq!(cpu.experts_bytes(&experts), packed + biases);
        let mut reference = Reference::new();
        let experts = reference.experts(source()).unwrap();
        let values = (4 * EXPERTS * 3 * INTER * HIDDEN) as u64;
        assert_eq!(reference.experts_bytes(&experts), values + biases);
    }

    #[test]
    fn every_isa_agrees_with_the_reference() {
        let rows = 9;
        let mut reference = Reference::new();
        let experts = reference.experts(source()).unwrap();
        for isa in Isa::available() {
            let found = forward(isa, 2, 0..rows);
            for row in 0..rows {
                let x: Vec<f32> = (0..HIDDEN).map(|i| noise(1, row * HIDDEN + i)).collect();
                let logits: Vec<f32> = (0..EXPERTS).map(|i| 3.0 * noise(2, row * EXPERTS + i)).collect();
                let (x, logits) = (one_row(&mut reference, &x), one_row(&mut reference, &logits));
                let mut out = reference.tensor(1, HIDDEN, TensorKind::Activation).unwrap();
                reference.experts_forward(&mut out, &x, &logits, &experts, routing(), 1);
                let mut expected = Vec::new();
                reference.download(&out, 1, &mut expected);
                for (found, expected) in found[row * HIDDEN..].iter().zip(&expected) {
                    assert!((found - expected).abs() < 1e-4, "{isa:?} row {row}: {found} for {expected}");
                }
            }
        }
    }

    /// A one-row tensor with these values. The reference's tensors are opaque, so the values are
    /// added as a bias.
    fn one_row(reference: &mut Reference, values: &[f32]) -> <Reference as Handles>::Tensor {
        let zero = reference.tensor(1, 1, TensorKind::Scores).unwrap();
        let weight = reference.weight(&matrix(0, values.len(), 1)).unwrap();
        let bias = reference.vector(values).unwrap();
        let mut out = reference.tensor(1, values.len(), TensorKind::Activation).unwrap();
        reference.linear(&mut out, &zero, &weight, Some(&bias), 1);
        out
    }
}
