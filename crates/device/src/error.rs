//! Errors of opening or filling a device. The operations of a step cannot fail: a wrong shape there
//! is a bug and asserts.

use std::path::PathBuf;

use folio_formats::Format;

pub type Result<T> = std::result::Result<T, Error>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("out of memory: {what} needs {bytes} bytes")]
    OutOfMemory { what: &'static str, bytes: u64 },

    /// Two sizes must agree and do not; `what` names both the thing and the dimension.
    #[error("{what} is {found}, but must be {expected}")]
    Shape { what: &'static str, expected: usize, found: usize },

    #[error("{backend} has no kernels for weights stored as {format:?}")]
    UnsupportedFormat { backend: &'static str, format: Format },

    #[error("{what} is not supported on {backend}")]
    Unsupported { backend: &'static str, what: String },

    #[error("cannot start {what}: {source}")]
    Host { what: &'static str, source: std::io::Error },

    /// A device, its driver or one of its libraries reported a failure.
    #[error("{device}: {message}")]
    Device { device: String, message: String },

    /// A file of packed weights does not have its written contents any more.
    #[error("{} is damaged: {problem}; the weights have to be packed anew", path.display())]
    PackedWeights { path: PathBuf, problem: &'static str },

    #[error(transparent)]
    Cuda(#[from] crate::cuda::driver::CudaError),

    #[error(transparent)]
    Format(#[from] folio_formats::Error),
}

impl Error {
    /// Ok if the two sizes agree.
    pub fn check(what: &'static str, expected: usize, found: usize) -> Result<()> {
        if expected == found { Ok(()) } else { Err(Error::Shape { what, expected, found }) }
    }
}
