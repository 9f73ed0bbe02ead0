//! Gathers the path of a tree's row into contiguous blocks, in the order of positions.
//!
//! The gathered blocks begin with the block in which the tree begins, so their first tokens may be
//! the prefix's. Keys and values are copied as they are stored, bit for bit.

use super::super::kv::{HeadBlock, Layer, Storage, copy_token};
use super::super::simd::LANES;
use super::SPLIT;
use super::plan::{Item, MAX_VALUES, Tile};
use super::tile::Operands;
use crate::BLOCK_TOKENS;
use crate::tree::{self, TREE_ROWS};

/// Most blocks that the positions of a path touch.
const PATH_BLOCKS: usize = TREE_ROWS / BLOCK_TOKENS + 1;
/// Size in f32 of all paths that are gathered at a time; the largest possible one fits.
pub const MAX_PATHS: usize = 2 << 20;
const _: () = assert!(2 * PATH_BLOCKS * BLOCK_TOKENS * MAX_VALUES + LANES <= MAX_PATHS);

/// Size in f32 of one path: keys, values, and padding that kernels may read behind them.
pub fn room<T>(layer: &Layer<'_, T>) -> usize {
    (2 * PATH_BLOCKS * layer.head_bytes()).div_ceil(size_of::<f32>()).next_multiple_of(LANES) + LANES
}

/// One head's keys and values from position `first` on.
pub struct Path {
    /// Position of the first gathered token, a multiple of a block.
    pub first: usize,
    keys: *const u8,
    values: *const u8,
    head_bytes: usize,
}

impl Path {
    /// The path for the KV head of a head tile. None if the item's splits end before the tree
    /// begins.
    pub fn gather<T: Storage>(
        operands: &Operands<'_, T>,
        tile: &Tile,
        item: &Item,
        head_tile: usize,
        memory: &mut [f32],
    ) -> Option<Self> {
        let base = operands.base(tile);
        let first = base / BLOCK_TOKENS * BLOCK_TOKENS;
        if (item.first_split + item.num_splits) as usize * SPLIT <= first {
            return None;
        }
        assert!(memory.len() >= room(&operands.layer), "{} f32 for a path", memory.len());
        let word = operands.word(tile);
        let seen = operands.seen(tile, word, 0);
        let (kv_head, _) = operands.geometry.heads_of(head_tile);
        let head_bytes = operands.layer.head_bytes();
        let keys = memory.as_mut_ptr().cast::<u8>();
        // SAFETY: the room of a path has this many blocks of both.
        let values = unsafe { keys.add(PATH_BLOCKS * head_bytes) };
        let places = (first..base).chain(tree::path(word).map(|row| base + row));
        for (position, place) in (first..).zip(places).skip_while(|(position, _)| *position < seen.start) {
            let from = operands.block(tile, place, kv_head);
            let start = (position - first) / BLOCK_TOKENS * head_bytes;
            // SAFETY: a path of at most 64 tokens, from inside its first block on, touches at most
            // PATH_BLOCKS blocks, and the layer's blocks have heads of this size.
            unsafe {
                let from = HeadBlock { keys: from.0, values: from.1 };
                let to = HeadBlock { keys: keys.add(start), values: values.add(start) };
                let (from, to) = ((from, place % BLOCK_TOKENS), (to, position % BLOCK_TOKENS));
                copy_token::<T>(operands.op.head_dim, from, to);
            }
        }
        Some(Self { first, keys, values, head_bytes })
    }

    /// Keys and values of the block that holds a position.
    #[inline(always)]
    pub fn block(&self, position: usize) -> (*const u8, *const u8) {
        let block = (position - self.first) / BLOCK_TOKENS;
        assert!(block < PATH_BLOCKS, "block {block} of a path");
        // SAFETY: the block was gathered.
        unsafe { (self.keys.add(block * self.head_bytes), self.values.add(block * self.head_bytes)) }
    }
}
