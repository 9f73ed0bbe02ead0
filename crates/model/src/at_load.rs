//! Plain weights encoded row by row while they are loaded: a smaller model without writing a new
//! one.
//!
//! This applies to the matrices of layers: embeddings, the head, routers and norms stay unchanged,
//! and so do weights that are quantized already.

use std::borrow::Cow;
use std::str::FromStr;
use std::sync::OnceLock;

use folio_formats::quant::{encode_quick, to_e4m3};
use folio_formats::{ActivationScale, Format, Grouped, GroupedLevels, GroupedRow, Matrix};

use half::f16;

use crate::Result;

/// Neighbours that share a scale in the formats with this number in their name.
const GROUP: usize = 128;

/// Format of plain weights after loading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtLoad {
    /// Eight bits, with a scale per 32 neighbours.
    Int8,
    /// Four bits, with a scale per 32 neighbours.
    Int4,
    /// Four bits, with a scale per 128 neighbours.
    Int4G128,
    /// E4M3, with a scale per row.
    Fp8,
}

impl AtLoad {
    pub const ALL: [(&'static str, AtLoad); 4] =
        [("int8", AtLoad::Int8), ("int4", AtLoad::Int4), ("int4-g128", AtLoad::Int4G128), ("fp8", AtLoad::Fp8)];

    pub fn name(self) -> &'static str {
        match self {
            AtLoad::Int8 => "int8",
            AtLoad::Int4 => "int4",
            AtLoad::Int4G128 => "int4-g128",
            AtLoad::Fp8 => "fp8",
        }
    }
}

impl FromStr for AtLoad {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let found = Self::ALL.iter().find(|(name, _)| *name == text).map(|(_, kind)| *kind);
        found.ok_or_else(|| format!("expected int8, int4, int4-g128 or fp8, found `{text}`"))
    }
}

/// Encodes matrices when they are requested.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Encoder {
    pub kind: AtLoad,
    /// Whether only sizes matter: codes are left empty.
    pub sizes_only: bool,
}

