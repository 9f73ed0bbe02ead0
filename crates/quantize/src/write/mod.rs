//! Writers of quantized models: folders that transformers and vLLM load, and GGUF files.
//!
//! Each layout is a file that turns a [`crate::Quantized`] into tensors; both kinds of output are
//! written one tensor at a time and have a temporary name until they are complete.

mod bitsandbytes;
mod compressed;
mod folder;
mod gguf;
mod staging;

use std::path::Path;

use serde_json::Value;

use crate::{Error, Result};
pub use folder::{FolderWriter, FolderWritten};
pub use gguf::{GgufJob, GgufWritten, Mix, write_gguf};

/// One of the tensors that a linear becomes.
#[derive(Clone, Debug, PartialEq)]
struct Stored {
    /// Suffix after the linear's name.
    suffix: &'static str,
    /// The tensor's type in safetensors' spelling.
    dtype: &'static str,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl Stored {
    fn new(suffix: &'static str, dtype: &'static str, shape: &[usize], bytes: Vec<u8>) -> Self {
        Self { suffix, dtype, shape: shape.to_vec(), bytes }
    }
}

fn read_json(path: &Path) -> Result<Value> {
    let text = std::fs::read_to_string(path).map_err(|source| Error::Io { path: path.to_owned(), source })?;
    serde_json::from_str(&text).map_err(|error| Error::File { path: path.to_owned(), problem: error.to_string() })
}
