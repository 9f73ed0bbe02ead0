//! Bytes at rest: safetensors and GGUF files, the block layouts of quantized weights, and their reference decoders.
//!
//! Everything a file says is checked here, in `u64`, against the file's real size; what leaves this crate is a slice
//! that exists. Nothing here knows a model family or a device.

mod error;
mod format;
pub mod gguf;
mod map;
mod matrix;
pub mod quant;
pub mod safetensors;
mod source;

pub use error::{Error, Result};
pub use format::Format;
pub use matrix::Matrix;
pub use source::{TensorView, WeightSource};
