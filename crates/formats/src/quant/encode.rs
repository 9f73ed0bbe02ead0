//! Encoders for the formats Folio writes itself: the plain floats, and the blocks of 32.
//!
//! `Nearest` is the usual round-to-nearest and gives the bytes the `gguf` package gives. `Search` tries a handful of
//! scales per block, refits each by least squares and keeps the one with the smallest squared error as it will be
//! decoded, half-precision rounding included.

use half::{bf16, f16};

use super::simple::LEN;
use crate::{Error, Format, Result};

/// How the scale of a block is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fit {
    Nearest,
    Search,
}

/// The bytes of `values` in `format`; they must be whole blocks.
pub fn encode(format: Format, values: &[f32], fit: Fit) -> Result<Vec<u8>> {
    let mut out = Vec::with_capacity(format.bytes_for(values.len() as u64)? as usize);
    match format {
        Format::F32 => out.extend(values.iter().flat_map(|value| value.to_le_bytes())),
        Format::F16 => out.extend(values.iter().flat_map(|value| f16::from_f32(*value).to_le_bytes())),
        Format::BF16 => out.extend(values.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes())),
        Format::Q4_0 | Format::Q4_1 | Format::Q5_0 | Format::Q5_1 | Format::Q8_0 => {
            let (blocks, _) = values.as_chunks::<LEN>();
            for block in blocks {
                push(format, &quantize(format, block, fit), &mut out);
            }
        }
        _ => return Err(Error::NoEncoder { format }),
    }
    Ok(out)
}

/// A block before packing: value `i` is `scale * (q[i] - offset) + minimum`.
struct Block {
    scale: f16,
    minimum: f16,
    q: [u8; LEN],
}

fn quantize(format: Format, x: &[f32; LEN], fit: Fit) -> Block {
    match (format, fit) {
        (Format::Q4_0, Fit::Nearest) => nearest_symmetric(x, 8.0),
        (Format::Q5_0, Fit::Nearest) => nearest_symmetric(x, 16.0),
        (Format::Q4_1, Fit::Nearest) => nearest_affine(x, 15.0),
        (Format::Q5_1, Fit::Nearest) => nearest_affine(x, 31.0),
        (Format::Q4_0, Fit::Search) => search_symmetric(x, 8.0),
        (Format::Q5_0, Fit::Search) => search_symmetric(x, 16.0),
        (Format::Q4_1, Fit::Search) => search_affine(x, 15.0),
        (Format::Q5_1, Fit::Search) => search_affine(x, 31.0),
        // Eight bits leave nothing to search for.
        (Format::Q8_0, _) => nearest_eight(x),
        _ => unreachable!("encode() lets only the formats above through"),
    }
}

fn push(format: Format, block: &Block, out: &mut Vec<u8>) {
    out.extend(block.scale.to_le_bytes());
    if matches!(format, Format::Q4_1 | Format::Q5_1) {
        out.extend(block.minimum.to_le_bytes());
    }
    if matches!(format, Format::Q5_0 | Format::Q5_1) {
        let high = block.q.iter().enumerate().fold(0u32, |word, (i, q)| word | u32::from(q >> 4) << i);
        out.extend(high.to_le_bytes());
    }
    match format {
        Format::Q8_0 => out.extend(block.q),
        _ => out.extend((0..LEN / 2).map(|i| block.q[i] & 15 | block.q[i + LEN / 2] << 4)),
    }
}

/// The value furthest from zero, with its sign; of equals the first.
fn extreme(x: &[f32; LEN]) -> f32 {
    x.iter().fold(0.0f32, |best, value| if value.abs() > best.abs() { *value } else { best })
}

fn range(x: &[f32; LEN]) -> (f32, f32) {
    x.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(low, high), value| (low.min(*value), high.max(*value)))
}

fn inverse(scale: f32) -> f32 {
    if scale == 0.0 { 0.0 } else { 1.0 / scale }
}

/// The value furthest from zero becomes `-half`, the level that has no positive twin.
fn nearest_symmetric(x: &[f32; LEN], half: f32) -> Block {
    let scale = extreme(x) / -half;
    let by = inverse(scale);
    let top = 2.0 * half - 1.0;
    let q = x.map(|value| (value * by + (half + 0.5)).min(top) as u8);
    Block { scale: f16::from_f32(scale), minimum: f16::ZERO, q }
}

fn nearest_affine(x: &[f32; LEN], top: f32) -> Block {
    let (low, high) = range(x);
    let scale = (high - low) / top;
    let by = inverse(scale);
    let q = x.map(|value| ((value - low) * by + 0.5).min(top) as u8);
    Block { scale: f16::from_f32(scale), minimum: f16::from_f32(low), q }
}

fn nearest_eight(x: &[f32; LEN]) -> Block {
    let scale = extreme(x).abs() / 127.0;
    let by = inverse(scale);
    let q = x.map(|value| (value * by).round() as i8 as u8);
    Block { scale: f16::from_f32(scale), minimum: f16::ZERO, q }
}

/// The scales tried: the block's reach over each of these, as a distance from the number of levels.
const TRIED: [f32; 13] = [-3.0, -2.5, -2.0, -1.5, -1.0, -0.75, -0.5, -0.25, 0.0, 0.25, 0.5, 0.75, 1.0];
const REFITS: usize = 2;

