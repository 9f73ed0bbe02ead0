//! A matrix as a list of row slices: stacking, picking and permuting rows never touch the bytes.

use std::borrow::Cow;

use crate::{Error, Format, Result, TensorView};

/// `[rows, cols]` in one storage format; every row is a contiguous run of whole blocks.
///
/// Fused projections, expert slices and row permutations are all rearrangements of row slices, so they cost a vector
/// of slices and no copy, and hold for quantized formats as they do for plain ones.
#[derive(Clone, Debug)]
pub struct Matrix<'a> {
    format: Format,
    cols: usize,
    rows: Vec<Cow<'a, [u8]>>,
}

impl<'a> Matrix<'a> {
    /// Rows given one by one; each must hold exactly `format.bytes_for(cols)` bytes.
    pub fn from_rows(format: Format, cols: usize, rows: Vec<Cow<'a, [u8]>>) -> Result<Self> {
        let need = format.bytes_for(cols as u64)?;
        match rows.iter().find(|row| row.len() as u64 != need) {
            Some(row) => Err(Error::RowSize { format, cols, expected: need, found: row.len() as u64 }),
            None => Ok(Self { format, cols, rows }),
        }
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

    pub fn format(&self) -> Format {
        self.format
    }

    pub fn cols(&self) -> usize {
        self.cols
    }

    pub fn num_rows(&self) -> usize {
        self.rows.len()
    }

    /// The stored bytes of one row.
    pub fn row(&self, index: usize) -> &[u8] {
        &self.rows[index]
    }

    /// Decodes one row; `out` has `cols` values.
    pub fn read_row(&self, index: usize, out: &mut [f32]) {
        self.format.decode(&self.rows[index], out);
    }

    /// Rows `range` alone.
    pub fn slice_rows(&self, range: std::ops::Range<usize>) -> Self {
        Self { format: self.format, cols: self.cols, rows: self.rows[range].to_vec() }
    }

    /// Row `i` of the result is row `order[i]` of this one.
    pub fn pick_rows(&self, order: impl IntoIterator<Item = usize>) -> Self {
        let rows = order.into_iter().map(|row| self.rows[row].clone()).collect();
        Self { format: self.format, cols: self.cols, rows }
    }

    /// The rows of `parts`, one below the other. Parts of different formats are brought to F32.
    pub fn stack(parts: Vec<Matrix<'a>>) -> Result<Self> {
        let Some(first) = parts.first() else { return Err(Error::EmptyStack) };
        let (format, cols) = (first.format, first.cols);
        if let Some(odd) = parts.iter().find(|part| part.cols != cols) {
            return Err(Error::StackWidth { expected: cols, found: odd.cols });
        }
        let same = parts.iter().all(|part| part.format == format);
        let parts = if same { parts } else { parts.iter().map(Matrix::to_f32).collect() };
        let format = if same { format } else { Format::F32 };
        Ok(Self { format, cols, rows: parts.into_iter().flat_map(|part| part.rows).collect() })
    }

    /// The same values, decoded and held in memory.
    pub fn to_f32(&self) -> Matrix<'a> {
        let mut values = vec![0.0f32; self.cols];
        let rows = (0..self.num_rows()).map(|row| {
            self.read_row(row, &mut values);
            Cow::Owned(values.iter().flat_map(|value| value.to_le_bytes()).collect())
        });
        Self { format: Format::F32, cols: self.cols, rows: rows.collect() }
    }

    /// Columns become rows; decoded to F32, since a block runs along a row.
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
        Self { format: Format::F32, cols: rows, rows: turned.into_iter().map(Cow::Owned).collect() }
    }
}
