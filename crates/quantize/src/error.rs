//! Errors of quantizing a model.

use std::path::PathBuf;

pub type Result<T> = std::result::Result<T, Error>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{found} is not a format that folio writes; expected one of {expected}")]
    UnknownTarget { found: String, expected: String },

    #[error("{found} is not a method; expected rtn, gptq or awq")]
    UnknownMethod { found: String },

    #[error("{what} needs text to calibrate on, but none was given")]
    NoCalibration { what: &'static str },

    #[error("calibration sequence {index} {problem}")]
    Calibration { index: usize, problem: String },

    #[error("{target} has groups of {group} values, but {name} has rows of {cols}")]
    GroupSize { target: String, group: usize, name: String, cols: usize },

    #[error("tensor {name} holds a value that is not a finite number")]
    NotFinite { name: String },

    #[error("{what} cannot be quantized: {why}")]
    Unsupported { what: String, why: &'static str },

    #[error("{}: {problem}", path.display())]
    File { path: PathBuf, problem: String },

    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: std::io::Error },

    #[error(transparent)]
    Model(#[from] folio_model::Error),

    #[error(transparent)]
    Device(#[from] folio_device::Error),

    #[error(transparent)]
    Formats(#[from] folio_formats::Error),
}
