//! One head of keys and one of values inside a block, in any storage format, as the kernels use
//! them.
//!
//! A stored value is `scale * level + min`. Kernels multiply levels, and apply scales and minimums
//! to the sums of sixteen tokens at once: one multiplication a block and group, however long the
//! head is. Features that a format lacks are left out at compile time, so plain formats pay nothing
//! for them.
//!
//! Keys are `[head_dim][16]` and values `[16][head_dim]`, as levels, or in pairs of neighbours. If
//! the format has scales, those of sixteen tokens (and their minimums) follow, group by group.

use super::super::simd::Simd;
use crate::{BLOCK_TOKENS, KvFormat};

/// A storage format of keys and values, as kernels read it.
pub(crate) trait Storage: Copy + Send + Sync + 'static {
    const FORMAT: KvFormat;
    /// Values of a head that share scales, a multiple of 32; the default, for one scale a head, is
    /// more than any head has.
    const GROUP: usize = usize::MAX;
    /// Whether the format has scales.
    const SCALED: bool;
    /// Whether the format has minimums.
    const AFFINE: bool;
    /// Whether the format is [`Pairs`](super::Pairs), which can be multiplied pair by pair.
    const PAIRS: bool = false;
    /// Bytes of the levels of sixteen values.
    const VECTOR_BYTES: usize;

    /// Bytes of the levels of one token's head.
    fn row_bytes(head_dim: usize) -> usize;

    /// Offset of the first scales from the head's start.
    #[inline(always)]
    fn scales_at(head_dim: usize) -> usize {
        BLOCK_TOKENS * Self::row_bytes(head_dim)
    }

    /// Keys `2 * pair` and `2 * pair + 1` of sixteen tokens, as levels.
    ///
    /// # Safety
    /// `keys` must be a head's, with more than `2 * pair + 1` values.
    unsafe fn key_pair<S: Simd>(s: S, keys: *const u8, pair: usize) -> [S::F; 2];

    /// Key `2 * pair`, the last one of an odd head.
    ///
    /// # Safety
    /// `keys` must be a head's, with more than `2 * pair` values.
    unsafe fn last_key<S: Simd>(s: S, keys: *const u8, pair: usize) -> S::F;

    /// `N` times sixteen values of each of two tokens from `offset`, as levels; lanes behind the
    /// head's end have no meaning. `N` is 1, or even and at most a group, with an even number of
    /// sixteens before `offset`.
    ///
    /// # Safety
    /// `rows` must be the values of an even token and the next one, of a head of `head_dim` values,
    /// more than `offset`.
    unsafe fn value_pair<S: Simd, const N: usize>(
        s: S,
        rows: *const u8,
        head_dim: usize,
        offset: usize,
    ) -> [[S::F; N]; 2];

    /// The scales of sixteen tokens for one group; ones if the format has none.
    ///
    /// # Safety
    /// `head` must be the keys or values of a head with that group.
    #[inline(always)]
    unsafe fn scales<S: Simd>(s: S, _head: *const u8, _head_dim: usize, _group: usize) -> S::F {
        s.splat(1.0)
    }

    /// The minimums of sixteen tokens for one group; zeros if the format has none.
    ///
    /// # Safety
    /// As for `scales`.
    #[inline(always)]
    unsafe fn minima<S: Simd>(s: S, _head: *const u8, _head_dim: usize, _group: usize) -> S::F {
        s.splat(0.0)
    }

    /// Rounds and stores one token's key.
    ///
    /// # Safety
    /// `head` must be the keys of a head of `key.len()` values, writable, and `token` below
    /// sixteen.
    unsafe fn write_key(head: *mut u8, token: usize, key: &[f32]);

    /// Rounds and stores one token's value.
    ///
    /// # Safety
    /// As for `write_key`.
    unsafe fn write_value(head: *mut u8, token: usize, value: &[f32]);
}

/// Evaluates an expression with `$storage` naming the type for `$format`.
macro_rules! with_storage {
    ($format:expr, $storage:ident => $body:expr) => {
        match $format {
            $crate::KvFormat::F32 => {
                type $storage = $crate::cpu::kv::Plain<f32>;
                $body
            }
            $crate::KvFormat::F16 => {
                type $storage = $crate::cpu::kv::Plain<half::f16>;
                $body
            }
            $crate::KvFormat::BF16 => {
                type $storage = $crate::cpu::kv::Pairs;
                $body
            }
            $crate::KvFormat::Fp8 => {
                type $storage = $crate::cpu::kv::Scaled<$crate::cpu::kv::E4m3>;
                $body
            }
            $crate::KvFormat::Int8 => {
                type $storage = $crate::cpu::kv::Scaled<$crate::cpu::kv::Signed>;
                $body
            }
            $crate::KvFormat::Int4 => {
                type $storage = $crate::cpu::kv::Nibbles;
                $body
            }
        }
    };
}
pub(crate) use with_storage;
