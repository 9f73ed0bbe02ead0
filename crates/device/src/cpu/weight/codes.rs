//! Panels of codes: each group of the inner dimension has its codes, its scales, and its minimums
//! if the format has them, in the order in which a kernel reads them. Multiples stand in front of
//! their super-block, behind the units that they are multiples of.
//!
//! Scales and minimums, or their units, are f16. An output's scales may be outside f16's range, so
//! each output has a factor, a power of two that brings the largest of them just below 2^15; a
//! product's sum is multiplied by it at the end. A number that was an f16 in the source stays
//! exact.

use folio_formats::{Coding, Levels, Numbers, Units};
use half::f16;
use half::slice::HalfFloatSliceExt;

use super::LANES;
use super::packing::{GroupPlace, Packing, code_bytes, step_groups};

/// One output as it is stored: codes in stored order, a scale (and a minimum) per group, and for
/// multiples their units per super-block.
pub struct CodedRow {
    pub codes: Vec<u8>,
    pub scales: Vec<f32>,
    pub minimums: Vec<f32>,
    pub units: Vec<Units>,
}

impl CodedRow {
    /// A row with room for `inputs` codes, all zero.
    pub fn new(coding: &Coding, inputs: usize) -> Self {
        let groups = coding.num_groups(inputs);
        let blocks = match coding.numbers {
            Numbers::Own => 0,
            Numbers::Multiples => inputs.div_ceil(Coding::BLOCK),
        };
        Self {
            codes: vec![0; inputs],
            scales: vec![0.0; groups],
            minimums: vec![0.0; if coding.affine { groups } else { 0 }],
            units: vec![Units::default(); blocks],
        }
    }
}

/// Packs outputs `first .. first + 32`, as far as they are below `shape.0`; `read` fills in one of
/// them.
pub fn pack_panel(
    coding: &Coding,
    (outputs, inputs): (usize, usize),
    read: impl Fn(usize, &mut CodedRow),
    first: usize,
    target: &mut [u8],
    factors: &mut [f32],
) {
    let groups = coding.num_groups(inputs);
    assert!(groups.is_multiple_of(step_groups(coding)), "{inputs} inputs in blocks of multiples");
    let mut row = CodedRow::new(coding, inputs);
    let mut lanes = Vec::with_capacity(LANES);
    for (lane, factor) in factors.iter_mut().enumerate().take(outputs - first) {
        row.codes.resize(inputs, 0);
        read(first + lane, &mut row);
        let lane = Lane::new(coding, &mut row, groups);
        *factor = lane.factor;
        lanes.push(lane);
    }
    // Group by group, so that the written step stays in cache for all lanes.
    for (index, step) in target.chunks_exact_mut(Packing::Coded(*coding).step_bytes()).enumerate() {
        for (at, lane) in lanes.iter().enumerate() {
            lane.put_units(coding, index, at, step);
        }
        for group in 0..step_groups(coding) {
            for (at, lane) in lanes.iter().enumerate() {
                lane.put(coding, index, group, at, step);
            }
        }
    }
}

/// One output, ready to be packed.
struct Lane {
    /// Codes of whole groups, so that the last one is no special case: codes past the end meet
    /// activations of zero.
    codes: Vec<u8>,
    /// Scales, one per group, or with multiples one unit per super-block.
    scales: Vec<f16>,
    minimums: Vec<f16>,
    /// Multiples of scales and of minimums, one of each per group.
    multiples: [Vec<i8>; 2],
    factor: f32,
}

impl Lane {
    /// Prepares a row for packing, and takes its codes.
    fn new(coding: &Coding, row: &mut CodedRow, groups: usize) -> Self {
        let CodedRow { scales, minimums, units, .. } = row;
        let (numbers, multiples) = match coding.numbers {
            Numbers::Own => ([scales.clone(), minimums.clone()], [Vec::new(), Vec::new()]),
            Numbers::Multiples => {
                let of_each = |unit: fn(&Units) -> f32| units.iter().map(unit).collect();
                let bytes = |all: &Vec<f32>| all.iter().map(|multiple| *multiple as i8).collect();
                ([of_each(|units| units.scale), of_each(|units| units.minimum)], [bytes(scales), bytes(minimums)])
            }
        };
        let factor = factor(numbers.iter().flatten());
        let [scales, minimums] = numbers.map(|mut numbers| {
            numbers.iter_mut().for_each(|number| *number /= factor);
            let mut halves = vec![f16::ZERO; numbers.len()];
            halves.convert_from_f32_slice(&numbers);
            halves
        });
        let mut codes = std::mem::take(&mut row.codes);
        codes.resize(groups * coding.group, 0);
        Self { codes, scales, minimums, multiples, factor }
    }

    /// Writes the units of a super-block's multiples in front of it.
    fn put_units(&self, coding: &Coding, block: usize, lane: usize, step: &mut [u8]) {
        if coding.numbers == Numbers::Multiples {
            put_f16(step, lane, self.scales[block]);
            if coding.affine {
                put_f16(step, LANES + lane, self.minimums[block]);
            }
        }
    }

