//! "K" blocks: 256 values in groups of 16 or 32, with scales that are small integers under one or
//! two half-precision scales. Q2_K, Q4_K and Q5_K have a minimum per group as well; Q3_K and Q6_K
//! are symmetric.

use super::half_at;
use crate::Units;

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

/// Values that lie side by side in all packings: run `r` of a block is values `32 * r ..`.
const RUN: usize = 32;

/// Bytes that hold some bits of several runs each.
fn bytes(packed: &[u8], index: usize) -> [u8; RUN] {
    packed.as_chunks::<RUN>().0[index]
}

/// Two bits of a run: each half of the block takes 32 bytes, each quarter of a half two bits of
/// every byte.
fn two_bits(packed: &[u8], run: usize) -> [u8; RUN] {
    bytes(packed, run / 4).map(|byte| byte >> (2 * (run % 4)) & 3)
}

/// Four bits of a run: 64 values share 32 bytes, the first 32 in the low halves.
fn four_bits(packed: &[u8], run: usize) -> [u8; RUN] {
    bytes(packed, run / 2).map(|byte| byte >> (4 * (run % 2)) & 15)
}

/// One bit of a run: bit `run` of every byte.
fn one_bit(packed: &[u8], run: usize) -> [u8; RUN] {
    bytes(packed, 0).map(|byte| byte >> run & 1)
}

/// Puts `high` above `low`, which has `bits` bits.
fn under(low: [u8; RUN], bits: u32, high: [u8; RUN]) -> [u8; RUN] {
    std::array::from_fn(|at| low[at] | high[at] << bits)
}

pub(crate) fn q2_k(block: &[u8], codes: &mut [u8], group_scales: &mut [f32], minimums: &mut [f32]) -> Units {
    let (scales, rest) = block.split_at(16);
    let (packed, rest) = rest.split_at(64);
    for (group, packed) in scales.iter().enumerate() {
        group_scales[group] = f32::from(packed & 15);
        minimums[group] = f32::from(packed >> 4);
    }
    fill(codes, |run| two_bits(packed, run));
    Units { scale: half_at(rest, 0), minimum: -half_at(rest, 2) }
}

pub(crate) fn q3_k(block: &[u8], codes: &mut [u8], group_scales: &mut [f32], _: &mut [f32]) -> Units {
    let (high, rest) = block.split_at(32);
    let (packed, rest) = rest.split_at(64);
    let (scales, rest) = rest.split_at(PACKED_SCALES);
    for (group, group_scale) in group_scales.iter_mut().enumerate() {
        let low = scales[group % 8] >> (4 * (group / 8)) & 15;
        let top = scales[8 + group % 4] >> (2 * (group / 4)) & 3;
        *group_scale = f32::from((low | top << 4) as i8 - 32);
    }
    fill(codes, |run| under(two_bits(packed, run), 2, one_bit(high, run)));
    Units { scale: half_at(rest, 0), minimum: 0.0 }
}

pub(crate) fn q4_k(block: &[u8], codes: &mut [u8], group_scales: &mut [f32], minimums: &mut [f32]) -> Units {
    let (scales, packed) = block[4..].split_at(PACKED_SCALES);
    fill(codes, |run| four_bits(packed, run));
    eight_groups(block, scales, group_scales, minimums)
}

pub(crate) fn q5_k(block: &[u8], codes: &mut [u8], group_scales: &mut [f32], minimums: &mut [f32]) -> Units {
    let (scales, rest) = block[4..].split_at(PACKED_SCALES);
    let (high, packed) = rest.split_at(32);
    fill(codes, |run| under(four_bits(packed, run), 4, one_bit(high, run)));
    eight_groups(block, scales, group_scales, minimums)
}

pub(crate) fn q6_k(block: &[u8], codes: &mut [u8], group_scales: &mut [f32], _: &mut [f32]) -> Units {
    let (low, rest) = block.split_at(128);
    let (high, rest) = rest.split_at(64);
    let (scales, rest) = rest.split_at(16);
    for (group_scale, by) in group_scales.iter_mut().zip(scales) {
        *group_scale = f32::from(*by as i8);
    }
    fill(codes, |run| {
        // Here 128 values share 64 bytes of nibbles, the first 64 in the low halves.
        let (half, quarter) = (run / 4, run % 4);
        let nibbles = bytes(low, 2 * half + quarter % 2).map(|byte| byte >> (4 * (quarter / 2)) & 15);
        under(nibbles, 4, two_bits(high, run))
    });
    Units { scale: half_at(rest, 0), minimum: 0.0 }
}

fn fill(codes: &mut [u8], run: impl Fn(usize) -> [u8; RUN]) {
    for (index, place) in codes.as_chunks_mut::<RUN>().0.iter_mut().enumerate() {
        *place = run(index);
    }
}

/// Scales and minimums of the formats with a half-precision scale for each at the start of a block.
fn eight_groups(block: &[u8], packed: &[u8], group_scales: &mut [f32], minimums: &mut [f32]) -> Units {
    for (group, (group_scale, group_minimum)) in group_scales.iter_mut().zip(minimums).enumerate() {
        (*group_scale, *group_minimum) = scale_and_minimum(packed, group);
    }
    Units { scale: half_at(block, 0), minimum: -half_at(block, 2) }
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
