//! Where quantized models are written: folders that transformers and vLLM load, and GGUF files.

mod gguf;

pub use gguf::{GgufJob, GgufWritten, Mix, write_gguf};
