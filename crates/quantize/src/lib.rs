//! Makes quantized models: what each weight becomes, and how that is chosen.
//!
//! [`run`] walks a model layer by layer, so that one larger than memory can be done: a layer is loaded, calibration
//! text runs through it to see what its linears read, its weights are coded and handed to a [`Sink`], and the coded
//! layer gives the next one's input. A method is one file (`rtn`, `gptq`, `awq`); a target is a row of
//! [`Target`] and its levels. Nothing here knows how files are laid out but the writers.

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
