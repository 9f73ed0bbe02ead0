//! Every matmul of the decoder: a packed weight and sometimes a bias. Only the backend knows the
//! weight's format.

use folio_device::{Backend, Norm, Product};
use folio_formats::Matrix;

use crate::{Result, load::Loader, load::Place, names::Part};

pub(crate) struct Linear<B: Backend> {
    weight: B::Weight,
    bias: Option<B::Vector>,
    /// Width of the result.
    pub outputs: usize,
}

impl<B: Backend> Linear<B> {
    pub fn new(backend: &mut B, matrix: &Matrix<'_>, bias: Option<&[f32]>) -> Result<Self> {
        let bias = bias.map(|values| backend.vector(values)).transpose()?;
        Ok(Self { weight: backend.weight(matrix)?, bias, outputs: matrix.num_rows() })
    }

    /// A whole stored matrix.
    pub fn load(backend: &mut B, loader: &Loader<'_>, place: Place, shape: LinearShape) -> Result<Self> {
        let matrix = loader.matrix(shape.part, place, shape.outputs, shape.inputs)?;
        let bias = match shape.bias {
            true => Some(loader.bias(shape.part, place, shape.outputs)?),
            false => None,
        };
        Self::new(backend, &matrix, bias.as_deref())
    }

    pub fn forward(&self, backend: &mut B, out: &mut B::Tensor, x: &B::Tensor, rows: usize) {
        backend.linear(out, x, &self.weight, self.bias.as_ref(), rows);
    }

    /// For operations that do more than multiply.
    pub fn product(&self) -> Product<'_, B> {
        Product { weight: &self.weight, bias: self.bias.as_ref() }
    }

    /// The weight alone, for a matrix that is also an embedding table.
    pub fn into_weight(self) -> B::Weight {
        self.weight
    }

    pub fn bytes(&self, backend: &B) -> u64 {
        backend.weight_bytes(&self.weight)
    }
}

/// Input of a sub-layer's first product.
pub(crate) enum Source<'a, B: Backend> {
    /// The residual stream without a norm.
    Stream,
    /// Rows that were normalized already.
    Normed,
    /// The residual stream, normalized by the product.
    Norm(Norm<'a, B>),
}

#[derive(Clone, Copy)]
pub(crate) struct LinearShape {
    pub part: Part,
    pub outputs: usize,
    pub inputs: usize,
    pub bias: bool,
}
