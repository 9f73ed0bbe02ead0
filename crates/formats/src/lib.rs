//! Stored weights: safetensors and GGUF files, the block layouts of quantized weights, and their
//! reference decoders.
//!
//! All sizes and offsets in a file are checked here, in `u64`, against the file's real size; this
//! crate hands out only slices that exist. Model families and devices are unknown here.

#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

mod coding;
mod digest;
mod error;
mod format;
pub mod gguf;
mod map;
mod matrix;
pub mod packing;
pub mod quant;
pub mod safetensors;
mod source;

pub use coding::{ActivationScale, Coding, Levels, Numbers, Units};
pub use digest::Digest;
pub use error::{Error, Result};
pub use format::Format;
pub use gguf::Gguf;
pub use map::{Mapped, Stamp};
pub use matrix::{Grouped, GroupedLevels, GroupedRow, Matrix, Part};
pub use safetensors::Safetensors;
pub use source::{TensorView, WeightSource};

/// The most tensors a file may hold: far above any real model, low enough that a hostile count
/// costs little.
const MAX_TENSORS: u64 = 200_000;
