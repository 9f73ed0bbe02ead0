//! Operations on each value by itself: gated activations, logits, the gather of output rows.
//!
//! Long rows are cut into runs of columns, so that one row keeps several threads busy; a value
//! never depends on the position of the cut.

use std::ops::Range;

use super::inputs::Inputs;
use super::norm::{WORTH_SHARING, rows_worth_sharing};
use super::pool::Disjoint;
use super::simd::{Kernel, LANES, Simd, dispatch, erf, exp, sigmoid, tanh};
use super::{Ctx, Isa, Tensor};
use crate::Activation;

/// Calls `body(row, columns)` so that every column of every row is covered once.
fn for_each_piece(ctx: Ctx<'_>, rows: usize, width: usize, body: impl Fn(usize, Range<usize>) + Sync) {
    const COLUMNS: usize = 4096;
    let pieces = width.div_ceil(COLUMNS).max(1);
    let min = (WORTH_SHARING / width.clamp(1, COLUMNS)).max(1);
    ctx.pool.for_each_static(rows * pieces, min, |range| {
        for piece in range {
            let start = piece % pieces * COLUMNS;
            body(piece / pieces, start..(start + COLUMNS).min(width));
        }
    });
}

/// `act(gate) * up` of sixteen values.
#[inline(always)]
fn activate<S: Simd>(s: S, activation: Activation, gate: S::F, up: S::F) -> S::F {
    let (one, half) = (s.splat(1.0), s.splat(0.5));
    match activation {
        // A quotient, so that a large negative gate gives zero and not a product with infinity.
        Activation::Silu => s.mul(s.div(gate, s.add(one, exp(s, s.sub(s.splat(0.0), gate)))), up),
        Activation::Gelu => {
            let twice = s.add(one, erf(s, s.mul(gate, s.splat(std::f32::consts::FRAC_1_SQRT_2))));
            s.mul(s.mul(s.mul(half, gate), twice), up)
        }
        Activation::GeluTanh => {
            const SQRT_2_OVER_PI: f32 = 0.797_884_6;
            let cubic = s.fma(s.mul(s.mul(gate, gate), gate), s.splat(0.044_715), gate);
            let twice = s.add(one, tanh(s, s.mul(cubic, s.splat(SQRT_2_OVER_PI))));
            s.mul(s.mul(s.mul(half, gate), twice), up)
        }
        Activation::SwigluClamped { alpha, limit } => {
            let gate = s.min(s.splat(limit), gate);
            let up = s.min(s.splat(limit), s.max(s.splat(-limit), up));
            let open = sigmoid(s, s.mul(gate, s.splat(alpha)));
            s.mul(s.add(up, one), s.mul(gate, open))
        }
    }
}

struct Gate<'a> {
    out: &'a mut [f32],
    gate: &'a [f32],
    up: &'a [f32],
    activation: Activation,
}

impl Kernel for Gate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // The matched value does not change, so the compiler moves the match out of the loop.
        let inputs = self.gate.chunks(LANES).zip(self.up.chunks(LANES));
        for (out, (gate, up)) in self.out.chunks_mut(LANES).zip(inputs) {
            s.write(out, activate(s, self.activation, s.read(gate), s.read(up)));
        }
    }
}

/// Computes one row `[gate | up]` to `act(gate) * up`, half as wide.
pub fn gate_row(isa: Isa, out: &mut [f32], gate_up: &[f32], activation: Activation) {
    assert_eq!(gate_up.len(), 2 * out.len(), "gate and up are as wide as the result");
    let (gate, up) = gate_up.split_at(out.len());
    dispatch(isa, Gate { out, gate, up, activation });
}

/// Computes rows `[gate | up]` to `act(gate) * up`, half as wide.
pub fn gate(ctx: Ctx<'_>, out: &mut Tensor, gate_up: &Tensor, activation: Activation, rows: usize) {
    let width = out.cols();
    assert_eq!(gate_up.cols(), 2 * width, "gate and up are as wide as the result");
    let all = Disjoint::new(out.head_mut(rows));
    for_each_piece(ctx, rows, width, |row, columns| {
        let (gate, up) = gate_up.row(row).split_at(width);
        // SAFETY: pieces do not overlap.
        let out = unsafe { all.part(row * width + columns.start..row * width + columns.end) };
        dispatch(ctx.isa, Gate { out, gate: &gate[columns.clone()], up: &up[columns], activation });
    });
}

