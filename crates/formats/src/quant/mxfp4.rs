//! MXFP4: 32 four-bit floats (one sign, two exponent, one mantissa bit) under a shared power of
//! two.
//!
//! The table holds twice each value, so the power is halved to match: that keeps the table
//! integral.

use super::simple::split_nibbles;
use crate::Levels;

pub(crate) const MXFP4_BYTES: usize = 1 + 16;

const _: () = assert!(MXFP4_BYTES == 17);

/// Twice the sixteen values. Minus zero decodes as zero.
pub(crate) const DOUBLED: Levels = Levels::Nibbles([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]);

pub(crate) fn mxfp4(block: &[u8], codes: &mut [u8], scales: &mut [f32], _: &mut [f32]) {
    scales[0] = half_power(block[0]);
    split_nibbles(&block[1..], codes);
}

/// `2^(exponent - 128)`; the two smallest are subnormal.
fn half_power(exponent: u8) -> f32 {
    let exponent = u32::from(exponent);
    f32::from_bits(if exponent < 2 { 0x0020_0000 << exponent } else { (exponent - 1) << 23 })
}
