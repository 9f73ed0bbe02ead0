//! Rows of codes with scales beside them: the common form of every checkpoint layout other than
//! GGUF blocks.

use std::borrow::Cow;
use std::sync::Arc;

use half::bf16;

use crate::quant::e4m3;
use crate::{ActivationScale, Coding, Error, Levels, Numbers, Result};

/// Properties that all rows of a grouped part share.
#[derive(Clone, Debug, PartialEq)]
pub struct Grouped {
    /// Neighbouring codes that share a scale; the width of a row, or more, for one scale per row.
    pub group: usize,
    pub levels: GroupedLevels,
    pub activations: ActivationScale,
    /// Stored column `j` is input `order[j]`; `None` if columns are in order.
    pub order: Option<Arc<[u32]>>,
    /// Inputs, ascending, with weights in bf16 beside the codes.
    pub outliers: Option<Arc<[u32]>>,
}

/// The level of a code, before it is scaled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GroupedLevels {
    /// Codes 0 to 15 index a table.
    Nibbles([f32; 16]),
    /// The code as two's complement.
    Signed8,
    /// Two's complement in 127ths: the scale is a row's largest magnitude.
    Of127,
    /// The code as an e4m3 number.
    Float8,
}

/// One row: `value[j] = scales[j / group] * level(codes[j]) + minimums[j / group]`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GroupedRow<'a> {
    /// The row's codes, one per byte.
    pub codes: Cow<'a, [u8]>,
    pub scales: Vec<f32>,
    /// Empty if groups have no minimum.
    pub minimums: Vec<f32>,
    /// One for each outlier column; they replace the codes there.
    pub outliers: Vec<bf16>,
}

/// Value of a code 1 of [`GroupedLevels::Of127`] at scale 1.
const ONE_127TH: f32 = 1.0 / 127.0;

/// Values that share a scale in the rounding to eight-bit integers: of activations, and of
/// eight-bit floats.
const ROUNDED_GROUP: usize = 32;

impl GroupedLevels {
    /// Integers from 0 to 15: codes with a zero point, which becomes part of the minimum.
    pub const UNSIGNED4: Self =
        GroupedLevels::Nibbles([0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.]);
    /// Four-bit floats with two exponent bits and one of mantissa.
    pub const E2M1: Self = GroupedLevels::Nibbles([
        0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
    ]);

    fn level(&self, code: u8) -> f32 {
        match self {
            GroupedLevels::Nibbles(table) => table[usize::from(code & 15)],
            GroupedLevels::Signed8 | GroupedLevels::Of127 => f32::from(code as i8),
            GroupedLevels::Float8 => e4m3(code),
        }
    }

    /// The levels as integers, and the value of one integer step.
    fn as_integers(&self) -> (Levels, f32) {
        let table = match self {
            GroupedLevels::Nibbles(table) => table,
            GroupedLevels::Of127 => return (Levels::Bytes, ONE_127TH),
            GroupedLevels::Signed8 | GroupedLevels::Float8 => return (Levels::Bytes, 1.0),
        };
        let largest = table.iter().fold(0.0f32, |most, level| most.max(level.abs()));
        // Whole and half numbers stay exact; other tables are rounded to 127ths of the largest.
        let exact =
            [1.0, 2.0].into_iter().find(|by| largest * by <= 127.0 && table.iter().all(|t| (t * by).fract() == 0.0));
        let step = exact.map_or(largest / 127.0, |by| 1.0 / by);
        (Levels::Nibbles(table.map(|level| (level / step).round() as i8)), step)
    }
}

impl Grouped {
    fn num_groups(&self, cols: usize) -> usize {
        cols.div_ceil(self.group.max(1))
    }

