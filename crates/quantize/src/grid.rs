//! The scales and zero points of a matrix, which determine its levels. Codes are chosen afterwards,
//! by nearness or by GPTQ.

use half::bf16;

use crate::levels::Levels;
use crate::target::FP8_BLOCK;
use crate::{Quantized, ScaleKind, Target, float8, parallel};

pub(crate) struct Grid {
    pub target: Target,
    pub rows: usize,
    pub cols: usize,
    levels: Levels,
    group: usize,
    groups: usize,
    /// Scales in the layout of [`Quantized`].
    scales: Vec<f32>,
    zeros: Vec<u8>,
    divisor: f32,
}

/// Scale and zero point of one group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Step {
    /// The scale in its stored precision.
    pub scale: f32,
    pub zero: u8,
}

/// An arbitrary scale for groups of zeros, because other loaders refuse a zero.
const NO_SCALE: f32 = 1.0 / 128.0;

/// Ranges tried by [`Grid::fitted`], as shares of the full one.
const SHRINKS: usize = 21;

fn shrink(step: usize) -> f32 {
    1.075 - 0.025 * step as f32
}

impl Grid {
    /// Chooses each group's levels to reach as far as its values.
    pub fn of_range(target: Target, weights: &[f32], cols: usize) -> Self {
        let mut grid = Self::empty(target, weights, cols);
        if target.rows_per_scale() > 1 {
            grid.fill_blocks(weights);
        } else {
            grid.fill(weights, 1, |grid, _, _, values| grid.step(values, 1.0));
        }
        grid
    }

    /// Chooses for each group the range that loses least, if an error in column `j` costs
    /// `importance[j]`.
    pub fn fitted(target: Target, weights: &[f32], cols: usize, importance: &[f32], threads: usize) -> Self {
        assert_eq!(importance.len(), cols, "one importance a column");
        if target.rows_per_scale() > 1 {
            return Self::of_range(target, weights, cols);
        }
        Self::chosen(target, weights, cols, threads, |grid, _, group, values| {
            let importance = &importance[group * grid.group..][..values.len()];
            grid.best_step(values, 1, |grid, step| {
                let errors = values.iter().zip(importance).map(|(value, importance)| {
                    let error = value - grid.rounded(step, *value);
                    importance * error * error
                });
                errors.sum()
            })
        })
    }

    /// Steps chosen by the caller: `choose(grid, row, group, values)`.
    pub fn chosen(
        target: Target,
        weights: &[f32],
        cols: usize,
        threads: usize,
        choose: impl Fn(&Self, usize, usize, &[f32]) -> Step + Sync,
    ) -> Self {
        let mut grid = Self::empty(target, weights, cols);
        grid.fill(weights, threads, choose);
        grid
    }

    fn empty(target: Target, weights: &[f32], cols: usize) -> Self {
        let group = target.group(cols);
        let divisor = match target.scale_kind() {
            // The largest scale becomes the largest E4M3 number.
            ScaleKind::E4m3 => {
                let reach = largest(weights);
                if reach > 0.0 { 448.0 * 6.0 / reach } else { 1.0 }
            }
            _ => 1.0,
        };
        let (rows, groups) = (weights.len() / cols.max(1), cols.div_ceil(group));
        let levels = Levels::of(target);
        Self { target, rows, cols, levels, group, groups, scales: Vec::new(), zeros: Vec::new(), divisor }
    }

    fn fill(&mut self, weights: &[f32], threads: usize, choose: impl Fn(&Self, usize, usize, &[f32]) -> Step + Sync) {
        let mut steps = vec![Step { scale: 0.0, zero: 0 }; self.rows * self.groups];
        let (cols, group) = (self.cols, self.group);
        let grid = &*self;
        parallel::rows(threads, &mut steps, self.groups, |first, steps| {
            for (row, steps) in steps.chunks_exact_mut(grid.groups).enumerate() {
                let values = &weights[(first + row) * cols..][..cols];
                for (number, (step, values)) in steps.iter_mut().zip(values.chunks(group)).enumerate() {
                    *step = choose(grid, first + row, number, values);
                }
            }
        });
        self.scales = steps.iter().map(|step| step.scale).collect();
        if self.target.zero_points() {
            self.zeros = steps.iter().map(|step| step.zero).collect();
        }
    }

