//! Every instruction set against a plain loop over the same integers, bit for bit, and against
//! itself with other row and thread counts.

use folio_formats::{ActivationScale, Coding, Levels, Numbers, Units};
use half::f16;

use super::super::super::weight::codes::CodedRow;
use super::super::super::{Ctx, Isa, Pool, Tensor, Vector, Weight};
use super::super::{Scratch, linear};
use super::LANES;

/// A number in -1..1 that depends on both arguments.
fn noise(seed: usize, index: usize) -> f32 {
    let mut state = (seed as u64) << 40 ^ index as u64;
    for _ in 0..2 {
        state = (state ^ state >> 29).wrapping_add(0x9e37_79b9).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    }
    (state >> 40) as f32 / (1 << 23) as f32 - 1.0
}

fn levels() -> [Levels; 7] {
    let from = |least: i8| Levels::Nibbles(std::array::from_fn(|code| least + code as i8));
    let uneven = [-127, -88, -67, -50, -36, -23, -12, 0, 10, 20, 31, 43, 56, 72, 92, 127];
    [
        Levels::Bytes,
        from(-8),
        from(0),
        Levels::Nibbles(uneven),
        Levels::Five { zero: 16 },
        Levels::Five { zero: 0 },
        Levels::Six { zero: 32 },
    ]
}

/// One output's codes, scales and minimums; scales of different outputs are far apart.
fn fill(coding: &Coding, output: usize, row: &mut CodedRow) {
    let most = match coding.levels {
        Levels::Bytes => 256.0,
        Levels::Nibbles(_) => 16.0,
        Levels::Five { .. } => 32.0,
        Levels::Six { .. } => 64.0,
    };
    for (at, code) in row.codes.iter_mut().enumerate() {
        *code = ((noise(1, output * 10_007 + at) + 1.0) * 0.5 * most) as u8;
    }
    let unit = 2f32.powi(output as i32 % 50 - 25);
    if coding.numbers == Numbers::Multiples {
        let whole = |seed: usize, at: usize| (noise(seed, output * 97 + at) * 128.0).floor();
        row.scales.iter_mut().enumerate().for_each(|(at, scale)| *scale = whole(2, at));
        row.minimums.iter_mut().enumerate().for_each(|(at, minimum)| *minimum = whole(3, at));
        for (at, units) in row.units.iter_mut().enumerate() {
            *units = Units { scale: noise(6, output * 97 + at) * unit, minimum: noise(7, output * 97 + at) * unit };
        }
        return;
    }
    for (at, scale) in row.scales.iter_mut().enumerate() {
        *scale = noise(2, output * 97 + at) * unit;
    }
    for (at, minimum) in row.minimums.iter_mut().enumerate() {
        *minimum = noise(3, output * 97 + at) * unit * 3.0;
    }
}

fn weight(ctx: Ctx<'_>, coding: Coding, outputs: usize, inputs: usize) -> Weight {
    Weight::from_codes(ctx, coding, (outputs, inputs), |output, row| fill(&coding, output, row))
}

fn tensor(rows: usize, cols: usize) -> Tensor {
    let mut tensor = Tensor::new(rows, cols).unwrap();
    for (index, value) in tensor.head_mut(rows).iter_mut().enumerate() {
        *value = noise(4, index) * (1 + index / cols % 5) as f32;
    }
    tensor
}

fn product(
    isa: Isa,
    threads: usize,
    x: &Tensor,
    coding: Coding,
    bias: Option<&Vector>,
    shape: (usize, usize),
) -> Vec<f32> {
    let pool = Pool::new(threads).unwrap();
    let ctx = Ctx { pool: &pool, isa };
    let (rows, outputs) = shape;
    let weight = weight(ctx, coding, outputs, x.cols());
    let mut out = Tensor::new(rows, outputs).unwrap();
    out.head_mut(rows).fill(7.0);
    linear(ctx, &mut Scratch::default(), &mut out, x, &weight, bias, rows);
    out.head(rows).to_vec()
}

/// The largest power of two not above `x`, by trying.
fn power_below(x: f32) -> f32 {
    (-126..128).map(|exponent| 2f32.powi(exponent)).rfind(|power| *power <= x).unwrap()
}

