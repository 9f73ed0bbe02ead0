//! Encoders for the formats Folio writes itself: the plain floats, the blocks of 32, and the "K"
//! blocks of 256.
//!
//! [`encode`] is the usual round-to-nearest and gives the bytes that the `gguf` package gives; for
//! K blocks and IQ4_NL, which have no defined nearest, it is the fit in which every value counts
//! alike. [`encode_fitted`] tries a handful of scales per block, refits each by least squares and
//! takes the one with the smallest squared error after decoding, half-precision rounding included;
//! errors can be weighted by the importance of each value.

mod iq4;
mod k;
mod k_pack;
mod quick;

use half::{bf16, f16};

use super::simple::LEN;
use crate::{Error, Format, Result};
pub use quick::encode_quick;

/// The bytes of `values` in `format`, rounded to nearest; they must be whole blocks.
pub fn encode(format: Format, values: &[f32]) -> Result<Vec<u8>> {
    let mut out = Vec::with_capacity(format.bytes_for(values.len() as u64)? as usize);
    match format {
        Format::F32 => out.extend(values.iter().flat_map(|value| value.to_le_bytes())),
        Format::F16 => out.extend(values.iter().flat_map(|value| f16::from_f32(*value).to_le_bytes())),
        Format::BF16 => out.extend(values.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes())),
        Format::IQ4_NL => iq4::push(values, &vec![1.0; values.len()], &mut out),
        _ if is_k(format) => k::push(format, values, &vec![1.0; values.len()], &mut out),
        _ => {
            let (levels, affine) = levels_of(format).ok_or(Error::NoEncoder { format })?;
            for x in values.as_chunks::<LEN>().0 {
                let block = match affine {
                    _ if format == Format::Q8_0 => nearest_eight(x),
                    true => nearest_affine(x, levels),
                    false => nearest_symmetric(x, levels),
                };
                push(format, &block, &mut out);
            }
        }
    }
    Ok(out)
}

/// The bytes of `values` in `format`, with scales chosen to minimize the sum of `weight * error^2`
/// in each block.
///
/// `weights` has one number per value, none negative. Formats without a scale to choose are rounded
/// to nearest.
pub fn encode_fitted(format: Format, values: &[f32], weights: &[f32]) -> Result<Vec<u8>> {
    assert_eq!(values.len(), weights.len(), "one weight a value");
    let mut out = Vec::with_capacity(format.bytes_for(values.len() as u64)? as usize);
    if format == Format::IQ4_NL {
        iq4::push(values, weights, &mut out);
        return Ok(out);
    }
    if is_k(format) {
        k::push(format, values, weights, &mut out);
        return Ok(out);
    }
    let (levels, affine) = match levels_of(format) {
        // With eight bits a search gains nothing.
        Some(found) if format != Format::Q8_0 => found,
        _ => return encode(format, values),
    };
    for (x, weights) in values.as_chunks::<LEN>().0.iter().zip(weights.as_chunks::<LEN>().0) {
        let block = match affine {
            true => fit_affine(x, weights, levels),
            false => fit_symmetric(x, weights, levels),
        };
        push(format, &block, &mut out);
    }
    Ok(out)
}

fn is_k(format: Format) -> bool {
    matches!(format, Format::Q2_K | Format::Q3_K | Format::Q4_K | Format::Q5_K | Format::Q6_K)
}

/// For the blocks of 32: the number of levels on either side of zero or, with a minimum, the
/// highest level; and whether there is a minimum.
fn levels_of(format: Format) -> Option<(f32, bool)> {
    Some(match format {
        Format::Q4_0 => (8.0, false),
        Format::Q5_0 => (16.0, false),
        Format::Q8_0 => (128.0, false),
        Format::Q4_1 => (15.0, true),
        Format::Q5_1 => (31.0, true),
        _ => return None,
    })
}