    /// Checks everything that reading relies on.
    pub(super) fn check(&self, cols: usize, rows: &[GroupedRow<'_>]) -> Result<()> {
        let wrong = |problem: String| Err(Error::Grouped { problem });
        if self.group == 0 {
            return wrong("groups of no values".into());
        }
        if self.order.is_some() && self.outliers.is_some() {
            return wrong("both a column order and outlier columns".into());
        }
        if let Some(order) = &self.order
            && !is_permutation(order, cols)
        {
            return wrong(format!("the column order does not name each of {cols} columns once"));
        }
        let outliers = self.outliers.as_deref().unwrap_or_default();
        if !outliers.is_sorted_by(|a, b| a < b) || outliers.last().is_some_and(|last| *last as usize >= cols) {
            return wrong(format!("outlier columns are not ascending and below {cols}"));
        }
        let affine = rows.first().is_some_and(|row| !row.minimums.is_empty());
        if affine && self.levels == GroupedLevels::Float8 {
            return wrong("eight-bit floats with minimums".into());
        }
        let groups = self.num_groups(cols);
        let minimums = if affine { groups } else { 0 };
        for (index, row) in rows.iter().enumerate() {
            let found = [row.codes.len(), row.scales.len(), row.minimums.len(), row.outliers.len()];
            let expected = [cols, groups, minimums, outliers.len()];
            if found != expected {
                return wrong(format!(
                    "row {index} has {found:?} codes, scales, minimums and outliers, but {expected:?} are needed"
                ));
            }
            if let Some(odd) = row.scales.iter().chain(&row.minimums).find(|value| !value.is_finite()) {
                return wrong(format!("row {index} has a scale or minimum of {odd}"));
            }
            let bad = match self.levels {
                GroupedLevels::Nibbles(_) => row.codes.iter().find(|code| **code > 15),
                GroupedLevels::Signed8 | GroupedLevels::Of127 => None,
                GroupedLevels::Float8 => row.codes.iter().find(|code| **code & 0x7f == 0x7f),
            };
            if let Some(code) = bad {
                return wrong(format!("row {index} has code {code}, which stands for no number"));
            }
        }
        Ok(())
    }

    /// The values of a row, by input.
    pub(super) fn read_row(&self, row: &GroupedRow<'_>, out: &mut [f32]) {
        match &self.order {
            None => self.read_stored(row, out),
            Some(order) => {
                let mut stored = vec![0.0; out.len()];
                self.read_stored(row, &mut stored);
                for (value, input) in stored.iter().zip(order.iter()) {
                    out[*input as usize] = *value;
                }
            }
        }
        for (column, value) in self.outliers.iter().flat_map(|columns| columns.iter()).zip(&row.outliers) {
            out[*column as usize] = value.to_f32();
        }
    }

    /// The values of a row in the order of its codes, without outliers.
    fn read_stored(&self, row: &GroupedRow<'_>, out: &mut [f32]) {
        for (group, (out, codes)) in out.chunks_mut(self.group).zip(row.codes.chunks(self.group)).enumerate() {
            let scale = row.scales[group];
            for (value, code) in out.iter_mut().zip(codes) {
                *value = scale * self.levels.level(*code);
                if self.levels == GroupedLevels::Of127 {
                    *value *= ONE_127TH;
                }
                if let Some(minimum) = row.minimums.get(group) {
                    *value += minimum;
                }
            }
        }
    }

    /// The rows as kernels read them; `None` if no kernel supports the group size.
    ///
    /// Activations are rounded group by group too, so a long group is treated as several with the
    /// same scale: rounding over 128 values costs twice the divergence that it costs over 32.
    pub(super) fn coding(&self, cols: usize, affine: bool) -> Option<Coding> {
        let longest = match self.activations {
            ActivationScale::Group => ROUNDED_GROUP,
            ActivationScale::Row => usize::MAX,
        };
        let group = match self.levels {
            GroupedLevels::Float8 => ROUNDED_GROUP,
            _ => {
                let fits = |group: &usize| self.group >= cols || self.group.is_multiple_of(*group);
                Coding::GROUPS.into_iter().rev().filter(|group| *group <= longest).find(fits)?
            }
        };
        Some(Coding {
            group,
            levels: self.levels.as_integers().0,
            affine,
            numbers: Numbers::Own,
            activations: self.activations,
        })
    }

    /// Codes, scales and minimums in the form of [`Grouped::coding`].
    pub(super) fn read_codes(&self, row: &GroupedRow<'_>, coding: &Coding, into: Codes<'_>) {
        if self.levels == GroupedLevels::Float8 {
            return self.round_codes(row, into);
        }
        into.codes.copy_from_slice(&row.codes);
        let step = self.levels.as_integers().1;
        for (index, scale) in into.scales.iter_mut().enumerate() {
            *scale = row.scales[index * coding.group / self.group] * step;
        }
        if coding.affine {
            for (index, minimum) in into.minimums.iter_mut().enumerate() {
                *minimum = row.minimums[index * coding.group / self.group];
            }
        }
    }

    /// The nearest eight-bit integers: the finest form for kernels without eight-bit floats.
    fn round_codes(&self, row: &GroupedRow<'_>, into: Codes<'_>) {
        let mut values = vec![0.0; row.codes.len()];
        self.read_stored(row, &mut values);
        let groups = values.chunks(ROUNDED_GROUP).zip(into.codes.chunks_mut(ROUNDED_GROUP));
        for ((values, codes), scale) in groups.zip(into.scales) {
            let largest = values.iter().fold(0.0f32, |most, value| most.max(value.abs()));
            *scale = largest / 127.0;
            let by = if largest > 0.0 { 127.0 / largest } else { 0.0 };
            for (code, value) in codes.iter_mut().zip(values) {
                *code = (value * by).round() as i8 as u8;
            }
        }
    }
}

/// Destination of a row's codes, scales and minimums.
pub(super) struct Codes<'o> {
    pub codes: &'o mut [u8],
    pub scales: &'o mut [f32],
    pub minimums: &'o mut [f32],
}

