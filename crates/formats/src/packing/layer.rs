//! The tensors of one packed layer: found by suffix, checked before use, and noted so that their
//! pages can be freed.

use std::cell::RefCell;

use super::{Packed, packed, tensor};
use crate::{Error, Format, Grouped, GroupedRow, Matrix, Result, TensorView, WeightSource};

pub(super) struct Layer<'a, 's> {
    source: &'a dyn WeightSource,
    stem: &'s str,
    pub rows: usize,
    pub cols: usize,
    read: RefCell<Vec<String>>,
}

impl<'a, 's> Layer<'a, 's> {
    pub fn new(source: &'a dyn WeightSource, stem: &'s str, rows: usize, cols: usize) -> Self {
        Self { source, stem, rows, cols, read: RefCell::default() }
    }

    pub fn name(&self, suffix: &str) -> String {
        format!("{}.{suffix}", self.stem)
    }

    /// A refusal of this layer's tensor.
    pub fn wrong(&self, suffix: &str, problem: impl Into<String>) -> Error {
        packed(&self.name(suffix), problem)
    }

    /// The tensor of that suffix, if the layer has one.
    pub fn find(&self, suffix: &str) -> Option<TensorView<'a>> {
        let name = self.name(suffix);
        let view = self.source.tensor(&name)?;
        self.read.borrow_mut().push(name);
        Some(view)
    }

    /// The tensor of that suffix, of one of those storage formats.
    pub fn need(&self, suffix: &str, formats: &[Format]) -> Result<TensorView<'a>> {
        self.find(suffix);
        let view = self.source.require(&self.name(suffix))?;
        if formats.contains(&view.format) {
            return Ok(view);
        }
        let names: Vec<&str> = formats.iter().map(|format| format.name()).collect();
        Err(self.wrong(suffix, format!("is stored as {}, but {} is needed", view.format, names.join(" or "))))
    }

    /// The tensor of that suffix, with this shape and one of these formats.
    pub fn shaped(&self, suffix: &str, formats: &[Format], shape: &[usize]) -> Result<TensorView<'a>> {
        self.find(suffix);
        tensor(self.source, &self.name(suffix), shape, formats)
    }

    /// A single number: a vector or matrix of one, or no dimension at all.
    pub fn number(&self, suffix: &str) -> Result<f32> {
        let view = self.need(suffix, &[Format::F32, Format::BF16, Format::F16])?;
        match view.shape.iter().all(|dim| *dim == 1) {
            true => Ok(view.to_f32()?[0]),
            false => Err(self.wrong(suffix, format!("has shape {:?}, but one number is needed", view.shape))),
        }
    }

    /// Rows of codes as a matrix; an error names the tensor that holds the codes.
    pub fn matrix(&self, suffix: &str, form: Grouped, rows: Vec<GroupedRow<'a>>) -> Result<Matrix<'a>> {
        Matrix::from_grouped(self.cols, form, rows).map_err(|error| match error {
            Error::Grouped { problem } => self.wrong(suffix, format!("does not fit its scales: {problem}")),
            other => other,
        })
    }

    /// The matrix with the names of all tensors that were used.
    pub fn done(self, matrix: Matrix<'a>) -> Packed<'a> {
        // Scales of activations and stored shapes are not read, but their pages are mapped too.
        for unused in ["input_scale", "input_global_scale", "input_zero_point", "weight_shape"] {
            self.find(unused);
        }
        let mut tensors = self.read.into_inner();
        tensors.sort();
        tensors.dedup();
        Packed { matrix, tensors }
    }
}