fn search_symmetric(x: &[f32; LEN], half: f32) -> Block {
    let mut best = nearest_symmetric(x, half);
    let mut best_error = squared_error(x, &best, half);
    let reach = extreme(x);
    for sign in [-1.0, 1.0] {
        for step in TRIED {
            let mut scale = f16::from_f32(sign * reach / (half + step));
            for _ in 0..REFITS {
                let levels = assign_symmetric(x, scale.to_f32(), half);
                let candidate = Block { scale, minimum: f16::ZERO, q: levels.map(|level| (level + half) as u8) };
                keep_better(x, half, candidate, &mut best, &mut best_error);
                let (dot, norm) = x
                    .iter()
                    .zip(&levels)
                    .fold((0.0, 0.0), |(dot, norm), (value, level)| (dot + value * level, norm + level * level));
                scale = f16::from_f32(dot * inverse(norm));
            }
        }
    }
    best
}

fn assign_symmetric(x: &[f32; LEN], scale: f32, half: f32) -> [f32; LEN] {
    let by = inverse(scale);
    x.map(|value| round_small(value * by).clamp(-half, half - 1.0))
}

fn search_affine(x: &[f32; LEN], top: f32) -> Block {
    let mut best = nearest_affine(x, top);
    let mut best_error = squared_error(x, &best, 0.0);
    let (low, high) = range(x);
    for step in TRIED {
        // A range cut short by `step` levels is cut at both ends.
        let scale = (high - low) / (top + step);
        let mut scale = f16::from_f32(scale);
        let mut minimum = f16::from_f32(0.5 * (high + low - scale.to_f32() * top));
        for _ in 0..=REFITS {
            let (by, from) = (inverse(scale.to_f32()), minimum.to_f32());
            let levels = x.map(|value| round_small((value - from) * by).clamp(0.0, top));
            let candidate = Block { scale, minimum, q: levels.map(|level| level as u8) };
            keep_better(x, 0.0, candidate, &mut best, &mut best_error);
            (scale, minimum) = line_through(x, &levels);
        }
    }
    best
}

/// The least-squares line from levels to values; the minimum is fitted to the scale as rounded.
fn line_through(x: &[f32; LEN], levels: &[f32; LEN]) -> (f16, f16) {
    let count = LEN as f32;
    let (mean_x, mean_level) = (x.iter().sum::<f32>() / count, levels.iter().sum::<f32>() / count);
    let (mut cross, mut norm) = (0.0, 0.0);
    for (value, level) in x.iter().zip(levels) {
        cross += (value - mean_x) * (level - mean_level);
        norm += (level - mean_level) * (level - mean_level);
    }
    let scale = f16::from_f32(cross * inverse(norm));
    (scale, f16::from_f32(mean_x - scale.to_f32() * mean_level))
}

/// Rounds half up; cheaper than `round` and as good here.
fn round_small(value: f32) -> f32 {
    (value + 0.5).floor()
}

fn keep_better(x: &[f32; LEN], offset: f32, candidate: Block, best: &mut Block, best_error: &mut f32) {
    let error = squared_error(x, &candidate, offset);
    if error < *best_error {
        (*best, *best_error) = (candidate, error);
    }
}

fn squared_error(x: &[f32; LEN], block: &Block, offset: f32) -> f32 {
    let (scale, minimum) = (block.scale.to_f32(), block.minimum.to_f32());
    x.iter().zip(&block.q).map(|(value, q)| (scale * (f32::from(*q) - offset) + minimum - value).powi(2)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::tests::gaussian;

    fn error_of(format: Format, values: &[f32], fit: Fit) -> f64 {
        let bytes = encode(format, values, fit).unwrap();
        let mut back = vec![0.0; values.len()];
        format.decode(&bytes, &mut back);
        values.iter().zip(&back).map(|(a, b)| f64::from(a - b).powi(2)).sum()
    }

    #[test]
    fn search_beats_nearest() {
        let values = gaussian(32 * 200);
        for format in [Format::Q4_0, Format::Q4_1, Format::Q5_0, Format::Q5_1] {
            let (nearest, search) = (error_of(format, &values, Fit::Nearest), error_of(format, &values, Fit::Search));
            assert!(search < nearest * 0.93, "{format}: {search} against {nearest}");
        }
        // More bits, less error.
        let of = |format| error_of(format, &values, Fit::Search);
        assert!(of(Format::Q8_0) < of(Format::Q5_1) && of(Format::Q5_1) < of(Format::Q5_0));
        assert!(of(Format::Q5_0) < of(Format::Q4_1) && of(Format::Q4_1) < of(Format::Q4_0));
    }

    #[test]
    fn flat_and_tiny_blocks_survive() {
        for format in [Format::Q4_0, Format::Q4_1, Format::Q5_0, Format::Q5_1, Format::Q8_0] {
            for fit in [Fit::Nearest, Fit::Search] {
                for value in [0.0, 1.0, -3.5, 1e-7] {
                    assert!(error_of(format, &[value; 32], fit) < 1e-4, "{format} {value} {fit:?}");
                }
            }
        }
    }

    #[test]
    fn what_cannot_be_encoded_is_an_error() {
        assert!(matches!(encode(Format::Q4_K, &[0.0; 256], Fit::Nearest), Err(Error::NoEncoder { .. })));
        assert!(matches!(encode(Format::Q5_0, &[0.0; 33], Fit::Nearest), Err(Error::PartialBlock { .. })));
    }
}
