//! GPTQ: columns are rounded one by one, and later columns compensate for the error of each, as far
//! as calibration shows that they can.
//!
//! With `U^T U = H^-1`, rounding column `i` of a row by `e` moves the columns `j > i` by
//! `-e / U[i][i] * U[i][j]`. Rows are independent, so threads divide them. Updates beyond a block
//! of columns wait until it is done. Columns go in order of falling importance; groups keep their
//! columns and have fixed scales, so a file needs no column order.

use crate::grid::Grid;
use crate::hessian::Hessian;
use crate::{GptqOptions, Quantized, Target, linalg, parallel};

/// Columns between two updates of all later columns.
const BLOCK: usize = 128;
/// Rows that go through a block together, so that `U` is read from memory once for all of them.
const TILE: usize = 16;
/// Tries with ten times the damping each, before columns are treated as independent.
const DAMPINGS: usize = 4;

/// Shared by the linears of one input: the order of columns and the factor that distributes errors.
pub struct Factor {
    size: usize,
    /// Column at each position of the order.
    order: Vec<u32>,
    /// Upper triangle `U`, in that order.
    upper: Vec<f32>,
    /// Cost of an error, by column.
    importance: Vec<f32>,
}

impl Factor {
    pub fn new(hessian: &Hessian, options: &GptqOptions, threads: usize) -> Self {
        let size = hessian.size;
        let mut diagonal = hessian.diagonal();
        let finite = hessian.values.iter().all(|value| value.is_finite());
        if !finite {
            diagonal.fill(1.0);
        }
        let mean = diagonal.iter().map(|value| f64::from(*value)).sum::<f64>() / size.max(1) as f64;
        let mean = if mean > 0.0 { mean as f32 } else { 1.0 };
        let mut order: Vec<u32> = (0..size as u32).collect();
        if options.act_order {
            order.sort_by(|a, b| diagonal[*b as usize].total_cmp(&diagonal[*a as usize]).then(a.cmp(b)));
        }
        let importance = diagonal.iter().map(|value| value + options.damping * mean).collect();
        let mut damping = options.damping * mean;
        for _ in 0..DAMPINGS {
            if !finite {
                break;
            }
            let damped = ordered(hessian, &order, damping, mean);
            if let Some(upper) = linalg::inverse_factor(&damped, size, threads) {
                return Self { size, order, upper, importance };
            }
            damping *= 10.0;
        }
        // The Hessian cannot be factored: columns become independent, which is rounding to nearest.
        let mut upper = vec![0.0; size * size];
        upper.iter_mut().step_by(size + 1).for_each(|value| *value = 1.0);
        Self { size, order, upper, importance }
    }
}

/// The Hessian in the order of columns, damped. A column that was never read is independent.
fn ordered(hessian: &Hessian, order: &[u32], damping: f32, mean: f32) -> Vec<f32> {
    let size = hessian.size;
    let mut out = Vec::with_capacity(size * size);
    for (place, row) in order.iter().enumerate() {
        let row = &hessian.values[*row as usize * size..][..size];
        out.extend(order.iter().map(|column| row[*column as usize]));
        let diagonal = &mut out[place * size + place];
        *diagonal = if *diagonal > 0.0 { *diagonal + damping } else { mean };
    }
    out
}

/// Quantizes `weights`, with rows as wide as the factor.
pub fn quantize(target: Target, weights: &[f32], factor: &Factor, options: &GptqOptions, threads: usize) -> Quantized {
    let grid = match options.fitted_scales {
        true => Grid::fitted(target, weights, factor.size, &factor.importance, threads),
        false => Grid::of_range(target, weights, factor.size),
    };
    let codes = spread(&grid, weights, factor, threads);
    grid.with_codes(codes)
}

fn spread(grid: &Grid, weights: &[f32], factor: &Factor, threads: usize) -> Vec<u8> {
    let size = factor.size;
    let mut codes = vec![0u8; weights.len()];
    parallel::rows(threads, &mut codes, size, |first, codes| {
        let mut tile = Tile { first_row: 0, values: vec![0.0; TILE * size], errors: vec![0.0; TILE * BLOCK] };
        for (number, codes) in codes.chunks_mut(TILE * size).enumerate() {
            tile.first_row = first + number * TILE;
            let rows = &weights[tile.first_row * size..][..codes.len()];
            for (values, row) in tile.values.chunks_exact_mut(size).zip(rows.chunks_exact(size)) {
                values.iter_mut().zip(&factor.order).for_each(|(value, column)| *value = row[*column as usize]);
            }
            for start in (0..size).step_by(BLOCK) {
                tile.code_block(grid, factor, codes, start..(start + BLOCK).min(size));
            }
        }
    });
    codes
}

/// A few rows on their way through the columns.
struct Tile {
    first_row: usize,
    /// `[TILE, size]`, in the factor's order.
    values: Vec<f32>,
    /// `[TILE, BLOCK]`
    errors: Vec<f32>,
}

impl Tile {
    fn code_block(&mut self, grid: &Grid, factor: &Factor, codes: &mut [u8], block: std::ops::Range<usize>) {
        let size = factor.size;
        let rows = self.values.chunks_exact_mut(size).zip(self.errors.chunks_exact_mut(BLOCK));
        for (number, ((values, errors), codes)) in rows.zip(codes.chunks_exact_mut(size)).enumerate() {
            for place in block.clone() {
                let column = factor.order[place] as usize;
                let (code, rounded) = grid.encode(self.first_row + number, column, values[place]);
                codes[column] = code;
                let upper = &factor.upper[place * size..][..size];
                let error = (values[place] - rounded) / upper[place];
                errors[place - block.start] = error;
                for (value, factor) in values[place + 1..block.end].iter_mut().zip(&upper[place + 1..block.end]) {
                    *value -= error * factor;
                }
            }
            spread_errors(&mut values[block.end..], &errors[..block.len()], factor, &block);
        }
    }
}

/// Updates the columns behind the block by all of its errors, four at a time.
fn spread_errors(rest: &mut [f32], errors: &[f32], factor: &Factor, block: &std::ops::Range<usize>) {
    let row = |place: usize| &factor.upper[place * factor.size + block.end..(place + 1) * factor.size];
    let (fours, remaining) = errors.as_chunks::<4>();
    for (number, e) in fours.iter().enumerate() {
        let first = block.start + 4 * number;
        let (a, b, c, d) = (row(first), row(first + 1), row(first + 2), row(first + 3));
        let factors = a.iter().zip(b).zip(c.iter().zip(d));
        for (value, ((a, b), (c, d))) in rest.iter_mut().zip(factors) {
            *value -= (e[0] * a + e[1] * b) + (e[2] * c + e[3] * d);
        }
    }
    for (number, e) in remaining.iter().enumerate() {
        for (value, factor) in rest.iter_mut().zip(row(block.start + 4 * fours.len() + number)) {
            *value -= e * factor;
        }
    }
}

#[cfg(test)]
mod tests;
