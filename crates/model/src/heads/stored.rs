//! Tensors of a head's file, found by exact names, and the memory a head works in.

use folio_device::{Backend, TensorKind};
use folio_formats::{Matrix, TensorView, WeightSource};

use crate::{Error, Result, linear::Linear};

/// A head's tensors.
#[derive(Clone, Copy)]
pub(super) struct Stored<'a> {
    source: &'a dyn WeightSource,
    /// For errors: the kind of head that needs the tensor.
    family: &'static str,
}

impl<'a> Stored<'a> {
    pub fn new(source: &'a dyn WeightSource, family: &'static str) -> Self {
        Self { source, family }
    }

    pub fn has(&self, name: &str) -> bool {
        self.source.contains(name)
    }

    /// The first number of the tensor's shape: outputs of a matrix whose size follows from nothing
    /// else.
    pub fn outputs(&self, name: &str) -> Result<usize> {
        let view = self.find(name, &[])?;
        Ok(view.shape.first().copied().unwrap_or(0))
    }

    fn find(&self, name: &str, shape: &[usize]) -> Result<TensorView<'a>> {
        self.source.require(name).map_err(|error| match error {
            folio_formats::Error::MissingTensor { .. } => self.missing(name, shape),
            unread => unread.into(),
        })
    }

    fn view(&self, name: &str, shape: &[usize]) -> Result<TensorView<'a>> {
        let view = self.find(name, shape)?;
        match view.shape == shape {
            true => Ok(view),
            false => Err(self.shape_error(name, shape, &view.shape)),
        }
    }

    pub fn missing(&self, name: &str, expected: &[usize]) -> Error {
        Error::MissingTensor { name: name.to_owned(), family: self.family, expected: expected.to_vec() }
    }

    pub fn shape_error(&self, name: &str, expected: &[usize], found: &[usize]) -> Error {
        let (expected, found) = (expected.to_vec(), found.to_vec());
        Error::TensorShape { name: name.to_owned(), family: self.family, expected, found }
    }

    fn format_error(&self, name: &str, expected: &'static str, view: &TensorView<'_>) -> Error {
        let found = format!("{:?}", view.format);
        Error::TensorFormat { name: name.to_owned(), family: self.family, expected, found }
    }

    /// A matrix in floats, or in the blocks of a GGUF file.
    pub fn matrix(&self, name: &str, rows: usize, cols: usize) -> Result<Matrix<'a>> {
        use folio_formats::Format::{BF16, F16, F32};
        let view = self.view(name, &[rows, cols])?;
        match view.format {
            F32 | F16 | BF16 => Ok(view.matrix()?),
            format if format.is_quantized() => Ok(view.matrix()?),
            _ => Err(self.format_error(name, "floating-point numbers or blocks of them", &view)),
        }
    }

    pub fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>> {
        Ok(self.view(name, &[len])?.to_f32()?)
    }

    /// A tensor of integers.
    pub fn integers(&self, name: &str, len: usize) -> Result<Vec<i64>> {
        use folio_formats::Format::{I16, I32, I64};
        let view = self.view(name, &[len])?;
        let bytes = view.bytes;
        Ok(match view.format {
            I64 => bytes.as_chunks().0.iter().map(|&value| i64::from_le_bytes(value)).collect(),
            I32 => bytes.as_chunks().0.iter().map(|&value| i32::from_le_bytes(value).into()).collect(),
            I16 => bytes.as_chunks().0.iter().map(|&value| i16::from_le_bytes(value).into()).collect(),
            _ => return Err(self.format_error(name, "integers of 16 to 64 bits", &view)),
        })
    }

    /// `{stem}.weight`, and `{stem}.bias` if there is one.
    pub fn linear<B: Backend>(&self, backend: &mut B, stem: &str, rows: usize, cols: usize) -> Result<Linear<B>> {
        self.stacked(backend, &[(stem.to_owned(), rows)], cols)
    }

    /// Several matrices of one input, the rows of the first above those of the next; all have a
    /// bias or none.
    pub fn stacked<B: Backend>(&self, backend: &mut B, stems: &[(String, usize)], cols: usize) -> Result<Linear<B>> {
        let (mut matrices, mut biases) = (Vec::with_capacity(stems.len()), Vec::new());
        let with_bias = stems.iter().any(|(stem, _)| self.has(&format!("{stem}.bias")));
        for (stem, rows) in stems {
            matrices.push(self.matrix(&format!("{stem}.weight"), *rows, cols)?);
            if with_bias {
                biases.extend(self.vector(&format!("{stem}.bias"), *rows)?);
            }
        }
        Linear::new(backend, &Matrix::stack(matrices)?, with_bias.then_some(&biases[..]))
    }

    pub fn norm<B: Backend>(&self, backend: &mut B, stem: &str, len: usize) -> Result<B::Vector> {
        Ok(backend.vector(&self.vector(&format!("{stem}.weight"), len)?)?)
    }
}

/// Makes tensors and counts their bytes.
pub(super) struct Room<'a, B: Backend> {
    pub backend: &'a mut B,
    pub bytes: u64,
}

impl<B: Backend> Room<'_, B> {
    pub fn tensor(&mut self, rows: usize, cols: usize, kind: TensorKind) -> Result<B::Tensor> {
        self.bytes += (rows * cols * self.backend.value_bytes(kind)) as u64;
        Ok(self.backend.tensor(rows, cols, kind)?)
    }
}
