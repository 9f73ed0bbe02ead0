//! One head of one token as bytes in any storage format, and back: plain loops that search the
//! nearest code by its value.

use half::{bf16, f16};

use crate::{KV_GROUP, KV_TINY, KvFormat};

/// The largest e4m3 number.
const LARGEST_E4M3: f32 = 448.0;

/// Value of an e4m3 code without its sign.
fn e4m3(code: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(code >> 3), f64::from(code & 7));
    if exponent == 0 { mantissa * 2f64.powi(-9) } else { (8.0 + mantissa) * 2f64.powi(exponent - 10) }
}

/// The nearest code; of two equally near, the even one.
fn nearest_e4m3(value: f32) -> u8 {
    let size = f64::from(value).abs();
    // Code 127 is NaN.
    let below = (0..126u8).rev().find(|&code| e4m3(code) <= size).unwrap_or(0);
    let (low, high) = (size - e4m3(below), e4m3(below + 1) - size);
    let code = if high < low || (high == low && below % 2 == 1) { below + 1 } else { below };
    if value.is_sign_negative() { code | 0x80 } else { code }
}

/// A scale, then a byte per value.
fn encode_scaled(values: &[f32], out: &mut [u8], largest_level: f32, code: impl Fn(f32) -> u8) {
    let (scale, codes) = out.split_at_mut(size_of::<f32>());
    let largest = values.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
    let stored = if !values.iter().all(|value| value.is_finite()) {
        f32::NAN
    } else if largest < KV_TINY {
        0.0
    } else {
        largest / largest_level
    };
    scale.copy_from_slice(&stored.to_le_bytes());
    for (&value, to) in values.iter().zip(codes) {
        *to = if stored > 0.0 { code(value * (largest_level / largest)) } else { 0 };
    }
}

/// Scale and minimum of one group, then a nibble per value, two to a byte.
fn encode_group(values: &[f32], out: &mut [u8]) {
    let most = f16::MAX.to_f32();
    let ends = values.iter().map(|value| value.clamp(-most, most));
    let (low, high) = ends.fold((f32::INFINITY, f32::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)));
    let (mut scale, mut min) = (f16::from_f32((high - low) / 15.0), f16::from_f32(low));
    if !values.iter().all(|value| value.is_finite()) {
        (scale, min) = (f16::NAN, f16::NAN);
    }
    out[..2].copy_from_slice(&scale.to_le_bytes());
    out[2..4].copy_from_slice(&min.to_le_bytes());
    out[4..].fill(0);
    if scale.to_f32() > 0.0 {
        let inverse = 1.0 / scale.to_f32();
        for (i, value) in values.iter().enumerate() {
            let level = ((value - min.to_f32()) * inverse).clamp(0.0, 15.0).round_ties_even();
            out[4 + i / 2] |= (level as u8) << (4 * (i % 2));
        }
    }
}

/// Bytes of an int4 group of `len` values, with scale and minimum in front.
fn group_bytes(len: usize) -> usize {
    4 + len.min(KV_GROUP / 2)
}

/// Rounds one head to its storage format.
pub fn encode(format: KvFormat, values: &[f32], mut out: &mut [u8]) {
    assert_eq!(out.len(), format.head_bytes(values.len()), "bytes of a head");
    match format {
        KvFormat::F32 => {
            out.chunks_exact_mut(4).zip(values).for_each(|(to, value)| to.copy_from_slice(&value.to_le_bytes()))
        }
        KvFormat::F16 => {
            let bytes = values.iter().map(|&value| f16::from_f32(value).to_le_bytes());
            out.chunks_exact_mut(2).zip(bytes).for_each(|(to, bytes)| to.copy_from_slice(&bytes));
        }
        KvFormat::BF16 => {
            let bytes = values.iter().map(|&value| bf16::from_f32(value).to_le_bytes());
            out.chunks_exact_mut(2).zip(bytes).for_each(|(to, bytes)| to.copy_from_slice(&bytes));
        }
        KvFormat::Fp8 => encode_scaled(values, out, LARGEST_E4M3, nearest_e4m3),
        KvFormat::Int8 => encode_scaled(values, out, 127.0, |value| value.round_ties_even() as i8 as u8),
        KvFormat::Int4 => {
            for group in values.chunks(KV_GROUP) {
                let to = out.split_off_mut(..group_bytes(group.len())).expect("room for every group");
                encode_group(group, to);
            }
        }
    }
}

