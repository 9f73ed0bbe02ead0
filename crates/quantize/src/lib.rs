//! Makes quantized models: chooses the codes and scales of each weight.
//!
//! [`run`] walks a model layer by layer, so that the model may be larger than memory: a layer is
//! loaded, calibration text runs through it to collect the inputs of its linears, its weights are
//! quantized and passed to a [`Sink`], and the quantized layer computes the next one's input. A
//! method is one file (`rtn`, `gptq`, `awq`); a target is a row of [`Target`] and its levels. Only
//! the writers know the layout of files.

#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

mod awq;
mod calibrate;
mod collect;
mod error;
mod float8;
pub mod gptq;
mod gram;
mod grid;
mod hessian;
mod layer;
mod levels;
mod linalg;
mod options;
mod overlay;
mod parallel;
mod quantized;
pub mod rtn;
mod run;
mod target;
#[cfg(test)]
mod testing;
pub mod write;

pub use error::{Error, Result};
pub use hessian::Hessian;
pub use levels::{E2M1, NF4};
pub use options::{AwqOptions, GptqOptions, Method, Options, Progress};
pub use quantized::{Finished, Outliers, Plain, Quantized, Sink};
pub use run::run;
pub use target::{FP8_BLOCK, ScaleKind, Target};
