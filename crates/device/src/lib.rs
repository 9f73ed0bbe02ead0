//! Computes forward passes: the trait [`Backend`] and its implementations.
//!
//! `reference` is plain loops, and all others are compared with it; `cpu` is fast; `cuda` is for
//! NVIDIA's GPUs. Requests, model families and text are unknown here. Nearly all unsafe code of the
//! project is in this crate.

#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

mod backend;
mod batch;
mod draw;
mod error;
mod host_memory;
mod kv_format;
mod pulse;

pub mod cpu;
pub mod cuda;
pub mod recording;
pub mod reference;
pub mod tree;

pub use backend::*;
pub use batch::{BLOCK_TOKENS, Batch, GroupTables, Span};
pub use draw::{DRAWN_TOKEN, Draw, DrawFailure, Drawn, DrawnLogprobs, Draws, SeenToken};
pub use error::{Error, Result};
pub use host_memory::HostMemory;
pub use kv_format::{KV_GROUP, KV_TINY, KvFormat, KvShape};
pub use pulse::Pulse;