struct AddGated<'a> {
    out: &'a mut [f32],
    x: &'a [f32],
    gate: &'a [f32],
}

impl Kernel for AddGated<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let width = self.x.len() / self.gate.len();
        let rows = self.out.chunks_exact_mut(width).zip(self.x.chunks_exact(width));
        for ((out, x), &gate) in rows.zip(self.gate) {
            let open = sigmoid(s, s.splat(gate));
            for (out, x) in out.chunks_mut(LANES).zip(x.chunks(LANES)) {
                s.write(out, s.fma(s.read(x), open, s.read(out)));
            }
        }
    }
}

/// `out[r] += x[r] * sigmoid(gate[r])`.
pub fn add_gated(ctx: Ctx<'_>, out: &mut Tensor, x: &Tensor, gate: &Tensor, rows: usize) {
    let width = x.cols();
    assert!(out.cols() == width && gate.cols() == 1, "a gate of {} on {width} -> {}", gate.cols(), out.cols());
    let (all, x, gate) = (Disjoint::new(out.head_mut(rows)), x.head(rows), gate.head(rows));
    ctx.pool.for_each_static(rows, rows_worth_sharing(width), |rows| {
        let range = rows.start * width..rows.end * width;
        // SAFETY: threads have different rows, and rows do not overlap.
        let out = unsafe { all.part(range.clone()) };
        dispatch(ctx.isa, AddGated { out, x: &x[range], gate: &gate[rows] });
    });
}

/// `out[i] = x[inputs.outputs[i]]`.
pub fn gather_outputs(_ctx: Ctx<'_>, out: &mut Tensor, x: &Tensor, inputs: &Inputs) {
    assert_eq!(out.cols(), x.cols(), "widths of the rows and of where they go");
    for (i, &row) in inputs.outputs().iter().enumerate() {
        out.row_mut(i).copy_from_slice(x.row(row as usize));
    }
}

struct FinishLogits<'a> {
    logits: &'a mut [f32],
    scale: f32,
    soft_cap: Option<f32>,
}

impl Kernel for FinishLogits<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let scale = s.splat(self.scale);
        for logits in self.logits.chunks_mut(LANES) {
            let scaled = s.mul(s.read(logits), scale);
            let finished = match self.soft_cap {
                Some(cap) => s.mul(s.splat(cap), tanh(s, s.div(scaled, s.splat(cap)))),
                None => scaled,
            };
            s.write(logits, finished);
        }
    }
}

