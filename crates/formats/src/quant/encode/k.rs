//! Encoders for the "K" blocks: 256 values in groups with scales that are small integers.
//!
//! Every group is first fitted alone, as if its scale (and minimum) could be any number; the
//! block's scale is the one with which the largest of them fits its integers. Then rounds of two
//! steps follow: each group takes the integers near its own fit that lose least, and the block's
//! scales are refitted to those integers by least squares. The best round is taken, compared after
//! decoding, half-precision rounding included.

use half::f16;

use super::inverse;
use super::k_pack::{self, Packed};
use crate::Format;
use crate::quant::k::LEN;

/// Rounds of integers, then block scales.
const ROUNDS: usize = 3;
/// The group scales tried: its reach over the number of levels plus each of these.
const TRIED: [f32; 7] = [-2.0, -1.25, -0.75, -0.4, 0.0, 0.4, 0.9];
const REFITS: usize = 2;
/// Integers around the nearest; the nearest first, so that it wins ties.
const NEAR: [f32; 3] = [0.0, -1.0, 1.0];

/// Appends whole blocks of `values`; lengths have been checked. `weights` has one number per value.
pub(super) fn push(format: Format, values: &[f32], weights: &[f32], out: &mut Vec<u8>) {
    for (x, weights) in values.as_chunks::<LEN>().0.iter().zip(weights.as_chunks::<LEN>().0) {
        let block = match format {
            Format::Q2_K => affine::<16>(x, weights, Affine { top: 3.0, integers: 15.0 }),
            Format::Q4_K => affine::<32>(x, weights, Affine { top: 15.0, integers: 63.0 }),
            Format::Q5_K => affine::<32>(x, weights, Affine { top: 31.0, integers: 63.0 }),
            Format::Q3_K => symmetric(x, weights, Symmetric { half: 4.0, integers: 32.0 }),
            Format::Q6_K => symmetric(x, weights, Symmetric { half: 32.0, integers: 128.0 }),
            _ => unreachable!("{format} has no K blocks"),
        };
        k_pack::push(format, &block, out);
    }
}

/// `value = scale * group_scale * level - minimum * group_minimum`, nothing negative.
#[derive(Clone, Copy)]
struct Affine {
    /// The highest level.
    top: f32,
    /// The highest group scale and group minimum.
    integers: f32,
}

/// A line from levels to values: `value = slope * level - drop`.
#[derive(Clone, Copy, Default)]
struct Line {
    slope: f32,
    drop: f32,
}

fn affine<const N: usize>(x: &[f32; LEN], weights: &[f32; LEN], kind: Affine) -> Packed {
    let groups = || x.as_chunks::<N>().0.iter().zip(weights.as_chunks::<N>().0);
    let lines: Vec<Line> = groups().map(|(x, weights)| best_line(x, weights, kind.top)).collect();
    let reach = |of: fn(&Line) -> f32| lines.iter().map(of).fold(0.0, f32::max);
    let mut scale = f16::from_f32(reach(|line| line.slope) / kind.integers);
    let mut minimum = f16::from_f32(reach(|line| line.drop) / kind.integers);
    let mut best = Packed::default();
    let mut least = f32::INFINITY;
    for _ in 0..ROUNDS {
        let mut block = Packed { scale, minimum, ..Packed::default() };
        let mut error = 0.0;
        let mut sums = BlockSums::default();
        for (group, (x, weights)) in groups().enumerate() {
            let found = best_integers(x, weights, lines[group], (scale.to_f32(), minimum.to_f32()), kind);
            error += found.error;
            block.scales[group] = found.slope as u8;
            block.minimums[group] = found.drop as u8;
            let line = Line { slope: scale.to_f32() * found.slope, drop: minimum.to_f32() * found.drop };
            let levels = nearest(x, line, kind.top);
            block.levels[group * N..][..N].copy_from_slice(&levels.map(|level| level as u8));
            sums.add(x, weights, &levels, found.slope, found.drop);
        }
        if error < least {
            (best, least) = (block, error);
        }
        (scale, minimum) = sums.solve(scale, minimum);
    }
    best
}

