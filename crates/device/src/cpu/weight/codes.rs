//! Panels of codes: each group of the inner dimension has its codes, its scales, and its minimums if there are any, in
//! the order in which a kernel wants them.
//!
//! Scales and minimums are f16. An output's may lie where f16 does not reach, so each has a factor, a power of two that
//! brings the largest of them just below 2^15; a product's sum is multiplied by it in the end. What was an f16 to begin
//! with stays exact.

use folio_formats::{Coding, Levels};
use half::f16;

use super::LANES;
use super::packing::{Packing, code_bytes};

/// One output as it is stored: codes in stored order, and a scale (and a minimum) a group.
pub struct CodedRow {
    pub codes: Vec<u8>,
    pub scales: Vec<f32>,
    pub minimums: Vec<f32>,
}

/// Packs outputs `first .. first + 32`, as far as there are `shape.0` of them; `read` fills in one.
pub fn pack_panel(
    coding: &Coding,
    (outputs, inputs): (usize, usize),
    read: impl Fn(usize, &mut CodedRow),
    first: usize,
    target: &mut [u8],
    factors: &mut [f32],
) {
    let groups = coding.num_groups(inputs);
    let mut row = CodedRow {
        codes: vec![0; inputs],
        scales: vec![0.0; groups],
        minimums: vec![0.0; if coding.affine { groups } else { 0 }],
    };
    for (lane, factor) in factors.iter_mut().enumerate().take(outputs - first) {
        row.codes.truncate(inputs);
        read(first + lane, &mut row);
        // Whole groups, so that the last one needs no care: what is past the end meets activations of zero.
        row.codes.resize(groups * coding.group, 0);
        *factor = pack_lane(coding, &row, lane, target);
    }
}

/// Writes one output to its lane and returns its factor.
fn pack_lane(coding: &Coding, row: &CodedRow, lane: usize, target: &mut [u8]) -> f32 {
    let factor = factor(row.scales.iter().chain(&row.minimums));
    let steps = target.chunks_exact_mut(Packing::Coded(*coding).step_bytes());
    for (group, (codes, step)) in row.codes.chunks_exact(coding.group).zip(steps).enumerate() {
        let (packed, numbers) = step.split_at_mut(code_bytes(coding));
        put_f16(numbers, lane, row.scales[group] / factor);
        if coding.affine {
            put_f16(numbers, LANES + lane, row.minimums[group] / factor);
        }
        match coding.levels {
            Levels::Bytes => put_bytes(codes, lane, packed),
            Levels::Nibbles(_) => put_nibbles(codes, lane, packed),
            Levels::Five { .. } => {
                for (codes, unit) in codes.chunks_exact(16).zip(packed.chunks_exact_mut(FIVE_UNIT)) {
                    let (nibbles, planes) = unit.split_at_mut(8 * LANES);
                    put_nibbles(codes, lane, nibbles);
                    put_fifth_bits(codes, lane, planes);
                }
            }
        }
    }
    factor
}

/// The power of two by which numbers are divided before they become f16: the largest ends up in 2^14 .. 2^15. What is
/// no finite number has no say, and stays what it is.
fn factor<'a>(numbers: impl Iterator<Item = &'a f32>) -> f32 {
    let largest = numbers.filter(|number| number.is_finite()).fold(0.0f32, |largest, number| largest.max(number.abs()));
    if largest == 0.0 {
        return 1.0;
    }
    // The exponent field; that of subnormal numbers counts as the least of the others.
    let exponent = (largest.to_bits() >> 23).max(1) as i32;
    f32::from_bits(((exponent - 14).max(1) as u32) << 23)
}

fn put_f16(target: &mut [u8], lane: usize, value: f32) {
    target[2 * lane..2 * lane + 2].copy_from_slice(&f16::from_f32(value).to_le_bytes());
}

/// `[group / 4][32][4]`, level + 128.
fn put_bytes(codes: &[u8], lane: usize, target: &mut [u8]) {
    let (codes, _) = codes.as_chunks::<4>();
    let (places, _) = target.as_chunks_mut::<4>();
    for (codes, place) in codes.iter().zip(places[lane..].iter_mut().step_by(LANES)) {
        *place = codes.map(|code| code ^ 128);
    }
}

