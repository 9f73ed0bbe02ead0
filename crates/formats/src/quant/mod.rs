//! The block layouts of quantized weights: one file per kind of block, each with its reference decoder.
//!
//! A block is a run of values along a row that share a scale. Decoders take whole blocks, work in `f32` in the order of
//! operations of the `gguf` package, and so give its bits. Encoders exist for the formats Folio writes itself.

mod encode;
pub(crate) mod iq4;
pub(crate) mod k;
pub(crate) mod mxfp4;
pub(crate) mod plain;
pub(crate) mod simple;

pub use encode::{encode, encode_fitted};

/// The half-precision number at byte `at` of a block.
fn half_at(block: &[u8], at: usize) -> f32 {
    half::f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

#[cfg(test)]
mod tests;
