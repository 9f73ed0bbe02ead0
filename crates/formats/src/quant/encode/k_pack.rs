//! Bit positions of a "K" block: the inverse of the decoders in `quant/k.rs`.

use half::f16;

use crate::Format;
use crate::quant::k::LEN;

/// A block before packing; formats with groups of 32 use the first eight scales and minimums.
#[derive(Clone)]
pub(super) struct Packed {
    pub scale: f16,
    pub minimum: f16,
    /// Scales of the groups, as two's complement in the symmetric formats.
    pub scales: [u8; LEN / 16],
    pub minimums: [u8; LEN / 16],
    /// Levels counted from zero up in every format.
    pub levels: [u8; LEN],
}

impl Default for Packed {
    fn default() -> Self {
        Self { scale: f16::ZERO, minimum: f16::ZERO, scales: [0; 16], minimums: [0; 16], levels: [0; LEN] }
    }
}

pub(super) fn push(format: Format, block: &Packed, out: &mut Vec<u8>) {
    let two_halves = [block.scale.to_le_bytes(), block.minimum.to_le_bytes()].concat();
    match format {
        Format::Q2_K => {
            out.extend((0..16).map(|group| block.scales[group] | block.minimums[group] << 4));
            out.extend(two_bits(&block.levels));
            out.extend(two_halves);
        }
        Format::Q3_K => {
            out.extend(one_bit(&block.levels.map(|level| level >> 2)));
            out.extend(two_bits(&block.levels));
            out.extend(six_bits_signed(&block.scales));
            out.extend(block.scale.to_le_bytes());
        }
        Format::Q4_K => {
            out.extend(two_halves);
            out.extend(six_bits(&block.scales, &block.minimums));
            out.extend(four_bits(&block.levels, 32));
        }
        Format::Q5_K => {
            out.extend(two_halves);
            out.extend(six_bits(&block.scales, &block.minimums));
            out.extend(one_bit(&block.levels.map(|level| level >> 4)));
            out.extend(four_bits(&block.levels, 32));
        }
        Format::Q6_K => {
            out.extend(four_bits(&block.levels, 64));
            out.extend(two_bits(&block.levels.map(|level| level >> 4)));
            out.extend(block.scales);
            out.extend(block.scale.to_le_bytes());
        }
        _ => unreachable!("{format} has no K blocks"),
    }
}

/// The low bit of value `i` becomes bit `i / 32` of byte `i % 32`.
fn one_bit(levels: &[u8; LEN]) -> [u8; 32] {
    let mut out = [0; 32];
    for (i, level) in levels.iter().enumerate() {
        out[i % 32] |= (level & 1) << (i / 32);
    }
    out
}

/// Each half of the block takes 32 bytes, each quarter of a half two bits of every byte.
fn two_bits(levels: &[u8; LEN]) -> [u8; 64] {
    let mut out = [0; 64];
    for (i, level) in levels.iter().enumerate() {
        out[i / 128 * 32 + i % 32] |= (level & 3) << (2 * (i / 32 % 4));
    }
    out
}

/// `2 * run` values share `run` bytes, the first of them in the low halves.
fn four_bits(levels: &[u8; LEN], run: usize) -> [u8; 128] {
    let mut out = [0; 128];
    for (i, level) in levels.iter().enumerate() {
        out[i / (2 * run) * run + i % run] |= (level & 15) << (4 * (i / run % 2));
    }
    out
}

/// Eight scales and eight minimums of six bits: four of each unchanged, the others' upper bits
/// above those.
fn six_bits(scales: &[u8; 16], minimums: &[u8; 16]) -> [u8; 12] {
    let mut out = [0; 12];
    for group in 0..4 {
        let (scale, minimum) = (scales[group + 4], minimums[group + 4]);
        out[group] = scales[group] | scale >> 4 << 6;
        out[group + 4] = minimums[group] | minimum >> 4 << 6;
        out[group + 8] = scale & 15 | (minimum & 15) << 4;
    }
    out
}

/// Sixteen signed numbers of six bits, 32 added: nibbles first, then the upper two bits of four at
/// a time.
fn six_bits_signed(scales: &[u8; 16]) -> [u8; 12] {
    let mut out = [0; 12];
    for (group, scale) in scales.iter().enumerate() {
        let scale = scale.wrapping_add(32);
        out[group % 8] |= (scale & 15) << (4 * (group / 8));
        out[8 + group % 4] |= (scale >> 4) << (2 * (group / 4));
    }
    out
}