    /// Writes a group of a step.
    fn put(&self, coding: &Coding, index: usize, group: usize, lane: usize, step: &mut [u8]) {
        let place = GroupPlace::of(coding, group);
        let group = index * step_groups(coding) + group;
        let put_number = |which: usize, halves: &[f16], at: usize, step: &mut [u8]| match coding.numbers {
            Numbers::Own => put_f16(&mut step[at..], lane, halves[group]),
            Numbers::Multiples => step[at + lane] = self.multiples[which][group] as u8,
        };
        put_number(0, &self.scales, place.scales, step);
        if coding.affine {
            put_number(1, &self.minimums, place.minimums, step);
        }
        let codes = &self.codes[group * coding.group..(group + 1) * coding.group];
        let packed = &mut step[place.codes..][..code_bytes(coding)];
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
            Levels::Six { .. } => {
                for (codes, unit) in codes.chunks_exact(16).zip(packed.chunks_exact_mut(SIX_UNIT)) {
                    let (nibbles, plane) = unit.split_at_mut(8 * LANES);
                    put_nibbles(codes, lane, nibbles);
                    put_upper_bits(codes, lane, plane);
                }
            }
        }
    }
}

/// The power of two by which numbers are divided before they become f16: the largest ends up in
/// 2^14 .. 2^15. Infinities and NaN are ignored and stay what they are.
fn factor<'a>(numbers: impl Iterator<Item = &'a f32>) -> f32 {
    let largest = numbers.filter(|number| number.is_finite()).fold(0.0f32, |largest, number| largest.max(number.abs()));
    if largest == 0.0 {
        return 1.0;
    }
    // The exponent field; subnormal numbers count as the smallest normal exponent.
    let exponent = (largest.to_bits() >> 23).max(1) as i32;
    f32::from_bits(((exponent - 14).max(1) as u32) << 23)
}

fn put_f16(target: &mut [u8], lane: usize, value: f16) {
    target[2 * lane..2 * lane + 2].copy_from_slice(&value.to_le_bytes());
}

/// Writes bytes in the layout `[group / 4][32][4]`, level + 128.
fn put_bytes(codes: &[u8], lane: usize, target: &mut [u8]) {
    for (codes, lanes) in codes.as_chunks::<4>().0.iter().zip(words(target)) {
        lanes[lane] = (u32::from_le_bytes(*codes) ^ 0x8080_8080).to_le_bytes();
    }
}

/// `[group / 8][32][4]`: of eight neighbours, the first four are in the low halves of bytes, the
/// others in the high halves.
fn put_nibbles(codes: &[u8], lane: usize, target: &mut [u8]) {
    for (codes, lanes) in codes.as_chunks::<8>().0.iter().zip(words(target)) {
        let codes = u64::from_le_bytes(*codes) & 0x0f0f_0f0f_0f0f_0f0f;
        lanes[lane] = ((codes | codes >> 28) as u32).to_le_bytes();
    }
}

/// The target as four bytes a lane.
fn words(target: &mut [u8]) -> &mut [[[u8; 4]; LANES]] {
    target.as_chunks_mut::<4>().0.as_chunks_mut::<LANES>().0
}

/// Bytes of 16 inner values of five bits.
const FIVE_UNIT: usize = 10 * LANES;

/// Writes `[4][32]` times four bits, the fifth bits of four neighbours.
fn put_fifth_bits(codes: &[u8], lane: usize, target: &mut [u8]) {
    let (codes, _) = codes.as_chunks::<4>();
    for (index, codes) in codes.iter().enumerate() {
        // Each byte's bit moves to the top byte, one position further left than the previous one.
        let bits = (u32::from_le_bytes(*codes) >> 4 & 0x0101_0101).wrapping_mul(0x0102_0408) >> 24 & 15;
        target[(index * LANES + lane) / 2] |= (bits as u8) << (4 * (lane % 2));
    }
}

/// Bytes of 16 inner values of six bits.
const SIX_UNIT: usize = 12 * LANES;

/// `[32][4]` of four times two bits: byte `i` has the upper bits of inner values `i`, `i + 4`,
/// `i + 8`, `i + 12`.
fn put_upper_bits(codes: &[u8], lane: usize, target: &mut [u8]) {
    let quarters = codes.as_chunks::<4>().0.iter().enumerate();
    let upper = quarters.map(|(quarter, codes)| (u32::from_le_bytes(*codes) >> 4 & 0x0303_0303) << (2 * quarter));
    words(target)[0][lane] = upper.fold(0, |all, upper| all | upper).to_le_bytes();
}

/// One output's values, in stored order.
pub fn read_lane(coding: &Coding, panel: &[u8], lane: usize, factor: f32, out: &mut [f32]) {
    let packing = Packing::Coded(*coding);
    let steps = panel.chunks_exact(packing.step_bytes());
    for (out, step) in out.chunks_mut(packing.step_values()).zip(steps) {
        for (group, out) in out.chunks_mut(coding.group).enumerate() {
            let place = GroupPlace::of(coding, group);
            let packed = &step[place.codes..][..code_bytes(coding)];
            // A scale (0) or a minimum (1).
            let number = |which: usize| {
                let at = [place.scales, place.minimums][which];
                match coding.numbers {
                    Numbers::Own => get_f16(&step[at..], lane) * factor,
                    Numbers::Multiples => {
                        f32::from(step[at + lane] as i8) * (get_f16(step, which * LANES + lane) * factor)
                    }
                }
            };
            let (scale, minimum) = (number(0), if coding.affine { number(1) } else { 0.0 });
            for (at, out) in out.iter_mut().enumerate() {
                *out = scale * f32::from(level(coding, packed, lane, at)) + minimum;
            }
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
        Levels::Six { .. } => {
            let (unit, at) = (&packed[at / 16 * SIX_UNIT..], at % 16);
            let upper = unit[8 * LANES + 4 * lane + at % 4] >> (2 * (at / 4)) & 3;
            coding.levels.level(nibble(unit, at) | upper << 4)
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
