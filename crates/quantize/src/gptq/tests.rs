use folio_testing::Rng;

use super::*;
use crate::{Target, rtn};

const INT4: Target = Target::Int { bits: 4, group: Some(32), zero_points: false };
const OPTIONS: GptqOptions = GptqOptions { damping: 0.01, act_order: true, fitted_scales: false };

/// Rows of correlated columns of very different sizes, and weights.
fn problem(size: usize, rows: usize) -> (Hessian, Vec<f32>) {
    let mut rng = Rng::new(size as u64);
    let sizes: Vec<f32> = (0..size).map(|_| (1.5 * rng.normal()).exp()).collect();
    let mut inputs = Vec::new();
    for _ in 0..2 * size {
        let common = rng.normal();
        inputs.extend(sizes.iter().map(|size| size * (0.6 * common + rng.normal())));
    }
    let weights = (0..rows * size).map(|_| 0.05 * rng.normal()).collect();
    (Hessian::of_rows(&inputs, size), weights)
}

/// The algorithm as in its paper: the whole inverse by elimination, one column after the other, in
/// f64.
fn by_the_book(target: Target, hessian: &Hessian, weights: &[f32], options: &GptqOptions) -> Vec<u8> {
    let n = hessian.size;
    let diagonal = hessian.diagonal();
    let mean = diagonal.iter().sum::<f32>() / n as f32;
    let mut order: Vec<usize> = (0..n).collect();
    if options.act_order {
        order.sort_by(|a, b| diagonal[*b].total_cmp(&diagonal[*a]));
    }
    let mut h = vec![vec![0.0f64; n]; n];
    for i in 0..n {
        for j in 0..n {
            h[i][j] = f64::from(hessian.values[order[i] * n + order[j]]);
        }
        h[i][i] += f64::from(options.damping * mean);
    }
    let mut inverse = invert(h);
    let grid = Grid::of_range(target, weights, n);
    let mut codes = vec![0u8; weights.len()];
    let mut rows: Vec<Vec<f64>> =
        weights.chunks_exact(n).map(|row| order.iter().map(|&column| f64::from(row[column])).collect()).collect();
    for i in 0..n {
        for (number, row) in rows.iter_mut().enumerate() {
            let (code, value) = grid.encode(number, order[i], row[i] as f32);
            codes[number * n + order[i]] = code;
            let error = (row[i] - f64::from(value)) / inverse[i][i];
            for j in i + 1..n {
                row[j] -= error * inverse[i][j];
            }
        }
        // One step of elimination removes column i from the inverse.
        for j in i + 1..n {
            for k in i + 1..n {
                inverse[j][k] -= inverse[j][i] * inverse[i][k] / inverse[i][i];
            }
        }
    }
    codes
}

fn invert(mut a: Vec<Vec<f64>>) -> Vec<Vec<f64>> {
    let n = a.len();
    let mut out: Vec<Vec<f64>> = (0..n).map(|i| (0..n).map(|j| f64::from(u8::from(i == j))).collect()).collect();
    for i in 0..n {
        let pivot = a[i][i];
        for j in 0..n {
            a[i][j] /= pivot;
            out[i][j] /= pivot;
        }
        for row in (0..n).filter(|row| *row != i) {
            let factor = a[row][i];
            for j in 0..n {
                a[row][j] -= factor * a[i][j];
                out[row][j] -= factor * out[i][j];
            }
        }
    }
    out
}

fn loss(hessian: &Hessian, weights: &[f32], coded: &Quantized) -> f64 {
    let errors: Vec<f32> = coded.to_f32().iter().zip(weights).map(|(a, b)| a - b).collect();
    hessian.loss(&errors)
}

#[test]
fn codes_are_those_of_the_book() {
    for size in [32, 160, 288] {
        let (hessian, weights) = problem(size, 21);
        for act_order in [false, true] {
            let options = GptqOptions { act_order, ..OPTIONS };
            let factor = Factor::new(&hessian, &options, 2);
            let found = quantize(INT4, &weights, &factor, &options, 2);
            assert_eq!(found.codes, by_the_book(INT4, &hessian, &weights, &options), "{size}, {act_order}");
            assert_eq!(found, quantize(INT4, &weights, &factor, &options, 1), "threads do not show");
        }
    }
}

