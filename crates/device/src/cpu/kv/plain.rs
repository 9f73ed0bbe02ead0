//! f32 and f16: a value is its own level.

use std::marker::PhantomData;

use half::f16;

use super::super::simd::{LANES, Simd};
use super::storage::Storage;
use crate::{BLOCK_TOKENS, KvFormat};

/// A number type that keys and values are stored in.
pub(crate) trait Element: Copy + Send + Sync + 'static {
    const FORMAT: KvFormat;
    /// Rounds to nearest even.
    fn narrow(value: f32) -> Self;
    /// Sixteen values, widened.
    ///
    /// # Safety
    /// Sixteen values must be readable at `from`.
    unsafe fn load<S: Simd>(s: S, from: *const Self) -> S::F;
}

impl Element for f32 {
    const FORMAT: KvFormat = KvFormat::F32;

    #[inline(always)]
    fn narrow(value: f32) -> f32 {
        value
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, from: *const f32) -> S::F {
        // SAFETY: the caller promises the memory.
        unsafe { s.load(from) }
    }
}

impl Element for f16 {
    const FORMAT: KvFormat = KvFormat::F16;

    #[inline(always)]
    fn narrow(value: f32) -> f16 {
        f16::from_f32(value)
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, from: *const f16) -> S::F {
        // SAFETY: the caller promises the memory; an f16 is its sixteen bits.
        unsafe { s.load_f16(from.cast()) }
    }
}

/// Storage without scales.
#[derive(Clone, Copy)]
pub(crate) struct Plain<E>(PhantomData<E>);

impl<E: Element> Storage for Plain<E> {
    const FORMAT: KvFormat = E::FORMAT;
    const SCALED: bool = false;
    const AFFINE: bool = false;
    const VECTOR_BYTES: usize = LANES * size_of::<E>();

    #[inline(always)]
    fn row_bytes(head_dim: usize) -> usize {
        head_dim * size_of::<E>()
    }

    #[inline(always)]
    unsafe fn key_pair<S: Simd>(s: S, keys: *const u8, pair: usize) -> [S::F; 2] {
        // SAFETY: keys are [head_dim][16], and the caller promises both.
        unsafe {
            let first = keys.cast::<E>().add(2 * pair * LANES);
            [E::load(s, first), E::load(s, first.add(LANES))]
        }
    }

    #[inline(always)]
    unsafe fn last_key<S: Simd>(s: S, keys: *const u8, pair: usize) -> S::F {
        // SAFETY: as above.
        unsafe { E::load(s, keys.cast::<E>().add(2 * pair * LANES)) }
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
            for n in 0..N {
                // SAFETY: the rows have values at `offset`, and sixteen more are readable behind
                // every row.
                vectors[half][n] = unsafe { E::load(s, rows.cast::<E>().add(half * head_dim + offset + n * LANES)) };
            }
        }
        vectors
    }

    #[inline(always)]
    unsafe fn write_key(head: *mut u8, token: usize, key: &[f32]) {
        for (i, &value) in key.iter().enumerate() {
            // SAFETY: the caller promises a head of this size.
            unsafe { head.cast::<E>().add(i * BLOCK_TOKENS + token).write(E::narrow(value)) };
        }
    }

    #[inline(always)]
    unsafe fn write_value(head: *mut u8, token: usize, value: &[f32]) {
        for (i, &narrowed) in value.iter().enumerate() {
            // SAFETY: as above.
            unsafe { head.cast::<E>().add(token * value.len() + i).write(E::narrow(narrowed)) };
        }
    }
}
