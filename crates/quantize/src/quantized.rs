//! A quantized matrix in memory: codes and scales in their stored precision, one code per byte.
//!
//! Both a matrix that a backend can pack and the tensors of a checkpoint are made from it;
//! [`Quantized::read_row`] decodes the codes.

use std::borrow::Cow;

use folio_formats::{ActivationScale, Grouped, GroupedLevels, GroupedRow, Matrix};
use half::bf16;

use crate::levels::{Levels, NF4};
use crate::{Result, Target};

#[derive(Clone, Debug, PartialEq)]
pub struct Quantized {
    pub target: Target,
    pub rows: usize,
    pub cols: usize,
    /// `[rows, cols]`, one code per byte. Integers are `level + 2^(bits - 1)` (unsigned), or the
    /// unsigned code from which the zero point is subtracted; floats are their bits; nf4 codes are
    /// the index of the level.
    pub codes: Vec<u8>,
    /// `[ceil(rows / rows_per_scale), groups]`, each a number that [`Target::scale_kind`] can hold.
    pub scales: Vec<f32>,
    /// `[rows, groups]`, or empty without zero points: the code of zero.
    pub zeros: Vec<u8>,
    /// Divisor of all scales: nvfp4's global scale as compressed-tensors stores it. Otherwise 1.
    pub divisor: f32,
    pub outliers: Option<Outliers>,
}

/// Columns stored beside the codes; their codes stand for zero.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outliers {
    /// The columns' indices, ascending.
    pub columns: Vec<u32>,
    /// `[rows, columns.len()]`.
    pub values: Vec<bf16>,
}

impl Quantized {
    /// Values along a row that share a scale.
    pub fn group(&self) -> usize {
        self.target.group(self.cols)
    }

    /// Scales of a row.
    pub fn num_groups(&self) -> usize {
        self.cols.div_ceil(self.group())
    }

    /// The codes of one row.
    pub fn row_codes(&self, row: usize) -> &[u8] {
        &self.codes[row * self.cols..(row + 1) * self.cols]
    }

    /// The scales of one row as numbers to multiply levels by.
    pub fn row_scales(&self, row: usize) -> impl Iterator<Item = f32> + '_ {
        let groups = self.num_groups();
        let first = row / self.target.rows_per_scale() * groups;
        self.scales[first..first + groups].iter().map(|scale| scale / self.divisor)
    }

    /// The zero points of one row; empty if there are none.
    pub fn row_zeros(&self, row: usize) -> &[u8] {
        let groups = self.num_groups();
        if self.zeros.is_empty() { &[] } else { &self.zeros[row * groups..(row + 1) * groups] }
    }

    /// Decodes one row.
    pub fn read_row(&self, row: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.cols, "values of a row");
        let levels = Levels::of(self.target);
        let group = self.group();
        let zeros = self.row_zeros(row);
        let codes = self.row_codes(row);
        for (at, scale) in self.row_scales(row).enumerate() {
            let zero = zeros.get(at).copied().unwrap_or(levels.middle());
            let range = at * group..((at + 1) * group).min(self.cols);
            for (out, code) in out[range.clone()].iter_mut().zip(&codes[range]) {
                *out = scale * levels.level(*code, zero);
            }
        }
        if let Some(outliers) = &self.outliers {
            let width = outliers.columns.len();
            for (column, value) in outliers.columns.iter().zip(&outliers.values[row * width..(row + 1) * width]) {
                out[*column as usize] = value.to_f32();
            }
        }
    }

    /// The values as a matrix that a backend can pack.
    pub fn matrix(&self) -> Result<Matrix<'_>> {
        let levels = match self.target {
            Target::Int { bits: 4, zero_points: false, .. } => {
                GroupedLevels::Nibbles(std::array::from_fn(|code| code as f32 - 8.0))
            }
            Target::Int { bits: 4, .. } => GroupedLevels::UNSIGNED4,
            Target::Int { .. } | Target::LlmInt8 => GroupedLevels::Signed8,
            Target::Fp8 { .. } => GroupedLevels::Float8,
            Target::Mxfp4 | Target::Nvfp4 => GroupedLevels::E2M1,
            Target::Nf4 => GroupedLevels::Nibbles(NF4),
        };
        let activations = match self.target {
            Target::LlmInt8 | Target::Int { bits: 8, group: None, .. } => ActivationScale::Row,
            _ => ActivationScale::Group,
        };
        let columns = self.outliers.as_ref().map(|outliers| outliers.columns.as_slice().into());
        let form = Grouped { group: self.group(), levels, activations, order: None, outliers: columns };
        let rows = (0..self.rows).map(|row| self.grouped_row(row, levels)).collect();
        Ok(Matrix::from_grouped(self.cols, form, rows)?)
    }

    fn grouped_row(&self, row: usize, levels: GroupedLevels) -> GroupedRow<'_> {
        let codes = match levels {
            // From codes counted from the lowest level to two's complement.
            GroupedLevels::Signed8 => self.row_codes(row).iter().map(|code| code ^ 0x80).collect(),
            _ => Cow::Borrowed(self.row_codes(row)),
        };
        let middle = if levels == GroupedLevels::Signed8 { 128.0 } else { 0.0 };
        let scales: Vec<f32> = self.row_scales(row).collect();
        let zeros = self.row_zeros(row).iter().zip(&scales);
        let minimums = zeros.map(|(zero, scale)| scale * (middle - f32::from(*zero))).collect();
        let outliers = match &self.outliers {
            Some(outliers) => {
                let width = outliers.columns.len();
                outliers.values[row * width..(row + 1) * width].to_vec()
            }
            None => Vec::new(),
        };
        GroupedRow { codes, scales, minimums, outliers }
    }

    /// All values, `[rows, cols]`.
    pub fn to_f32(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.rows * self.cols];
        for (row, values) in out.chunks_exact_mut(self.cols.max(1)).enumerate() {
            self.read_row(row, values);
        }
        out
    }
}

