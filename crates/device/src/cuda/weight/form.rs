//! The form of a matrix part in device memory: its layout, and the kernels that read it.

use folio_formats::{Format, GroupedLevels, Levels, Part};
use half::bf16;

use super::super::tensor::Float;

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Form {
    /// Plain values `[outputs, inputs]`.
    Plain(Float),
    /// e4m3 codes `[outputs, inputs]`; one f32 scale per output, or one for 128 outputs and 128
    /// inputs.
    Float8 {
        blocks: bool,
    },
    Coded(Coded),
}

/// Codes in the packed layout of the streaming kernels; see `codes.rs`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Coded {
    pub code: Code,
    /// Whether groups have a minimum.
    pub affine: bool,
    /// Values that share a scale: 16, 32, 64 or 128.
    pub group: usize,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Code {
    /// The code as two's complement.
    Byte,
    /// Codes 0 to 15, counted up from a lowest level.
    Nibble { least: i8 },
    /// Codes 0 to 15 that index a table.
    Table([bf16; 16]),
}

/// Bytes of a streaming kernel's step: a tile's codes of one chunk.
pub const CHUNK_BYTES: usize = 2048;
/// Inputs of a chunk.
pub const CHUNK: usize = 128;
/// Outputs that share the scales of eight-bit floats.
pub const FLOAT8_ROWS: usize = 128;
/// Value of a code 1 of [`GroupedLevels::Of127`] at scale 1.
pub const ONE_127TH: f32 = 1.0 / 127.0;

impl Form {
    /// The form for a part. Codes with their own order of columns or with outlier columns, and
    /// groups that no kernel supports, are decoded.
    pub fn of(part: &Part<'_>, values: Float) -> Form {
        let coded = match values {
            Float::F32 => None,
            Float::Bf16 => float8(part).or_else(|| coded(part)),
        };
        coded.unwrap_or(Form::Plain(values))
    }

    /// First part of the kernels' names for this form.
    pub fn stem(&self) -> &'static str {
        match self {
            Form::Plain(Float::Bf16) => "bf16",
            Form::Plain(Float::F32) => "f32",
            Form::Float8 { .. } => "fp8",
            Form::Coded(coded) => match (coded.code, coded.has_minimums(), coded.group) {
                (Code::Byte, _, 16) => "int8_by16",
                (Code::Byte, false, _) => "int8",
                (Code::Byte, true, _) => "int8_affine",
                (Code::Nibble { .. }, _, 16) => "int4_affine_by16",
                (Code::Nibble { .. }, false, _) => "int4",
                (Code::Nibble { .. }, true, _) => "int4_affine",
                (Code::Table(_), _, 16) => "table_by16",
                (Code::Table(_), ..) => "table",
            },
        }
    }

    /// First part of streaming kernels' names, which differ for long groups of nibbles.
    pub fn stream_stem(&self) -> &'static str {
        let is_long = matches!(self, Form::Coded(Coded { group: CHUNK, .. }));
        match self.stem() {
            "int4" if is_long => "int4_by128",
            "int4_affine" if is_long => "int4_affine_by128",
            stem => stem,
        }
    }
}

impl Coded {
    /// Outputs of a tile.
    pub fn rows(&self) -> usize {
        if self.code == Code::Byte { 16 } else { 32 }
    }

    pub fn by_16(&self) -> bool {
        self.group == 16
    }

    /// Whether the layout has room for minimums; nibbles in groups of 16 always have.
    pub fn has_minimums(&self) -> bool {
        self.affine || (self.by_16() && matches!(self.code, Code::Nibble { .. }))
    }

    /// Quarters of a chunk, 32 inputs each, that share a set of scales.
    pub fn quarters(&self) -> usize {
        (self.group / 32).max(1)
    }

    /// Bytes of scales and minimums of one set: an eighth of a tile's outputs, one group (two of
    /// 16).
    pub fn lane_bytes(&self) -> usize {
        self.rows() / 8 * 2 * (1 + usize::from(self.has_minimums())) * (1 + usize::from(self.by_16()))
    }

    /// Bytes of scales and minimums of a tile's chunk.
    pub fn scale_bytes(&self) -> usize {
        4 / self.quarters() * 8 * self.lane_bytes()
    }

    fn has_kernels(&self) -> bool {
        match self.code {
            Code::Byte => !(self.affine && self.by_16()),
            Code::Nibble { .. } => true,
            Code::Table(_) => !self.affine,
        }
    }
}

/// e4m3 codes stay unchanged if a whole row, or blocks of 128 outputs and 128 inputs, share a
/// scale.
fn float8(part: &Part<'_>) -> Option<Form> {
    let (grouped, rows) = part.grouped_rows()?;
    if grouped.levels != GroupedLevels::Float8 || is_rearranged(part) || !part.cols().is_multiple_of(16) {
        return None;
    }
    if grouped.group >= part.cols() {
        return Some(Form::Float8 { blocks: false });
    }
    let shared = rows.chunks(FLOAT8_ROWS).all(|tile| tile.iter().all(|row| row.scales == tile[0].scales));
    (shared && grouped.group.is_multiple_of(CHUNK)).then_some(Form::Float8 { blocks: true })
}

fn coded(part: &Part<'_>) -> Option<Form> {
    if is_rearranged(part) || !part.cols().is_multiple_of(8) {
        return None;
    }
    let coded = match part.grouped_rows() {
        Some((grouped, rows)) => Coded {
            code: match grouped.levels {
                GroupedLevels::Signed8 | GroupedLevels::Of127 => Code::Byte,
                GroupedLevels::Nibbles(table) => code_of(table),
                GroupedLevels::Float8 => return None,
            },
            affine: rows.first().is_some_and(|row| !row.minimums.is_empty()),
            group: group_for(grouped.group, part.cols())?,
        },
        None => {
            let coding = part.format().filter(|format| format.is_quantized()).and_then(Format::coding)?;
            Coded {
                code: match coding.levels {
                    Levels::Nibbles(table) => code_of(table.map(f32::from)),
                    Levels::Five { .. } | Levels::Six { .. } | Levels::Bytes => Code::Byte,
                },
                affine: coding.affine,
                group: group_for(coding.group, part.cols())?,
            }
        }
    };
    coded.has_kernels().then_some(Form::Coded(coded))
}

fn is_rearranged(part: &Part<'_>) -> bool {
    part.column_order().is_some() || part.outlier_columns().is_some_and(|columns| !columns.is_empty())
}

/// The longest group that kernels support and that divides both the stored one and the row.
fn group_for(group: usize, cols: usize) -> Option<usize> {
    let stored = group.min(cols);
    [CHUNK, 64, 32, 16].into_iter().find(|known| stored.is_multiple_of(*known) && cols.is_multiple_of(*known))
}

fn code_of(table: [f32; 16]) -> Code {
    let least = table[0];
    let even = table.iter().enumerate().all(|(code, level)| *level == least + code as f32);
    if even && least.fract() == 0.0 && (-128.0..=112.0).contains(&least) {
        Code::Nibble { least: least as i8 }
    } else {
        // Whole and half numbers are exact; other tables lose what any bf16 weight loses.
        Code::Table(table.map(bf16::from_f32))
    }
}