/// A block before packing: value `i` is `scale * (q[i] - offset) + minimum`.
struct Block {
    scale: f16,
    minimum: f16,
    q: [u8; LEN],
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

fn fit_symmetric(x: &[f32; LEN], weights: &[f32; LEN], half: f32) -> Block {
    let mut best = nearest_symmetric(x, half);
    let mut best_error = weighed_error(x, weights, &best, half);
    let reach = extreme(x);
    for sign in [-1.0, 1.0] {
        for step in TRIED {
            let mut scale = f16::from_f32(sign * reach / (half + step));
            for _ in 0..=REFITS {
                let by = inverse(scale.to_f32());
                let levels = x.map(|value| round_small(value * by).clamp(-half, half - 1.0));
                let candidate = Block { scale, minimum: f16::ZERO, q: levels.map(|level| (level + half) as u8) };
                let error = weighed_error(x, weights, &candidate, half);
                if error < best_error {
                    (best, best_error) = (candidate, error);
                }
                scale = slope_through(x, weights, &levels);
            }
        }
    }
    best
}

/// The least-squares line through zero from levels to values.
fn slope_through(x: &[f32; LEN], weights: &[f32; LEN], levels: &[f32; LEN]) -> f16 {
    let (mut cross, mut norm) = (0.0, 0.0);
    for i in 0..LEN {
        cross += weights[i] * x[i] * levels[i];
        norm += weights[i] * levels[i] * levels[i];
    }
    f16::from_f32(cross * inverse(norm))
}

fn fit_affine(x: &[f32; LEN], weights: &[f32; LEN], top: f32) -> Block {
    let mut best = nearest_affine(x, top);
    let mut best_error = weighed_error(x, weights, &best, 0.0);
    let (low, high) = range(x);
    for step in TRIED {
        // A range shortened by `step` levels is shortened at both ends.
        let mut scale = f16::from_f32((high - low) / (top + step));
        let mut minimum = f16::from_f32(0.5 * (high + low - scale.to_f32() * top));
        for _ in 0..=REFITS {
            let (by, from) = (inverse(scale.to_f32()), minimum.to_f32());
            let levels = x.map(|value| round_small((value - from) * by).clamp(0.0, top));
            let candidate = Block { scale, minimum, q: levels.map(|level| level as u8) };
            let error = weighed_error(x, weights, &candidate, 0.0);
            if error < best_error {
                (best, best_error) = (candidate, error);
            }
            (scale, minimum) = line_through(x, weights, &levels);
        }
    }
    best
}

/// The least-squares line from levels to values; the minimum is fitted to the scale as rounded.
fn line_through(x: &[f32; LEN], weights: &[f32; LEN], levels: &[f32; LEN]) -> (f16, f16) {
    let total: f32 = weights.iter().sum();
    let mean = |values: &[f32; LEN]| {
        values.iter().zip(weights).map(|(value, weight)| value * weight).sum::<f32>() * inverse(total)
    };
    let (mean_x, mean_level) = (mean(x), mean(levels));
    let (mut cross, mut norm) = (0.0, 0.0);
    for i in 0..LEN {
        cross += weights[i] * (x[i] - mean_x) * (levels[i] - mean_level);
        norm += weights[i] * (levels[i] - mean_level) * (levels[i] - mean_level);
    }
    let scale = f16::from_f32(cross * inverse(norm));
    (scale, f16::from_f32(mean_x - scale.to_f32() * mean_level))
}

/// Rounds half up; cheaper than `round` and sufficient here.
fn round_small(value: f32) -> f32 {
    (value + 0.5).floor()
}

fn weighed_error(x: &[f32; LEN], weights: &[f32; LEN], block: &Block, offset: f32) -> f32 {
    let (scale, minimum) = (block.scale.to_f32(), block.minimum.to_f32());
    let mut error = 0.0;
    for i in 0..LEN {
        let off = scale * (f32::from(block.q[i]) - offset) + minimum - x[i];
        error += weights[i] * off * off;
    }
    error
}

#[cfg(test)]
mod tests {
    use folio_testing::Rng;

    use super::*;
    use crate::quant::tests::gaussian;

    const BLOCKS: [Format; 6] = [Format::Q4_0, Format::Q4_1, Format::Q5_0, Format::Q5_1, Format::Q8_0, Format::IQ4_NL];

    fn error_of(format: Format, bytes: &[u8], values: &[f32], weights: &[f32]) -> f64 {
        let mut back = vec![0.0; values.len()];
        format.decode(bytes, &mut back);
        (0..values.len()).map(|i| f64::from(weights[i]) * f64::from(values[i] - back[i]).powi(2)).sum()
    }

    #[test]
    fn fitted_scales_beat_nearest() {
        let values = gaussian(32 * 200);
        let even = vec![1.0; values.len()];
        let uneven: Vec<f32> = (0..values.len() as u64).map(|i| (Rng::at(9, i) % 100) as f32).collect();
        let fitted = |format, weights: &[f32], judged: &[f32]| {
            error_of(format, &encode_fitted(format, &values, weights).unwrap(), &values, judged)
        };
        for format in [Format::Q4_0, Format::Q4_1, Format::Q5_0, Format::Q5_1] {
            let nearest = error_of(format, &encode(format, &values).unwrap(), &values, &even);
            let search = fitted(format, &even, &even);
            assert!(search < nearest * 0.93, "{format}: {search} against {nearest}");
            assert!(fitted(format, &uneven, &uneven) < fitted(format, &even, &uneven) * 0.99, "{format}");
        }
        // Formats with more bits have smaller errors.
        let of = |format| fitted(format, &even, &even);
        assert!(of(Format::Q8_0) < of(Format::Q5_1) && of(Format::Q5_1) < of(Format::Q5_0));
        assert!(of(Format::Q5_0) < of(Format::Q4_1) && of(Format::Q4_1) < of(Format::Q4_0));
        // Levels placed for bell-shaped values, and weighted errors.
        assert!(of(Format::IQ4_NL) < of(Format::Q4_0) * 0.93);
        let (weighed, plain) = (&uneven[..], &even[..]);
        assert!(fitted(Format::IQ4_NL, weighed, weighed) < fitted(Format::IQ4_NL, plain, weighed) * 0.99);
    }

    #[test]
    fn flat_and_tiny_blocks_survive() {
        for format in BLOCKS {
            for value in [0.0, 1.0, -3.5, 1e-7] {
                let x = [value; 32];
                for bytes in
                    [encode(format, &x), encode_fitted(format, &x, &[1.0; 32]), encode_fitted(format, &x, &[0.0; 32])]
                {
                    assert!(error_of(format, &bytes.unwrap(), &x, &[1.0; 32]) < 1e-4, "{format} {value}");
                }
            }
        }
    }

    #[test]
    fn what_cannot_be_encoded_is_an_error() {
        assert!(matches!(encode(Format::IQ4_XS, &[0.0; 256]), Err(Error::NoEncoder { .. })));
        assert!(matches!(encode(Format::Q5_0, &[0.0; 33]), Err(Error::PartialBlock { .. })));
        assert!(matches!(encode_fitted(Format::Q5_0, &[0.0; 33], &[1.0; 33]), Err(Error::PartialBlock { .. })));
    }
}