/// Exact values of a stored head.
pub fn decode(format: KvFormat, head_dim: usize, bytes: &[u8]) -> Vec<f64> {
    assert_eq!(bytes.len(), format.head_bytes(head_dim), "bytes of a head");
    let half = |at: &[u8]| f16::from_le_bytes([at[0], at[1]]).to_f64();
    let scaled = |level: fn(u8) -> f64| {
        let (scale, codes) = bytes.split_at(size_of::<f32>());
        let scale = f64::from(f32::from_le_bytes([scale[0], scale[1], scale[2], scale[3]]));
        codes.iter().map(|&code| scale * level(code)).collect()
    };
    match format {
        KvFormat::F32 => {
            bytes.chunks_exact(4).map(|b| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]]))).collect()
        }
        KvFormat::F16 => bytes.chunks_exact(2).map(half).collect(),
        KvFormat::BF16 => bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f64()).collect(),
        KvFormat::Fp8 => scaled(|code| e4m3(code & 0x7f) * if code > 0x7f { -1.0 } else { 1.0 }),
        KvFormat::Int8 => scaled(|code| f64::from(code as i8)),
        KvFormat::Int4 => {
            let mut values = Vec::with_capacity(head_dim);
            let mut rest = bytes;
            while values.len() < head_dim {
                let len = KV_GROUP.min(head_dim - values.len());
                let (group, after) = rest.split_at(group_bytes(len));
                let (scale, min) = (half(group), half(&group[2..]));
                let level = |i: usize| f64::from(group[4 + i / 2] >> (4 * (i % 2)) & 15);
                values.extend((0..len).map(|i| scale * level(i) + min));
                rest = after;
            }
            values
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(format: KvFormat, values: &[f32]) -> Vec<f64> {
        let mut bytes = vec![0xa5; format.head_bytes(values.len())];
        encode(format, values, &mut bytes);
        decode(format, values.len(), &bytes)
    }

    #[test]
    fn values_come_back_within_half_a_step() {
        let values: Vec<f32> = (0..67).map(|i| ((i * 29) % 67) as f32 * 0.13 - 3.0).collect();
        for (format, step) in [(KvFormat::Int8, 6.0 / 127.0), (KvFormat::Int4, 9.0 / 15.0), (KvFormat::Fp8, 0.5)] {
            for (found, value) in stored(format, &values).iter().zip(&values) {
                assert!((found - f64::from(*value)).abs() <= step / 2.0 + 1e-3, "{format:?}: {found}, {value}");
            }
        }
    }

    #[test]
    fn e4m3_is_as_the_format_says() {
        assert_eq!(
            [e4m3(1), e4m3(7), e4m3(8), e4m3(0x38), e4m3(0x7e)],
            [2f64.powi(-9), 0.013671875, 0.015625, 1.0, 448.0]
        );
        for (value, code) in [(1.0, 0x38), (-1.0, 0xb8), (448.0, 0x7e), (1.0625, 0x38), (1.1875, 0x3a), (0.0, 0)] {
            assert_eq!(nearest_e4m3(value), code, "{value}");
        }
    }

    #[test]
    fn zeros_tiny_and_endless_values_are_defined() {
        for format in [KvFormat::Fp8, KvFormat::Int8, KvFormat::Int4] {
            assert!(stored(format, &[0.0; 40]).iter().all(|&value| value == 0.0), "{format:?}");
            assert!(stored(format, &[1e-39; 40]).iter().all(|&value| value == 0.0), "{format:?}");
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut values = [0.5; 40];
                values[33] = bad;
                let found = stored(format, &values);
                assert!(found[32..].iter().all(|value| value.is_nan()), "{format:?}: {bad}");
                assert_eq!(found[0].is_nan(), format != KvFormat::Int4, "{format:?}: {bad}");
            }
            let large = stored(format, &[f32::MAX, -f32::MAX, 1.0]);
            assert!(large.iter().all(|value| value.is_finite()), "{format:?}: {large:?}");
        }
        let limited = stored(KvFormat::Int4, &[1e6, -1e6])[0];
        assert!((limited - 65504.0).abs() < 64.0, "{limited}");
    }
}
