//! Draft trees as kernels see them: every row a span of its own, which finds its last positions elsewhere in the tree's
//! table.
//!
//! Rows so go the way of rows that are decoded, split by split of their keys, and get the same bits: the warp that
//! copies keys and values looks up where each token of a path lies, and no other notices. The price is that a prefix is
//! read once a row; rows of one split come one after the other, so all but the first find it in the second-level cache.

use crate::{Batch, Span, tree};

/// Spans of a step with its trees taken apart.
#[derive(Default)]
pub(super) struct Apart {
    pub spans: Vec<Span>,
    /// Which of the batch's spans each is of.
    pub origins: Vec<u32>,
}

impl Apart {
    pub fn with_room(spans: usize) -> Self {
        Self { spans: Vec::with_capacity(spans), origins: Vec::with_capacity(spans) }
    }

    pub fn fill(&mut self, batch: &Batch) {
        self.spans.clear();
        self.origins.clear();
        for (number, span) in batch.spans.iter().enumerate() {
            match tree::of_span(&batch.ancestors, span) {
                None => self.spans.push(*span),
                Some(words) => self.spans.extend((span.first_row..).zip(words).map(|(first_row, word)| Span {
                    first_row,
                    num_rows: 1,
                    context: tree::base(span) as u32 + word.count_ones(),
                })),
            }
            self.origins.resize(self.spans.len(), number as u32);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_a_tree_see_as_many_positions_as_they_are_deep() {
        let span = |first_row, num_rows, context| Span { first_row, num_rows, context };
        let mut apart = Apart::default();
        let chains = Batch { spans: vec![span(0, 2, 9), span(2, 1, 1)], ..Batch::default() };
        apart.fill(&chains);
        assert_eq!((&apart.spans, &apart.origins[..]), (&chains.spans, &[0, 1][..]));
        let words = tree::ancestors(&[None, Some(0), Some(0), Some(2)]);
        let ancestors = [vec![0; 2], words, vec![0]].concat();
        apart.fill(&Batch { spans: vec![span(0, 2, 9), span(2, 4, 24), span(6, 1, 5)], ancestors, ..Batch::default() });
        let expected = [span(0, 2, 9), span(2, 1, 21), span(3, 1, 22), span(4, 1, 22), span(5, 1, 23), span(6, 1, 5)];
        assert_eq!((&apart.spans[..], &apart.origins[..]), (&expected[..], &[0, 1, 1, 1, 1, 2][..]));
    }
}
