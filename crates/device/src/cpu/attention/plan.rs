//! Divides a step's attention into work items: spans are cut into tiles of rows, and long tiles
//! into splits when threads would idle. Rows of trees are tiles of their own and come last.

use std::ops::Range;

use super::super::buffer::Buffer;
use super::super::inputs::reserved;
use super::super::simd::LANES;
use super::SPLIT;
use super::path::MAX_PATHS;
use crate::{InputLimits, Result, Span, tree};

/// Most query vectors of a tile.
pub const MAX_VECTORS: usize = 64;
/// Most values of a tile's queries, and of its sums: the size of a thread's stack memory.
pub const MAX_VALUES: usize = 8192;
/// Most groups, with one scale each, in a tile's queries: a head's last group may be as short as a
/// vector.
pub const MAX_GROUPS: usize = MAX_VALUES / LANES;
/// Most values of all partial sums of one operation. Mapped, and untouched until long contexts need
/// it.
pub const MAX_PARTIALS: usize = 4 << 20;

/// How heads and rows form tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    pub heads: usize,
    pub kv_heads: usize,
    /// `head_dim` rounded up to whole vectors.
    pub padded_dim: usize,
    /// Query heads that share a KV head.
    pub group: usize,
    /// Heads of a group in one tile: all, unless the group is very large.
    pub tile_heads: usize,
    pub tile_rows: usize,
}

impl Geometry {
    pub fn new(heads: usize, kv_heads: usize, head_dim: usize) -> Self {
        let padded_dim = head_dim.next_multiple_of(LANES);
        assert!((1..=MAX_VALUES).contains(&padded_dim), "a head of {head_dim} values");
        let group = heads / kv_heads;
        let vectors = (MAX_VALUES / padded_dim).min(MAX_VECTORS);
        let tile_heads = group.min(vectors);
        Self { heads, kv_heads, padded_dim, group, tile_heads, tile_rows: vectors / tile_heads }
    }

    /// Number of tiles side by side over the heads.
    pub fn head_tiles(&self) -> usize {
        self.kv_heads * self.group.div_ceil(self.tile_heads)
    }

    /// The KV head of a head tile, and its query heads.
    pub fn heads_of(&self, head_tile: usize) -> (usize, Range<usize>) {
        let tiles = self.group.div_ceil(self.tile_heads);
        let (kv_head, part) = (head_tile / tiles, head_tile % tiles);
        let first = part * self.tile_heads;
        let last = (first + self.tile_heads).min(self.group);
        (kv_head, kv_head * self.group + first..kv_head * self.group + last)
    }

    /// Size of one partial sum in values: the sum itself, then the largest score and the
    /// denominator.
    pub fn partial_values(&self) -> usize {
        self.padded_dim + LANES
    }
}

/// Consecutive rows of one span; a row of a tree is a tile alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    pub span: u32,
    /// First row, counted from the span's.
    pub first: u32,
    pub rows: u32,
    /// Splits that at least one of the rows sees.
    pub first_split: u32,
    pub num_splits: u32,
    /// Start of its partial sums, `[split][row][head]`, when they are written at all.
    pub partials: usize,
}

/// A run of a tile's splits, computed by one thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    pub tile: u32,
    pub first_split: u32,
    pub num_splits: u32,
    /// Index of this item's partial sum in the tile; none if the item is the whole tile.
    pub partial: Option<u32>,
}

/// The work list of one operation, and room for partial sums.
pub struct Scratch {
    pub tiles: Vec<Tile>,
    pub items: Vec<Item>,
    /// The first item with a row of a tree.
    pub first_tree: usize,
    /// Partial sums and, in a step with trees, the gathered paths behind them.
    pub partials: Buffer<f32>,
}

impl Scratch {
    pub fn new(limits: InputLimits) -> Result<Self> {
        Ok(Self {
            tiles: reserved(limits.rows)?,
            items: reserved(limits.rows.saturating_add(limits.table_entries))?,
            first_tree: 0,
            partials: Buffer::zeroed("partial sums of attention", MAX_PARTIALS)?,
        })
    }

    /// Bytes of all its memory.
    #[cfg(test)]
    pub fn bytes(&self) -> u64 {
        let lists = self.tiles.capacity() * size_of::<Tile>() + self.items.capacity() * size_of::<Item>();
        (lists + size_of_val(&self.partials[..])) as u64
    }

