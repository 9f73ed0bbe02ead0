//! Round to nearest: each group's range becomes its scale, each value its nearest level. The
//! reference tools do this without calibration, and methods with calibration are compared with it.

use half::bf16;

use crate::grid::Grid;
use crate::{Outliers, Quantized, Target};

/// Quantizes `weights` with rows of `cols` values.
pub fn quantize(target: Target, weights: &[f32], cols: usize, threads: usize) -> Quantized {
    Grid::of_range(target, weights, cols).nearest(weights, threads)
}

/// Quantizes `weights` with some columns (ascending) stored beside the codes, where they no longer
/// widen a group's range.
pub fn quantize_around(
    target: Target,
    mut weights: Vec<f32>,
    cols: usize,
    columns: Vec<u32>,
    threads: usize,
) -> Quantized {
    let outliers = take_columns(&mut weights, cols, columns);
    Quantized { outliers, ..quantize(target, &weights, cols, threads) }
}

fn take_columns(weights: &mut [f32], cols: usize, columns: Vec<u32>) -> Option<Outliers> {
    if columns.is_empty() {
        return None;
    }
    let mut values = Vec::with_capacity(weights.len() / cols.max(1) * columns.len());
    for row in weights.chunks_exact_mut(cols) {
        for column in &columns {
            values.push(bf16::from_f32(std::mem::take(&mut row[*column as usize])));
        }
    }
    Some(Outliers { columns, values })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outlier_columns_are_kept_and_do_not_widen_the_range() {
        let weights = [[0.5f32, 100.0, -1.0], [0.25, -7.0, 2.0]].concat();
        let plain = quantize(Target::LlmInt8, &weights, 3, 1);
        assert!((plain.to_f32()[0] - 0.5).abs() > 0.1);
        let kept = quantize_around(Target::LlmInt8, weights.clone(), 3, vec![1], 1);
        for (value, expected) in kept.to_f32().iter().zip(&weights) {
            assert!((value - expected).abs() < 0.01, "{value} for {expected}");
        }
        assert_eq!(kept.to_f32()[1], 100.0);
        assert_eq!(kept.codes[1], 128, "a code that means zero");
    }
}
