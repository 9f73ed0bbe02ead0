//! Division of attention into work items: spans of one row into splits of their keys, prompt chunks
//! into tiles of their rows.
//!
//! Splits are counted from position 0 and always have the same size, so that the parts of a row's
//! result depend on its position alone.

use super::paths::CHAIN_SPLITS;
use crate::{BLOCK_TOKENS, InputLimits, Span};

/// Keys of one work item of a decode step.
pub(super) const SPLIT: usize = 256;
/// Rows of a tile; a row is one head of one token.
pub(super) const TILE_ROWS: usize = 128;

/// Key of a list of work items.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WorkKey {
    /// Positions that a row sees; 0 for no window.
    pub window: usize,
    pub tiles: TileRule,
}

/// Division of a prompt chunk's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TileRule {
    /// Heads of one group lie side by side, and tiles end anywhere: this many heads per group.
    Packed(usize),
    /// Whole tokens: this many per tile.
    Tokens(usize),
    /// One item per row, including rows that are alone in their span.
    EachRow,
}

impl TileRule {
    fn count(self, rows: usize) -> usize {
        match self {
            TileRule::Packed(group) => (rows * group).div_ceil(TILE_ROWS),
            TileRule::Tokens(tokens) => rows.div_ceil(tokens),
            TileRule::EachRow => rows,
        }
    }

    /// The last row of a tile in a span of `rows`.
    fn last_row(self, tile: usize, rows: usize) -> usize {
        let end = match self {
            TileRule::Packed(group) => ((tile + 1) * TILE_ROWS).div_ceil(group),
            TileRule::Tokens(tokens) => (tile + 1) * tokens,
            TileRule::EachRow => tile + 1,
        };
        end.min(rows) - 1
    }
}

/// Most items of a step.
pub(super) fn most_splits(limits: &InputLimits) -> usize {
    (limits.table_entries / (SPLIT / BLOCK_TOKENS)).saturating_add(limits.spans).saturating_add(CHAIN_SPLITS)
}

pub(super) fn most_tiles(limits: &InputLimits) -> usize {
    limits.rows.saturating_add(limits.spans)
}

/// Earliest position that a span's rows see.
fn earliest(span: &Span, window: usize) -> usize {
    let first = (span.context - span.num_rows) as usize;
    if window == 0 { 0 } else { (first + 1).saturating_sub(window) }
}

/// Pairs (span, split) of spans with one row, ascending.
pub(super) fn splits(spans: &[Span], key: WorkKey) -> impl Iterator<Item = u32> {
    let alone = spans.iter().enumerate().filter(|(_, span)| span.num_rows == 1 && span.context > 0);
    alone.flat_map(move |(number, span)| {
        let (first, last) = (earliest(span, key.window) / SPLIT, (span.context as usize - 1) / SPLIT);
        (first..=last).flat_map(move |split| [number as u32, split as u32])
    })
}

/// Pairs (span, tile) of the other spans (of all for `EachRow`), those that see most keys first.
pub(super) fn tiles(spans: &[Span], key: WorkKey) -> impl Iterator<Item = u32> {
    let mut items: Vec<(usize, u32, u32)> = Vec::new();
    let least = if key.tiles == TileRule::EachRow { 1 } else { 2 };
    for (number, span) in spans.iter().enumerate().filter(|(_, span)| span.num_rows >= least && span.context > 0) {
        let rows = span.num_rows as usize;
        for tile in 0..key.tiles.count(rows) {
            let position = span.context as usize - rows + key.tiles.last_row(tile, rows);
            let seen = if key.window == 0 { position } else { position.min(key.window) };
            items.push((seen, number as u32, tile as u32));
        }
    }
    items.sort_by_key(|item| std::cmp::Reverse(item.0));
    items.into_iter().flat_map(|(_, span, tile)| [span, tile])
}

#[cfg(test)]
mod tests {
    use super::*;

    const PACKED: WorkKey = WorkKey { window: 0, tiles: TileRule::Packed(4) };

    fn span(num_rows: u32, context: u32) -> Span {
        Span { first_row: 0, num_rows, context }
    }

    #[test]
    fn splits_cover_what_a_row_sees() {
        let spans = [span(1, 256), span(3, 300), span(1, 257), span(1, 1), span(1, 0)];
        let found: Vec<u32> = splits(&spans, PACKED).collect();
        assert_eq!(found, [0, 0, 2, 0, 2, 1, 3, 0]);
        // A row at position 511 with a window of 256 sees 256 to 511; with one of 257 it sees 255
        // too.
        let windowed = |window| splits(&[span(1, 512)], WorkKey { window, ..PACKED }).collect::<Vec<_>>();
        assert_eq!(windowed(256), [0, 1]);
        assert_eq!(windowed(257), [0, 0, 0, 1]);
    }

    #[test]
    fn tiles_cover_all_rows_and_the_longest_come_first() {
        // 4 heads per group: 32 tokens per tile.
        let found: Vec<u32> = tiles(&[span(33, 33), span(1, 9), span(2, 1000)], PACKED).collect();
        assert_eq!(found, [2, 0, 0, 1, 0, 0]);
        // Groups of 12: tiles of 128 packed rows are 10 and two thirds of a token.
        for (rule, rows, count) in
            [(TileRule::Packed(12), 11, 2), (TileRule::Packed(12), 32, 3), (TileRule::Tokens(10), 32, 4)]
        {
            assert_eq!(rule.count(rows), count, "{rule:?}");
            assert_eq!(rule.last_row(count - 1, rows), rows - 1, "{rule:?}");
        }
        assert_eq!(TileRule::Packed(12).last_row(0, 32), 10);
    }

    #[test]
    fn lists_fit_their_room() {
        let limits =
            InputLimits { rows: 64, spans: 3, outputs: 1, table_entries: 70, groups: 1, ropes: 0, rope_pairs: 0 };
        let spans = [span(1, 16 * 40), span(1, 16 * 29), span(1, 16)];
        assert!(splits(&spans, PACKED).count() / 2 <= most_splits(&limits));
        let spans = [span(40, 40), span(23, 40), span(1, 5)];
        for group in [1, 7, 128] {
            let key = WorkKey { window: 0, tiles: TileRule::Packed(group) };
            assert!(tiles(&spans, key).count() / 2 <= most_tiles(&limits));
        }
    }
}