/// `logits = cap * tanh(logits * scale / cap)`, or `logits * scale` without a cap.
pub fn finish_logits(ctx: Ctx<'_>, logits: &mut Tensor, scale: f32, soft_cap: Option<f32>, rows: usize) {
    if scale == 1.0 && soft_cap.is_none() {
        return;
    }
    let width = logits.cols();
    let all = Disjoint::new(logits.head_mut(rows));
    for_each_piece(ctx, rows, width, |row, columns| {
        // SAFETY: pieces do not overlap.
        let logits = unsafe { all.part(row * width + columns.start..row * width + columns.end) };
        dispatch(ctx.isa, FinishLogits { logits, scale, soft_cap });
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::simd::testing::{close, each_setup, filled, tensor};

    fn plain_gate(activation: Activation, gate: f64, up: f64) -> f64 {
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        match activation {
            Activation::Silu => gate * sigmoid(gate) * up,
            // Abramowitz and Stegun's formula is not exact in the last digits; the conformance
            // tests have a better one.
            Activation::Gelu => {
                let x = gate.abs() * std::f64::consts::FRAC_1_SQRT_2;
                let t = 1.0 / (1.0 + 0.3275911 * x);
                let poly =
                    t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))));
                let erf = (1.0 - poly * (-x * x).exp()) * gate.signum();
                0.5 * gate * (1.0 + erf) * up
            }
            Activation::GeluTanh => {
                let inner = (2.0 / std::f64::consts::PI).sqrt() * (gate + 0.044715 * gate.powi(3));
                0.5 * gate * (1.0 + inner.tanh()) * up
            }
            Activation::SwigluClamped { alpha, limit } => {
                let (gate, limit) = (gate.min(f64::from(limit)), f64::from(limit));
                (up.clamp(-limit, limit) + 1.0) * gate * sigmoid(f64::from(alpha) * gate)
            }
        }
    }

    #[test]
    fn activations_match_plain_loops() {
        let clamped = Activation::SwigluClamped { alpha: 1.702, limit: 2.5 };
        for activation in [Activation::Silu, Activation::Gelu, Activation::GeluTanh, clamped] {
            for (rows, width) in [(1, 5), (3, 40), (2, 9000)] {
                let values: Vec<f32> = filled(rows * 2 * width, 7).iter().map(|v| v * 4.0).collect();
                let expected: Vec<f32> = (0..rows * width)
                    .map(|i| (i / width * 2 * width + i % width, i))
                    .map(|(at, _)| plain_gate(activation, values[at].into(), values[at + width].into()) as f32)
                    .collect();
                each_setup(|ctx| {
                    let gate_up = tensor(rows, 2 * width, &values);
                    let mut out = tensor(rows, width, &vec![1.0; rows * width]);
                    gate(ctx, &mut out, &gate_up, activation, rows);
                    close(out.head(rows), &expected, 4e-6);
                    let mut row = vec![0.0; width];
                    gate_row(ctx.isa, &mut row, gate_up.row(rows - 1), activation);
                    assert_eq!(row, out.row(rows - 1));
                    out.head(rows).iter().map(|v| v.to_bits()).collect()
                });
            }
        }
    }

    #[test]
    fn extreme_gates_stay_finite() {
        each_setup(|ctx| {
            let gate_up = tensor(1, 8, &[-1e4, 1e4, -200.0, 0.0, 1.0, 1.0, 1.0, 1.0]);
            for activation in [Activation::Silu, Activation::Gelu, Activation::GeluTanh] {
                let mut out = tensor(1, 4, &[5.0; 4]);
                gate(ctx, &mut out, &gate_up, activation, 1);
                close(out.row(0), &[0.0, 1e4, 0.0, 0.0], 0.0);
            }
            Vec::new()
        });
    }

    #[test]
    fn gated_sum_and_logits_match_plain_loops() {
        let (rows, width) = (3, 5000);
        let (x, base, gates) = (filled(rows * width, 1), filled(rows * width, 2), filled(rows, 3));
        let sigmoid = |x: f32| 1.0 / (1.0 + (-f64::from(x)).exp());
        let summed: Vec<f32> = (0..rows * width)
            .map(|i| (f64::from(base[i]) + f64::from(x[i]) * sigmoid(gates[i / width])) as f32)
            .collect();
        let capped: Vec<f32> = x.iter().map(|&v| (30.0 * (f64::from(v) * 20.0 / 30.0).tanh()) as f32).collect();
        let scaled: Vec<f32> = x.iter().map(|&v| v * 0.125).collect();
        each_setup(|ctx| {
            let mut out = tensor(rows, width, &base);
            add_gated(ctx, &mut out, &tensor(rows, width, &x), &tensor(rows, 1, &gates), rows);
            close(out.head(rows), &summed, 1e-6);
            let mut logits = tensor(rows, width, &x);
            finish_logits(ctx, &mut logits, 20.0, Some(30.0), rows);
            close(logits.head(rows), &capped, 1e-6);
            let mut logits = tensor(rows, width, &x);
            finish_logits(ctx, &mut logits, 0.125, None, rows);
            close(logits.head(rows), &scaled, 0.0);
            out.head(rows).iter().map(|v| v.to_bits()).collect()
        });
    }
}
