//! Single tokens, copied as they are stored: a lane of a block's keys, a row of its values, and their scales.
//!
//! Of the storage only the layout counts: lanes are `[n][16]` elements of one size, be it levels of keys or scales and
//! minima of either half.

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
/// Both must be a head of `head_dim` values in storage `T`, `to` writable, and both tokens below sixteen.
pub(crate) unsafe fn copy_token<T: Storage>(
    head_dim: usize,
    from: (HeadBlock<*const u8>, usize),
    to: (HeadBlock<*mut u8>, usize),
) {
    let ((from, from_token), (to, to_token)) = (from, to);
    debug_assert!(from_token < BLOCK_TOKENS && to_token < BLOCK_TOKENS, "token {from_token} to {to_token}");
    let (row, scales) = (T::row_bytes(head_dim), T::scales_at(head_dim));
    let lanes = BLOCK_TOKENS * T::FORMAT.head_bytes(head_dim) - scales;
    // Two nibbles of a key share a byte.
    let level = (T::VECTOR_BYTES / BLOCK_TOKENS).max(1);
    let scale = if T::AFFINE { size_of::<u16>() } else { size_of::<f32>() };
    // SAFETY: levels are the first `scales` bytes, keys by lanes and values by rows; all behind them is lanes of scales.
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
/// Both must be `bytes` bytes of `[n][16]` elements of `size` bytes.
unsafe fn copy_lane(from: *const u8, from_token: usize, to: *mut u8, to_token: usize, bytes: usize, size: usize) {
    for start in (0..bytes).step_by(BLOCK_TOKENS * size) {
        // SAFETY: sixteen elements begin at `start`.
        unsafe {
            std::ptr::copy(from.add(start + from_token * size), to.add(start + to_token * size), size);
        }
    }
}
