//! The packed layout of codes, as the streaming kernels read it: a lane's 16 bytes are its own
//! fragments of the next matrix instructions.
//!
//! A tile has 16 outputs (32 for nibbles), a chunk 128 inputs; a tile's chunk is 2,048 bytes. Lane
//! `4 g + t` of a warp has the outputs `g` and `g + 8` (of each 16). From each quarter of 32 inputs
//! it has those at `8 t` and the next seven, four for each of two instructions `s`. For groups of
//! 16 it has those at `4 t` and `16 + 4 t`, so that an instruction stays inside a group.
//!
//! | codes | layout |
//! |---|---|
//! | bytes | `[quarter][lane][s][g, g + 8]` words of four: 0, 2, 1, 3 |
//! | nibbles | `[16 outputs][half][lane][quarter of two][s]` words: four of `g`, four of `g + 8` |
//!
//! In a word of nibbles the pairs are (g: 0, 1), (g + 8: 0, 1), (g: 2, 3), (g + 8: 2, 3). Levels
//! that count up have the first of each pair in the low half and the second in the high half;
//! levels from a table are stored pair by pair.
//!
//! Scales are f16, divided by a factor per output that multiplies the product at the end:
//! `[group][g][outputs]` in a chunk, each followed by its minimum if there are any; for groups of
//! 16 `[quarter][g][s][outputs]`.

use half::f16;

use super::form::{CHUNK, CHUNK_BYTES, Code, Coded};

/// One output: a code per input (bytes as two's complement), and a scale (and a minimum) per group.
#[derive(Default)]
pub struct Row {
    pub codes: Vec<u8>,
    pub scales: Vec<f32>,
    pub minimums: Vec<f32>,
}

/// Target memory of one tile; all zeros before.
pub struct Tile<'o> {
    pub codes: &'o mut [u8],
    pub scales: &'o mut [u8],
    /// One f32 per output.
    pub factors: &'o mut [u8],
}

impl Tile<'_> {
    /// Stores output `index` of the tile. Codes past the row's end are zeros, and no input
    /// multiplies them.
    pub fn put(&mut self, coded: &Coded, index: usize, row: &mut Row) {
        let chunks = row.codes.len().div_ceil(CHUNK);
        row.codes.resize(chunks * CHUNK, 0);
        let (sixteenth, upper, g) = (index / 16, index / 8 % 2, index % 8);
        for (chunk, codes) in row.codes.chunks_exact(CHUNK).enumerate() {
            let place = &mut self.codes[chunk * CHUNK_BYTES..(chunk + 1) * CHUNK_BYTES];
            let (words, _) = place.as_chunks_mut::<4>();
            let (fours, _) = codes.as_chunks::<4>();
            for (at, four) in fours.iter().enumerate() {
                let (quarter, t, s) = place_of(coded, at);
                let lane = 4 * g + t;
                match coded.code {
                    Code::Byte => {
                        words[(quarter * 32 + lane) * 4 + 2 * s + upper] = [four[0], four[2], four[1], four[3]]
                    }
                    _ => {
                        let word = &mut words[((sixteenth * 2 + quarter / 2) * 32 + lane) * 4 + quarter % 2 * 2 + s];
                        let joined = u32::from_le_bytes(*word) | nibbles(coded, *four, upper);
                        *word = joined.to_le_bytes();
                    }
                }
            }
        }
        self.put_scales(coded, index, row, chunks);
    }

    fn put_scales(&mut self, coded: &Coded, index: usize, row: &Row, chunks: usize) {
        let factor = factor(row);
        self.factors[4 * index..4 * index + 4].copy_from_slice(&factor.to_le_bytes());
        let (eighth, g) = (index / 8, index % 8);
        let groups_a_chunk = CHUNK / coded.group;
        let each = if coded.has_minimums() { 2 } else { 1 };
        for group in 0..row.scales.len().min(chunks * groups_a_chunk) {
            let (chunk, within) = (group / groups_a_chunk, group % groups_a_chunk);
            let (place, s) = if coded.by_16() { (within / 2, within % 2) } else { (within, 0) };
            let lane = chunk * coded.scale_bytes() + (place * 8 + g) * coded.lane_bytes();
            let at = lane + s * coded.lane_bytes() / 2 + eighth * 2 * each;
            put_f16(&mut self.scales[at..], row.scales[group] / factor);
            if let Some(minimum) = row.minimums.get(group) {
                put_f16(&mut self.scales[at + 2..], minimum / factor);
            }
        }
    }
}

/// Quarter, t and instruction of the four codes number `at` of a chunk.
fn place_of(coded: &Coded, at: usize) -> (usize, usize, usize) {
    let (quarter, within) = (at / 8, at % 8);
    if coded.by_16() { (quarter, within % 4, within / 4) } else { (quarter, within / 2, within % 2) }
}

/// Four codes in their positions of a word.
fn nibbles(coded: &Coded, four: [u8; 4], upper: usize) -> u32 {
    let places = match coded.code {
        Code::Table(_) => [0, 1, 4, 5].map(|place| place + 2 * upper),
        _ => [0, 4, 2, 6].map(|place| place + upper),
    };
    four.iter().zip(places).fold(0, |word, (code, place)| word | u32::from(code & 15) << (4 * place))
}

/// The divisor of an output's scales and minimums before they become f16. If all scales are equal
/// and there are no minimums, it is that scale, and nothing is rounded. Otherwise it is the power
/// of two that brings the largest into 2^14 .. 2^15.
fn factor(row: &Row) -> f32 {
    let first = row.scales.first().copied().unwrap_or(1.0);
    if row.minimums.is_empty() && first != 0.0 && row.scales.iter().all(|scale| *scale == first) {
        return first;
    }
    let largest = row.scales.iter().chain(&row.minimums).fold(0.0f32, |largest, number| largest.max(number.abs()));
    if largest == 0.0 {
        return 1.0;
    }
    // The exponent field; subnormal numbers count as the smallest normal exponent.
    let exponent = (largest.to_bits() >> 23).max(1) as i32;
    f32::from_bits(((exponent - 14).max(1) as u32) << 23)
}

fn put_f16(target: &mut [u8], value: f32) {
    target[..2].copy_from_slice(&f16::from_f32(value).to_le_bytes());
}