impl Encoder {
    /// The encoded matrix; unchanged if it is quantized already or its rows are not whole groups.
    pub fn encode<'a>(&self, matrix: Matrix<'a>) -> Result<Matrix<'a>> {
        let plain = |format| matches!(format, Some(Format::F32 | Format::F16 | Format::BF16));
        let whole = match self.kind {
            AtLoad::Fp8 => true,
            AtLoad::Int4G128 => matrix.cols().is_multiple_of(GROUP),
            AtLoad::Int8 | AtLoad::Int4 => matrix.cols().is_multiple_of(32),
        };
        if !whole || matrix.num_rows() == 0 || !matrix.parts().iter().all(|part| plain(part.format())) {
            return Ok(matrix);
        }
        let cols = matrix.cols();
        Ok(match self.kind {
            AtLoad::Int8 => Matrix::from_rows(Format::Q8_0, cols, self.blocks(&matrix, Format::Q8_0)?)?,
            AtLoad::Int4 => Matrix::from_rows(Format::Q4_0, cols, self.blocks(&matrix, Format::Q4_0)?)?,
            AtLoad::Int4G128 => {
                let levels = GroupedLevels::Nibbles(std::array::from_fn(|code| code as f32 - 8.0));
                let activations = ActivationScale::Group;
                let form = Grouped { group: GROUP, levels, activations, order: None, outliers: None };
                Matrix::from_grouped(cols, form, self.nibbles(&matrix))?
            }
            AtLoad::Fp8 => {
                let (levels, activations) = (GroupedLevels::Float8, ActivationScale::Group);
                let form = Grouped { group: cols, levels, activations, order: None, outliers: None };
                Matrix::from_grouped(cols, form, self.float8(&matrix))?
            }
        })
    }

    fn blocks(&self, matrix: &Matrix<'_>, format: Format) -> Result<Vec<Cow<'static, [u8]>>> {
        if self.sizes_only {
            let bytes = format.bytes_for(matrix.cols() as u64)? as usize;
            return Ok(vec![zeros(bytes); matrix.num_rows()]);
        }
        let rows = in_parallel(matrix, |values| encode_quick(format, values).map(Cow::Owned));
        Ok(rows.into_iter().collect::<folio_formats::Result<_>>()?)
    }

    /// The value of largest magnitude in a group becomes -8.
    fn nibbles(&self, matrix: &Matrix<'_>) -> Vec<GroupedRow<'static>> {
        let groups = matrix.cols() / GROUP;
        if self.sizes_only {
            let codes = Cow::Owned(vec![0; matrix.cols()]);
            let row = GroupedRow { codes, scales: vec![0.0; groups], ..GroupedRow::default() };
            return vec![row; matrix.num_rows()];
        }
        in_parallel(matrix, |values| {
            let (mut codes, mut scales) = (Vec::with_capacity(values.len()), Vec::with_capacity(groups));
            for group in values.chunks_exact(GROUP) {
                let largest =
                    group.iter().fold(0.0f32, |most, value| if value.abs() > most.abs() { *value } else { most });
                let scale = f16::from_f32(largest / -8.0).to_f32();
                let by = if scale == 0.0 { 0.0 } else { 1.0 / scale };
                scales.push(scale);
                codes.extend(group.iter().map(|value| ((value * by).round() + 8.0).clamp(0.0, 15.0) as u8));
            }
            GroupedRow { codes: Cow::Owned(codes), scales, ..GroupedRow::default() }
        })
    }

    fn float8(&self, matrix: &Matrix<'_>) -> Vec<GroupedRow<'static>> {
        if self.sizes_only {
            let codes = zeros(matrix.cols());
            let row = GroupedRow { codes, scales: vec![0.0], ..GroupedRow::default() };
            return vec![row; matrix.num_rows()];
        }
        in_parallel(matrix, |values| {
            let reach = values.iter().fold(0.0f32, |reach, value| reach.max(value.abs()));
            let scale = reach / 448.0;
            let by = if scale > 0.0 { 1.0 / scale } else { 0.0 };
            let codes = values.iter().map(|value| to_e4m3(value * by)).collect();
            GroupedRow { codes: Cow::Owned(codes), scales: vec![scale], ..GroupedRow::default() }
        })
    }
}

/// Placeholder bytes that are never read: all rows share them, so that counting sizes does not fill
/// memory.
fn zeros(bytes: usize) -> Cow<'static, [u8]> {
    const MOST: usize = 1 << 20;
    static ZEROS: OnceLock<Vec<u8>> = OnceLock::new();
    ZEROS.get_or_init(|| vec![0; MOST]).get(..bytes).map_or_else(|| Cow::Owned(vec![0; bytes]), Cow::Borrowed)
}

/// Applies `one` to every row's values on all cores; the result does not depend on their number.
fn in_parallel<T: Send>(matrix: &Matrix<'_>, one: impl Fn(&[f32]) -> T + Sync) -> Vec<T> {
    let rows = matrix.num_rows();
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(rows);
    let share = rows.div_ceil(threads);
    let some = |range: std::ops::Range<usize>| {
        let mut values = vec![0.0; matrix.cols()];
        let turn = |row| {
            matrix.read_row(row, &mut values);
            one(&values)
        };
        range.map(turn).collect::<Vec<T>>()
    };
    let some = &some;
    std::thread::scope(|scope| {
        let starts = (0..rows).step_by(share);
        let workers: Vec<_> = starts.map(|at| scope.spawn(move || some(at..(at + share).min(rows)))).collect();
        let done = workers.into_iter().map(|worker| worker.join());
        done.flat_map(|rows| rows.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrix(format: Format, rows: usize, cols: usize) -> Matrix<'static> {
        let value = |at: usize| ((at * 37 % 101) as f32 - 50.0) / 100.0;
        let row = |row: usize| {
            let values: Vec<f32> = (0..cols).map(|col| value(row * cols + col)).collect();
            Cow::Owned(folio_formats::quant::encode(format, &values).unwrap())
        };
        Matrix::from_rows(format, cols, (0..rows).map(row).collect()).unwrap()
    }

    #[test]
    fn values_survive_within_what_each_form_rounds() {
        let plain = matrix(Format::BF16, 7, 128);
        let kinds = [(AtLoad::Int8, 0.003), (AtLoad::Int4, 0.05), (AtLoad::Int4G128, 0.07), (AtLoad::Fp8, 0.02)];
        for (kind, most) in kinds {
            let coded = Encoder { kind, sizes_only: false }.encode(plain.clone()).unwrap();
            assert_eq!((coded.num_rows(), coded.cols()), (7, 128));
            assert!(coded.parts()[0].coding().is_some());
            let (mut a, mut b) = ([0.0; 128], [0.0; 128]);
            for row in 0..7 {
                plain.read_row(row, &mut a);
                coded.read_row(row, &mut b);
                let off = a.iter().zip(&b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(off <= most && off > 0.0, "{kind:?}: {off}");
            }
            let sized = Encoder { kind, sizes_only: true }.encode(plain.clone()).unwrap();
            assert_eq!(sized.parts()[0].coding(), coded.parts()[0].coding());
        }
    }

    #[test]
    fn what_is_quantized_or_odd_stays() {
        let int8 = Encoder { kind: AtLoad::Int8, sizes_only: false };
        assert_eq!(int8.encode(matrix(Format::Q4_0, 2, 64)).unwrap().format(), Some(Format::Q4_0));
        assert_eq!(int8.encode(matrix(Format::F32, 2, 33)).unwrap().format(), Some(Format::F32));
        assert_eq!(int8.encode(matrix(Format::F16, 2, 32)).unwrap().format(), Some(Format::Q8_0));
        let int4 = Encoder { kind: AtLoad::Int4G128, sizes_only: false };
        assert_eq!(int4.encode(matrix(Format::BF16, 2, 192)).unwrap().format(), Some(Format::BF16));
    }

    #[test]
    fn names_go_both_ways() {
        for (name, kind) in AtLoad::ALL {
            assert_eq!((name.parse(), kind.name()), (Ok(kind), name));
        }
        assert!("int5".parse::<AtLoad>().is_err());
    }
}