#[test]
fn outputs_are_nearer_than_by_rounding() {
    let (hessian, weights) = problem(160, 30);
    let targets = ["int4-g32", "int8-channel", "nf4", "fp8", "mxfp4", "nvfp4"].map(|name| name.parse().unwrap());
    for target in targets.into_iter().chain([Target::Int { bits: 4, group: Some(32), zero_points: true }]) {
        let plain = loss(&hessian, &weights, &rtn::quantize(target, &weights, 160, 1));
        let factor = Factor::new(&hessian, &OPTIONS, 1);
        let found = loss(&hessian, &weights, &quantize(target, &weights, &factor, &OPTIONS, 1));
        assert!(found < 0.75 * plain, "{target}: {found} against {plain}");
        let fitted = GptqOptions { fitted_scales: true, ..OPTIONS };
        let fitted = loss(&hessian, &weights, &quantize(target, &weights, &factor, &fitted, 1));
        assert!(fitted < 0.75 * plain, "{target}: {fitted} against {plain}");
    }
}

/// Independent columns have no errors to compensate: any order gives rounding to nearest.
#[test]
fn independent_columns_round_to_nearest() {
    let (mut hessian, weights) = problem(64, 9);
    for (at, value) in hessian.values.iter_mut().enumerate() {
        if at % 65 != 0 {
            *value = 0.0;
        }
    }
    let plain = rtn::quantize(INT4, &weights, 64, 1);
    for act_order in [false, true] {
        let options = GptqOptions { act_order, ..OPTIONS };
        assert_eq!(quantize(INT4, &weights, &Factor::new(&hessian, &options, 1), &options, 1), plain);
    }
}

/// With columns in order of importance, their earlier order does not matter, as long as groups move
/// along.
#[test]
fn a_column_order_is_undone() {
    let (hessian, weights) = problem(64, 9);
    let channel = Target::Int { bits: 4, group: None, zero_points: false };
    let found = quantize(channel, &weights, &Factor::new(&hessian, &OPTIONS, 1), &OPTIONS, 1);
    let turned: Vec<usize> = (0..64).map(|column| (column * 13 + 5) % 64).collect();
    let mut other = Hessian::new(64);
    for i in 0..64 {
        for j in 0..64 {
            other.values[i * 64 + j] = hessian.values[turned[i] * 64 + turned[j]];
        }
    }
    let moved: Vec<f32> = weights.chunks_exact(64).flat_map(|row| turned.iter().map(|&column| row[column])).collect();
    let other = quantize(channel, &moved, &Factor::new(&other, &OPTIONS, 1), &OPTIONS, 1);
    for (row, moved) in found.codes.chunks_exact(64).zip(other.codes.chunks_exact(64)) {
        assert!(turned.iter().zip(moved).all(|(&column, code)| row[column] == *code));
    }
}

#[test]
fn damaged_hessians_are_survived() {
    let (hessian, weights) = problem(64, 9);
    let plain = rtn::quantize(INT4, &weights, 64, 1);
    let run = |hessian: &Hessian| quantize(INT4, &weights, &Factor::new(hessian, &OPTIONS, 1), &OPTIONS, 1);
    assert_eq!(run(&Hessian::new(64)), plain, "nothing was ever read");
    let mut broken = hessian.clone();
    broken.values[7] = f32::NAN;
    assert_eq!(run(&broken), plain);
    broken.values[7] = -1e30;
    assert_eq!(run(&broken).codes.len(), plain.codes.len(), "not positive definite");
    // Columns that were never read are rounded to nearest and affect no other.
    let mut dead = hessian;
    for other in 0..64 {
        for column in [3, 40] {
            (dead.values[column * 64 + other], dead.values[other * 64 + column]) = (0.0, 0.0);
        }
    }
    let found = run(&dead);
    for (row, expected) in found.codes.chunks_exact(64).zip(plain.codes.chunks_exact(64)) {
        assert_eq!((row[3], row[40]), (expected[3], expected[40]));
    }
    assert!(loss(&dead, &weights, &found) < loss(&dead, &weights, &plain));
}