/// Content of a finished tensor, as a sink receives it.
#[derive(Clone, Debug)]
pub enum Finished<'a> {
    /// A linear's weight, coded.
    Quantized(&'a Quantized),
    /// Any other tensor, in its stored form.
    Plain(Plain<'a>),
}

/// A tensor in a plain format.
#[derive(Clone, Debug)]
pub struct Plain<'a> {
    pub format: folio_formats::Format,
    pub shape: Vec<usize>,
    pub bytes: Cow<'a, [u8]>,
}

/// Receives finished tensors, in order: those outside the layers first, then layer by layer. Names
/// are those of the source, with `.weight`.
pub trait Sink {
    fn tensor(&mut self, name: &str, tensor: Finished<'_>) -> Result<()>;
}

#[cfg(test)]
mod tests {
    use folio_testing::Rng;

    use super::*;
    use crate::rtn;

    /// The matrix for a backend decodes to the same values.
    #[test]
    fn the_matrix_means_the_same() {
        let mut rng = Rng::new(11);
        let weights: Vec<f32> = (0..130 * 256).map(|_| 0.1 * rng.normal()).collect();
        let names = ["int8", "int8-channel", "int4-g128", "int4-g32", "fp8", "fp8-block", "mxfp4", "nvfp4", "nf4"];
        let affine = [4, 8].map(|bits| Target::Int { bits, group: Some(32), zero_points: true });
        let plain = names.map(|name| name.parse().unwrap()).into_iter().chain(affine);
        let mut coded: Vec<Quantized> = plain.map(|target| rtn::quantize(target, &weights, 256, 1)).collect();
        coded.push(rtn::quantize_around(Target::LlmInt8, weights, 256, vec![3, 200], 1));
        for coded in coded {
            let matrix = coded.matrix().unwrap();
            let mut found = vec![0.0; 256];
            for (row, expected) in coded.to_f32().chunks_exact(256).enumerate() {
                matrix.read_row(row, &mut found);
                for (found, expected) in found.iter().zip(expected) {
                    // `scale * code + minimum` and `scale * (code - zero)` round differently.
                    let limit = if coded.zeros.is_empty() { 0.0 } else { 1e-6 };
                    assert!((found - expected).abs() <= limit, "{}: {found} for {expected}", coded.target);
                }
            }
        }
    }
}
