//! Scales beside a weight: one for all of it, a row, a group along a row, or a block of rows and
//! columns.

use super::layer::Layer;
use crate::quant::float8::e8m0;
use crate::{Format, Result};

/// The values that share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sharing {
    Tensor,
    Row,
    /// This many neighbours along a row.
    Group(usize),
    /// A block of this many rows and columns; the last ones may be short.
    Block {
        rows: usize,
        cols: usize,
    },
}

impl Sharing {
    /// Neighbours along a row that share a scale.
    pub fn group(self, cols: usize) -> usize {
        match self {
            Sharing::Tensor | Sharing::Row => cols,
            Sharing::Group(group) => group,
            Sharing::Block { cols, .. } => cols,
        }
    }

    /// Rows that share their scales.
    fn rows(self, rows: usize) -> usize {
        match self {
            Sharing::Tensor => rows,
            Sharing::Row | Sharing::Group(_) => 1,
            Sharing::Block { rows, .. } => rows,
        }
    }
}

/// The scales of a layer as a table: a line for every run of rows that share them.
pub(super) struct Scales {
    values: Vec<f32>,
    groups: usize,
    rows_a_line: usize,
}

const FLOATS: &[Format] = &[Format::F32, Format::BF16, Format::F16];
const POWERS: &[Format] = &[Format::U8, Format::F8_E8M0];

impl Scales {
    /// Reads `suffix` as plain numbers.
    pub fn floats(layer: &Layer<'_, '_>, suffix: &str, sharing: Sharing) -> Result<Self> {
        Self::read(layer, suffix, sharing, FLOATS)
    }

    /// Reads `suffix` as eight-bit floats.
    pub fn float8(layer: &Layer<'_, '_>, suffix: &str, sharing: Sharing) -> Result<Self> {
        Self::read(layer, suffix, sharing, &[Format::F8_E4M3])
    }

    /// Reads `suffix` as exponents of two, 127 standing for 1.
    pub fn powers(layer: &Layer<'_, '_>, suffix: &str, sharing: Sharing) -> Result<Self> {
        Self::read(layer, suffix, sharing, POWERS)
    }

    /// Reads `suffix` as plain numbers or exponents, by the tensor's format.
    pub fn any(layer: &Layer<'_, '_>, suffix: &str, sharing: Sharing) -> Result<Self> {
        let exponents = layer.find(suffix).is_some_and(|view| POWERS.contains(&view.format));
        Self::read(layer, suffix, sharing, if exponents { POWERS } else { FLOATS })
    }

    fn read(layer: &Layer<'_, '_>, suffix: &str, sharing: Sharing, formats: &[Format]) -> Result<Self> {
        let view = layer.need(suffix, formats)?;
        let rows_a_line = sharing.rows(layer.rows).max(1);
        let groups = layer.cols.div_ceil(sharing.group(layer.cols).max(1));
        let expected = [layer.rows.div_ceil(rows_a_line), groups];
        // Writers differ in dimensions of one: `[rows]` and `[rows, 1]`, `[]` and `[1]` are the
        // same table.
        let beside_one = |shape: &[usize]| -> Vec<usize> { shape.iter().copied().filter(|dim| *dim != 1).collect() };
        if beside_one(&view.shape) != beside_one(&expected) {
            return Err(layer.wrong(suffix, format!("has shape {:?}, but {expected:?} is needed", view.shape)));
        }
        let values = match view.format {
            Format::U8 => view.bytes.iter().map(|code| e8m0(*code)).collect(),
            _ => view.to_f32()?,
        };
        if let Some(at) = values.iter().position(|value| !value.is_finite()) {
            let (line, group) = (at / groups, at % groups);
            let problem = format!("is {} at [{line}, {group}], but must be finite", values[at]);
            return Err(layer.wrong(suffix, problem));
        }
        Ok(Self { values, groups, rows_a_line })
    }

    /// The scales along a row.
    pub fn row(&self, row: usize) -> &[f32] {
        &self.values[row / self.rows_a_line * self.groups..][..self.groups]
    }

    pub fn values(&self) -> &[f32] {
        &self.values
    }

    pub fn map(mut self, change: impl Fn(f32) -> f32) -> Self {
        self.values.iter_mut().for_each(|value| *value = change(*value));
        self
    }

    /// Refuses a scale of zero over nonzero codes: the file's writer meant another scale.
    pub fn refuse_zeros(
        &self,
        layer: &Layer<'_, '_>,
        suffix: &str,
        group: usize,
        mut codes: impl FnMut(usize, usize) -> bool,
    ) -> Result<()> {
        if !self.values.contains(&0.0) {
            return Ok(());
        }
        for row in 0..layer.rows {
            for (at, _) in self.row(row).iter().enumerate().filter(|(_, scale)| **scale == 0.0) {
                let end = layer.cols.min((at + 1) * group);
                if (at * group..end).any(|col| codes(row, col)) {
                    let line = row / self.rows_a_line;
                    return Err(layer.wrong(suffix, format!("is zero at [{line}, {at}], where weights are not")));
                }
            }
        }
        Ok(())
    }
}
