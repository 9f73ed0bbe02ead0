//! bf16 in pairs, as dot products take them: a vector of keys is sixteen tokens times two
//! neighbouring values, a vector of values is sixteen values times two neighbouring tokens.
//!
//! Keys are `[head_dim / 2][16][2]`, followed by `[16]` for the last one of an odd head; values are
//! `[8][head_dim][2]`.

use half::bf16;

use super::super::simd::{LANES, Simd, nearest_bf16};
use super::storage::Storage;
use crate::{BLOCK_TOKENS, KvFormat};

#[derive(Clone, Copy)]
pub(crate) struct Pairs;

/// Values are rounded in runs of this length before they are stored one by one, so that rounding is
/// compiled for vectors.
const RUN: usize = 64;

#[inline(always)]
fn rounded(values: &[f32]) -> [bf16; RUN] {
    let mut rounded = [bf16::ZERO; RUN];
    for (rounded, &value) in rounded.iter_mut().zip(values) {
        *rounded = bf16::from_bits((nearest_bf16(value) >> 16) as u16);
    }
    rounded
}

impl Pairs {
    /// Keys `2 * pair` and `2 * pair + 1` of sixteen tokens, a pair a lane.
    ///
    /// # Safety
    /// `keys` must be a head's, with more than `2 * pair + 1` values.
    #[inline(always)]
    pub unsafe fn keys<S: Simd>(s: S, keys: *const u8, pair: usize) -> S::F {
        // SAFETY: pairs of keys are [head_dim / 2][16], of four bytes, and the caller promises that
        // this one exists.
        unsafe { s.load(keys.cast::<f32>().add(pair * LANES)) }
    }

    /// Key `2 * pair`, the last one of an odd head, paired with zero.
    ///
    /// # Safety
    /// `keys` must be a head's, with more than `2 * pair` values.
    #[inline(always)]
    pub unsafe fn last_keys<S: Simd>(s: S, keys: *const u8, pair: usize) -> S::F {
        let mut pairs = [[bf16::ZERO; 2]; LANES];
        for (token, slot) in pairs.iter_mut().enumerate() {
            // SAFETY: sixteen single keys follow the pairs.
            slot[0] = unsafe { *keys.cast::<bf16>().add(2 * pair * LANES + token) };
        }
        // SAFETY: sixteen pairs are as long as sixteen f32.
        unsafe { s.load(pairs.as_ptr().cast()) }
    }

    /// `N` times sixteen values of two neighbouring tokens from `offset`, a pair a lane; behind the
    /// head's end, anything.
    ///
    /// # Safety
    /// As for [`Storage::value_pair`].
    #[inline(always)]
    pub unsafe fn values<S: Simd, const N: usize>(s: S, rows: *const u8, offset: usize) -> [S::F; N] {
        let mut vectors = [s.splat(0.0); N];
        for n in 0..N {
            // SAFETY: both rows have values at `offset`, and sixteen f32 are readable behind every
            // row.
            vectors[n] = unsafe { s.load(rows.cast::<f32>().add(offset + n * LANES)) };
        }
        vectors
    }
}

impl Storage for Pairs {
    const FORMAT: KvFormat = KvFormat::BF16;
    const SCALED: bool = false;
    const AFFINE: bool = false;
    const PAIRS: bool = true;
    const VECTOR_BYTES: usize = LANES * size_of::<bf16>();

    #[inline(always)]
    fn row_bytes(head_dim: usize) -> usize {
        head_dim * size_of::<bf16>()
    }

    #[inline(always)]
    unsafe fn key_pair<S: Simd>(s: S, keys: *const u8, pair: usize) -> [S::F; 2] {
        // SAFETY: the caller promises both keys.
        s.halves(unsafe { Self::keys(s, keys, pair) })
    }

    #[inline(always)]
    unsafe fn last_key<S: Simd>(s: S, keys: *const u8, pair: usize) -> S::F {
        // SAFETY: the caller promises the key.
        s.halves(unsafe { Self::last_keys(s, keys, pair) })[0]
    }

    #[inline(always)]
    unsafe fn value_pair<S: Simd, const N: usize>(
        s: S,
        rows: *const u8,
        _head_dim: usize,
        offset: usize,
    ) -> [[S::F; N]; 2] {
        // SAFETY: the caller promises both rows.
        let pairs: [S::F; N] = unsafe { Self::values(s, rows, offset) };
        let mut vectors = [[s.splat(0.0); N]; 2];
        for n in 0..N {
            [vectors[0][n], vectors[1][n]] = s.halves(pairs[n]);
        }
        vectors
    }

    #[inline(always)]
    unsafe fn write_key(head: *mut u8, token: usize, key: &[f32]) {
        let head = head.cast::<bf16>();
        for (run, values) in key.chunks(RUN).enumerate() {
            let (first, rounded) = (run * RUN, rounded(values));
            for pair in 0..values.len() / 2 {
                let both = [rounded[2 * pair], rounded[2 * pair + 1]];
                let at = (first + 2 * pair) * BLOCK_TOKENS + 2 * token;
                // SAFETY: pairs of keys are [head_dim / 2][16], and the caller promises a head of
                // this size.
                unsafe { head.add(at).cast::<[bf16; 2]>().write(both) };
            }
            if !values.len().is_multiple_of(2) {
                let last = values.len() - 1;
                // SAFETY: as above; runs are even, so this is the head's last key, which is stored
                // unpaired.
                unsafe { head.add((first + last) * BLOCK_TOKENS + token).write(rounded[last]) };
            }
        }
    }

    #[inline(always)]
    unsafe fn write_value(head: *mut u8, token: usize, value: &[f32]) {
        // SAFETY: values are [8][head_dim][2], and the caller promises a head of this size.
        let row = unsafe { head.cast::<bf16>().add(token / 2 * 2 * value.len() + token % 2) };
        for (run, values) in value.chunks(RUN).enumerate() {
            let rounded = rounded(values);
            for i in 0..values.len() {
                // SAFETY: as above.
                unsafe { row.add(2 * (run * RUN + i)).write(rounded[i]) };
            }
        }
    }
}
