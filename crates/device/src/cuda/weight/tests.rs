//! Packed bytes, decoded again by a plain loop, against the stored rows. No device is needed.

use std::borrow::Cow;

use folio_formats::{ActivationScale, Format, Grouped, GroupedLevels, GroupedRow, Matrix};
use half::f16;

use super::codes::Tile;
use super::form::{CHUNK, CHUNK_BYTES, Code, Coded, Form};
use super::{Layout, Plan, Precision, RandomForm, packed_bytes, put_float8_scales};
use crate::cuda::tensor::Float;

/// A deterministic sequence of random-looking numbers.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        self.0 >> 33
    }

    fn unit(&mut self) -> f32 {
        (self.next() % 2000) as f32 / 1000.0 - 1.0
    }
}

fn grouped(levels: GroupedLevels, (rows, cols): (usize, usize), group: usize, affine: bool) -> Matrix<'static> {
    let mut noise = Noise(rows as u64 * 31 + group as u64);
    let most = match levels {
        GroupedLevels::Nibbles(_) => 16,
        GroupedLevels::Float8 => 127,
        _ => 256,
    };
    let groups = cols.div_ceil(group);
    let mut row = || GroupedRow {
        codes: Cow::Owned((0..cols).map(|_| (noise.next() % most) as u8).collect()),
        scales: (0..groups).map(|_| f16::from_f32(noise.unit() + 1.5).to_f32()).collect(),
        minimums: (0..if affine { groups } else { 0 }).map(|_| f16::from_f32(noise.unit()).to_f32()).collect(),
        outliers: Vec::new(),
    };
    let rows = (0..rows).map(|_| row()).collect();
    let form = Grouped { group, levels, activations: ActivationScale::Group, order: None, outliers: None };
    Matrix::from_grouped(cols, form, rows).unwrap()
}

fn blocks(format: Format, rows: usize, cols: usize) -> Matrix<'static> {
    let mut noise = Noise(format as u64);
    let mut row = || {
        let values: Vec<f32> = (0..cols).map(|_| noise.unit()).collect();
        Cow::Owned(folio_formats::quant::encode(format, &values).unwrap())
    };
    Matrix::from_rows(format, cols, (0..rows).map(|_| row()).collect()).unwrap()
}

/// A packed run, read value by value from the layout's words as kernels do.
struct Packed {
    coded: Coded,
    codes: Vec<u8>,
    scales: Vec<u8>,
    factors: Vec<u8>,
    chunks: usize,
}

impl Packed {
    fn of(plan: &Plan<'_, '_>, coded: Coded) -> Self {
        let layout = plan.layout();
        let (tiles, chunks) = (plan.outputs.div_ceil(coded.rows()), plan.inputs.div_ceil(CHUNK));
        let bytes = |part: Option<(usize, usize)>| vec![0u8; part.unwrap().1];
        let mut packed = Self {
            coded,
            codes: vec![0; layout.data_bytes],
            scales: bytes(layout.scales),
            factors: bytes(layout.factors),
            chunks,
        };
        let (codes, scales) = (chunks * CHUNK_BYTES, chunks * coded.scale_bytes());
        let places = packed.codes.chunks_mut(codes).zip(packed.scales.chunks_mut(scales));
        for (tile, ((codes, scales), factors)) in places.zip(packed.factors.chunks_mut(4 * coded.rows())).enumerate() {
            assert!(tile < tiles);
            plan.pack_tile(&coded, tile, Tile { codes, scales, factors });
        }
        packed
    }

