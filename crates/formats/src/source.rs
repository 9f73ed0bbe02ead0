//! One view over every kind of weight file.

use crate::error::shown;
use crate::{Error, Format, Matrix, Result};

/// A named tensor inside a weight file: its storage format, its shape (outermost first, as PyTorch prints it) and
/// exactly the bytes that shape and format need.
#[derive(Clone, Debug)]
pub struct TensorView<'a> {
    pub name: &'a str,
    pub format: Format,
    pub shape: Vec<usize>,
    pub bytes: &'a [u8],
}

/// Weights by name, wherever they lie. Implemented by safetensors folders, by GGUF files and by test generators.
pub trait WeightSource: Send + Sync {
    /// Every tensor name, in file order.
    fn names(&self) -> Vec<&str>;

    /// The tensor of that name, or `None`.
    fn tensor(&self, name: &str) -> Option<TensorView<'_>>;

    /// The tensor of that name, or an error that says why there is none: missing, or stored in a way Folio does not read.
    fn require(&self, name: &str) -> Result<TensorView<'_>> {
        let place = "weights".to_owned();
        self.tensor(name).ok_or_else(|| Error::MissingTensor { place, name: shown(name) })
    }

    /// Whether there is a tensor of that name, in whatever type it is stored: one that Folio does not read is not missing.
    fn contains(&self, name: &str) -> bool {
        !matches!(self.require(name), Err(Error::MissingTensor { .. }))
    }

    /// Says that the tensor has been copied and will not be read again, so that its pages may be given back.
    fn release(&self, name: &str);

    /// Whether all that was read is what the files held when they were opened: asked once everything has been copied, as nobody hears
    /// of a file that is truncated or written to meanwhile.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Says that little of it will be read from now on, so that nothing is read ahead any more.
    fn rest(&self) {}
}

impl<'a> TensorView<'a> {
    /// The tensor as rows: all leading dimensions flattened, the last one is the row. A vector is one row.
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
