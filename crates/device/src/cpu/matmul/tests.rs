//! Every instruction set against plain f64 sums and against itself with other row and thread
//! counts.

use std::borrow::Cow;

use folio_formats::{Format, Matrix};
use half::{bf16, f16};

use super::super::packed::Supply;
use super::super::weight::LANES;
use super::super::{Isa, Pool};
use super::blocks::GROUP_TILES;
use super::kernel::MAX_ROWS;
use super::*;

/// A number in -1..1 that depends on both arguments, by a multiplicative hash.
fn noise(seed: usize, index: usize) -> f32 {
    let mut state = (seed as u64) << 32 | index as u64;
    for _ in 0..2 {
        state = (state ^ state >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    }
    (state >> 40) as f32 / (1 << 23) as f32 - 1.0
}

fn matrix(format: Format, outputs: usize, inputs: usize) -> Matrix<'static> {
    let rows = (0..outputs).map(|row| {
        let values = (0..inputs).map(move |col| noise(1, row * inputs + col));
        Cow::Owned(match format {
            Format::F32 => values.flat_map(f32::to_le_bytes).collect::<Vec<u8>>(),
            Format::F16 => values.flat_map(|value| f16::from_f32(value).to_le_bytes()).collect(),
            _ => values.flat_map(|value| bf16::from_f32(value).to_le_bytes()).collect(),
        })
    });
    Matrix::from_rows(format, inputs, rows.collect()).unwrap()
}

fn tensor(seed: usize, rows: usize, cols: usize) -> Tensor {
    let mut tensor = Tensor::new(rows, cols).unwrap();
    for (index, value) in tensor.head_mut(rows).iter_mut().enumerate() {
        *value = noise(seed, index);
    }
    tensor
}

fn product(isa: Isa, threads: usize, x: &Tensor, matrix: &Matrix<'_>, bias: Option<&Vector>, rows: usize) -> Vec<f32> {
    let pool = Pool::new(threads).unwrap();
    let ctx = Ctx { pool: &pool, isa };
    let weight = Weight::pack(ctx, &mut Supply::Fresh, matrix).unwrap();
    let mut out = tensor(99, rows, weight.outputs());
    linear(ctx, &mut Scratch::default(), &mut out, x, &weight, bias, rows);
    out.head(rows).to_vec()
}

/// The expected product in f64 and the sum of the products' magnitudes, which bounds the rounding
/// error.
fn expected(x: &Tensor, matrix: &Matrix<'_>, bias: Option<&Vector>, row: usize, output: usize) -> (f64, f64) {
    let mut weights = vec![0.0; matrix.cols()];
    matrix.read_row(output, &mut weights);
    let bias = bias.map_or(0.0, |bias| bias[output] as f64);
    let round = |value: f32| match matrix.format().unwrap() {
        Format::BF16 => bf16::from_f32(value).to_f32() as f64,
        _ => value as f64,
    };
    x.row(row).iter().zip(&weights).fold((bias, bias.abs()), |(sum, size), (&x, &w)| {
        let product = round(x) * w as f64;
        (sum + product, size + product.abs())
    })
}

const FORMATS: [Format; 3] = [Format::F32, Format::F16, Format::BF16];