/// One output of one row, computed step by step as documented.
fn emulated(x: &[f32], row: &CodedRow, coding: &Coding, fused: bool) -> f32 {
    let add_product = |sum: f32, a: f32, b: f32| if fused { a.mul_add(b, sum) } else { sum + a * b };
    let largest = |values: &[f32]| values.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
    let numbers: Vec<f32> = match coding.numbers {
        Numbers::Own => row.scales.iter().chain(&row.minimums).copied().collect(),
        Numbers::Multiples => row.units.iter().flat_map(|units| [units.scale, units.minimum]).collect(),
    };
    let factor = power_below(largest(&numbers)) / 16384.0;
    let short = |value: f32| f16::from_f32(value / factor).to_f32();
    let number = |number: f32, group: usize, unit: fn(&Units) -> f32| match coding.numbers {
        Numbers::Own => short(number),
        Numbers::Multiples => number * short(unit(&row.units[group * coding.group / Coding::BLOCK])),
    };
    let whole_row = largest(x);
    let mut sum = 0.0;
    for (group, (x, codes)) in x.chunks(coding.group).zip(row.codes.chunks(coding.group)).enumerate() {
        let most = if coding.activations == ActivationScale::Row { whole_row } else { largest(x) };
        let rounded: Vec<i32> = x.iter().map(|x| (x * (127.0 / most)).round_ties_even() as i32).collect();
        let level = |code: &u8| i32::from(coding.levels.level(*code));
        let dot: i32 = rounded.iter().zip(codes).map(|(x, code)| x * level(code)).sum();
        let step = most / 127.0;
        let scale = number(row.scales[group], group, |units| units.scale);
        sum = add_product(sum, dot as f32, scale * step);
        if coding.affine {
            let minimum = number(row.minimums[group], group, |units| units.minimum);
            sum = add_product(sum, minimum, step * rounded.iter().sum::<i32>() as f32);
        }
    }
    sum * factor
}

fn codings() -> Vec<Coding> {
    let mut codings = Vec::new();
    for levels in levels() {
        for group in Coding::GROUPS {
            for affine in [false, true] {
                for activations in [ActivationScale::Group, ActivationScale::Row] {
                    for numbers in [Numbers::Own, Numbers::Multiples] {
                        codings.push(Coding { group, levels, affine, numbers, activations });
                    }
                }
            }
        }
    }
    codings
}

