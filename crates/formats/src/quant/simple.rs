//! Blocks of 32 values with one scale, and an optional minimum: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0.
//!
//! Byte `i` of the nibbles holds value `i` in its low half and value `i + 16` in its high half. The
//! 5-bit formats keep the fifth bits of all 32 values in one little-endian word. `_0` is
//! `scale * (q - offset)`, `_1` is `scale * q + minimum`.

use super::half_at;

pub(crate) const LEN: usize = 32;
const HALF: usize = 2;
const NIBBLES: usize = LEN / 2;
const HIGH_BITS: usize = LEN / 8;

pub(crate) const Q4_0_BYTES: usize = HALF + NIBBLES;
pub(crate) const Q4_1_BYTES: usize = 2 * HALF + NIBBLES;
pub(crate) const Q5_0_BYTES: usize = HALF + HIGH_BITS + NIBBLES;
pub(crate) const Q5_1_BYTES: usize = 2 * HALF + HIGH_BITS + NIBBLES;
pub(crate) const Q8_0_BYTES: usize = HALF + LEN;

const _: () = assert!(Q4_0_BYTES == 18 && Q4_1_BYTES == 20 && Q5_0_BYTES == 22 && Q5_1_BYTES == 24);
const _: () = assert!(Q8_0_BYTES == 34);

/// Unpacks one block into codes, its scale and, for the `_1` formats, its minimum.
pub(crate) fn q4_0(block: &[u8], codes: &mut [u8], scales: &mut [f32], _: &mut [f32]) {
    scales[0] = half_at(block, 0);
    split_nibbles(&block[2..], codes);
}

pub(crate) fn q4_1(block: &[u8], codes: &mut [u8], scales: &mut [f32], minimums: &mut [f32]) {
    (scales[0], minimums[0]) = (half_at(block, 0), half_at(block, 2));
    split_nibbles(&block[4..], codes);
}

pub(crate) fn q5_0(block: &[u8], codes: &mut [u8], scales: &mut [f32], _: &mut [f32]) {
    scales[0] = half_at(block, 0);
    five_bits(&block[2..], codes);
}

pub(crate) fn q5_1(block: &[u8], codes: &mut [u8], scales: &mut [f32], minimums: &mut [f32]) {
    (scales[0], minimums[0]) = (half_at(block, 0), half_at(block, 2));
    five_bits(&block[4..], codes);
}

pub(crate) fn q8_0(block: &[u8], codes: &mut [u8], scales: &mut [f32], _: &mut [f32]) {
    scales[0] = half_at(block, 0);
    codes.copy_from_slice(&block[2..]);
}

/// Low halves are the first sixteen codes, high halves the rest.
pub(super) fn split_nibbles(packed: &[u8], codes: &mut [u8]) {
    let (low, high) = codes.split_at_mut(NIBBLES);
    for (byte, (low, high)) in packed.iter().zip(low.iter_mut().zip(high)) {
        (*low, *high) = (byte & 15, byte >> 4);
    }
}

/// The 32 numbers of 5 bits in a word of fifth bits followed by the nibbles.
fn five_bits(packed: &[u8], codes: &mut [u8]) {
    let high = u32::from_le_bytes([packed[0], packed[1], packed[2], packed[3]]);
    split_nibbles(&packed[HIGH_BITS..], codes);
    for (i, code) in codes.iter_mut().enumerate() {
        *code |= ((high >> i & 1) as u8) << 4;
    }
}