#[test]
fn every_isa_agrees_with_plain_sums() {
    for isa in Isa::available() {
        for format in FORMATS {
            for (rows, outputs, inputs) in [(1, 1, 1), (3, 31, 33), (7, 33, 64), (15, 64, 31), (29, 97, 700)] {
                let (matrix, x) = (matrix(format, outputs, inputs), tensor(2, rows, inputs));
                let bias = Vector::new(&(0..outputs).map(|output| noise(3, output)).collect::<Vec<_>>()).unwrap();
                for bias in [None, Some(&bias)] {
                    let out = product(isa, 2, &x, &matrix, bias, rows);
                    for row in 0..rows {
                        for output in 0..outputs {
                            let (sum, size) = expected(&x, &matrix, bias, row, output);
                            let found = out[row * outputs + output] as f64;
                            let close = (found - sum).abs() <= 1e-6 * (size + 1.0) * (inputs as f64).sqrt();
                            assert!(close, "{isa:?} {format:?} [{row}, {output}]: {found} for {sum}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_alone_and_among_others() {
    // Wide enough for several blocks of the inner dimension, and for every height of tile.
    let (outputs, inputs) = (2 * LANES + 5, 4130);
    assert!(inputs > 2 * kernel::BLOCK_BYTES / 64, "several blocks in every packing");
    for isa in Isa::available() {
        for format in FORMATS {
            let matrix = matrix(format, outputs, inputs);
            let x = tensor(4, 45, inputs);
            let all = product(isa, 2, &x, &matrix, None, 45);
            for rows in (1..=16).chain([31, 44]) {
                let some = product(isa, 1 + rows % 3, &x, &matrix, None, rows);
                assert!(some == all[..rows * outputs], "{isa:?} {format:?} {rows} rows");
            }
            let mut last = Tensor::new(1, inputs).unwrap();
            last.row_mut(0).copy_from_slice(x.row(44));
            // Computed by one thread, which has neighbouring panels.
            assert!(product(isa, 1, &last, &matrix, None, 1) == all[44 * outputs..], "{isa:?} {format:?} alone");
        }
    }
}

#[test]
fn a_row_has_the_same_bits_among_more_than_pass_a_block_together() {
    let (outputs, inputs, rows) = (3 * LANES + 5, 1030, (GROUP_TILES + 1) * MAX_ROWS + 5);
    let (matrix, x) = (matrix(Format::BF16, outputs, inputs), tensor(6, rows, inputs));
    // With one thread, a tile runs through all panels.
    for (isa, threads) in Isa::available().into_iter().flat_map(|isa| [(isa, 1), (isa, 2)]) {
        let all = product(isa, threads, &x, &matrix, None, rows);
        for row in [0, 31, 32, GROUP_TILES * MAX_ROWS - 1, GROUP_TILES * MAX_ROWS, rows - 1] {
            let mut alone = Tensor::new(1, inputs).unwrap();
            alone.row_mut(0).copy_from_slice(x.row(row));
            let alone = product(isa, 1, &alone, &matrix, None, 1);
            assert!(alone == all[row * outputs..][..outputs], "{isa:?} {threads} threads, row {row}");
        }
    }
}

#[test]
fn several_products_in_one_fork_equal_one_by_one() {
    let (outputs, inputs, counts) = (70, 300, [3usize, 0, 17, 1]);
    for isa in Isa::available() {
        let pool = Pool::new(3).unwrap();
        let ctx = Ctx { pool: &pool, isa };
        let matrices: Vec<_> = (0..4).map(|_| matrix(Format::BF16, outputs, inputs)).collect();
        let weights: Vec<_> =
            matrices.iter().map(|matrix| Weight::pack(ctx, &mut Supply::Fresh, matrix).unwrap()).collect();
        let kernel = weights[0].parts()[0].kernel();
        let x = tensor(5, 21, inputs);
        let picked: Vec<u32> = (0..21).rev().collect();
        let mut first = 0;
        let sets: Vec<RowTiles> = counts
            .iter()
            .map(|&rows| {
                first += rows;
                kernel.tiles(first - rows, rows)
            })
            .collect();
        let mut scratch = Scratch::default();
        let source = Source { values: x.head(21), cols: inputs, picked: Some(&picked), columns: Columns::default() };
        let packed = pack(ctx, kernel.activations(), &mut scratch.packed, source, 21, &sets);
        let mut out = vec![0.0; 21 * outputs];
        let product_of = |index: usize| Product {
            main: operand(&weights[index].parts()[0], packed, sets[index].first_row, sets[index].rows),
            outliers: None,
            bias: None,
            first_column: 0,
        };
        multiply(ctx, &mut scratch.per_thread, 4, product_of, &mut out, outputs);
        let whole = product(isa, 1, &x, &matrices[0], None, 21);
        for row in 0..21 {
            let source = picked[row] as usize;
            assert!(out[row * outputs..][..outputs] == whole[source * outputs..][..outputs], "{isa:?} row {row}");
        }
    }
}