/// The line that fits a group best if slope and drop may be any numbers that are not negative.
fn best_line<const N: usize>(x: &[f32; N], weights: &[f32; N], top: f32) -> Line {
    let low = x.iter().fold(0.0f32, |low, value| low.min(*value));
    let high = x.iter().fold(low, |high, value| high.max(*value));
    let mut best = Line { slope: (high - low) / top, drop: -low };
    let mut least = error_of(x, weights, best, top);
    for step in TRIED {
        let slope = (high - low) / (top + step);
        // A shortened range is shortened at both ends.
        let mut line = Line { slope, drop: (0.5 * (slope * top - high - low)).max(0.0) };
        for _ in 0..=REFITS {
            let error = error_of(x, weights, line, top);
            if error < least {
                (best, least) = (line, error);
            }
            line = line_through(x, weights, &nearest(x, line, top));
        }
    }
    best
}

/// The weighted least-squares line; if its drop would be negative, the one through zero.
fn line_through<const N: usize>(x: &[f32; N], weights: &[f32; N], levels: &[f32; N]) -> Line {
    let total = sum::<N>(|i| weights[i]);
    let mean_x = sum::<N>(|i| weights[i] * x[i]) * inverse(total);
    let mean_level = sum::<N>(|i| weights[i] * levels[i]) * inverse(total);
    let cross = sum::<N>(|i| weights[i] * (x[i] - mean_x) * (levels[i] - mean_level));
    let norm = sum::<N>(|i| weights[i] * (levels[i] - mean_level) * (levels[i] - mean_level));
    let slope = (cross * inverse(norm)).max(0.0);
    let drop = slope * mean_level - mean_x;
    if drop >= 0.0 {
        return Line { slope, drop };
    }
    let cross = sum::<N>(|i| weights[i] * x[i] * levels[i]);
    let norm = sum::<N>(|i| weights[i] * levels[i] * levels[i]);
    Line { slope: (cross * inverse(norm)).max(0.0), drop: 0.0 }
}

struct Integers {
    slope: f32,
    drop: f32,
    error: f32,
}

/// The group scale and minimum near `line` that lose least under the block's `scale` and `minimum`.
fn best_integers<const N: usize>(
    x: &[f32; N],
    weights: &[f32; N],
    line: Line,
    (scale, minimum): (f32, f32),
    kind: Affine,
) -> Integers {
    let near = |value: f32, unit: f32| {
        let middle = round(value * inverse(unit), kind.integers);
        NEAR.map(|step| (middle + step).clamp(0.0, kind.integers))
    };
    let mut best = Integers { slope: 0.0, drop: 0.0, error: f32::INFINITY };
    for slope in near(line.slope, scale) {
        for drop in near(line.drop, minimum) {
            let error = error_of(x, weights, Line { slope: scale * slope, drop: minimum * drop }, kind.top);
            if error < best.error {
                best = Integers { slope, drop, error };
            }
        }
    }
    best
}

/// Sums for the least-squares fit of a block's two scales, given its integers.
#[derive(Default)]
struct BlockSums {
    steps_steps: f32,
    steps_drops: f32,
    drops_drops: f32,
    steps_x: f32,
    drops_x: f32,
}

impl BlockSums {
    fn add<const N: usize>(&mut self, x: &[f32; N], weights: &[f32; N], levels: &[f32; N], slope: f32, drop: f32) {
        self.steps_steps += slope * slope * sum::<N>(|i| weights[i] * levels[i] * levels[i]);
        self.steps_drops += slope * drop * sum::<N>(|i| weights[i] * levels[i]);
        self.drops_drops += drop * drop * sum::<N>(|i| weights[i]);
        self.steps_x += slope * sum::<N>(|i| weights[i] * levels[i] * x[i]);
        self.drops_x += drop * sum::<N>(|i| weights[i] * x[i]);
    }

