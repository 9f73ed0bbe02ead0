//! Errors between a model folder and a loaded decoder. Every message names the file and the field
//! or the tensor, and the expected and the found value.

use std::path::PathBuf;

pub type Result<T> = std::result::Result<T, Error>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read {path}: {source}", path = path.display())]
    Read { path: PathBuf, source: std::io::Error },

    #[error("{path} is neither a folder with config.json nor a .gguf file", path = path.display())]
    NotAModel { path: PathBuf },

    #[error("{file} is not valid JSON: {reason}")]
    Json { file: String, reason: String },

    #[error("{file}: field {field} {problem}")]
    Field { file: String, field: String, problem: String },

    #[error("{file}: field {field} is {found}, but only {supported} are supported")]
    Family { file: String, field: String, found: String, supported: String },

    #[error("tensor {name} is missing, but {family} needs it with shape {expected:?}")]
    MissingTensor { name: String, family: &'static str, expected: Vec<usize> },

    #[error("tensor {name} has shape {found:?}, but {family} needs {expected:?}")]
    TensorShape { name: String, family: &'static str, expected: Vec<usize>, found: Vec<usize> },

    #[error("tensor {name} is stored as {found}, but {family} needs {expected}")]
    TensorFormat { name: String, family: &'static str, expected: &'static str, found: String },

    /// A step that exceeds the decoder's limits, or contradicts itself.
    #[error("{what} is {found}, but at most {limit} fit")]
    BatchLimit { what: &'static str, found: usize, limit: usize },

    #[error("{what} has {found} entries, but {expected} were expected")]
    BatchShape { what: &'static str, found: usize, expected: usize },

    #[error("limits name {found} layer groups, but {family} has {expected}")]
    GroupCount { family: &'static str, found: usize, expected: usize },

    #[error(transparent)]
    Formats(#[from] folio_formats::Error),

    #[error(transparent)]
    Device(#[from] folio_device::Error),
}
