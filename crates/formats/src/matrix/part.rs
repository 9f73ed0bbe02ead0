//! Rows of one storage form.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use half::bf16;

use super::grouped::{Codes, Grouped, GroupedRow};
use crate::{Coding, Format, Units};

/// Some rows of a matrix, all in one form.
#[derive(Clone, Debug)]
pub struct Part<'a> {
    cols: usize,
    rows: Rows<'a>,
}

#[derive(Clone, Debug)]
enum Rows<'a> {
    /// Each a contiguous run of whole blocks.
    Blocks {
        format: Format,
        rows: Vec<Cow<'a, [u8]>>,
    },
    Grouped {
        form: Arc<Grouped>,
        rows: Vec<GroupedRow<'a>>,
    },
}

impl<'a> Part<'a> {
    /// The rows' sizes have been checked.
    pub(super) fn blocks(format: Format, cols: usize, rows: Vec<Cow<'a, [u8]>>) -> Self {
        Self { cols, rows: Rows::Blocks { format, rows } }
    }

    /// The rows have been checked.
    pub(super) fn grouped(form: Arc<Grouped>, cols: usize, rows: Vec<GroupedRow<'a>>) -> Self {
        Self { cols, rows: Rows::Grouped { form, rows } }
    }

    pub fn cols(&self) -> usize {
        self.cols
    }

    pub fn num_rows(&self) -> usize {
        match &self.rows {
            Rows::Blocks { rows, .. } => rows.len(),
            Rows::Grouped { rows, .. } => rows.len(),
        }
    }

    /// The storage format of plain values and GGUF blocks; `None` for codes with scales beside
    /// them.
    pub fn format(&self) -> Option<Format> {
        match &self.rows {
            Rows::Blocks { format, .. } => Some(*format),
            Rows::Grouped { .. } => None,
        }
    }

    /// The stored bytes of one row of plain values or blocks.
    pub fn row(&self, index: usize) -> &[u8] {
        match &self.rows {
            Rows::Blocks { rows, .. } => &rows[index],
            Rows::Grouped { .. } => panic!("a grouped row is not one run of bytes"),
        }
    }

    /// Decodes one row; `out` has `cols` values. This is the reference for every kernel.
    pub fn read_row(&self, index: usize, out: &mut [f32]) {
        match &self.rows {
            Rows::Blocks { format, rows } => format.decode(&rows[index], out),
            Rows::Grouped { form, rows } => form.read_row(&rows[index], out),
        }
    }

    /// The integer form of the rows; `None` for plain values, and for group sizes that no kernel
    /// supports.
    pub fn coding(&self) -> Option<Coding> {
        match &self.rows {
            Rows::Blocks { format, .. } => format.coding(),
            Rows::Grouped { form, rows } => {
                form.coding(self.cols, rows.first().is_some_and(|row| !row.minimums.is_empty()))
            }
        }
    }

    /// Reads one row in the form of [`Part::coding`]: one code per value, in stored order, and one
    /// scale per group; minimums are written if the coding has them. Values that are not exactly
    /// codes (eight-bit floats) are rounded.
    ///
    /// Panics if there is no coding.
    pub fn read_codes(&self, index: usize, codes: &mut [u8], scales: &mut [f32], minimums: &mut [f32]) {
        match &self.rows {
            Rows::Blocks { format, rows } => format.read_codes(&rows[index], codes, scales, minimums),
            Rows::Grouped { form, rows } => {
                let coding = self.coding().expect("a part that is read as codes has a coding");
                form.read_codes(&rows[index], &coding, Codes { codes, scales, minimums });
            }
        }
    }

    /// Reads one row of a coding with [`Numbers::Multiples`](crate::Numbers::Multiples), like
    /// [`Format::read_multiples`].
    pub fn read_multiples(
        &self,
        index: usize,
        codes: &mut [u8],
        scales: &mut [f32],
        minimums: &mut [f32],
        units: &mut [Units],
    ) {
        match &self.rows {
            Rows::Blocks { format, rows } => format.read_multiples(&rows[index], codes, scales, minimums, units),
            Rows::Grouped { .. } => panic!("groups have numbers of their own"),
        }
    }

    /// Codes with scales beside them, in their stored form; `None` for plain values and GGUF
    /// blocks.
    pub fn grouped_rows(&self) -> Option<(&Grouped, &[GroupedRow<'a>])> {
        match &self.rows {
            Rows::Blocks { .. } => None,
            Rows::Grouped { form, rows } => Some((form, rows)),
        }
    }

    /// Stored column `j` is input `order[j]`; `None` if columns are in order.
    pub fn column_order(&self) -> Option<&Arc<[u32]>> {
        match &self.rows {
            Rows::Blocks { .. } => None,
            Rows::Grouped { form, .. } => form.order.as_ref(),
        }
    }

    /// Inputs, ascending, with weights in [`Part::outliers`] instead of the codes.
    pub fn outlier_columns(&self) -> Option<&Arc<[u32]>> {
        match &self.rows {
            Rows::Blocks { .. } => None,
            Rows::Grouped { form, .. } => form.outliers.as_ref(),
        }
    }

    /// One row's weights of the outlier columns.
    pub fn outliers(&self, index: usize) -> &[bf16] {
        match &self.rows {
            Rows::Blocks { .. } => &[],
            Rows::Grouped { rows, .. } => &rows[index].outliers,
        }
    }

    pub(super) fn slice_rows(&self, range: Range<usize>) -> Self {
        let rows = match &self.rows {
            Rows::Blocks { format, rows } => Rows::Blocks { format: *format, rows: rows[range].to_vec() },
            Rows::Grouped { form, rows } => Rows::Grouped { form: form.clone(), rows: rows[range].to_vec() },
        };
        Self { cols: self.cols, rows }
    }

    /// Adds the rows of a part of the same form; returns any other part.
    pub(super) fn join(&mut self, other: Part<'a>) -> Option<Part<'a>> {
        match (&mut self.rows, other.rows) {
            (Rows::Blocks { format, rows }, Rows::Blocks { format: same, rows: more }) if *format == same => {
                rows.extend(more);
                None
            }
            (Rows::Grouped { form, rows }, Rows::Grouped { form: same, rows: more })
                if *form == same && has_minimums(rows) == has_minimums(&more) =>
            {
                rows.extend(more);
                None
            }
            (_, rows) => Some(Part { cols: other.cols, rows }),
        }
    }
}

fn has_minimums(rows: &[GroupedRow<'_>]) -> bool {
    rows.first().is_some_and(|row| !row.minimums.is_empty())
}
