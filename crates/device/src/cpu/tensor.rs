//! Activations and constant vectors: plain f32 in aligned memory.

use super::buffer::Buffer;
use crate::{Error, Result};

/// `[rows, cols]` of f32, row-major without padding; with the rows of the largest step.
pub struct Tensor {
    rows: usize,
    cols: usize,
    data: Buffer<f32>,
}

impl Tensor {
    pub fn new(rows: usize, cols: usize) -> Result<Self> {
        let Some(len) = rows.checked_mul(cols) else {
            return Err(Error::OutOfMemory { what: "a tensor", bytes: u64::MAX });
        };
        Ok(Self { rows, cols, data: Buffer::zeroed("a tensor", len)? })
    }

    /// Rows the tensor has room for.
    pub fn num_rows(&self) -> usize {
        self.rows
    }

    pub fn cols(&self) -> usize {
        self.cols
    }

    pub fn row(&self, row: usize) -> &[f32] {
        &self.data[row * self.cols..(row + 1) * self.cols]
    }

    pub fn row_mut(&mut self, row: usize) -> &mut [f32] {
        &mut self.data[row * self.cols..(row + 1) * self.cols]
    }

    /// The first `rows` rows, one after the other.
    pub fn head(&self, rows: usize) -> &[f32] {
        assert!(rows <= self.rows, "{rows} rows of a tensor of {}", self.rows);
        &self.data[..rows * self.cols]
    }

    /// The first `rows` rows, one after the other.
    pub fn head_mut(&mut self, rows: usize) -> &mut [f32] {
        assert!(rows <= self.rows, "{rows} rows of a tensor of {}", self.rows);
        &mut self.data[..rows * self.cols]
    }
}

/// A short constant vector.
pub struct Vector(Buffer<f32>);

impl Vector {
    pub fn new(values: &[f32]) -> Result<Self> {
        let mut data = Buffer::zeroed("a vector", values.len())?;
        data.copy_from_slice(values);
        Ok(Self(data))
    }
}

impl std::ops::Deref for Vector {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.0
    }
}
