//! "K" blocks: 256 values in groups of 16 or 32, whose own scales are small integers under one or two half-precision
//! scales. Q2_K, Q4_K and Q5_K have a minimum per group as well; Q3_K and Q6_K are symmetric.

use super::half_at;

pub(crate) const LEN: usize = 256;
const HALF: usize = 2;
/// Eight scales and eight minimums of 6 bits.
const PACKED_SCALES: usize = 12;

pub(crate) const Q2_K_BYTES: usize = LEN / 16 + LEN / 4 + 2 * HALF;
pub(crate) const Q3_K_BYTES: usize = LEN / 8 + LEN / 4 + PACKED_SCALES + HALF;
pub(crate) const Q4_K_BYTES: usize = 2 * HALF + PACKED_SCALES + LEN / 2;
pub(crate) const Q5_K_BYTES: usize = 2 * HALF + PACKED_SCALES + LEN / 8 + LEN / 2;
pub(crate) const Q6_K_BYTES: usize = LEN / 2 + LEN / 4 + LEN / 16 + HALF;

const _: () = assert!(Q2_K_BYTES == 84 && Q3_K_BYTES == 110 && Q4_K_BYTES == 144);
const _: () = assert!(Q5_K_BYTES == 176 && Q6_K_BYTES == 210);

/// Two bits of value `i`: each half of the block takes 32 bytes, each quarter of a half two bits of every byte.
fn two_bits(packed: &[u8], i: usize) -> u8 {
    let (half, quarter, lane) = (i / 128, i / 32 % 4, i % 32);
    packed[half * 32 + lane] >> (2 * quarter) & 3
}

/// Four bits of value `i`: 64 values share 32 bytes, the first 32 in the low halves.
fn four_bits(packed: &[u8], i: usize) -> u8 {
    let (pair, high, lane) = (i / 64, i / 32 % 2, i % 32);
    packed[pair * 32 + lane] >> (4 * high) & 15
}

/// One bit of value `i`: bit `i / 32` of byte `i % 32`.
fn one_bit(packed: &[u8], i: usize) -> u8 {
    packed[i % 32] >> (i / 32) & 1
}

pub(crate) fn q2_k(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in bytes.chunks_exact(Q2_K_BYTES).zip(out.chunks_exact_mut(LEN)) {
        let (scales, rest) = block.split_at(16);
        let (packed, rest) = rest.split_at(64);
        let (scale, minimum) = (half_at(rest, 0), half_at(rest, 2));
        for (group, out) in out.chunks_exact_mut(16).enumerate() {
            let group_scale = scale * f32::from(scales[group] & 15);
            let group_minimum = minimum * f32::from(scales[group] >> 4);
            for (i, value) in out.iter_mut().enumerate() {
                *value = group_scale * f32::from(two_bits(packed, group * 16 + i)) - group_minimum;
            }
        }
    }
}

pub(crate) fn q3_k(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in bytes.chunks_exact(Q3_K_BYTES).zip(out.chunks_exact_mut(LEN)) {
        let (high, rest) = block.split_at(32);
        let (packed, rest) = rest.split_at(64);
        let (scales, rest) = rest.split_at(PACKED_SCALES);
        let scale = half_at(rest, 0);
        for (group, out) in out.chunks_exact_mut(16).enumerate() {
            let low = scales[group % 8] >> (4 * (group / 8)) & 15;
            let top = scales[8 + group % 4] >> (2 * (group / 4)) & 3;
            let group_scale = scale * f32::from((low | top << 4) as i8 - 32);
            for (i, value) in out.iter_mut().enumerate() {
                let at = group * 16 + i;
                // A cleared high bit takes four away.
                let q = two_bits(packed, at) as i8 - ((one_bit(high, at) ^ 1) << 2) as i8;
                *value = group_scale * f32::from(q);
            }
        }
    }
}

/// The 6-bit scale and minimum of one of eight groups.
fn scale_and_minimum(packed: &[u8], group: usize) -> (f32, f32) {
    let (scale, minimum) = match group {
        0..4 => (packed[group] & 63, packed[group + 4] & 63),
        _ => {
            let low = packed[group + 4];
            (low & 15 | packed[group - 4] >> 2 & 48, low >> 4 | packed[group] >> 2 & 48)
        }
    };
    (f32::from(scale), f32::from(minimum))
}

pub(crate) fn q4_k(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in bytes.chunks_exact(Q4_K_BYTES).zip(out.chunks_exact_mut(LEN)) {
        let (scales, packed) = block[4..].split_at(PACKED_SCALES);
        with_minimums(half_at(block, 0), half_at(block, 2), scales, out, |i| four_bits(packed, i));
    }
}

pub(crate) fn q5_k(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in bytes.chunks_exact(Q5_K_BYTES).zip(out.chunks_exact_mut(LEN)) {
        let (scales, rest) = block[4..].split_at(PACKED_SCALES);
        let (high, packed) = rest.split_at(32);
        with_minimums(half_at(block, 0), half_at(block, 2), scales, out, |i| {
            four_bits(packed, i) | one_bit(high, i) << 4
        });
    }
}

fn with_minimums(scale: f32, minimum: f32, scales: &[u8], out: &mut [f32], q: impl Fn(usize) -> u8) {
    for (group, out) in out.chunks_exact_mut(32).enumerate() {
        let (by_scale, by_minimum) = scale_and_minimum(scales, group);
        let (group_scale, group_minimum) = (scale * by_scale, minimum * by_minimum);
        for (i, value) in out.iter_mut().enumerate() {
            *value = group_scale * f32::from(q(group * 32 + i)) - group_minimum;
        }
    }
}

pub(crate) fn q6_k(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in bytes.chunks_exact(Q6_K_BYTES).zip(out.chunks_exact_mut(LEN)) {
        let (low, rest) = block.split_at(128);
        let (high, rest) = rest.split_at(64);
        let (scales, rest) = rest.split_at(16);
        let scale = half_at(rest, 0);
        for (group, out) in out.chunks_exact_mut(16).enumerate() {
            let group_scale = scale * f32::from(scales[group] as i8);
            for (i, value) in out.iter_mut().enumerate() {
                let at = group * 16 + i;
                // Here 128 values share 64 bytes of nibbles, the first 64 in the low halves.
                let (half, upper, lane) = (at / 128, at / 64 % 2, at % 64);
                let nibble = low[half * 64 + lane] >> (4 * upper) & 15;
                let q = (nibble | two_bits(high, at) << 4) as i8 - 32;
                *value = group_scale * f32::from(q);
            }
        }
    }
}