    /// Scale and minimum of the best fit, or the old ones if there is none.
    fn solve(&self, scale: f16, minimum: f16) -> (f16, f16) {
        let (a, b, c) = (f64::from(self.steps_steps), -f64::from(self.steps_drops), f64::from(self.drops_drops));
        let (p, q) = (f64::from(self.steps_x), -f64::from(self.drops_x));
        let determinant = a * c - b * b;
        let (s, m) = if determinant > 1e-9 * a * c {
            ((p * c - q * b) / determinant, (q * a - p * b) / determinant)
        } else if a > 0.0 {
            ((p - b * minimum.to_f64()) / a, minimum.to_f64())
        } else {
            return (scale, minimum);
        };
        let usable = |value: f64| value.is_finite() && value >= 0.0;
        if usable(s) && usable(m) { (f16::from_f64(s), f16::from_f64(m)) } else { (scale, minimum) }
    }
}

/// `value = scale * group_scale * level`; both integers have one more step below zero than above.
#[derive(Clone, Copy)]
struct Symmetric {
    half: f32,
    integers: f32,
}

/// Groups of 16 in both symmetric formats.
const GROUP: usize = 16;

fn symmetric(x: &[f32; LEN], weights: &[f32; LEN], kind: Symmetric) -> Packed {
    let groups = || x.as_chunks::<GROUP>().0.iter().zip(weights.as_chunks::<GROUP>().0);
    let slopes: Vec<f32> = groups().map(|(x, weights)| best_slope(x, weights, kind.half)).collect();
    // The largest becomes the lowest integer, which has no positive twin.
    let largest = slopes.iter().fold(0.0f32, |best, slope| if slope.abs() > best.abs() { *slope } else { best });
    let mut scale = f16::from_f32(-largest / kind.integers);
    let mut best = Packed::default();
    let mut least = f32::INFINITY;
    for _ in 0..ROUNDS {
        let mut block = Packed { scale, ..Packed::default() };
        let (mut error, mut cross, mut norm) = (0.0, 0.0, 0.0);
        for (group, (x, weights)) in groups().enumerate() {
            let unit = scale.to_f32();
            let middle = round_signed(slopes[group] * inverse(unit), kind.integers);
            let near = NEAR.map(|step| (middle + step).clamp(-kind.integers, kind.integers - 1.0));
            let of = |integer: &f32| (error_through(x, weights, unit * integer, kind.half), *integer);
            let (loss, integer) =
                near.iter().map(of).fold((f32::INFINITY, middle), |a, b| if b.0 < a.0 { b } else { a });
            error += loss;
            let levels = nearest_through(x, unit * integer, kind.half);
            block.scales[group] = integer as i8 as u8;
            block.levels[group * GROUP..][..GROUP].copy_from_slice(&levels.map(|level| (level + kind.half) as u8));
            cross += integer * sum::<GROUP>(|i| weights[i] * x[i] * levels[i]);
            norm += integer * integer * sum::<GROUP>(|i| weights[i] * levels[i] * levels[i]);
        }
        if error < least {
            (best, least) = (block, error);
        }
        if norm > 0.0 {
            scale = f16::from_f32(cross / norm);
        }
    }
    best
}

/// The slope that fits a group best if it may be any number.
fn best_slope(x: &[f32; GROUP], weights: &[f32; GROUP], half: f32) -> f32 {
    let reach = x.iter().fold(0.0f32, |best, value| if value.abs() > best.abs() { *value } else { best });
    let mut best = -reach / half;
    let mut least = error_through(x, weights, best, half);
    for sign in [-1.0, 1.0] {
        for step in TRIED {
            let mut slope = sign * reach / (half + step);
            for _ in 0..=REFITS {
                let error = error_through(x, weights, slope, half);
                if error < least {
                    (best, least) = (slope, error);
                }
                let levels = nearest_through(x, slope, half);
                let cross = sum::<GROUP>(|i| weights[i] * x[i] * levels[i]);
                let norm = sum::<GROUP>(|i| weights[i] * levels[i] * levels[i]);
                slope = cross * inverse(norm);
            }
        }
    }
    best
}

fn nearest<const N: usize>(x: &[f32; N], line: Line, top: f32) -> [f32; N] {
    let by = inverse(line.slope);
    x.map(|value| round((value + line.drop) * by, top))
}

pub(super) fn nearest_through<const N: usize>(x: &[f32; N], slope: f32, half: f32) -> [f32; N] {
    let by = inverse(slope);
    x.map(|value| round_signed(value * by, half))
}