    /// One scale for a block of rows and columns.
    fn fill_blocks(&mut self, weights: &[f32]) {
        for rows in weights.chunks(FP8_BLOCK * self.cols) {
            for number in 0..self.groups {
                let range = number * self.group..((number + 1) * self.group).min(self.cols);
                let reach = rows.chunks_exact(self.cols).map(|row| largest(&row[range.clone()])).fold(0.0f32, f32::max);
                self.scales.push(self.step(&[reach], 1.0).scale);
            }
        }
    }

    /// The step with levels that cover `share` of the values' range.
    pub fn step(&self, values: &[f32], share: f32) -> Step {
        let middle = self.levels.middle();
        if self.target.zero_points() {
            let low = values.iter().fold(0.0f32, |low, value| low.min(*value)) * share;
            let high = values.iter().fold(0.0f32, |high, value| high.max(*value)) * share;
            let scale = self.stored_scale((high - low) / (2.0 * self.reach()));
            let zero = (-low / scale).round_ties_even().clamp(0.0, 2.0 * self.reach());
            return Step { scale, zero: zero as u8 };
        }
        Step { scale: self.stored_scale(largest(values) * share / self.reach()), zero: middle }
    }

    /// The best by `loss` of the steps that cover different shares of the range: every `stride`-th
    /// of them.
    pub fn best_step(&self, values: &[f32], stride: usize, loss: impl Fn(&Self, Step) -> f32) -> Step {
        let mut best = self.step(values, 1.0);
        let mut best_loss = loss(self, best);
        let mut last = best;
        for share in (0..SHRINKS).step_by(stride).map(shrink) {
            let step = self.step(values, share);
            if step == last {
                continue;
            }
            last = step;
            let found = loss(self, step);
            if found < best_loss {
                (best, best_loss) = (step, found);
            }
        }
        best
    }

    fn reach(&self) -> f32 {
        // bitsandbytes leaves the lowest code of a byte unused.
        if self.target == Target::LlmInt8 { 127.0 } else { self.levels.reach() }
    }

    /// The scale in its stored precision.
    fn stored_scale(&self, scale: f32) -> f32 {
        let stored = match self.target.scale_kind() {
            ScaleKind::Bf16 => bf16::from_f32(scale).to_f32(),
            ScaleKind::F32 => scale,
            ScaleKind::E8m0 => power_of_two(scale * self.reach()),
            // Zero would lose the group; the smallest number comes nearest.
            ScaleKind::E4m3 => float8::round(scale * self.divisor).max(float8::decode(1)),
        };
        if stored > 0.0 { stored } else { NO_SCALE }
    }

    /// `value` rounded with this step.
    pub fn rounded(&self, step: Step, value: f32) -> f32 {
        let scale = step.scale / self.divisor;
        scale * self.levels.level(self.levels.nearest(value / scale, step.zero), step.zero)
    }

    fn step_of(&self, row: usize, col: usize) -> Step {
        let at = row / self.target.rows_per_scale() * self.groups + col / self.group;
        Step { scale: self.scales[at], zero: self.zeros.get(at).copied().unwrap_or(self.levels.middle()) }
    }

    /// The nearest code of `value` at (row, col), and its decoded value.
    pub fn encode(&self, row: usize, col: usize, value: f32) -> (u8, f32) {
        let step = self.step_of(row, col);
        let scale = step.scale / self.divisor;
        let code = self.levels.nearest(value / scale, step.zero);
        (code, scale * self.levels.level(code, step.zero))
    }

    /// Rounds every value to its nearest level.
    pub fn nearest(self, weights: &[f32], threads: usize) -> Quantized {
        let mut codes = vec![0u8; weights.len()];
        parallel::rows(threads, &mut codes, self.cols, |first, codes| {
            for (row, codes) in codes.chunks_exact_mut(self.cols).enumerate() {
                let values = &weights[(first + row) * self.cols..][..self.cols];
                for (number, (codes, values)) in codes.chunks_mut(self.group).zip(values.chunks(self.group)).enumerate()
                {
                    let step = self.step_of(first + row, number * self.group);
                    let scale = step.scale / self.divisor;
                    for (code, value) in codes.iter_mut().zip(values) {
                        *code = self.levels.nearest(value / scale, step.zero);
                    }
                }
            }
        });
        self.with_codes(codes)
    }