    /// Fills the lists for one operation.
    pub fn plan(
        &mut self,
        spans: &[Span],
        ancestors: &[u64],
        geometry: &Geometry,
        window: Option<usize>,
        threads: usize,
    ) {
        self.tiles.clear();
        self.items.clear();
        let mut partials = 0;
        // Adds `rows` rows from `first` on, at positions from `position` on.
        let mut push = |span: usize, first: usize, rows: usize, position: usize| {
            let oldest = window.map_or(0, |window| (position + 1).saturating_sub(window));
            let first_split = oldest / SPLIT;
            let num_splits = (position + rows - 1) / SPLIT + 1 - first_split;
            self.tiles.push(Tile {
                span: span as u32,
                first: first as u32,
                rows: rows as u32,
                first_split: first_split as u32,
                num_splits: num_splits as u32,
                partials,
            });
            partials += num_splits * rows * geometry.heads * geometry.partial_values();
        };
        let is_tree = |span: &Span| tree::of_span(ancestors, span).is_some();
        let mut chain_tiles = 0;
        for (index, span) in spans.iter().enumerate().filter(|(_, span)| !is_tree(span)) {
            let start = tree::base(span, &[]);
            // Late rows see more keys: they go first, so that the work left at the end is small.
            for tile in (0..(span.num_rows as usize).div_ceil(geometry.tile_rows)).rev() {
                let first = tile * geometry.tile_rows;
                let rows = geometry.tile_rows.min(span.num_rows as usize - first);
                push(index, first, rows, start + first);
                chain_tiles += 1;
            }
        }
        for (index, span) in spans.iter().enumerate() {
            let words = tree::of_span(ancestors, span).unwrap_or_default();
            for (row, word) in words.iter().enumerate().rev() {
                push(index, row, 1, tree::base(span, words) + word.count_ones() as usize - 1);
            }
        }
        let room = self.partials.len() - if self.tiles.len() > chain_tiles { MAX_PATHS } else { 0 };
        let idle = threads > 1 && self.tiles.len() * geometry.head_tiles() < 4 * threads;
        let share = idle && partials <= room;
        for (index, tile) in self.tiles.iter().enumerate() {
            if index == chain_tiles {
                self.first_tree = self.items.len();
            }
            let whole =
                Item { tile: index as u32, first_split: tile.first_split, num_splits: tile.num_splits, partial: None };
            if share && tile.num_splits > 1 {
                self.items.extend((0..tile.num_splits).map(|split| Item {
                    first_split: tile.first_split + split,
                    num_splits: 1,
                    partial: Some(split),
                    ..whole
                }));
            } else {
                self.items.push(whole);
            }
        }
        if self.tiles.len() == chain_tiles {
            self.first_tree = self.items.len();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_and_split_is_planned_once() {
        let limits =
            InputLimits { rows: 600, spans: 3, outputs: 1, table_entries: 900, groups: 1, ropes: 0, rope_pairs: 0 };
        let mut scratch = Scratch::new(limits).unwrap();
        let spans = [
            Span { first_row: 0, num_rows: 1, context: 5000 },
            Span { first_row: 1, num_rows: 200, context: 3000 },
            Span { first_row: 201, num_rows: 17, context: 17 },
        ];
        for (heads, kv_heads, head_dim) in [(8, 8, 64), (9, 3, 80), (140, 1, 128), (6, 2, 256)] {
            let geometry = Geometry::new(heads, kv_heads, head_dim);
            let all: Vec<usize> = (0..geometry.head_tiles()).flat_map(|tile| geometry.heads_of(tile).1).collect();
            assert_eq!(all, (0..heads).collect::<Vec<_>>());
            // The last span as a chain, and as a tree in which every row follows the first.
            let tree: Vec<u64> = vec![0; 201].into_iter().chain((0..17).map(|row| 1 | 1 << row)).collect();
            let kinds = [(1, None), (2, Some(100)), (500, None), (500, Some(1500))];
            for ((threads, window), words) in kinds.into_iter().flat_map(|kind| [(kind, &[][..]), (kind, &tree)]) {
                scratch.plan(&spans, words, &geometry, window, threads);
                assert_eq!(scratch.first_tree == scratch.items.len(), words.is_empty());
                for (index, span) in spans.iter().enumerate() {
                    let tiles = scratch.tiles.iter().filter(|tile| tile.span == index as u32);
                    let mut rows: Vec<u32> = tiles.flat_map(|tile| tile.first..tile.first + tile.rows).collect();
                    rows.sort_unstable();
                    assert_eq!(rows, (0..span.num_rows).collect::<Vec<_>>());
                }
                for (index, tile) in scratch.tiles.iter().enumerate() {
                    let items = scratch.items.iter().filter(|item| item.tile == index as u32);
                    let splits: Vec<u32> =
                        items.flat_map(|item| item.first_split..item.first_split + item.num_splits).collect();
                    let expected = tile.first_split..tile.first_split + tile.num_splits;
                    assert_eq!(splits, expected.collect::<Vec<_>>());
                }
            }
        }
    }
}
