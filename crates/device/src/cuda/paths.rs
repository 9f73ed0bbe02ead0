//! Drafts in the form that kernels read: every row of a tree is a span of its own, which finds its
//! last positions elsewhere in the tree's table. So may rows of a chain be.
//!
//! These rows are computed like decode rows, split by split of their keys, and get the same bits:
//! the warp that copies keys and values looks up the slot of each token of a path, and the other
//! warps do not differ. The price is that a prefix is read once per row; rows of one split come one
//! after the other, so all but the first find it in the second-level cache.
//!
//! A chain could as well be a tile, like the chunks of prompts, which reads a prefix once, but from
//! end to end by one multiprocessor per KV head. With 8 KV heads on 132 multiprocessors tiles take
//! `context / 64` us a layer until there are more than 16 chains, and separate rows about
//! `rows * context / 1300`. So few rows are better separate and many together, at any length:
//! measured on an H200 at 2,040 tokens, 20 separate rows of 4 chains take 31 us a layer more than
//! at 300 tokens, and 25 rows of 5 chains together 22.

use super::work::SPLIT;
use crate::{Batch, Span, tree};

/// Most rows of chains in a step that are computed separately.
pub(super) const CHAIN_ROWS: usize = 16;
/// Most splits of these rows in all.
pub(super) const CHAIN_SPLITS: usize = 48 * CHAIN_ROWS;

/// Spans of a step with its trees split into rows.
#[derive(Default)]
pub(super) struct Apart {
    pub spans: Vec<Span>,
    /// For each of them, the index of its span in the batch.
    pub origins: Vec<u32>,
}

/// Whether the rows of chains are so few that they are better computed separately.
pub(super) fn are_few(batch: &Batch) -> bool {
    let is_chain = |span: &&Span| span.num_rows > 1 && tree::of_span(&batch.ancestors, span).is_none();
    let (mut rows, mut splits) = (0, 0);
    for span in batch.spans.iter().filter(is_chain) {
        rows += span.num_rows as usize;
        splits += span.num_rows as usize * (span.context as usize).div_ceil(SPLIT);
    }
    rows <= CHAIN_ROWS && splits <= CHAIN_SPLITS
}

impl Apart {
    pub fn with_room(spans: usize) -> Self {
        Self { spans: Vec::with_capacity(spans), origins: Vec::with_capacity(spans) }
    }

    /// `chains`: rows of chains are split as well.
    pub fn fill(&mut self, batch: &Batch, chains: bool) {
        self.spans.clear();
        self.origins.clear();
        for (number, span) in batch.spans.iter().enumerate() {
            match tree::of_span(&batch.ancestors, span) {
                None if chains => self.spans.extend((0..span.num_rows).map(|row| Span {
                    first_row: span.first_row + row,
                    num_rows: 1,
                    context: span.context - span.num_rows + row + 1,
                })),
                None => self.spans.push(*span),
                Some(words) => self.spans.extend((span.first_row..).zip(words).map(|(first_row, word)| Span {
                    first_row,
                    num_rows: 1,
                    context: tree::base(span, words) as u32 + word.count_ones(),
                })),
            }
            self.origins.resize(self.spans.len(), number as u32);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(first_row: u32, num_rows: u32, context: u32) -> Span {
        Span { first_row, num_rows, context }
    }

    #[test]
    fn rows_of_a_tree_see_as_many_positions_as_they_are_deep() {
        let mut apart = Apart::default();
        let chains = Batch { spans: vec![span(0, 2, 9), span(2, 1, 1)], ..Batch::default() };
        apart.fill(&chains, false);
        assert_eq!((&apart.spans, &apart.origins[..]), (&chains.spans, &[0, 1][..]));
        let words = tree::ancestors(&[None, Some(0), Some(0), Some(2)]);
        let ancestors = [vec![0; 2], words, vec![0]].concat();
        let mixed = Batch { spans: vec![span(0, 2, 9), span(2, 4, 24), span(6, 1, 5)], ancestors, ..Batch::default() };
        apart.fill(&mixed, false);
        let rows = [span(2, 1, 21), span(3, 1, 22), span(4, 1, 22), span(5, 1, 23), span(6, 1, 5)];
        assert_eq!((apart.spans[0], &apart.spans[1..]), (span(0, 2, 9), &rows[..]));
        assert_eq!(apart.origins, [0, 1, 1, 1, 1, 2]);
        apart.fill(&mixed, true);
        assert_eq!((&apart.spans[..2], &apart.spans[2..]), (&[span(0, 1, 8), span(1, 1, 9)][..], &rows[..]));
        assert_eq!(apart.origins, [0, 0, 1, 1, 1, 1, 2]);
    }

    #[test]
    fn few_rows_of_chains_are_apart() {
        let batch = |spans: Vec<Span>| Batch { spans, ..Batch::default() };
        assert!(are_few(&batch(vec![span(0, 5, 2000), span(5, 1, 90_000), span(6, 11, 300)])));
        assert!(!are_few(&batch(vec![span(0, 5, 2000), span(5, 12, 300)])), "too many");
        assert!(are_few(&batch(vec![span(0, 8, 96 * 256)])) && !are_few(&batch(vec![span(0, 8, 96 * 256 + 1)])));
        let words = tree::ancestors(&[None; 40]);
        assert!(are_few(&Batch { spans: vec![span(0, 40, 40)], ancestors: words, ..Batch::default() }), "no chain");
    }
}