fn error_of<const N: usize>(x: &[f32; N], weights: &[f32; N], line: Line, top: f32) -> f32 {
    let levels = nearest(x, line, top);
    sum::<N>(|i| {
        let off = line.slope * levels[i] - line.drop - x[i];
        weights[i] * off * off
    })
}

pub(super) fn error_through<const N: usize>(x: &[f32; N], weights: &[f32; N], slope: f32, half: f32) -> f32 {
    let levels = nearest_through(x, slope, half);
    sum::<N>(|i| {
        let off = slope * levels[i] - x[i];
        weights[i] * off * off
    })
}

/// Adding and subtracting this number rounds a small one to nearest, without a call.
const WHOLE: f32 = 12_582_912.0;

fn round(value: f32, top: f32) -> f32 {
    (value.clamp(0.0, top) + WHOLE) - WHOLE
}

fn round_signed(value: f32, half: f32) -> f32 {
    (value.clamp(-half, half - 1.0) + WHOLE) - WHOLE
}

/// Summed in eight running sums, so that eight terms can be added at a time.
pub(super) fn sum<const N: usize>(term: impl Fn(usize) -> f32) -> f32 {
    let mut sums = [0.0f32; 8];
    for start in (0..N).step_by(8) {
        for (lane, sum) in sums.iter_mut().enumerate() {
            *sum += term(start + lane);
        }
    }
    sums.iter().sum()
}

#[cfg(test)]
mod tests {
    use folio_testing::Rng;

    use super::*;
    use crate::quant::tests::gaussian;
    use crate::quant::{encode, encode_fitted};

    const K: [Format; 5] = [Format::Q2_K, Format::Q3_K, Format::Q4_K, Format::Q5_K, Format::Q6_K];

    fn error_of(format: Format, bytes: &[u8], values: &[f32], weights: &[f32]) -> f64 {
        let mut back = vec![0.0; values.len()];
        format.decode(bytes, &mut back);
        (0..values.len()).map(|i| f64::from(weights[i]) * f64::from(values[i] - back[i]).powi(2)).sum()
    }

    /// The other encoder is `quantize_q4_K` and its relatives of ggml (llama.cpp in
    /// llama-cpp-python 0.3.36), on the same values; with even importances, which suit it best
    /// here.
    #[test]
    fn bell_shaped_values_lose_less_than_with_ggml() {
        let values = gaussian(LEN * 64);
        let even = vec![1.0; values.len()];
        for (format, ggml) in K.into_iter().zip([371.967, 106.878, 25.3059, 6.27561, 1.50362]) {
            let error = error_of(format, &encode(format, &values).unwrap(), &values, &even);
            assert!(error < ggml, "{format}: {error} against {ggml}");
            assert!(error > 0.5 * ggml, "{format}: {error} is too good to be true");
        }
    }

    #[test]
    fn weights_move_the_error_to_where_it_matters_less() {
        let values = gaussian(LEN * 16);
        let even = vec![1.0; values.len()];
        let uneven: Vec<f32> = (0..values.len() as u64).map(|i| (Rng::at(9, i) % 100) as f32).collect();
        for format in K {
            let judged =
                |weights: &[f32]| error_of(format, &encode_fitted(format, &values, weights).unwrap(), &values, &uneven);
            assert!(judged(&uneven) < 0.99 * judged(&even), "{format}");
        }
    }

    #[test]
    fn flat_tiny_and_one_sided_blocks_survive() {
        for format in K {
            for value in [0.0, 1.0, -3.5, 1e-7] {
                let x = [value; LEN];
                for weights in [[1.0; LEN], [0.0; LEN]] {
                    let bytes = encode_fitted(format, &x, &weights).unwrap();
                    assert!(error_of(format, &bytes, &x, &[1.0; LEN]) < 1e-2 * LEN as f64, "{format} {value}");
                }
            }
            let above: Vec<f32> = gaussian(LEN).iter().map(|value| value + 3.0).collect();
            let error = error_of(format, &encode(format, &above).unwrap(), &above, &[1.0; LEN]);
            assert!(error < 0.3 * LEN as f64, "{format}: {error}");
        }
    }
}
