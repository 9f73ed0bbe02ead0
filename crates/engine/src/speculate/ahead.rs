//! Blocks for a drafting method with keys and values of its own, with room beyond the rows that the
//! decoder has computed.
//!
//! A method of this kind has its own storage, but no block tables of its own. Its blocks have the
//! numbers of one layer group of the decoder, so that a sequence has the same table in both, and
//! the scheduler's decisions about blocks hold for both. Drafts reach beyond a request's block
//! table, because they are not planned yet. Their rows are written to scratch blocks with numbers
//! above the group's, enough for the longest draft of every sequence in a step. Scratch rows last
//! for one step; they are computed again once their tokens are accepted and have blocks.

use std::ops::Range;

use folio_device::{BLOCK_TOKENS, Batch, GroupTables, Span, tree};
use folio_model::ModelSpec;

/// See the [module](self).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ahead {
    group: usize,
    /// Number of the first scratch block.
    first_scratch: usize,
    sequences: usize,
    scratch_each: usize,
}

impl Ahead {
    /// `blocks` is the size of the decoder's layer group `group`; `sequences` the most of a step,
    /// and `rows` the most from a request's last token on.
    pub fn new(group: usize, blocks: usize, sequences: usize, rows: usize) -> Self {
        assert!((1..=tree::TREE_ROWS).contains(&rows), "{rows} rows of a draft");
        Self { group, first_scratch: blocks, sequences, scratch_each: rows.div_ceil(BLOCK_TOKENS) }
    }

    /// The layer group without a window, which has all blocks of a sequence, if there is one.
    pub fn full_group(spec: &ModelSpec) -> Option<usize> {
        spec.kv_groups().iter().position(|group| group.window.is_none())
    }

    pub fn group(&self) -> usize {
        self.group
    }

    /// Number of the first block that is not numbered as the decoder's.
    pub fn first_scratch(&self) -> usize {
        self.first_scratch
    }

    /// Blocks of the method's storage, scratch blocks included.
    pub fn num_blocks(&self) -> usize {
        self.first_scratch + self.sequences * self.scratch_each
    }

    /// Block table entries of the method's steps, from those of the decoder's.
    pub fn table_entries(&self, decoders: usize) -> usize {
        decoders + self.sequences * self.scratch_each
    }

