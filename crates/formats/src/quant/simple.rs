//! Blocks of 32 values with one scale, and an optional minimum: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0.
//!
//! Byte `i` of the nibbles holds value `i` in its low half and value `i + 16` in its high half. The 5-bit formats keep
//! the fifth bits of all 32 values in one little-endian word. `_0` is `scale * (q - offset)`, `_1` is
//! `scale * q + minimum`.

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

pub(crate) fn q4_0(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in bytes.chunks_exact(Q4_0_BYTES).zip(out.chunks_exact_mut(LEN)) {
        let scale = half_at(block, 0);
        for (i, byte) in block[2..].iter().enumerate() {
            out[i] = scale * f32::from((byte & 15) as i8 - 8);
            out[i + 16] = scale * f32::from((byte >> 4) as i8 - 8);
        }
    }
}

pub(crate) fn q4_1(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in bytes.chunks_exact(Q4_1_BYTES).zip(out.chunks_exact_mut(LEN)) {
        let (scale, minimum) = (half_at(block, 0), half_at(block, 2));
        for (i, byte) in block[4..].iter().enumerate() {
            out[i] = scale * f32::from(byte & 15) + minimum;
            out[i + 16] = scale * f32::from(byte >> 4) + minimum;
        }
    }
}

pub(crate) fn q5_0(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in bytes.chunks_exact(Q5_0_BYTES).zip(out.chunks_exact_mut(LEN)) {
        let scale = half_at(block, 0);
        for (value, q) in out.iter_mut().zip(five_bits(&block[2..])) {
            *value = scale * f32::from(q as i8 - 16);
        }
    }
}

pub(crate) fn q5_1(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in bytes.chunks_exact(Q5_1_BYTES).zip(out.chunks_exact_mut(LEN)) {
        let (scale, minimum) = (half_at(block, 0), half_at(block, 2));
        for (value, q) in out.iter_mut().zip(five_bits(&block[4..])) {
            *value = scale * f32::from(q) + minimum;
        }
    }
}

pub(crate) fn q8_0(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in bytes.chunks_exact(Q8_0_BYTES).zip(out.chunks_exact_mut(LEN)) {
        let scale = half_at(block, 0);
        for (value, q) in out.iter_mut().zip(&block[2..]) {
            *value = f32::from(*q as i8) * scale;
        }
    }
}

/// The 32 numbers of 5 bits in a word of fifth bits followed by the nibbles.
fn five_bits(packed: &[u8]) -> [u8; LEN] {
    let high = u32::from_le_bytes([packed[0], packed[1], packed[2], packed[3]]);
    let nibbles = &packed[HIGH_BITS..];
    let mut q = [0; LEN];
    for i in 0..NIBBLES {
        q[i] = nibbles[i] & 15 | ((high >> i & 1) as u8) << 4;
        q[i + 16] = nibbles[i] >> 4 | ((high >> (i + 16) & 1) as u8) << 4;
    }
    q
}
