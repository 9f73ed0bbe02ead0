//! The block layouts of quantized weights: one file per kind of block, each with its reference
//! decoder.
//!
//! A block is a run of values along a row, in one or more groups that share a scale. Unpacking one
//! gives a code per value and the groups' scales and minimums in `f32`; [`crate::Format::decode`]
//! computes values from them in the order of operations of the `gguf` package, and so gives its
//! bits. Encoders exist for the formats Folio writes itself.

mod encode;
pub(crate) mod float8;
pub(crate) mod iq4;
pub(crate) mod k;
pub(crate) mod mxfp4;
pub(crate) mod plain;
pub(crate) mod simple;

pub use encode::{encode, encode_fitted, encode_quick};
pub use float8::{e4m3, to_e4m3};

/// The half-precision number at byte `at` of a block.
fn half_at(block: &[u8], at: usize) -> f32 {
    half::f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

#[cfg(test)]
mod tests;
