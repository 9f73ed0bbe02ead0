//! Root-mean-square norms and the residual stream. A row's squares are summed in an order that
//! depends on its width alone: four vectors of partial sums, then their lanes.

use super::pool::Disjoint;
use super::simd::{Kernel, LANES, Simd, dispatch};
use super::{Ctx, Tensor, Vector};

/// A second thread pays from this number of values per thread on.
pub(crate) const WORTH_SHARING: usize = 1 << 14;

/// `1 / rms(x)`.
#[inline(always)]
pub(crate) fn inverse_rms<S: Simd>(s: S, x: &[f32], eps: f32) -> f32 {
    let mut sums = [s.splat(0.0); 4];
    for group in x.chunks(4 * LANES) {
        for (sum, lanes) in sums.iter_mut().zip(group.chunks(LANES)) {
            let value = s.read(lanes);
            *sum = s.fma(value, value, *sum);
        }
    }
    let total = s.sum(s.add(s.add(sums[0], sums[1]), s.add(sums[2], sums[3])));
    1.0 / (total / x.len() as f32 + eps).sqrt()
}

/// `out = x * inverse * weight`.
#[inline(always)]
fn scale_row<S: Simd>(s: S, out: &mut [f32], x: &[f32], inverse: f32, weight: &[f32]) {
    let inverse = s.splat(inverse);
    for ((out, x), weight) in out.chunks_mut(LANES).zip(x.chunks(LANES)).zip(weight.chunks(LANES)) {
        s.write(out, s.mul(s.mul(s.read(x), inverse), s.read(weight)));
    }
}

/// Normalizes a row in place.
#[inline(always)]
pub(crate) fn norm_in_place<S: Simd>(s: S, x: &mut [f32], weight: &[f32], eps: f32) {
    assert_eq!(x.len(), weight.len(), "norm weight as wide as its row");
    let inverse = s.splat(inverse_rms(s, x, eps));
    for (x, weight) in x.chunks_mut(LANES).zip(weight.chunks(LANES)) {
        s.write(x, s.mul(s.mul(s.read(x), inverse), s.read(weight)));
    }
}

/// `residual += x * scale`.
#[inline(always)]
fn add_row<S: Simd>(s: S, residual: &mut [f32], x: &[f32], scale: f32) {
    let scale = s.splat(scale);
    for (residual, x) in residual.chunks_mut(LANES).zip(x.chunks(LANES)) {
        s.write(residual, s.fma(s.read(x), scale, s.read(residual)));
    }
}

struct Norm<'a> {
    out: &'a mut [f32],
    x: &'a [f32],
    weight: &'a [f32],
    eps: f32,
}

impl Kernel for Norm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let width = self.weight.len();
        for (out, x) in self.out.chunks_exact_mut(width).zip(self.x.chunks_exact(width)) {
            let inverse = inverse_rms(s, x, self.eps);
            scale_row(s, out, x, inverse, self.weight);
        }
    }
}

struct Add<'a> {
    residual: &'a mut [f32],
    x: &'a [f32],
    scale: f32,
}

impl Kernel for Add<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        add_row(s, self.residual, self.x, self.scale);
    }
}

struct AddNorm<'a> {
    out: &'a mut [f32],
    residual: &'a mut [f32],
    x: &'a [f32],
    scale: f32,
    weight: &'a [f32],
    eps: f32,
}

impl Kernel for AddNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let width = self.weight.len();
        let rows = self.residual.chunks_exact_mut(width).zip(self.x.chunks_exact(width));
        for (out, (residual, x)) in self.out.chunks_exact_mut(width).zip(rows) {
            add_row(s, residual, x, self.scale);
            let inverse = inverse_rms(s, residual, self.eps);
            scale_row(s, out, residual, inverse, self.weight);
        }
    }
}

fn check_width(out: &Tensor, x: &Tensor, width: usize) {
    assert!(width > 0 && out.cols() == width && x.cols() == width, "norm of {width} on {} -> {}", x.cols(), out.cols());
}

/// A second thread pays from this number of rows per thread on.
pub(crate) fn rows_worth_sharing(width: usize) -> usize {
    (WORTH_SHARING / width.max(1)).max(1)
}

/// `out = x / rms(x) * weight`, row by row.
pub fn rms_norm(ctx: Ctx<'_>, out: &mut Tensor, x: &Tensor, weight: &Vector, eps: f32, rows: usize) {
    let width = weight.len();
    check_width(out, x, width);
    let (all, x) = (Disjoint::new(out.head_mut(rows)), x.head(rows));
    ctx.pool.for_each_static(rows, rows_worth_sharing(width), |rows| {
        let range = rows.start * width..rows.end * width;
        // SAFETY: threads have different rows, and rows do not overlap.
        let out = unsafe { all.part(range.clone()) };
        dispatch(ctx.isa, Norm { out, x: &x[range], weight, eps });
    });
}

