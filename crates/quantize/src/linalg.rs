//! The linear algebra that GPTQ needs, in f64: a Cholesky factor and the inverse of a triangle.
//!
//! GPTQ needs an upper triangle `U` with `U^T U = H^-1`. With the rows and columns of `H` in
//! reverse, `H' = L L^T`; reversed again, `L` is upper and `H = R R^T`, so `U = R^-1`: the inverse
//! of `H` itself is never formed.

use crate::parallel;

/// Columns that are factored together, so that most of the work is long dot products.
const BLOCK: usize = 64;

/// The lower `L` with `L L^T = a`, in place; elements above the diagonal are unchanged. False if
/// `a` is not positive definite (or contains NaN).
pub(crate) fn cholesky(a: &mut [f64], n: usize, threads: usize) -> bool {
    assert_eq!(a.len(), n * n, "a square matrix");
    for first in (0..n).step_by(BLOCK) {
        let width = BLOCK.min(n - first);
        // The block's finished columns, copied for the rows below to read.
        let panel: Vec<f64> = (first..first + width).flat_map(|row| a[row * n..row * n + first].to_vec()).collect();
        let below = &mut a[first * n..];
        parallel::rows(if first == 0 { 1 } else { threads }, below, n, |_, rows| {
            for row in rows.chunks_exact_mut(n) {
                let (done, rest) = row.split_at_mut(first);
                for (value, other) in rest[..width].iter_mut().zip(panel.chunks_exact(first.max(1))) {
                    *value -= dot(done, other);
                }
            }
        });
        if !factor_block(below, n, first, width) {
            return false;
        }
        let diagonal: Vec<f64> =
            (0..width).flat_map(|row| below[row * n + first..row * n + first + width].to_vec()).collect();
        parallel::rows(threads, &mut below[width * n..], n, |_, rows| {
            for row in rows.chunks_exact_mut(n) {
                let row = &mut row[first..first + width];
                for j in 0..width {
                    let sum = dot(&row[..j], &diagonal[j * width..j * width + j]);
                    row[j] = (row[j] - sum) / diagonal[j * width + j];
                }
            }
        });
    }
    true
}

fn factor_block(rows: &mut [f64], n: usize, first: usize, width: usize) -> bool {
    for i in 0..width {
        for j in 0..=i {
            let (a, b) = (i * n + first, j * n + first);
            let sum = dot(&rows[a..a + j], &rows[b..b + j]);
            let value = rows[a + j] - sum;
            if i == j {
                // Not `<=`: NaN must fail too.
                if !(value > 0.0 && value.is_finite()) {
                    return false;
                }
                rows[a + j] = value.sqrt();
            } else {
                rows[a + j] = value / rows[b + j];
            }
        }
    }
    true
}

/// Several sums side by side, for vector units; always in the same order.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut sums = [0.0f64; 8];
    let (a, a_rest) = a.as_chunks::<8>();
    let (b, b_rest) = b.as_chunks::<8>();
    for (a, b) in a.iter().zip(b) {
        for lane in 0..8 {
            sums[lane] += a[lane] * b[lane];
        }
    }
    let rest: f64 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f64>() + rest
}

/// Columns of the inverse that are solved for together.
const STRIP: usize = 32;

/// The upper `U` with `U^T U = h^-1`, or none if `h` is not positive definite.
pub(crate) fn inverse_factor(h: &[f32], n: usize, threads: usize) -> Option<Vec<f32>> {
    let mut lower: Vec<f64> = h.iter().rev().map(|value| f64::from(*value)).collect();
    if !cholesky(&mut lower, n, threads) {
        return None;
    }
    let strips = parallel::map(threads, n.div_ceil(STRIP), |strip| invert_strip(&lower, n, strip * STRIP));
    let mut upper = vec![0.0f32; n * n];
    for (number, strip) in strips.iter().enumerate() {
        let first = number * STRIP;
        for (offset, values) in strip.chunks_exact(STRIP).enumerate() {
            let row = first + offset;
            for (lane, value) in values.iter().enumerate().take(STRIP.min(n - first)) {
                upper[(n - 1 - row) * n + (n - 1 - first - lane)] = *value as f32;
            }
        }
    }
    Some(upper)
}

/// Columns `first .. first + STRIP` of the lower triangle's inverse, from row `first` down:
/// `[n - first, STRIP]`.
fn invert_strip(lower: &[f64], n: usize, first: usize) -> Vec<f64> {
    let mut out = vec![0.0f64; (n - first) * STRIP];
    for row in first..n {
        let (above, here) = out.split_at_mut((row - first) * STRIP);
        let mut sums = [0.0f64; STRIP];
        for (values, factor) in above.as_chunks::<STRIP>().0.iter().zip(&lower[row * n + first..row * n + row]) {
            for lane in 0..STRIP {
                sums[lane] += values[lane] * factor;
            }
        }
        let diagonal = lower[row * n + row];
        for lane in 0..STRIP {
            let one = if first + lane == row { 1.0 } else { 0.0 };
            here[lane] = (one - sums[lane]) / diagonal;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_factor_known_by_heart() {
        let mut a = vec![4.0, 12.0, -16.0, 12.0, 37.0, -43.0, -16.0, -43.0, 98.0];
        assert!(cholesky(&mut a, 3, 1));
        let lower = [a[0], a[3], a[4], a[6], a[7], a[8]];
        assert_eq!(lower, [2.0, 6.0, 1.0, -8.0, 5.0, 3.0]);
    }

    /// `X^T X` of pseudo-random rows.
    pub(crate) fn gram(n: usize, tokens: usize) -> Vec<f32> {
        let mut rng = folio_testing::Rng::new(7);
        let x: Vec<f32> = (0..tokens * n).map(|_| rng.normal()).collect();
        let mut h = vec![0.0; n * n];
        for row in x.chunks_exact(n) {
            for i in 0..n {
                for j in 0..n {
                    h[i * n + j] += row[i] * row[j];
                }
            }
        }
        h
    }

    #[test]
    fn the_factor_of_the_inverse_inverts() {
        for n in [1, 5, 64, 65, 150] {
            let h = gram(n, 2 * n + 3);
            let one = inverse_factor(&h, n, 1).unwrap();
            assert_eq!(one, inverse_factor(&h, n, 3).unwrap(), "threads do not show");
            // U^T U H = 1, and U is upper.
            let u = |i: usize, j: usize| f64::from(one[i * n + j]);
            for i in 0..n {
                assert!((0..i).all(|j| u(i, j) == 0.0));
                let row: Vec<f64> = (0..n).map(|j| (0..n).map(|k| u(k, i) * u(k, j)).sum()).collect();
                for j in 0..n {
                    let found: f64 = (0..n).map(|k| row[k] * f64::from(h[k * n + j])).sum();
                    let expected = if i == j { 1.0 } else { 0.0 };
                    assert!((found - expected).abs() < 1e-3, "{n}: ({i}, {j}) is {found}");
                }
            }
        }
    }

    #[test]
    fn what_has_no_factor_is_refused() {
        assert!(inverse_factor(&[1.0, 2.0, 2.0, 1.0], 2, 1).is_none());
        assert!(inverse_factor(&[0.0], 1, 1).is_none());
        assert!(inverse_factor(&[f32::NAN], 1, 1).is_none());
        assert!(inverse_factor(&[f32::INFINITY], 1, 1).is_none());
    }
}
