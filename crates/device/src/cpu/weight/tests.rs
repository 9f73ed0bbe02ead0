//! Every value is where the layout says, and sizes are as predicted.

use std::borrow::Cow;

use folio_formats::{ActivationScale, Format, Grouped, GroupedLevels, GroupedRow};
use half::{bf16, f16};

use super::*;
use crate::Error;
use crate::cpu::{Isa, Pool};

fn pack(matrix: &Matrix<'_>) -> Weight {
    let pool = Pool::new(2).unwrap();
    Weight::pack(Ctx { pool: &pool, isa: Isa::Scalar }, &mut Supply::Fresh, matrix).unwrap()
}

fn bytes_foretold(matrix: &Matrix<'_>) -> u64 {
    packed_parts(matrix).unwrap().iter().map(PartShape::bytes).sum()
}

fn plain(format: Format, rows: usize, cols: usize) -> Matrix<'static> {
    let value = |row: usize, col: usize| (row * 7 + col) as f32 % 61.0 - 30.0;
    let rows = (0..rows).map(|row| {
        let values = (0..cols).map(|col| value(row, col));
        Cow::Owned(match format {
            Format::F32 => values.flat_map(f32::to_le_bytes).collect::<Vec<u8>>(),
            Format::F16 => values.flat_map(|v| f16::from_f32(v).to_le_bytes()).collect(),
            _ => values.flat_map(|v| bf16::from_f32(v).to_le_bytes()).collect(),
        })
    });
    Matrix::from_rows(format, cols, rows.collect()).unwrap()
}

/// Rows of one format with scales of very different sizes; `outliers` are columns, `order` reverses
/// the columns.
fn grouped(
    levels: GroupedLevels,
    (group, affine, order): (usize, bool, bool),
    outliers: &[u32],
    (rows, cols): (usize, usize),
) -> Matrix<'static> {
    let groups = cols.div_ceil(group);
    let number = |row: usize, at: usize| (1.0 + (row * 13 + at * 5) as f32 % 7.0) * 2f32.powi(row as i32 % 40 - 30);
    let row = |row: usize| GroupedRow {
        codes: (0..cols)
            .map(|col| match levels {
                GroupedLevels::Nibbles(_) => ((row * 3 + col * 5) % 16) as u8,
                _ => ((row * 11 + col * 7) % 255) as u8,
            })
            .collect(),
        scales: (0..groups).map(|at| number(row, at)).collect(),
        minimums: (0..if affine { groups } else { 0 }).map(|at| -number(row, at + 3)).collect(),
        outliers: outliers.iter().map(|&col| bf16::from_f32(100.0 + col as f32)).collect(),
    };
    let form = Grouped {
        group,
        levels,
        // Groups over which activations are rounded too are at most 32 long.
        activations: if group > 32 { ActivationScale::Row } else { ActivationScale::Group },
        order: order.then(|| (0..cols as u32).rev().collect()),
        outliers: (!outliers.is_empty()).then(|| outliers.into()),
    };
    Matrix::from_grouped(cols, form, (0..rows).map(row).collect()).unwrap()
}

/// Both ways of reading agree, but for the rounding of scales and minimums to f16; sizes are as
/// predicted.
fn check(matrix: &Matrix<'_>, tolerance: f32) {
    let weight = pack(matrix);
    assert_eq!(weight.bytes(), bytes_foretold(matrix));
    let (mut expected, mut found) = (vec![0.0; matrix.cols()], vec![0.0; matrix.cols()]);
    for output in 0..matrix.num_rows() {
        matrix.read_row(output, &mut expected);
        weight.read_output(output, &mut found);
        let largest = expected.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
        for (col, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert!((found - expected).abs() <= tolerance * largest, "[{output}, {col}]: {found} for {expected}");
        }
    }
}

#[test]
fn plain_values_lie_where_the_table_says() {
    for format in [Format::F32, Format::F16, Format::BF16] {
        for (outputs, inputs) in [(1, 1), (32, 32), (33, 31), (70, 131)] {
            let matrix = plain(format, outputs, inputs);
            let weight = pack(&matrix);
            let part = &weight.parts()[0];
            let mut row = vec![0.0; inputs];
            for output in 0..outputs {
                matrix.read_row(output, &mut row);
                let (panel, lane) = (part.panel(output / LANES), output % LANES);
                let short = |at: usize| u16::from_le_bytes([panel[2 * at], panel[2 * at + 1]]);
                for (k, &expected) in row.iter().enumerate() {
                    let found = match format {
                        Format::F32 => {
                            let at = 4 * (k * LANES + lane);
                            f32::from_le_bytes([panel[at], panel[at + 1], panel[at + 2], panel[at + 3]])
                        }
                        Format::F16 => f16::from_bits(short(k * LANES + lane)).to_f32(),
                        _ => bf16::from_bits(short((k / 2 * LANES + lane) * 2 + k % 2)).to_f32(),
                    };
                    assert_eq!(found, expected, "{format:?} [{output}, {k}]");
                }
            }
            check(&matrix, 0.0);
        }
    }
}

#[test]
fn codes_read_back_as_they_decode() {
    const F16_SCALES: f32 = 1.0 / 1024.0;
    let nf4: [f32; 16] = std::array::from_fn(|code| (code as f32 - 7.5).powi(3) / 421.9);
    let levels = [
        // Half steps of 127ths of a group's scale, which may be larger than the row's largest
        // value.
        (GroupedLevels::Nibbles(nf4), 1.0 / 100.0),
        (GroupedLevels::UNSIGNED4, F16_SCALES),
        (GroupedLevels::E2M1, F16_SCALES),
        (GroupedLevels::Signed8, F16_SCALES),
    ];
    for (levels, tolerance) in levels {
        for group in [16, 32, 64, 128, 256] {
            for (affine, order, shape) in [(false, false, (1, 7)), (true, false, (33, 300)), (false, true, (70, 513))] {
                check(&grouped(levels, (group, affine, order), &[], shape), tolerance);
                let outliers = [0, 5, 6];
                if !order {
                    check(&grouped(levels, (group, affine, order), &outliers, shape), tolerance);
                }
            }
        }
    }
}