/// `residual += x * scale`.
pub fn add(ctx: Ctx<'_>, residual: &mut Tensor, x: &Tensor, scale: f32, rows: usize) {
    assert_eq!(residual.cols(), x.cols(), "widths of the residual stream and of what is added");
    let width = x.cols();
    let (all, x) = (Disjoint::new(residual.head_mut(rows)), x.head(rows));
    ctx.pool.for_each_static(rows, rows_worth_sharing(width), |rows| {
        let range = rows.start * width..rows.end * width;
        // SAFETY: threads have different rows, and rows do not overlap.
        let residual = unsafe { all.part(range.clone()) };
        dispatch(ctx.isa, Add { residual, x: &x[range], scale });
    });
}

/// `residual += x * scale; out = rms_norm(residual)`.
pub fn add_rms_norm(
    ctx: Ctx<'_>,
    out: &mut Tensor,
    residual: &mut Tensor,
    x: &Tensor,
    scale: f32,
    weight: &Vector,
    eps: f32,
    rows: usize,
) {
    let width = weight.len();
    check_width(out, x, width);
    assert_eq!(residual.cols(), width, "widths of the residual stream and of the norm");
    let (all_out, all_residual) = (Disjoint::new(out.head_mut(rows)), Disjoint::new(residual.head_mut(rows)));
    let x = x.head(rows);
    ctx.pool.for_each_static(rows, rows_worth_sharing(width), |rows| {
        let range = rows.start * width..rows.end * width;
        // SAFETY: threads have different rows, and rows do not overlap.
        let (out, residual) = unsafe { (all_out.part(range.clone()), all_residual.part(range.clone())) };
        dispatch(ctx.isa, AddNorm { out, residual, x: &x[range], scale, weight, eps });
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::simd::testing::{close, each_setup, filled, tensor, vector};

    #[test]
    fn norms_match_plain_loops() {
        for (rows, width) in [(1, 1), (3, 7), (2, 16), (5, 65), (4, 200), (40, 1024)] {
            let (x, residual, weight) = (filled(rows * width, 1), filled(rows * width, 2), filled(width, 3));
            let mut expected_residual = residual.clone();
            let mut expected = vec![0.0; rows * width];
            for row in 0..rows {
                let mut sum = 0.0f64;
                for i in row * width..(row + 1) * width {
                    expected_residual[i] += x[i] * 0.3;
                    sum += f64::from(expected_residual[i]).powi(2);
                }
                let inverse = 1.0 / (sum / width as f64 + 1e-5).sqrt();
                for i in 0..width {
                    let value = f64::from(expected_residual[row * width + i]);
                    expected[row * width + i] = (value * inverse * f64::from(weight[i])) as f32;
                }
            }
            each_setup(|ctx| {
                let (x, weight) = (tensor(rows, width, &x), vector(&weight));
                let mut stream = tensor(rows, width, &residual);
                let mut out = tensor(rows, width, &vec![9.0; rows * width]);
                add_rms_norm(ctx, &mut out, &mut stream, &x, 0.3, &weight, 1e-5, rows);
                close(stream.head(rows), &expected_residual, 1e-6);
                close(out.head(rows), &expected, 1e-5);
                // The fused form and its two halves give the same bits.
                let mut separate = tensor(rows, width, &residual);
                add(ctx, &mut separate, &x, 0.3, rows);
                assert_eq!(separate.head(rows), stream.head(rows));
                let mut normed = tensor(rows, width, &vec![0.0; rows * width]);
                rms_norm(ctx, &mut normed, &separate, &weight, 1e-5, rows);
                assert_eq!(normed.head(rows), out.head(rows));
                out.head(rows).iter().map(|v| v.to_bits()).collect()
            });
        }
    }

    #[test]
    fn rows_beyond_the_count_stay_untouched() {
        each_setup(|ctx| {
            let (x, weight) = (tensor(3, 8, &filled(24, 5)), vector(&[1.0; 8]));
            let mut out = tensor(3, 8, &[7.0; 24]);
            rms_norm(ctx, &mut out, &x, &weight, 1e-6, 2);
            assert_eq!(out.row(2), [7.0; 8]);
            Vec::new()
        });
    }
}