fn is_permutation(order: &[u32], cols: usize) -> bool {
    let mut seen = vec![false; cols];
    order.len() == cols
        && order.iter().all(|input| seen.get_mut(*input as usize).is_some_and(|seen| !std::mem::replace(seen, true)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Matrix;

    fn plain(levels: GroupedLevels, group: usize) -> Grouped {
        Grouped { group, levels, activations: ActivationScale::Group, order: None, outliers: None }
    }

    fn row(codes: Vec<u8>, scales: &[f32]) -> GroupedRow<'static> {
        GroupedRow { codes: codes.into(), scales: scales.to_vec(), ..GroupedRow::default() }
    }

    /// Values computed from the codes, in stored order.
    fn through_codes(matrix: &Matrix<'_>) -> Vec<f32> {
        let part = &matrix.parts()[0];
        let coding = part.coding().unwrap();
        let (mut codes, groups) = (vec![0; matrix.cols()], coding.num_groups(matrix.cols()));
        let (mut scales, mut minimums) = (vec![0.0; groups], vec![0.0; groups]);
        part.read_codes(0, &mut codes, &mut scales, &mut minimums);
        let value = |(j, code): (usize, &u8)| {
            scales[j / coding.group] * f32::from(coding.levels.level(*code)) + minimums[j / coding.group]
        };
        codes.iter().enumerate().map(value).collect()
    }

    #[test]
    fn codes_and_values_agree() {
        let codes: Vec<u8> = (0..64).map(|i| (i * 7 % 16) as u8).collect();
        for levels in [GroupedLevels::UNSIGNED4, GroupedLevels::E2M1] {
            let mut row = row(codes.clone(), &[0.5, -0.25]);
            if levels == GroupedLevels::UNSIGNED4 {
                row.minimums = vec![-4.0, 1.5];
            }
            let matrix = Matrix::from_grouped(64, plain(levels, 32), vec![row]).unwrap();
            let mut values = vec![0.0; 64];
            matrix.read_row(0, &mut values);
            assert_eq!(values, through_codes(&matrix));
            assert_eq!(values[1], 0.5 * levels.level(7) + if levels == GroupedLevels::UNSIGNED4 { -4.0 } else { 0.0 });
        }
    }

    #[test]
    fn one_scale_a_row_is_seen_as_groups() {
        let codes: Vec<u8> = (0..300).map(|i| i as u8).collect();
        for (activations, group) in [(ActivationScale::Row, 256), (ActivationScale::Group, 32)] {
            let form = Grouped { activations, ..plain(GroupedLevels::Signed8, 300) };
            let matrix = Matrix::from_grouped(300, form, vec![row(codes.clone(), &[2.0])]).unwrap();
            assert_eq!(matrix.parts()[0].coding().unwrap().group, group);
            let values = through_codes(&matrix);
            assert_eq!((values[127], values[128], values[299]), (254.0, -256.0, 86.0));
        }
    }

    #[test]
    fn parts_of_127_are_scaled_first() {
        let codes: Vec<u8> = (0..=255).collect();
        let rows = vec![row(codes, &[0.3])];
        let matrix = Matrix::from_grouped(256, plain(GroupedLevels::Of127, 256), rows).unwrap();
        let mut values = vec![0.0; 256];
        matrix.read_row(0, &mut values);
        assert_eq!((values[127], values[129]), (0.3f32 * 127.0 * ONE_127TH, 0.3f32 * -127.0 * ONE_127TH));
        for (a, b) in values.iter().zip(through_codes(&matrix)) {
            assert!((a - b).abs() < 1e-7, "{a} {b}");
        }
    }

    #[test]
    fn groups_that_no_kernel_knows_have_no_coding() {
        for (group, expected) in [(24, None), (48, Some(16)), (8, None), (96, Some(32)), (512, Some(32))] {
            let groups = 1024usize.div_ceil(group);
            let rows = vec![row(vec![0; 1024], &vec![1.0; groups])];
            let matrix = Matrix::from_grouped(1024, plain(GroupedLevels::Signed8, group), rows).unwrap();
            assert_eq!(matrix.parts()[0].coding().map(|coding| coding.group), expected, "{group}");
        }
    }

    #[test]
    fn eight_bit_floats_are_rounded_for_kernels_alone() {
        let codes: Vec<u8> = (0..64).map(|i| i as u8 * 2).chain([0; 32]).collect();
        let rows = vec![row(codes, &[0.5])];
        let matrix = Matrix::from_grouped(96, plain(GroupedLevels::Float8, 128), rows).unwrap();
        let mut values = vec![0.0; 96];
        matrix.read_row(0, &mut values);
        assert_eq!(values[63], 0.5 * e4m3(126));
        let rounded = through_codes(&matrix);
        for (group, (exact, rounded)) in values.chunks(32).zip(rounded.chunks(32)).enumerate() {
            let largest = exact.iter().fold(0.0f32, |most, value| most.max(value.abs()));
            for (a, b) in exact.iter().zip(rounded) {
                assert!((a - b).abs() <= largest / 253.0, "group {group}: {a} {b}");
            }
        }
    }

    #[test]
    fn order_and_outliers_are_applied() {
        let mut ordered = plain(GroupedLevels::Signed8, 2);
        ordered.order = Some(vec![3, 1, 0, 2].into());
        let matrix = Matrix::from_grouped(4, ordered, vec![row(vec![1, 2, 3, 4], &[1.0, 10.0])]).unwrap();
        let mut values = [0.0; 4];
        matrix.read_row(0, &mut values);
        assert_eq!(values, [30.0, 2.0, 40.0, 1.0]);
        let mut mixed = plain(GroupedLevels::Signed8, 4);
        mixed.outliers = Some(vec![2].into());
        let with = GroupedRow { outliers: vec![bf16::from_f32(0.5)], ..row(vec![1, 2, 0, 4], &[1.0]) };
        let matrix = Matrix::from_grouped(4, mixed, vec![with]).unwrap();
        matrix.read_row(0, &mut values);
        assert_eq!(values, [1.0, 2.0, 0.5, 4.0]);
    }

    #[test]
    fn what_does_not_fit_together_is_an_error() {
        let check = |grouped: Grouped, row: GroupedRow<'static>, expect: &str| {
            let error = Matrix::from_grouped(4, grouped, vec![row]).unwrap_err().to_string();
            assert!(error.contains(expect), "{error}");
        };
        let nibbles = || plain(GroupedLevels::UNSIGNED4, 2);
        let good = || row(vec![0; 4], &[1.0, 1.0]);
        check(Grouped { group: 0, ..nibbles() }, good(), "groups of no values");
        check(nibbles(), row(vec![0; 3], &[1.0, 1.0]), "[3, 2, 0, 0]");
        check(nibbles(), row(vec![0; 4], &[1.0]), "[4, 1, 0, 0]");
        check(nibbles(), row(vec![0, 16, 0, 0], &[1.0, 1.0]), "code 16");
        check(nibbles(), row(vec![0; 4], &[1.0, f32::NAN]), "NaN");
        check(nibbles(), GroupedRow { minimums: vec![1.0], ..good() }, "[4, 2, 1, 0]");
        check(Grouped { order: Some(vec![0, 1, 2, 2].into()), ..nibbles() }, good(), "column order");
        check(Grouped { order: Some(vec![0, 1, 2].into()), ..nibbles() }, good(), "column order");
        check(Grouped { outliers: Some(vec![1, 1].into()), ..nibbles() }, good(), "outlier columns");
        check(Grouped { outliers: Some(vec![4].into()), ..nibbles() }, good(), "outlier columns");
        check(plain(GroupedLevels::Float8, 2), row(vec![0, 0x7f, 0, 0], &[1.0, 1.0]), "code 127");
    }
}
