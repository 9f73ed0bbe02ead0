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

pub(crate) fn q2_k(block: &[u8], codes: &mut [u8], group_scales: &mut [f32], minimums: &mut [f32]) {
    let (scales, rest) = block.split_at(16);
    let (packed, rest) = rest.split_at(64);
    let (scale, minimum) = (half_at(rest, 0), half_at(rest, 2));
    for (group, packed) in scales.iter().enumerate() {
        group_scales[group] = scale * f32::from(packed & 15);
        minimums[group] = -(minimum * f32::from(packed >> 4));
    }
    fill(codes, |i| two_bits(packed, i));
}

pub(crate) fn q3_k(block: &[u8], codes: &mut [u8], group_scales: &mut [f32], _: &mut [f32]) {
    let (high, rest) = block.split_at(32);
    let (packed, rest) = rest.split_at(64);
    let (scales, rest) = rest.split_at(PACKED_SCALES);
    let scale = half_at(rest, 0);
    for (group, group_scale) in group_scales.iter_mut().enumerate() {
        let low = scales[group % 8] >> (4 * (group / 8)) & 15;
        let top = scales[8 + group % 4] >> (2 * (group / 4)) & 3;
        *group_scale = scale * f32::from((low | top << 4) as i8 - 32);
    }
    fill(codes, |i| two_bits(packed, i) | one_bit(high, i) << 2);
}

pub(crate) fn q4_k(block: &[u8], codes: &mut [u8], group_scales: &mut [f32], minimums: &mut [f32]) {
    let (scales, packed) = block[4..].split_at(PACKED_SCALES);
    eight_groups(block, scales, group_scales, minimums);
    fill(codes, |i| four_bits(packed, i));
}

pub(crate) fn q5_k(block: &[u8], codes: &mut [u8], group_scales: &mut [f32], minimums: &mut [f32]) {
    let (scales, rest) = block[4..].split_at(PACKED_SCALES);
    let (high, packed) = rest.split_at(32);
    eight_groups(block, scales, group_scales, minimums);
    fill(codes, |i| four_bits(packed, i) | one_bit(high, i) << 4);
}

pub(crate) fn q6_k(block: &[u8], codes: &mut [u8], group_scales: &mut [f32], _: &mut [f32]) {
    let (low, rest) = block.split_at(128);
    let (high, rest) = rest.split_at(64);
    let (scales, rest) = rest.split_at(16);
    let scale = half_at(rest, 0);
    for (group_scale, by) in group_scales.iter_mut().zip(scales) {
        *group_scale = scale * f32::from(*by as i8);
    }
    fill(codes, |i| {
        // Here 128 values share 64 bytes of nibbles, the first 64 in the low halves.
        let (half, upper, lane) = (i / 128, i / 64 % 2, i % 64);
        let nibble = low[half * 64 + lane] >> (4 * upper) & 15;
        (nibble | two_bits(high, i) << 4).wrapping_sub(32)
    });
}

fn fill(codes: &mut [u8], code: impl Fn(usize) -> u8) {
    for (i, place) in codes.iter_mut().enumerate() {
        *place = code(i);
    }
}

/// Scales and minimums of the formats whose block begins with a half-precision scale for each.
fn eight_groups(block: &[u8], packed: &[u8], group_scales: &mut [f32], minimums: &mut [f32]) {
    let (scale, minimum) = (half_at(block, 0), half_at(block, 2));
    for (group, (group_scale, group_minimum)) in group_scales.iter_mut().zip(minimums).enumerate() {
        let (by_scale, by_minimum) = scale_and_minimum(packed, group);
        (*group_scale, *group_minimum) = (scale * by_scale, -(minimum * by_minimum));
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