    /// Block table of the request that has this span in the decoder's step.
    pub fn table<'a>(&self, step: &'a Batch, request: usize) -> &'a [u32] {
        let tables = &step.groups[self.group];
        let end = tables.first_block.get(request + 1).map_or(tables.blocks.len(), |&end| end as usize);
        &tables.blocks[tables.first_block[request] as usize..end]
    }

    /// Empties a batch of this many layer groups, and keeps its memory.
    pub fn clear(batch: &mut Batch, groups: usize) {
        let Batch { tokens, positions, spans, ancestors, groups: tables, outputs } = batch;
        [tokens, positions, outputs].into_iter().for_each(Vec::clear);
        spans.clear();
        ancestors.clear();
        tables.resize_with(groups, GroupTables::default);
        for GroupTables { slots, blocks, first_block } in tables {
            [slots, blocks, first_block].into_iter().for_each(Vec::clear);
        }
    }

    /// Adds a span to `batch`: tokens at places `first..` of a request of the decoder's step. They
    /// are a tree if `words` has words of [`tree::ancestors`], and a chain if it is empty. For a
    /// tree that grows, the places are those after the rows before. Returns the span's first row;
    /// the caller adds outputs.
    pub fn push(
        &self,
        step: &Batch,
        request: usize,
        first: usize,
        tokens: &[u32],
        ancestors: &[u64],
        batch: &mut Batch,
    ) -> u32 {
        self.push_to(self.table(step, request), request, first, tokens, ancestors, batch)
    }

    /// The same with the request's block table, or with its last blocks if places are counted from
    /// the first of these.
    pub fn push_to(
        &self,
        table: &[u32],
        request: usize,
        first: usize,
        tokens: &[u32],
        ancestors: &[u64],
        batch: &mut Batch,
    ) -> u32 {
        let (row, places) = (batch.num_rows(), first..first + tokens.len());
        batch.tokens.extend(tokens);
        batch.spans.push(Span { first_row: row as u32, num_rows: tokens.len() as u32, context: places.end as u32 });
        if ancestors.is_empty() {
            batch.positions.extend(places.clone().map(|place| place as u32));
        } else {
            assert_eq!(ancestors.len(), tokens.len(), "words of ancestors and tokens");
            let root = (first - tree::rows_before(ancestors)) as u32;
            batch.positions.extend(ancestors.iter().map(|word| root + word.count_ones() - 1));
            batch.ancestors.resize(row, 0);
            batch.ancestors.extend(ancestors);
        }
        if !batch.ancestors.is_empty() {
            batch.ancestors.resize(row + tokens.len(), 0);
        }
        for group in &mut batch.groups {
            self.push_table(table, request, places.clone(), group);
        }
        row as u32
    }

    fn push_table(&self, table: &[u32], sequence: usize, places: Range<usize>, group: &mut GroupTables) {
        let (begin, entries) = (group.blocks.len(), places.end.div_ceil(BLOCK_TOKENS));
        let beyond = entries.saturating_sub(table.len());
        assert!(beyond <= self.scratch_each, "{places:?} are {beyond} blocks beyond a table of {}", table.len());
        assert!(sequence < self.sequences, "sequence {sequence}, but scratch for {}", self.sequences);
        let scratch = self.first_scratch + sequence * self.scratch_each;
        group.first_block.push(begin as u32);
        group.blocks.extend(&table[..entries.min(table.len())]);
        group.blocks.extend((scratch..scratch + beyond).map(|block| block as u32));
        let blocks = &group.blocks[begin..];
        let slot = |place: usize| blocks[place / BLOCK_TOKENS] * BLOCK_TOKENS as u32 + (place % BLOCK_TOKENS) as u32;
        group.slots.extend(places.map(slot));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two requests, of 18 and of 16 tokens after the step.
    fn step() -> Batch {
        let tables = |blocks: &[u32]| GroupTables { slots: vec![], blocks: blocks.to_vec(), first_block: vec![0, 2] };
        Batch { groups: vec![tables(&[9, 9, 9]), tables(&[4, 1, 6])], ..Batch::default() }
    }

    #[test]
    fn rows_lie_in_the_requests_blocks_and_beyond_them_in_scratch() {
        let (ahead, step) = (Ahead::new(1, 8, 3, 5), step());
        assert_eq!((ahead.num_blocks(), ahead.table_entries(10)), (11, 13));
        assert_eq!((ahead.table(&step, 0), ahead.table(&step, 1)), (&[4, 1][..], &[6][..]));
        let mut batch = Batch::default();
        for _ in 0..2 {
            Ahead::clear(&mut batch, 2);
            assert_eq!(ahead.push(&step, 0, 30, &[7, 8, 9], &[], &mut batch), 0);
            assert_eq!(ahead.push(&step, 1, 14, &[5], &[], &mut batch), 3);
            assert_eq!(batch.tokens, [7, 8, 9, 5]);
            assert_eq!(batch.positions, [30, 31, 32, 14]);
            assert_eq!(batch.spans[0], Span { first_row: 0, num_rows: 3, context: 33 });
            assert_eq!(batch.spans[1], Span { first_row: 3, num_rows: 1, context: 15 });
            assert!(batch.ancestors.is_empty() && batch.outputs.is_empty());
            for group in &batch.groups {
                assert_eq!(group.blocks, [4, 1, 8, 6]);
                assert_eq!(group.first_block, [0, 3]);
                assert_eq!(group.slots, [30, 31, 128, 110]);
            }
        }
    }

    #[test]
    fn a_tree_lies_row_by_row_and_counts_by_depth() {
        let (ahead, step) = (Ahead::new(1, 8, 3, 20), step());
        let words = tree::ancestors(&[None, Some(0), Some(0), Some(2)]);
        let mut batch = Batch::default();
        Ahead::clear(&mut batch, 1);
        ahead.push(&step, 0, 3, &[1], &[], &mut batch);
        ahead.push(&step, 1, 15, &[1, 2, 3, 4], &words, &mut batch);
        ahead.push(&step, 0, 4, &[1, 2], &[], &mut batch);
        assert_eq!(batch.positions, [3, 15, 16, 16, 17, 4, 5]);
        assert_eq!(batch.ancestors, [0, 0b1, 0b11, 0b101, 0b1101, 0, 0]);
        assert_eq!(batch.spans[1], Span { first_row: 1, num_rows: 4, context: 19 });
        assert_eq!(batch.groups[0].slots[1..5], [111, 160, 161, 162], "the second sequence's scratch");
        assert_eq!(ahead.num_blocks(), 14);
    }

    #[test]
    #[should_panic(expected = "2 blocks beyond a table of 1")]
    fn scratch_is_for_the_longest_draft_alone() {
        Ahead::new(1, 8, 3, 5).push(
            &step(),
            1,
            30,
            &[1; 3],
            &[],
            &mut Batch { groups: step().groups, ..Batch::default() },
        );
    }
}