#[test]
fn parts_keep_their_packing() {
    let parts = || {
        vec![
            plain(Format::BF16, 5, 64),
            grouped(GroupedLevels::Signed8, (32, false, false), &[], (40, 64)),
            grouped(GroupedLevels::Signed8, (32, true, false), &[], (3, 64)),
            grouped(GroupedLevels::UNSIGNED4, (32, true, false), &[], (33, 64)),
            plain(Format::F32, 31, 64),
        ]
    };
    let matrix = Matrix::stack(parts()).unwrap();
    check(&matrix, 1.0 / 1024.0);
    let weight = pack(&matrix);
    assert_eq!(weight.parts().len(), 5);
    // Codes of one group differ only in whether they need sums and starts, and from which offset.
    assert_eq!(weight.feeds().len(), 4);
    let alone: u64 = parts().iter().map(|matrix| bytes_foretold(matrix)).sum();
    assert_eq!(weight.bytes(), alone);
}

#[test]
fn memory_nodes_change_no_byte() {
    let stacked = Matrix::stack(vec![
        plain(Format::BF16, 40, 64),
        grouped(GroupedLevels::Signed8, (32, false, false), &[], (300, 64)),
        grouped(GroupedLevels::UNSIGNED4, (32, true, false), &[], (33, 64)),
        plain(Format::F32, 131, 64),
    ]);
    let with_outliers = grouped(GroupedLevels::Signed8, (32, false, false), &[0, 5, 6], (200, 64));
    for matrix in [stacked.unwrap(), with_outliers] {
        let packed = |pool: Pool| {
            let weight = Weight::pack(Ctx { pool: &pool, isa: Isa::Scalar }, &mut Supply::Fresh, &matrix).unwrap();
            let contents = |part: &Part| {
                let factors: Vec<u32> = part.factors.iter().map(|factor| factor.to_bits()).collect();
                (part.data.to_vec(), factors)
            };
            let outliers = weight.parts().iter().filter_map(Part::outliers);
            weight.parts().iter().chain(outliers).map(contents).collect::<Vec<_>>()
        };
        let alone = packed(Pool::new(1).unwrap());
        for threads in [2, 3, 20] {
            assert!(packed(Pool::on_two_nodes(threads).unwrap()) == alone, "{threads} threads");
        }
    }
}

#[test]
fn bytes_are_those_of_the_layout() {
    let bytes = |levels, group, affine, shape| pack(&grouped(levels, (group, affine, false), &[], shape)).bytes();
    // Codes, an f16 per group, an f32 per output.
    assert_eq!(bytes(GroupedLevels::Signed8, 32, false, (64, 128)), 64 * (128 + 4 * 2 + 4));
    assert_eq!(bytes(GroupedLevels::UNSIGNED4, 128, true, (64, 256)), 64 * (128 + 2 * 4 + 4));
    // The last panel and the last group are whole.
    assert_eq!(bytes(GroupedLevels::UNSIGNED4, 256, false, (1, 257)), 32 * (256 + 2 * 2 + 4));
    let outliers = [1, 2, 9];
    let with = pack(&grouped(GroupedLevels::Signed8, (32, false, false), &outliers, (64, 128))).bytes();
    assert_eq!(with, 64 * (128 + 4 * 2 + 4) + 64 * 2 * 4);
}

#[test]
fn experts_of_different_forms_become_bf16() {
    let pool = Pool::new(1).unwrap();
    let ctx = Ctx { pool: &pool, isa: Isa::Scalar };
    let form =
        |affine, order, outliers: &[u32]| grouped(GroupedLevels::UNSIGNED4, (32, affine, order), outliers, (6, 64));
    let packings = |matrices: Vec<Matrix<'static>>| {
        let weights = Weight::pack_uniform(ctx, &mut Supply::Fresh, &matrices).unwrap();
        let foretold: u64 =
            uniform_runs(&matrices).unwrap().iter().flatten().flat_map(Run::shapes).map(|shape| shape.bytes()).sum();
        assert_eq!(weights.iter().map(Weight::bytes).sum::<u64>(), foretold);
        let packing = |weight: &Weight| *weight.parts()[0].kernel().packing();
        assert!(weights.iter().all(|weight| weight.parts().len() == 1));
        weights.iter().map(packing).collect::<Vec<_>>()
    };
    assert!(packings(vec![form(true, false, &[]), form(true, false, &[])]).iter().all(Packing::has_factors));
    let stacked = Matrix::stack(vec![form(true, false, &[]), form(false, false, &[])]).unwrap();
    for odd in [form(false, false, &[]), form(true, true, &[]), form(true, false, &[3]), stacked] {
        assert_eq!(packings(vec![form(true, false, &[]), odd]), [Packing::BF16; 2]);
    }
}

#[test]
fn index_tensors_are_refused() {
    let pool = Pool::new(1).unwrap();
    let ctx = Ctx { pool: &pool, isa: Isa::Scalar };
    let matrix = Matrix::from_rows(Format::U8, 2, vec![Cow::Owned(vec![1, 2])]).unwrap();
    assert!(matches!(Weight::pack(ctx, &mut Supply::Fresh, &matrix), Err(Error::UnsupportedFormat { .. })));
    assert!(matches!(packed_parts(&matrix), Err(Error::UnsupportedFormat { .. })));
}