#[test]
fn every_isa_computes_what_the_book_says() {
    let (rows, outputs) = (13, 37);
    let bias = Vector::new(&(0..outputs).map(|output| noise(5, output)).collect::<Vec<_>>()).unwrap();
    for coding in codings() {
        // Multiples come in whole super-blocks.
        let inputs = if coding.numbers == Numbers::Own { 271 } else { 512 };
        let x = tensor(rows, inputs);
        let stored: Vec<CodedRow> = (0..outputs)
            .map(|output| {
                let mut row = CodedRow::new(&coding, inputs);
                fill(&coding, output, &mut row);
                row
            })
            .collect();
        for isa in Isa::available() {
            let fused = isa != Isa::Scalar;
            for bias in [None, Some(&bias)] {
                let found = product(isa, 2, &x, coding, bias, (rows, outputs));
                for row in 0..rows {
                    for (output, stored) in stored.iter().enumerate() {
                        let expected =
                            emulated(x.row(row), stored, &coding, fused) + bias.map_or(0.0, |bias| bias[output]);
                        let found = found[row * outputs + output];
                        assert!(found == expected, "{isa:?} {coding:?} [{row}, {output}]: {found} for {expected}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_alone_and_among_others() {
    // Wide enough for several blocks of the inner dimension, and every height of tile.
    let (outputs, inputs) = (2 * LANES + 5, 66 * Coding::BLOCK);
    let x = tensor(512, inputs);
    let bias = Vector::new(&(0..outputs).map(|output| noise(5, output)).collect::<Vec<_>>()).unwrap();
    let each =
        levels().into_iter().flat_map(|levels| [Numbers::Own, Numbers::Multiples].map(|numbers| (levels, numbers)));
    for (index, (levels, numbers)) in each.enumerate() {
        let (group, affine) = (Coding::GROUPS[index % 5], index / 2 % 2 == 0);
        let coding = Coding { group, levels, affine, numbers, activations: ActivationScale::Group };
        for isa in Isa::available() {
            let many = if isa == Isa::Avx512 { 512 } else { 20 };
            let all = product(isa, 2, &x, coding, Some(&bias), (many, outputs));
            for rows in 1..=14 {
                let some = product(isa, 1 + rows % 3, &x, coding, Some(&bias), (rows, outputs));
                assert!(some == all[..rows * outputs], "{isa:?} {coding:?} {rows} rows");
            }
            let mut last = Tensor::new(1, inputs).unwrap();
            last.row_mut(0).copy_from_slice(x.row(many - 1));
            // Computed by one thread, which has neighbouring panels.
            let alone = product(isa, 1, &last, coding, Some(&bias), (1, outputs));
            assert!(alone == all[(many - 1) * outputs..], "{isa:?} {coding:?} alone");
        }
    }
}

#[test]
fn a_row_has_the_same_bits_when_its_tile_goes_from_panel_to_panel() {
    let (outputs, rows) = (11 * LANES + 5, 53);
    let each =
        levels().into_iter().flat_map(|levels| [Numbers::Own, Numbers::Multiples].map(|numbers| (levels, numbers)));
    for (index, (levels, numbers)) in each.enumerate() {
        let coding = Coding { group: 32, levels, affine: index % 2 == 0, numbers, activations: ActivationScale::Group };
        // The short inner dimension has several panels side by side, the long one blocks of two.
        for (isa, blocks) in Isa::available().into_iter().flat_map(|isa| [(isa, 2), (isa, 32)]) {
            if blocks > 2 && isa != Isa::Avx512 {
                continue;
            }
            let x = tensor(rows, blocks * Coding::BLOCK);
            // With one thread, a tile runs through all panels.
            let all = product(isa, 1, &x, coding, None, (rows, outputs));
            for row in [0, 5, 6, 29, rows - 1] {
                let mut alone = Tensor::new(1, x.cols()).unwrap();
                alone.row_mut(0).copy_from_slice(x.row(row));
                let alone = product(isa, 1, &alone, coding, None, (1, outputs));
                assert!(alone == all[row * outputs..][..outputs], "{isa:?} {coding:?} {blocks} row {row}");
            }
        }
    }
}

#[test]
fn what_is_no_number_stays_in_its_row() {
    let (rows, outputs, inputs) = (9, 40, 100);
    for activations in [ActivationScale::Group, ActivationScale::Row] {
        for levels in levels() {
            let coding = Coding { group: 32, levels, affine: true, numbers: Numbers::Own, activations };
            for isa in Isa::available() {
                let good = tensor(rows, inputs);
                let mut bad = tensor(rows, inputs);
                for (row, value) in [(1, f32::NAN), (4, f32::INFINITY), (8, f32::NEG_INFINITY)] {
                    bad.row_mut(row)[row * 12] = value;
                }
                let expected = product(isa, 2, &good, coding, None, (rows, outputs));
                let found = product(isa, 2, &bad, coding, None, (rows, outputs));
                for row in 0..rows {
                    let (found, expected) = (&found[row * outputs..][..outputs], &expected[row * outputs..][..outputs]);
                    match row {
                        1 | 4 | 8 => assert!(found.iter().all(|value| value.is_nan()), "{isa:?} row {row}"),
                        _ => assert!(found == expected, "{isa:?} row {row}"),
                    }
                }
            }
        }
    }
}

#[test]
fn zeros_and_an_empty_inner_dimension_give_the_bias() {
    let activations = ActivationScale::Group;
    let coding = Coding { group: 32, levels: Levels::Bytes, affine: true, numbers: Numbers::Own, activations };
    let bias = Vector::new(&[1.5, -2.0, 3.25]).unwrap();
    for isa in Isa::available() {
        for inputs in [0, 5, 64] {
            let x = Tensor::new(2, inputs).unwrap();
            assert_eq!(product(isa, 1, &x, coding, Some(&bias), (2, 3)), [1.5, -2.0, 3.25, 1.5, -2.0, 3.25]);
        }
    }
}
