//! A matrix as a list of row slices: stacking, selecting and permuting rows never touch the bytes.

mod grouped;
mod part;

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

pub use grouped::{Grouped, GroupedLevels, GroupedRow};
pub use part::Part;

use crate::{Error, Format, Result, TensorView};

/// `[rows, cols]`, as parts of one storage form each, one below the other.
///
/// Fused projections, expert slices and row permutations are all rearrangements of row slices, so
/// they cost a vector of slices and no copy, for quantized formats as well as for plain ones.
#[derive(Clone, Debug)]
pub struct Matrix<'a> {
    cols: usize,
    parts: Vec<Part<'a>>,
}

impl<'a> Matrix<'a> {
    /// Rows given one by one; each must hold exactly `format.bytes_for(cols)` bytes.
    pub fn from_rows(format: Format, cols: usize, rows: Vec<Cow<'a, [u8]>>) -> Result<Self> {
        let need = format.bytes_for(cols as u64)?;
        match rows.iter().find(|row| row.len() as u64 != need) {
            Some(row) => Err(Error::RowSize { format, cols, expected: need, found: row.len() as u64 }),
            None => Ok(Self { cols, parts: vec![Part::blocks(format, cols, rows)] }),
        }
    }

    /// Rows of codes with their scales. Everything that `form` and the rows require of each other
    /// is checked.
    pub fn from_grouped(cols: usize, form: Grouped, rows: Vec<GroupedRow<'a>>) -> Result<Self> {
        form.check(cols, &rows)?;
        Ok(Self { cols, parts: vec![Part::grouped(Arc::new(form), cols, rows)] })
    }

    /// A tensor's rows: leading dimensions flattened.
    pub fn from_view(view: &TensorView<'a>) -> Result<Self> {
        let cols = view.shape.last().copied().unwrap_or(1);
        let row_bytes = view.format.bytes_for(cols as u64)? as usize;
        let rows = match row_bytes {
            0 => Vec::new(),
            size => view.bytes.chunks_exact(size).map(Cow::Borrowed).collect(),
        };
        Self::from_rows(view.format, cols, rows)
    }

    pub fn cols(&self) -> usize {
        self.cols
    }

    pub fn num_rows(&self) -> usize {
        self.parts.iter().map(Part::num_rows).sum()
    }

    /// The rows by storage form, from the top down.
    pub fn parts(&self) -> &[Part<'a>] {
        &self.parts
    }

    /// The one storage format of all rows; `None` if they differ or are codes with scales beside
    /// them.
    pub fn format(&self) -> Option<Format> {
        match &self.parts[..] {
            [only] => only.format(),
            _ => None,
        }
    }

    /// The part that holds a row, and the row's number there.
    fn place(&self, index: usize) -> (usize, usize) {
        let mut left = index;
        for (at, part) in self.parts.iter().enumerate() {
            if left < part.num_rows() {
                return (at, left);
            }
            left -= part.num_rows();
        }
        panic!("row {index} of a matrix of {}", self.num_rows());
    }

    /// Decodes one row; `out` has `cols` values.
    pub fn read_row(&self, index: usize, out: &mut [f32]) {
        let (part, row) = self.place(index);
        self.parts[part].read_row(row, out);
    }

    /// Only the rows of `range`.
    pub fn slice_rows(&self, range: Range<usize>) -> Self {
        let mut first = 0;
        let mut parts = Vec::new();
        for part in &self.parts {
            let last = first + part.num_rows();
            let (start, end) = (range.start.max(first), range.end.min(last));
            if start < end {
                parts.push(part.slice_rows(start - first..end - first));
            }
            first = last;
        }
        assert!(range.start <= range.end && range.end <= first, "rows {range:?} of a matrix of {first}");
        Self { cols: self.cols, parts }
    }

    /// Row `i` of the result is row `order[i]` of this one.
    pub fn pick_rows(&self, order: impl IntoIterator<Item = usize>) -> Self {
        let picked = order.into_iter().map(|row| {
            let (part, row) = self.place(row);
            self.parts[part].slice_rows(row..row + 1)
        });
        Self { cols: self.cols, parts: joined(picked) }
    }

    /// The rows of `parts`, one below the other, each in its own form.
    pub fn stack(parts: Vec<Matrix<'a>>) -> Result<Self> {
        let Some(first) = parts.first() else { return Err(Error::EmptyStack) };
        let cols = first.cols;
        if let Some(odd) = parts.iter().find(|part| part.cols != cols) {
            return Err(Error::StackWidth { expected: cols, found: odd.cols });
        }
        Ok(Self { cols, parts: joined(parts.into_iter().flat_map(|matrix| matrix.parts)) })
    }

    /// Turns columns into rows; decoded to F32, since a block runs along a row.
    pub fn transpose(&self) -> Matrix<'a> {
        let (rows, cols) = (self.num_rows(), self.cols);
        let mut turned = vec![vec![0u8; rows * 4]; cols];
        let mut values = vec![0.0f32; cols];
        for row in 0..rows {
            self.read_row(row, &mut values);
            for (col, value) in values.iter().enumerate() {
                turned[col][row * 4..row * 4 + 4].copy_from_slice(&value.to_le_bytes());
            }
        }
        let turned = turned.into_iter().map(Cow::Owned).collect();
        Self { cols: rows, parts: vec![Part::blocks(Format::F32, rows, turned)] }
    }
}

/// Joins neighbours of the same form into one part.
fn joined<'a>(parts: impl Iterator<Item = Part<'a>>) -> Vec<Part<'a>> {
    let mut all: Vec<Part<'a>> = Vec::new();
    for part in parts {
        let left = match all.last_mut() {
            Some(last) => last.join(part),
            None => Some(part),
        };
        all.extend(left);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrix(format: Format, values: &[[f32; 2]]) -> Matrix<'static> {
        let rows = values.iter().map(|row| Cow::Owned(crate::quant::encode(format, row).unwrap()));
        Matrix::from_rows(format, 2, rows.collect()).unwrap()
    }

    fn values(matrix: &Matrix<'_>) -> Vec<[f32; 2]> {
        let row = |index| {
            let mut out = [0.0; 2];
            matrix.read_row(index, &mut out);
            out
        };
        (0..matrix.num_rows()).map(row).collect()
    }

    #[test]
    fn forms_are_kept_through_every_rearrangement() {
        let low = matrix(Format::BF16, &[[1.0, 2.0], [3.0, 4.0]]);
        let same = matrix(Format::BF16, &[[5.0, 6.0]]);
        let other = matrix(Format::F32, &[[7.0, 8.0]]);
        let all = Matrix::stack(vec![low, same, other]).unwrap();
        let formats = |matrix: &Matrix<'_>| matrix.parts().iter().map(|p| p.format().unwrap()).collect::<Vec<_>>();
        assert_eq!(values(&all), [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]);
        assert_eq!((formats(&all), all.format()), (vec![Format::BF16, Format::F32], None));
        let picked = all.pick_rows([3, 0, 2]);
        assert_eq!(values(&picked), [[7.0, 8.0], [1.0, 2.0], [5.0, 6.0]]);
        assert_eq!(formats(&picked), [Format::F32, Format::BF16]);
        let cut = all.slice_rows(1..3);
        assert_eq!((values(&cut), cut.format()), (vec![[3.0, 4.0], [5.0, 6.0]], Some(Format::BF16)));
        assert_eq!(all.transpose().num_rows(), 2);
    }
}
