//! Four bits a value; scale and minimum in f16 for every group of 32.
//!
//! Keys `2 p` and `2 p + 1` of a token share a byte, the even one in its low bits:
//! `[head_dim / 2][16]`. Values `j` and `j + 16` of a group share a byte, so that sixteen bytes
//! become two vectors without moving a lane. Sixteen scales and sixteen minimums follow them, group
//! by group.

use half::f16;

use super::super::simd::{LANES, Simd};
use super::storage::Storage;
use crate::{BLOCK_TOKENS, KV_GROUP, KvFormat};

#[derive(Clone, Copy)]
pub(crate) struct Nibbles;

/// Bytes of a whole group's codes.
const GROUP_BYTES: usize = KV_GROUP / 2;
/// Bytes of sixteen tokens' scales and minimums for one group.
const SCALES_BYTES: usize = 2 * BLOCK_TOKENS * size_of::<u16>();

/// Codes, scale and minimum of one group of one token's head.
struct Coded {
    scale: u16,
    min: u16,
    codes: [u8; KV_GROUP],
}

/// An integer for each f32, in the same order.
#[inline(always)]
fn ordered(value: f32) -> i32 {
    let bits = value.to_bits() as i32;
    bits ^ ((bits >> 31) & i32::MAX)
}

/// The inverse of [`ordered`].
#[inline(always)]
fn unordered(order: i32) -> f32 {
    f32::from_bits((order ^ ((order >> 31) & i32::MAX)) as u32)
}

#[inline(always)]
fn encode(values: &[f32]) -> Coded {
    let (mut low, mut high) = (i32::MAX, i32::MIN);
    for &value in values {
        low = low.min(ordered(value));
        high = high.max(ordered(value));
    }
    // NaN comes beyond the infinities in this order.
    let (low, high) = (unordered(low), unordered(high));
    let mut coded = Coded { scale: f16::NAN.to_bits(), min: f16::NAN.to_bits(), codes: [0; KV_GROUP] };
    if !low.is_finite() || !high.is_finite() {
        return coded;
    }
    let most = f16::MAX.to_f32();
    let (low, high) = (low.clamp(-most, most), high.clamp(-most, most));
    let (scale, min) = (f16::from_f32((high - low) / 15.0), f16::from_f32(low));
    (coded.scale, coded.min) = (scale.to_bits(), min.to_bits());
    let (scale, min) = (scale.to_f32(), min.to_f32());
    if scale > 0.0 {
        let inverse = 1.0 / scale;
        for (code, &value) in coded.codes.iter_mut().zip(values) {
            let level = (value - min) * inverse;
            let level = if level > 0.0 { level } else { 0.0 };
            let level = if level < 15.0 { level } else { 15.0 };
            // Rounds to units, halves to even; the integer is in the last bits.
            *code = (level + 12_582_912.0).to_bits() as u8;
        }
    }
    coded
}

impl Nibbles {
    /// # Safety
    /// `head` must be a head of `head_dim` values with that group, writable, and `token` below
    /// sixteen.
    #[inline(always)]
    unsafe fn write_scales(head: *mut u8, head_dim: usize, group: usize, token: usize, coded: &Coded) {
        // SAFETY: sixteen scales and sixteen minimums follow the levels for every group.
        unsafe {
            let scales = head.add(Self::scales_at(head_dim) + group * SCALES_BYTES).cast::<u16>();
            scales.add(token).write(coded.scale);
            scales.add(BLOCK_TOKENS + token).write(coded.min);
        }
    }
}

impl Storage for Nibbles {
    const FORMAT: KvFormat = KvFormat::Int4;
    const GROUP: usize = KV_GROUP;
    const SCALED: bool = true;
    const AFFINE: bool = true;
    const VECTOR_BYTES: usize = LANES / 2;

    #[inline(always)]
    fn row_bytes(head_dim: usize) -> usize {
        head_dim / KV_GROUP * GROUP_BYTES + (head_dim % KV_GROUP).min(GROUP_BYTES)
    }

    #[inline(always)]
    unsafe fn key_pair<S: Simd>(s: S, keys: *const u8, pair: usize) -> [S::F; 2] {
        // SAFETY: pairs of keys are [head_dim / 2][16], and the caller promises that this one
        // exists.
        unsafe { s.load_nibbles(keys.add(pair * LANES)) }
    }

    #[inline(always)]
    unsafe fn last_key<S: Simd>(s: S, keys: *const u8, pair: usize) -> S::F {
        // SAFETY: as above; the last key of an odd head has a byte to itself.
        unsafe { s.load_nibbles(keys.add(pair * LANES))[0] }
    }

    #[inline(always)]
    unsafe fn value_pair<S: Simd, const N: usize>(
        s: S,
        rows: *const u8,
        head_dim: usize,
        offset: usize,
    ) -> [[S::F; N]; 2] {
        let mut vectors = [[s.splat(0.0); N]; 2];
        for half in 0..2 {
            let at = half * Self::row_bytes(head_dim) + offset / KV_GROUP * GROUP_BYTES;
            // SAFETY: the rows have values at `offset`; 64 bytes of scales, or more, follow the
            // last row.
            let [low, high] = unsafe { s.load_nibbles(rows.add(at)) };
            vectors[half] = [low; N];
            if N == 2 {
                vectors[half][1] = high;
            } else if !offset.is_multiple_of(KV_GROUP) {
                vectors[half][0] = high;
            }
        }
        vectors
    }

    #[inline(always)]
    unsafe fn scales<S: Simd>(s: S, head: *const u8, head_dim: usize, group: usize) -> S::F {
        // SAFETY: sixteen scales and sixteen minimums follow the levels for every group.
        unsafe { s.load_f16(head.add(Self::scales_at(head_dim) + group * SCALES_BYTES).cast()) }
    }

    #[inline(always)]
    unsafe fn minima<S: Simd>(s: S, head: *const u8, head_dim: usize, group: usize) -> S::F {
        // SAFETY: as above.
        unsafe { s.load_f16(head.add(Self::scales_at(head_dim) + group * SCALES_BYTES + SCALES_BYTES / 2).cast()) }
    }

    #[inline(always)]
    unsafe fn write_key(head: *mut u8, token: usize, key: &[f32]) {
        for (group, values) in key.chunks(KV_GROUP).enumerate() {
            let coded = encode(values);
            for pair in 0..values.len().div_ceil(2) {
                let byte = coded.codes[2 * pair] | coded.codes[2 * pair + 1] << 4;
                // SAFETY: pairs of keys are [head_dim / 2][16], and the caller promises a head of
                // this size.
                unsafe { head.add((group * GROUP_BYTES + pair) * BLOCK_TOKENS + token).write(byte) };
            }
            // SAFETY: as above.
            unsafe { Self::write_scales(head, key.len(), group, token, &coded) };
        }
    }

    #[inline(always)]
    unsafe fn write_value(head: *mut u8, token: usize, value: &[f32]) {
        let row_bytes = Self::row_bytes(value.len());
        // SAFETY: the caller promises a head of this size.
        let row = unsafe { std::slice::from_raw_parts_mut(head.add(token * row_bytes), row_bytes) };
        for ((group, values), row) in value.chunks(KV_GROUP).enumerate().zip(row.chunks_mut(GROUP_BYTES)) {
            let coded = encode(values);
            for (j, byte) in row.iter_mut().enumerate() {
                *byte = coded.codes[j] | coded.codes[j + GROUP_BYTES] << 4;
            }
            // SAFETY: as above.
            unsafe { Self::write_scales(head, value.len(), group, token, &coded) };
        }
    }
}