/// `[group / 8][32][4]`: of eight neighbours the first four in low halves of bytes, the others in high halves.
fn put_nibbles(codes: &[u8], lane: usize, target: &mut [u8]) {
    let (codes, _) = codes.as_chunks::<8>();
    let (places, _) = target.as_chunks_mut::<4>();
    for (codes, place) in codes.iter().zip(places[lane..].iter_mut().step_by(LANES)) {
        *place = std::array::from_fn(|at| codes[at] & 15 | codes[at + 4] << 4);
    }
}

/// Bytes of 16 inner values of five bits.
const FIVE_UNIT: usize = 10 * LANES;

/// `[4][32]` of four bits: the fifth bits of four neighbours.
fn put_fifth_bits(codes: &[u8], lane: usize, target: &mut [u8]) {
    let (codes, _) = codes.as_chunks::<4>();
    for (index, codes) in codes.iter().enumerate() {
        let bits = codes.iter().rev().fold(0, |bits, code| bits << 1 | (code >> 4 & 1));
        target[(index * LANES + lane) / 2] |= bits << (4 * (lane % 2));
    }
}

/// One output's values, in stored order.
pub fn read_lane(coding: &Coding, panel: &[u8], lane: usize, factor: f32, out: &mut [f32]) {
    let steps = panel.chunks_exact(Packing::Coded(*coding).step_bytes());
    for (out, step) in out.chunks_mut(coding.group).zip(steps) {
        let (packed, numbers) = step.split_at(code_bytes(coding));
        let scale = get_f16(numbers, lane) * factor;
        let minimum = if coding.affine { get_f16(numbers, LANES + lane) * factor } else { 0.0 };
        for (at, out) in out.iter_mut().enumerate() {
            *out = scale * f32::from(level(coding, packed, lane, at)) + minimum;
        }
    }
}

fn get_f16(numbers: &[u8], lane: usize) -> f32 {
    f16::from_le_bytes([numbers[2 * lane], numbers[2 * lane + 1]]).to_f32()
}

/// Level `at` of a group.
fn level(coding: &Coding, packed: &[u8], lane: usize, at: usize) -> i8 {
    let nibble = |packed: &[u8], at: usize| {
        let pair = packed[(at / 8 * LANES + lane) * 4 + at % 4];
        if at % 8 < 4 { pair & 15 } else { pair >> 4 }
    };
    match coding.levels {
        Levels::Bytes => (packed[(at / 4 * LANES + lane) * 4 + at % 4] ^ 128) as i8,
        Levels::Nibbles(_) => coding.levels.level(nibble(packed, at)),
        Levels::Five { .. } => {
            let (unit, at) = (&packed[at / 16 * FIVE_UNIT..], at % 16);
            let fifth = unit[8 * LANES + (at / 4 * LANES + lane) / 2] >> (4 * (lane % 2) + at % 4) & 1;
            coding.levels.level(nibble(unit, at) | fifth << 4)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_bring_numbers_into_the_range_of_f16() {
        for (numbers, expected) in [
            (&[0.0f32, -0.0][..], 1.0),
            (&[], 1.0),
            (&[1.0, -0.5], 1.0 / 16384.0),
            (&[65504.0], 2.0),
            (&[f32::NAN, 2.0, f32::INFINITY], 1.0 / 8192.0),
            (&[1e-42, 0.0], f32::MIN_POSITIVE),
            (&[f32::MAX], 2f32.powi(113)),
        ] {
            assert_eq!(factor(numbers.iter()), expected, "{numbers:?}");
        }
        // Every f16 survives the division by its own factor.
        for bits in 0..0x7c00u16 {
            let value = f16::from_bits(bits).to_f32();
            let factor = factor([value].iter());
            assert_eq!(f16::from_f32(value / factor).to_f32() * factor, value);
        }
    }
}
