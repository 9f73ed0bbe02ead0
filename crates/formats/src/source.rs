//! One view over every kind of weight file.

use crate::error::shown;
use crate::{Error, Format, Matrix, Result};

/// A named tensor inside a weight file: its storage format, its shape (outermost first, as PyTorch
/// prints it) and exactly the bytes of that shape and format.
#[derive(Clone, Debug)]
pub struct TensorView<'a> {
    pub name: &'a str,
    pub format: Format,
    pub shape: Vec<usize>,
    pub bytes: &'a [u8],
}

/// Weights by name, from any place. Implemented by safetensors folders, by GGUF files and by test
/// generators.
pub trait WeightSource: Send + Sync {
    /// Every tensor name, in file order.
    fn names(&self) -> Vec<&str>;

    /// The tensor of that name, or `None`.
    fn tensor(&self, name: &str) -> Option<TensorView<'_>>;

    /// The tensor of that name, or an error with the reason: missing, or in a format that Folio
    /// does not read.
    fn require(&self, name: &str) -> Result<TensorView<'_>> {
        let place = "weights".to_owned();
        self.tensor(name).ok_or_else(|| Error::MissingTensor { place, name: shown(name) })
    }

    /// Whether there is a tensor of that name, of any type: one that Folio does not read is not
    /// missing.
    fn contains(&self, name: &str) -> bool {
        !matches!(self.require(name), Err(Error::MissingTensor { .. }))
    }

    /// Reports that the tensor has been copied and will not be read again, so that its pages may be
    /// freed.
    fn release(&self, name: &str);

    /// Whether all bytes read are those that the files had when they were opened. To be called once
    /// everything has been copied, because reads do not notice that a file is truncated or written
    /// to.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Reports that little of it will be read from now on, which ends the prefetching.
    fn rest(&self) {}
}

impl<'a> TensorView<'a> {
    /// The tensor as rows: all leading dimensions flattened, the last one is the row. A vector is
    /// one row.
    pub fn matrix(&self) -> Result<Matrix<'a>> {
        Matrix::from_view(self)
    }

    /// All values as f32, in order. For norms and biases; a big matrix is read by [`Matrix`] rows.
    pub fn to_f32(&self) -> Result<Vec<f32>> {
        let matrix = self.matrix()?;
        let mut out = vec![0.0; matrix.num_rows() * matrix.cols()];
        for (row, values) in out.chunks_exact_mut(matrix.cols().max(1)).enumerate() {
            matrix.read_row(row, values);
        }
        Ok(out)
    }
}