    pub fn with_codes(self, codes: Vec<u8>) -> Quantized {
        let Self { target, rows, cols, scales, zeros, divisor, .. } = self;
        assert_eq!(codes.len(), rows * cols, "a code a value");
        Quantized { target, rows, cols, codes, scales, zeros, divisor, outliers: None }
    }
}

fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0.0f32, |most, value| most.max(value.abs()))
}

/// The scale of an E2M1 group with largest value `reach`: a power of two that brings it between 3.5
/// and 7, because values slightly above 6 still round to 6.
fn power_of_two(reach: f32) -> f32 {
    let bumped = (reach.to_bits() + (1 << 21)) & 0x7f80_0000;
    // Four, the largest power of two below the largest level, is 2^2.
    let exponent = ((bumped >> 23) as i32 - 2).clamp(1, 254);
    if reach > 0.0 { f32::from_bits((exponent as u32) << 23) } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use folio_testing::Rng;

    use super::*;

    const TARGETS: [&str; 10] =
        ["int8", "int8-channel", "int4-g128", "int4-g32", "fp8", "fp8-block", "mxfp4", "nvfp4", "nf4", "llm-int8"];

    fn error(a: &[f32], b: &[f32]) -> f64 {
        let square = |x: f32| f64::from(x) * f64::from(x);
        let wrong: f64 = a.iter().zip(b).map(|(a, b)| square(a - b)).sum();
        (wrong / a.iter().map(|a| square(*a)).sum::<f64>()).sqrt()
    }

    #[test]
    fn every_target_comes_close() {
        let mut rng = Rng::new(3);
        let weights: Vec<f32> = (0..200 * 256).map(|_| 0.02 * rng.normal()).collect();
        let all = TARGETS.map(|name| name.parse().unwrap());
        let more = [4, 8].map(|bits| Target::Int { bits, group: Some(32), zero_points: true });
        for target in all.into_iter().chain(more) {
            let grid = Grid::of_range(target, &weights, 256);
            let (code, value) = grid.encode(150, 200, weights[150 * 256 + 200]);
            let coded = grid.nearest(&weights, 2);
            let values = coded.to_f32();
            assert_eq!((coded.codes[150 * 256 + 200], values[150 * 256 + 200]), (code, value), "{target}");
            let found = error(&weights, &values);
            let limit = match (target.bits(), target) {
                (8, Target::Fp8 { .. }) => 0.03,
                (8, _) => 0.01,
                (_, Target::Mxfp4) => 0.14,
                _ => 0.12,
            };
            assert!(found < limit, "{target}: {found}");
            let fitted = Grid::fitted(target, &weights, 256, &[1.0; 256], 2).nearest(&weights, 1);
            assert!(error(&weights, &fitted.to_f32()) <= found, "{target}: a fitted scale is no worse");
        }
    }

    #[test]
    fn scales_are_what_the_reference_tool_takes() {
        let int4 = Grid::of_range("int4-g32".parse().unwrap(), &[[0.75; 31].as_slice(), &[-1.5]].concat(), 32);
        assert_eq!(int4.scales, [bf16::from_f32(1.5 / 7.5).to_f32()]);
        let affine = Target::Int { bits: 4, group: None, zero_points: true };
        let grid = Grid::of_range(affine, &[-1.0, 0.0, 2.0], 3);
        assert_eq!((grid.scales[0], grid.zeros[0]), (bf16::from_f32(0.2).to_f32(), 5));
        // Powers of two: 1.75 and more counts as 2.
        for (reach, scale) in [(1.0, 0.25), (1.74, 0.25), (1.75, 0.5), (6.0, 1.0), (0.0, 0.0)] {
            assert_eq!(power_of_two(reach), scale, "{reach}");
        }
        let nvfp4 = Grid::of_range(Target::Nvfp4, &[[6.0; 16], [3.0; 16]].concat(), 32);
        assert_eq!((nvfp4.divisor, nvfp4.scales), (448.0, vec![448.0, 224.0]));
    }

    #[test]
    fn zeros_are_coded_without_a_zero_scale() {
        for name in TARGETS {
            let coded = Grid::of_range(name.parse().unwrap(), &[0.0; 128], 128).nearest(&[0.0; 128], 1);
            assert!(coded.scales.iter().all(|scale| *scale > 0.0 && scale.is_finite()), "{name}");
            assert!(coded.to_f32().iter().all(|value| *value == 0.0), "{name}");
        }
    }
}
