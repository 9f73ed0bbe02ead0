//! One step's work as a device sees it: rows, spans and block tables. Requests are unknown here.

use crate::{InputLimits, tree};

/// Tokens in a KV block.
pub const BLOCK_TOKENS: usize = 16;

/// Consecutive rows that belong to one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    pub first_row: u32,
    pub num_rows: u32,
    /// Tokens of the sequence with keys readable in this step, this span's rows included: the
    /// span's last row is at position `context - 1`, or stored there if it belongs to a [`tree`].
    pub context: u32,
}

/// Slots and block tables of the step's sequences in one layer group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GroupTables {
    /// For every row the slot of its key and value: `block * BLOCK_TOKENS + offset`. No two rows
    /// have the same.
    pub slots: Vec<u32>,
    /// Block tables of all spans, one after the other; entry `i` of a table holds positions
    /// `16 i .. 16 i + 16`.
    pub blocks: Vec<u32>,
    /// Start of each span's table in `blocks`.
    pub first_block: Vec<u32>,
}

/// A step: any mix of prompt chunks and single tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    pub tokens: Vec<u32>,
    pub positions: Vec<u32>,
    /// Spans in the order of their rows; every row belongs to exactly one.
    pub spans: Vec<Span>,
    /// Empty, or one word per row. If the row's span is a [`tree`], the word marks the rows of the
    /// span on the path from the root to this row; otherwise it is 0.
    pub ancestors: Vec<u64>,
    /// Slots and block tables, one entry per layer group.
    pub groups: Vec<GroupTables>,
    /// Rows with requested logits, ascending.
    pub outputs: Vec<u32>,
}

impl Batch {
    pub fn num_rows(&self) -> usize {
        self.tokens.len()
    }

    /// Asserts that the batch is within the limits and does not contradict itself: backends divide
    /// their threads by rows, spans and slots and rely on it. Only backends that need it check that
    /// slots differ, because the check takes memory.
    pub(crate) fn check(&self, limits: &InputLimits) {
        let rows = self.num_rows();
        assert!(rows <= limits.rows, "{rows} rows, limit {}", limits.rows);
        assert_eq!(self.positions.len(), rows, "positions and rows");
        assert!(self.spans.len() <= limits.spans, "{} spans, limit {}", self.spans.len(), limits.spans);
        assert_eq!(self.groups.len(), limits.groups, "layer groups of the batch and of the limits");
        assert!(self.outputs.iter().all(|&row| (row as usize) < rows), "an output row beyond {rows}");
        let mut next = 0;
        for span in &self.spans {
            assert_eq!(span.first_row as usize, next, "first row of {span:?} and the end of the one before it");
            assert!(span.num_rows <= span.context, "{span:?} has more rows than context");
            next += span.num_rows as usize;
        }
        assert_eq!(next, rows, "rows of all spans and of the batch");
        let (more_spans, more_entries) = self.check_trees();
        let spans = self.spans.len() + more_spans;
        assert!(spans <= limits.spans, "{spans} spans with rows of trees, limit {}", limits.spans);
        for group in &self.groups {
            assert_eq!(group.slots.len(), rows, "slots and rows");
            assert_eq!(group.first_block.len(), self.spans.len(), "block tables and spans");
            let entries = group.blocks.len();
            assert!(entries <= limits.table_entries, "{entries} table entries, limit {}", limits.table_entries);
            let entries_read = entries + more_entries;
            assert!(entries_read <= limits.table_entries, "trees read {entries_read} entries in all, over the limit");
            for (span, &first) in self.spans.iter().zip(&group.first_block) {
                let needed = first as usize + (span.context as usize).div_ceil(BLOCK_TOKENS);
                assert!(needed <= entries, "the block table of {span:?} is too short");
            }
        }
    }

    /// Asserts that trees are trees. Returns how many more spans and table entries there are if
    /// each of their rows is a span of its own.
    fn check_trees(&self) -> (usize, usize) {
        if self.ancestors.is_empty() {
            return (0, 0);
        }
        assert_eq!(self.ancestors.len(), self.num_rows(), "words of ancestors and rows");
        let (mut spans, mut entries) = (0, 0);
        for span in &self.spans {
            let rows = span.first_row as usize..(span.first_row + span.num_rows) as usize;
            match tree::of_span(&self.ancestors, span) {
                Some(words) => {
                    tree::check(words, span, &self.positions[rows]);
                    spans += words.len() - 1;
                    entries += (words.len() - 1) * (span.context as usize).div_ceil(BLOCK_TOKENS);
                }
                None => assert!(self.ancestors[rows].iter().all(|&word| word == 0), "{span:?} is a tree in part"),
            }
        }
        (spans, entries)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: InputLimits =
        InputLimits { rows: 4, spans: 2, outputs: 1, table_entries: 4, groups: 1, ropes: 0, rope_pairs: 0 };

    /// Two sequences: a chunk of two rows that ends at position 17, and a first token.
    fn batch() -> Batch {
        Batch {
            tokens: vec![1, 2, 3],
            positions: vec![16, 17, 0],
            spans: vec![
                Span { first_row: 0, num_rows: 2, context: 18 },
                Span { first_row: 2, num_rows: 1, context: 1 },
            ],
            ancestors: Vec::new(),
            groups: vec![GroupTables { slots: vec![0, 1, 32], blocks: vec![1, 0, 2], first_block: vec![0, 2] }],
            outputs: vec![1, 2],
        }
    }

    fn refused(change: impl Fn(&mut Batch)) -> String {
        let mut batch = batch();
        change(&mut batch);
        let payload = std::panic::catch_unwind(|| batch.check(&LIMITS)).expect_err("the batch was taken");
        *payload.downcast::<String>().expect("a message")
    }

    #[test]
    fn a_batch_that_contradicts_itself_is_refused() {
        batch().check(&LIMITS);
        Batch { groups: vec![GroupTables::default()], ..Batch::default() }.check(&LIMITS);
        let tree = Batch { ancestors: vec![1, 2, 1], positions: vec![16, 16, 0], ..batch() };
        tree.check(&InputLimits { spans: 3, table_entries: 5, ..LIMITS });
        type Change = fn(&mut Batch);
        let cases: [(&str, Change); 13] = [
            ("5 rows, limit 4", |b| b.tokens = vec![0; 5]),
            ("positions and rows", |b| b.positions.truncate(2)),
            ("3 spans, limit 2", |b| b.spans.push(b.spans[0])),
            ("an output row", |b| b.outputs = vec![3]),
            ("end of the one before", |b| b.spans[1].first_row = 1),
            ("rows of all spans", |b| b.spans[1].num_rows = 0),
            ("more rows than context", |b| b.spans[0].context = 1),
            ("5 table entries, limit 4", |b| b.groups[0].blocks = vec![0; 5]),
            ("too short", |b| b.groups[0].first_block[1] = 3),
            ("words of ancestors", |b| b.ancestors = vec![0; 2]),
            ("a tree in part", |b| b.ancestors = vec![0, 2, 0]),
            ("position of row 1", |b| b.ancestors = vec![1, 2, 0]),
            ("3 spans with rows of trees, limit 2", |b| b.ancestors = vec![1, 3, 1]),
        ];
        for (expected, change) in cases {
            let message = refused(change);
            assert!(message.contains(expected), "{message} for {expected}");
        }
    }
}
