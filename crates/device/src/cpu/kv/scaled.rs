//! A byte a value and one f32 scale a token and head: int8 and e4m3.
//!
//! Rounding is written as plain loops over integers and f32 without branches on values, so that it
//! is compiled for vectors and gives the same bits on every instruction set.

use std::marker::PhantomData;

use super::super::simd::{LANES, Simd};
use super::storage::Storage;
use crate::{BLOCK_TOKENS, KV_TINY, KvFormat};

/// A one-byte number type that keys and values are stored in.
pub(crate) trait Code: Copy + Send + Sync + 'static {
    const FORMAT: KvFormat;
    /// The largest magnitude of a level.
    const LARGEST: f32;
    /// `load` returns levels divided by this power of two; stored scales are multiplied by it.
    const UNIT: f32;
    /// The nearest code of a level, halves to even; magnitudes of levels are at most `LARGEST`.
    fn round(level: f32) -> u8;
    /// Two vectors of sixteen levels, divided by `UNIT`.
    ///
    /// # Safety
    /// 32 bytes must be readable at `from`.
    unsafe fn load<S: Simd>(s: S, from: *const u8) -> [S::F; 2];
}

/// Signed bytes, levels from -127 to 127.
#[derive(Clone, Copy)]
pub(crate) struct Signed;

impl Code for Signed {
    const FORMAT: KvFormat = KvFormat::Int8;
    const LARGEST: f32 = 127.0;
    const UNIT: f32 = 1.0;

    #[inline(always)]
    fn round(level: f32) -> u8 {
        // Above 2^23 an f32 has no fraction left, so this sum rounds to units and ends in the
        // integer's bits.
        const UNIT: f32 = 12_582_912.0;
        (level + UNIT).to_bits() as u8
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, from: *const u8) -> [S::F; 2] {
        // SAFETY: the caller promises the memory.
        unsafe { [s.load_i8(from.cast()), s.load_i8(from.add(LANES).cast())] }
    }
}

/// Sign, four bits of exponent, three of mantissa; no infinities.
#[derive(Clone, Copy)]
pub(crate) struct E4m3;

impl Code for E4m3 {
    const FORMAT: KvFormat = KvFormat::Fp8;
    const LARGEST: f32 = 448.0;
    const UNIT: f32 = 256.0;

    #[inline(always)]
    fn round(level: f32) -> u8 {
        const SMALLEST_NORMAL: u32 = (127 - 6) << 23;
        let sign = (level.to_bits() >> 24) & 0x80;
        let size = level.to_bits() & 0x7fff_ffff;
        // Adds half of the lowest kept bit, less one if that bit is even; then changes the
        // exponent's bias.
        let normal = ((size + 0x7_ffff + ((size >> 20) & 1)) >> 20).wrapping_sub((127 - 7) << 3);
        // At 2^14 an f32 ends at 2^-9, the distance of e4m3's subnormal numbers.
        let below = (f32::from_bits(size) + 16384.0).to_bits().wrapping_sub(16384f32.to_bits());
        (sign | if size < SMALLEST_NORMAL { below } else { normal }) as u8
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, from: *const u8) -> [S::F; 2] {
        // SAFETY: the caller promises the memory.
        unsafe { s.load_e4m3(from) }
    }
}

/// Storage of one byte per value and one scale per token and head.
#[derive(Clone, Copy)]
pub(crate) struct Scaled<C>(PhantomData<C>);

impl<C: Code> Scaled<C> {
    /// The stored scale, and the factor from values to levels: zero if all values are zero.
    #[inline(always)]
    fn scale(values: &[f32]) -> (f32, f32) {
        // Magnitudes are ordered like their bits; infinity and NaN come last.
        let largest = values.iter().fold(0, |largest: u32, value| largest.max(value.to_bits() & 0x7fff_ffff));
        let largest = f32::from_bits(largest);
        if !largest.is_finite() {
            (f32::NAN, 0.0)
        } else if largest < KV_TINY {
            (0.0, 0.0)
        } else {
            (largest / C::LARGEST * C::UNIT, C::LARGEST / largest)
        }
    }

    /// # Safety
    /// `head` must be a head of `head_dim` values, writable, and `token` below sixteen.
    #[inline(always)]
    unsafe fn write_scale(head: *mut u8, head_dim: usize, token: usize, scale: f32) {
        // SAFETY: sixteen scales follow the levels.
        unsafe { head.add(Self::scales_at(head_dim)).cast::<f32>().add(token).write(scale) };
    }
}

/// Codes of up to 32 values.
#[inline(always)]
fn codes<C: Code>(values: &[f32], inverse: f32) -> [u8; 32] {
    let mut codes = [0; 32];
    if inverse > 0.0 {
        for (code, value) in codes.iter_mut().zip(values) {
            *code = C::round(value * inverse);
        }
    }
    codes
}

impl<C: Code> Storage for Scaled<C> {
    const FORMAT: KvFormat = C::FORMAT;
    const SCALED: bool = true;
    const AFFINE: bool = false;
    const VECTOR_BYTES: usize = LANES;

    #[inline(always)]
    fn row_bytes(head_dim: usize) -> usize {
        head_dim
    }

    #[inline(always)]
    unsafe fn key_pair<S: Simd>(s: S, keys: *const u8, pair: usize) -> [S::F; 2] {
        // SAFETY: keys are [head_dim][16], and the caller promises both.
        unsafe { C::load(s, keys.add(2 * pair * LANES)) }
    }

    #[inline(always)]
    unsafe fn last_key<S: Simd>(s: S, keys: *const u8, pair: usize) -> S::F {
        // SAFETY: as above; the bytes behind the last key are scales.
        unsafe { C::load(s, keys.add(2 * pair * LANES))[0] }
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
            for n in (0..N).step_by(2) {
                // SAFETY: the rows have values at `offset`; 64 bytes of scales follow the last row.
                let neighbours = unsafe { C::load(s, rows.add(half * head_dim + offset + n * LANES)) };
                vectors[half][n] = neighbours[0];
                if n + 1 < N {
                    vectors[half][n + 1] = neighbours[1];
                }
            }
        }
        vectors
    }

    #[inline(always)]
    unsafe fn scales<S: Simd>(s: S, head: *const u8, head_dim: usize, _: usize) -> S::F {
        // SAFETY: sixteen scales follow the levels.
        unsafe { s.load(head.add(Self::scales_at(head_dim)).cast()) }
    }

    #[inline(always)]
    unsafe fn write_key(head: *mut u8, token: usize, key: &[f32]) {
        let (scale, inverse) = Self::scale(key);
        for (part, values) in key.chunks(32).enumerate() {
            let codes = codes::<C>(values, inverse);
            for i in 0..values.len() {
                // SAFETY: keys are [head_dim][16], and the caller promises a head of this size.
                unsafe { head.add((part * 32 + i) * BLOCK_TOKENS + token).write(codes[i]) };
            }
        }
        // SAFETY: as above.
        unsafe { Self::write_scale(head, key.len(), token, scale) };
    }

    #[inline(always)]
    unsafe fn write_value(head: *mut u8, token: usize, value: &[f32]) {
        let (scale, inverse) = Self::scale(value);
        // SAFETY: the caller promises a head of this size.
        let row = unsafe { std::slice::from_raw_parts_mut(head.add(token * value.len()), value.len()) };
        for (to, values) in row.chunks_mut(32).zip(value.chunks(32)) {
            to.copy_from_slice(&codes::<C>(values, inverse)[..values.len()]);
        }
        // SAFETY: as above.
        unsafe { Self::write_scale(head, value.len(), token, scale) };
    }
}