    /// A value, located as a lane of the kernel does.
    fn value(&self, output: usize, input: usize) -> f32 {
        let (rows, by_16) = (self.coded.rows(), self.coded.by_16());
        let (tile, row) = (output / rows, output % rows);
        let (half, upper, g) = (row / 16, row / 8 % 2, row % 8);
        let (chunk, within) = (input / CHUNK, input % CHUNK);
        let (quarter, place) = (within / 32, within % 32);
        let (t, s, v) =
            if by_16 { (place % 16 / 4, place / 16, place % 4) } else { (place / 8, place % 8 / 4, place % 4) };
        let base = (tile * self.chunks + chunk) * CHUNK_BYTES;
        let lane = 4 * g + t;
        let level = match self.coded.code {
            Code::Byte => {
                let byte = [0, 2, 1, 3][v];
                f32::from(self.codes[base + quarter * 512 + lane * 16 + (2 * s + upper) * 4 + byte] as i8)
            }
            code => {
                let at = base + half * 1024 + quarter / 2 * 512 + lane * 16 + (quarter % 2 * 2 + s) * 4;
                let word = u32::from_le_bytes(self.codes[at..at + 4].try_into().unwrap());
                let (pair, second) = (2 * (v / 2) + upper, v % 2);
                match code {
                    Code::Table(levels) => levels[(word >> (4 * (2 * pair + second)) & 15) as usize].to_f32(),
                    Code::Nibble { least } => (word >> (4 * (pair + 4 * second)) & 15) as f32 + f32::from(least),
                    Code::Byte => unreachable!(),
                }
            }
        };
        let lane_bytes = self.coded.lane_bytes();
        let groups = 4 / self.coded.quarters();
        let place = ((tile * self.chunks + chunk) * groups + quarter / self.coded.quarters()) * 8 + g;
        let each = if self.coded.has_minimums() { 2 } else { 1 };
        let at = place * lane_bytes + if by_16 { s * lane_bytes / 2 } else { 0 } + (2 * half + upper) * 2 * each;
        let number = |at: usize| f16::from_le_bytes([self.scales[at], self.scales[at + 1]]).to_f32();
        let factor = f32::from_le_bytes(self.factors[4 * output..4 * output + 4].try_into().unwrap());
        let minimum = if each == 2 { number(at + 2) } else { 0.0 };
        (number(at) * level + minimum) * factor
    }
}

/// Packs and compares. `tolerance` is the largest difference as a share of the largest value,
/// because scales are rounded to f16.
fn check(matrix: &Matrix<'_>, stem: &str, tolerance: f32) {
    let plans = Plan::of(matrix, Float::Bf16);
    assert_eq!(plans.len(), 1);
    let plan = &plans[0];
    assert_eq!(plan.form.stem(), stem);
    let Form::Coded(coded) = plan.form else { panic!("{stem} is not coded") };
    let packed = Packed::of(plan, coded);
    assert_eq!(packed_bytes(matrix, Precision::BF16, RandomForm::Plain), plan.layout().bytes as u64);
    let mut row = vec![0.0; matrix.cols()];
    for output in 0..matrix.num_rows() {
        matrix.read_row(output, &mut row);
        let largest = row.iter().fold(0.0f32, |most, value| most.max(value.abs()));
        for (input, expected) in row.iter().enumerate() {
            let found = packed.value(output, input);
            assert!((found - expected).abs() <= tolerance * largest, "{stem} [{output}, {input}]: {found}, {expected}");
        }
    }
}

#[test]
fn packed_codes_are_what_was_stored() {
    let eight = GroupedLevels::Signed8;
    let four = GroupedLevels::UNSIGNED4;
    for (group, stem) in [(16, "int8_by16"), (32, "int8"), (64, "int8"), (128, "int8"), (1024, "int8")] {
        check(&grouped(eight, (37, 256 + group.min(128)), group, false), stem, 1e-7);
    }
    for (group, stem) in [(32, "int8_affine"), (128, "int8_affine")] {
        check(&grouped(eight, (37, 256 + group), group, true), stem, 1e-7);
    }
    for (group, stem) in [(16, "int4_affine_by16"), (32, "int4_affine"), (128, "int4_affine"), (256, "int4_affine")] {
        check(&grouped(four, (37, 512 + group), group, true), stem, 1e-7);
    }
    for (group, stem) in [(16, "int4_affine_by16"), (64, "int4"), (128, "int4")] {
        check(&grouped(four, (37, 256 + group), group, false), stem, 1e-7);
    }
    for (group, stem) in [(16, "table_by16"), (32, "table"), (128, "table")] {
        check(&grouped(GroupedLevels::E2M1, (70, 128 + group), group, false), stem, 1e-7);
    }
    check(&grouped(GroupedLevels::Of127, (5, 320), 320, false), "int8", 1e-6);
}

