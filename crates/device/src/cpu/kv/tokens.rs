//! Copies single tokens in their stored form: a lane of a block's keys, a row of its values, and
//! their scales.
//!
//! Only the layout of the storage matters here: lanes are `[n][16]` elements of one size, whether
//! levels of keys, or scales and minimums of keys or values. In pairs, a lane of keys is two
//! neighbours long, and a row of values is every other number.

use super::Storage;
use crate::BLOCK_TOKENS;

/// Keys and values of one head in one block.
#[derive(Clone, Copy)]
pub(crate) struct HeadBlock<P> {
    pub keys: P,
    pub values: P,
}

/// Copies one token's key and value from block to block, which may be the same one.
///
/// # Safety
/// Both must be a head of `head_dim` values in storage `T`, `to` writable, and both tokens below
/// sixteen.
pub(crate) unsafe fn copy_token<T: Storage>(
    head_dim: usize,
    from: (HeadBlock<*const u8>, usize),
    to: (HeadBlock<*mut u8>, usize),
) {
    let ((from, from_token), (to, to_token)) = (from, to);
    debug_assert!(from_token < BLOCK_TOKENS && to_token < BLOCK_TOKENS, "token {from_token} to {to_token}");
    let (row, scales) = (T::row_bytes(head_dim), T::scales_at(head_dim));
    let lanes = BLOCK_TOKENS * T::FORMAT.head_bytes(head_dim) - scales;
    // Two keys of four bits share a byte, so a lane is at least one byte.
    let level = (T::VECTOR_BYTES / BLOCK_TOKENS).max(1);
    let scale = if T::AFFINE { size_of::<u16>() } else { size_of::<f32>() };
    if T::PAIRS {
        // SAFETY: the caller's promise; pairs have nothing but levels.
        return unsafe { copy_paired(head_dim, (from, from_token), (to, to_token)) };
    }
    // SAFETY: levels are the first `scales` bytes, keys by lanes and values by rows; lanes of
    // scales follow them.
    unsafe {
        copy_lane(from.keys, from_token, to.keys, to_token, scales, level);
        std::ptr::copy(from.values.add(from_token * row), to.values.add(to_token * row), row);
        if T::SCALED {
            copy_lane(from.keys.add(scales), from_token, to.keys.add(scales), to_token, lanes, scale);
            copy_lane(from.values.add(scales), from_token, to.values.add(scales), to_token, lanes, scale);
        }
    }
}

/// # Safety
/// As for [`copy_token`], with pairs of bf16.
unsafe fn copy_paired(
    head_dim: usize,
    (from, from_token): (HeadBlock<*const u8>, usize),
    (to, to_token): (HeadBlock<*mut u8>, usize),
) {
    const NUMBER: usize = size_of::<u16>();
    let whole = head_dim / 2 * BLOCK_TOKENS * 2 * NUMBER;
    let start = |token: usize| (token / 2 * 2 * head_dim + token % 2) * NUMBER;
    // SAFETY: keys are [head_dim / 2][16][2] and the last of an odd head [16], values
    // [8][head_dim][2].
    unsafe {
        copy_lane(from.keys, from_token, to.keys, to_token, whole, 2 * NUMBER);
        let last = head_dim % 2 * BLOCK_TOKENS * NUMBER;
        copy_lane(from.keys.add(whole), from_token, to.keys.add(whole), to_token, last, NUMBER);
        let (from, to) = (from.values.add(start(from_token)), to.values.add(start(to_token)));
        for i in 0..head_dim {
            std::ptr::copy(from.add(2 * i * NUMBER), to.add(2 * i * NUMBER), NUMBER);
        }
    }
}

/// # Safety
/// Both must be `bytes` bytes of `[n][16]` elements of `size` bytes.
unsafe fn copy_lane(from: *const u8, from_token: usize, to: *mut u8, to_token: usize, bytes: usize, size: usize) {
    for start in (0..bytes).step_by(BLOCK_TOKENS * size) {
        // SAFETY: sixteen elements begin at `start`.
        unsafe {
            std::ptr::copy(from.add(start + from_token * size), to.add(start + to_token * size), size);
        }
    }
}