#[test]
fn blocks_are_packed_as_their_codes() {
    for (format, stem) in [
        (Format::Q4_0, "int4"),
        (Format::Q4_1, "int4_affine"),
        (Format::Q5_0, "int8"),
        (Format::Q5_1, "int8_affine"),
        (Format::Q8_0, "int8"),
        (Format::Q2_K, "int4_affine_by16"),
        (Format::Q3_K, "int4_affine_by16"),
        (Format::Q4_K, "int4_affine"),
        (Format::Q5_K, "int8_affine"),
        (Format::Q6_K, "int8_by16"),
    ] {
        // Scale and minimum are rounded to eleven bits each, and may be twice as large as their
        // sum.
        check(&blocks(format, 35, 768), stem, 2e-3);
    }
}

#[test]
fn what_no_kernel_takes_is_plain() {
    let form = |matrix: &Matrix<'_>, float| Plan::of(matrix, float)[0].form;
    let coded = grouped(GroupedLevels::Signed8, (8, 96), 96, false);
    assert_eq!(form(&coded, Float::F32), Form::Plain(Float::F32));
    assert_eq!(packed_bytes(&coded, Precision::F32, RandomForm::Plain), 8 * 96 * 4);
    // A row that ends in the middle of a group, and groups of an odd length.
    for (cols, group) in [(100, 32), (120, 24)] {
        let matrix = grouped(GroupedLevels::Signed8, (8, cols), group, false);
        assert_eq!(form(&matrix, Float::Bf16), Form::Plain(Float::Bf16), "{cols} in groups of {group}");
    }
    let stacked = Matrix::stack(vec![coded, grouped(GroupedLevels::UNSIGNED4, (8, 96), 32, true)]).unwrap();
    let plans = Plan::of(&stacked, Float::Bf16);
    assert_eq!(
        plans.iter().map(|plan| (plan.first, plan.form.stem())).collect::<Vec<_>>(),
        [(0, "int8"), (8, "int4_affine")]
    );
}

#[test]
fn plain_parts_become_one_run() {
    let stacked = Matrix::stack(vec![blocks(Format::BF16, 3, 16), blocks(Format::F32, 2, 16)]).unwrap();
    let plans = Plan::of(&stacked, Float::Bf16);
    assert_eq!((plans.len(), plans[0].outputs, plans[0].layout().bytes), (1, 5, 5 * 16 * 2));
    let (part, row) = plans[0].locate(4);
    let mut found = vec![0; 32];
    super::plain::read_row(part, row, Float::Bf16, &mut found);
    let mut expected = vec![0.0; 16];
    stacked.read_row(4, &mut expected);
    let narrow: Vec<u8> = expected.iter().flat_map(|value| half::bf16::from_f32(*value).to_le_bytes()).collect();
    assert_eq!(found, narrow);
}

#[test]
fn eight_bit_floats_keep_their_codes() {
    let whole = grouped(GroupedLevels::Float8, (20, 160), 160, false);
    let plans = Plan::of(&whole, Float::Bf16);
    assert_eq!(plans[0].form, Form::Float8 { blocks: false });
    let layout = plans[0].layout();
    assert_eq!((layout.data_bytes, layout.scales, layout.factors), (3200, None, Some((3328, 80))));
    // Rows of a block have one scale per 128 inputs; here every row has its own.
    let own = grouped(GroupedLevels::Float8, (20, 256), 128, false);
    assert_eq!(Plan::of(&own, Float::Bf16)[0].form, Form::Plain(Float::Bf16));

    let row = |scales: [f32; 2]| GroupedRow {
        codes: Cow::Owned(vec![0x38; 256]),
        scales: scales.to_vec(),
        ..GroupedRow::default()
    };
    let rows = (0..130).map(|index| if index < 128 { row([1.0, 2.0]) } else { row([3.0, 4.0]) }).collect();
    let form = Grouped {
        group: 128,
        levels: GroupedLevels::Float8,
        activations: ActivationScale::Group,
        order: None,
        outliers: None,
    };
    let matrix = Matrix::from_grouped(256, form, rows).unwrap();
    assert_eq!(Plan::of(&matrix, Float::Bf16)[0].form, Form::Float8 { blocks: true });
    let layout = Layout::of(&Form::Float8 { blocks: true }, 130, 256);
    let mut scales = vec![0; layout.scales.unwrap().1];
    put_float8_scales(&matrix.parts()[0], &mut scales);
    let scales: Vec<f32> = scales.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    assert_eq!(scales, [1.0, 2.0, 3.0, 4.0]);
}
