//! Turns a plan's assignments into the rows of a batch.

use std::{ops::Range, sync::Arc};

use folio_device::{BLOCK_TOKENS, Batch, GroupTables, Span};
use folio_scheduler::{Assignment, BlockId, RequestId, StepPlan};

use crate::speculate::{Draft, ancestors};

/// The output rows of one request in a step: those of its prompt targets, then those of its sample.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OutputRows {
    pub id: RequestId,
    /// Rows of the batch, and the place of the first one in the sequence.
    pub span: Range<usize>,
    pub first: usize,
    pub prompt: Range<usize>,
    pub prompt_targets: Vec<u32>,
    /// Row of the last token; the rows of the draft's nodes follow it.
    pub sample: Option<usize>,
    /// Position of the token that the sampled row gives.
    pub position: usize,
    /// The draft to verify after the last token.
    pub draft: Draft,
    /// Block tables, set if the draft is no chain: accepted rows may have to be moved.
    pub tables: Option<Arc<[Vec<BlockId>]>>,
    /// Whether a token that the rows follow was never sampled, so that their results mean nothing.
    pub is_orphan: bool,
    /// Whether the rows give hidden states and not logits.
    pub pools: bool,
}

/// The requests of a step, as far as its rows depend on them.
pub(crate) trait Requests {
    /// The token that a request sampled for a position, if it has.
    fn awaited(&self, id: RequestId, position: usize) -> Option<u32>;

    /// Whether the request needs hidden states.
    fn pools(&self, id: RequestId) -> bool;
}

/// Fills `batch` from `plan`, reusing its memory. Rows with logits come first among the outputs;
/// returns their number.
pub(crate) fn gather(
    plan: &StepPlan,
    requests: &impl Requests,
    batch: &mut Batch,
    outputs: &mut Vec<OutputRows>,
) -> usize {
    let num_groups = plan.assignments.first().map_or(0, |a| a.tables.len());
    batch.tokens.clear();
    batch.positions.clear();
    batch.spans.clear();
    batch.outputs.clear();
    batch.ancestors.clear();
    batch.groups.resize_with(num_groups, GroupTables::default);
    for group in &mut batch.groups {
        group.slots.clear();
        group.blocks.clear();
        group.first_block.clear();
    }
    outputs.clear();
    let mut pooled = Vec::new();
    for assignment in &plan.assignments {
        let pools = requests.pools(assignment.id);
        let list = if pools { &mut pooled } else { &mut batch.outputs };
        let mut rows = OutputRows { pools, ..push_outputs(assignment, batch.tokens.len(), list) };
        push_rows(assignment, batch);
        if assignment.awaits_token {
            let token = requests.awaited(assignment.id, rows.position - 1);
            rows.is_orphan = token.is_none();
            // An orphan writes to blocks of its own, and its request is about to end.
            batch.tokens.push(token.unwrap_or(0));
        }
        outputs.push(rows);
    }
    push_ancestors(outputs, batch);
    let num_logits = batch.outputs.len();
    batch.outputs.extend(pooled);
    for rows in outputs.iter_mut().filter(|rows| rows.pools) {
        rows.prompt = rows.prompt.start + num_logits..rows.prompt.end + num_logits;
        rows.sample = rows.sample.map(|row| row + num_logits);
    }
    num_logits
}

/// Appends the output rows of an assignment that begins at `first_row` to `list`.
fn push_outputs(assignment: &Assignment, first_row: usize, list: &mut Vec<u32>) -> OutputRows {
    let targets = &assignment.prompt_targets;
    let first = list.len();
    let rows = (0..targets.tokens.len()).map(|i| first_row + targets.first + i - assignment.first);
    list.extend(rows.map(|row| row as u32));
    let prompt = first..list.len();
    let (num_rows, num_drafts) = (assignment.num_rows(), assignment.num_drafts);
    let sample = assignment.samples.then(|| {
        let last = list.len();
        let end = first_row + num_rows;
        list.extend((end - 1 - num_drafts..end).map(|row| row as u32));
        last
    });
    let draft = assignment.draft();
    OutputRows {
        id: assignment.id,
        span: first_row..first_row + num_rows,
        first: assignment.first,
        prompt,
        prompt_targets: targets.tokens.clone(),
        sample,
        position: assignment.first + num_rows - num_drafts,
        tables: (!draft.is_chain()).then(|| Arc::clone(&assignment.tables)),
        draft,
        is_orphan: false,
        pools: false,
    }
}

/// If a draft is no chain, every row has a word of ancestors. Rows of chains and prompts read all
/// rows before them, and their word is 0.
fn push_ancestors(outputs: &[OutputRows], batch: &mut Batch) {
    if outputs.iter().all(|rows| rows.draft.is_chain()) {
        return;
    }
    batch.ancestors.resize(batch.tokens.len(), 0);
    for rows in outputs.iter().filter(|rows| !rows.draft.is_chain()) {
        batch.ancestors[rows.span.clone()].copy_from_slice(&ancestors(&rows.draft));
    }
}

/// Appends all rows but that of the awaited token.
fn push_rows(assignment: &Assignment, batch: &mut Batch) {
    let places = assignment.first..assignment.first + assignment.num_rows();
    batch.spans.push(Span {
        first_row: batch.tokens.len() as u32,
        num_rows: assignment.num_rows() as u32,
        context: places.end as u32,
    });
    batch.tokens.extend(&assignment.tokens);
    if assignment.num_drafts == 0 {
        batch.positions.extend(places.clone().map(|position| position as u32));
    } else {
        batch.positions.extend(assignment.positions().map(|position| position as u32));
    }
    for (group, table) in batch.groups.iter_mut().zip(assignment.tables.iter()) {
        group.slots.extend(places.clone().map(|place| slot(table, place)));
        group.first_block.push(group.blocks.len() as u32);
        group.blocks.extend(table.iter().map(|&block| device_block(block)));
    }
}

/// The slot of the keys and values at a place of a sequence.
pub(crate) fn slot(table: &[BlockId], place: usize) -> u32 {
    let block = table[place / BLOCK_TOKENS];
    assert_ne!(block, BlockId::GONE, "a row at place {place} writes to a block that is gone");
    block.0 * BLOCK_TOKENS as u32 + (place % BLOCK_TOKENS) as u32
}

/// No kernel reads a block behind the window, but a decoder refuses a block table with an entry
/// outside its memory. Block 0 therefore takes the place of freed blocks.
fn device_block(block: BlockId) -> u32 {
    if block == BlockId::GONE { 0 } else { block.0 }
}

#[cfg(test)]
mod tests {
    use folio_scheduler::PromptTargets;

    use super::*;

    /// Request 1 awaits its position plus 100, and request 4 is for an embedding.
    struct Known;

    impl Requests for Known {
        fn awaited(&self, id: RequestId, position: usize) -> Option<u32> {
            (id.0 == 1).then_some(position as u32 + 100)
        }

        fn pools(&self, id: RequestId) -> bool {
            id.0 == 4
        }
    }

    fn assignment(id: u64, first: usize, tokens: &[u32], table: &[u32]) -> Assignment {
        Assignment {
            id: RequestId(id),
            first,
            tokens: tokens.to_vec(),
            awaits_token: false,
            num_drafts: 0,
            parents: Vec::new(),
            samples: true,
            prompt_targets: PromptTargets::default(),
            tables: [table.iter().copied().map(BlockId).collect()].into(),
        }
    }

    #[test]
    fn rows_spans_slots_and_outputs_line_up() {
        let targets = PromptTargets { first: 15, tokens: vec![7, 8] };
        let plan = StepPlan {
            assignments: vec![
                Assignment { samples: false, prompt_targets: targets, ..assignment(1, 14, &[5, 6, 7], &[3, 1]) },
                assignment(2, 4, &[9], &[2]),
            ],
            ..StepPlan::default()
        };
        let (mut batch, mut outputs) = (Batch::default(), Vec::new());
        for _ in 0..2 {
            assert_eq!(gather(&plan, &Known, &mut batch, &mut outputs), 3);
            assert_eq!(batch.tokens, [5, 6, 7, 9]);
            assert_eq!(batch.positions, [14, 15, 16, 4]);
            assert_eq!(batch.outputs, [1, 2, 3]);
            assert_eq!(batch.spans[0], Span { first_row: 0, num_rows: 3, context: 17 });
            assert_eq!(batch.spans[1], Span { first_row: 3, num_rows: 1, context: 5 });
            assert_eq!(batch.groups[0].slots, [62, 63, 16, 36]);
            assert_eq!(batch.groups[0].blocks, [3, 1, 2]);
            assert_eq!(batch.groups[0].first_block, [0, 2]);
            assert_eq!((outputs[0].prompt.clone(), outputs[0].sample), (0..2, None));
            assert_eq!((outputs[1].prompt.clone(), outputs[1].sample), (2..2, Some(2)));
            assert_eq!((outputs[0].position, outputs[1].position), (17, 5));
        }
    }

    #[test]
    fn an_awaited_token_is_the_last_row() {
        let gone = BlockId::GONE.0;
        let plan = StepPlan {
            assignments: vec![
                Assignment { awaits_token: true, ..assignment(1, 30, &[5], &[gone, 4]) },
                Assignment { awaits_token: true, ..assignment(2, 3, &[], &[6]) },
                assignment(3, 0, &[8, 9], &[7]),
            ],
            ..StepPlan::default()
        };
        let (mut batch, mut outputs) = (Batch::default(), Vec::new());
        gather(&plan, &Known, &mut batch, &mut outputs);
        assert_eq!(batch.tokens, [5, 131, 0, 8, 9]);
        assert_eq!(batch.positions, [30, 31, 3, 0, 1]);
        assert_eq!(batch.outputs, [1, 2, 4]);
        assert_eq!(batch.spans[1], Span { first_row: 2, num_rows: 1, context: 4 });
        assert_eq!(batch.groups[0].slots, [78, 79, 99, 112, 113]);
        assert_eq!(batch.groups[0].blocks, [0, 4, 6, 7]);
        assert_eq!(outputs.iter().map(|o| o.is_orphan).collect::<Vec<_>>(), [false, true, false]);
        assert_eq!(outputs.iter().map(|o| o.position).collect::<Vec<_>>(), [32, 4, 2]);
    }

    /// Rows of a tree have words, and every node is an output. A chain in the same step is a span
    /// like any other.
    #[test]
    fn drafts_lie_behind_the_last_token() {
        let tree = [None, Some(0), None, Some(2)];
        let drafted = |assignment, parents: &[Option<u16>]| Assignment {
            num_drafts: parents.len(),
            parents: parents.to_vec(),
            ..assignment
        };
        let chain = || drafted(assignment(2, 4, &[9, 8], &[2]), &[None]);
        let plan = StepPlan {
            assignments: vec![
                assignment(1, 0, &[7, 7], &[5]),
                drafted(assignment(3, 14, &[1, 10, 11, 12, 13], &[3, 1]), &tree),
                chain(),
            ],
            ..StepPlan::default()
        };
        let (mut batch, mut outputs) = (Batch::default(), Vec::new());
        assert_eq!(gather(&plan, &Known, &mut batch, &mut outputs), 8);
        assert_eq!(batch.tokens, [7, 7, 1, 10, 11, 12, 13, 9, 8]);
        assert_eq!(batch.positions, [0, 1, 14, 15, 16, 15, 16, 4, 5]);
        assert_eq!(batch.spans[1], Span { first_row: 2, num_rows: 5, context: 19 });
        assert_eq!(batch.groups[0].slots, [80, 81, 62, 63, 16, 17, 18, 36, 37]);
        assert_eq!(batch.ancestors, [0, 0, 0b1, 0b11, 0b111, 0b1001, 0b11001, 0, 0]);
        assert_eq!(batch.outputs, [1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(outputs.iter().map(|o| o.sample).collect::<Vec<_>>(), [Some(0), Some(1), Some(6)]);
        assert_eq!(outputs.iter().map(|o| (o.position, o.draft.len())).collect::<Vec<_>>(), [(2, 0), (15, 4), (5, 1)]);
        assert!(outputs[1].tables.is_some() && outputs[2].tables.is_none());
        // Chains alone need no words.
        gather(&StepPlan { assignments: vec![chain()], ..StepPlan::default() }, &Known, &mut batch, &mut outputs);
        assert!(batch.ancestors.is_empty() && batch.positions == [4, 5]);
    }

    #[test]
    fn rows_without_logits_come_last() {
        let targets = PromptTargets { first: 0, tokens: vec![6] };
        let plan = StepPlan {
            assignments: vec![
                Assignment { prompt_targets: targets, ..assignment(4, 0, &[5, 6], &[3]) },
                assignment(2, 4, &[9], &[2]),
            ],
            ..StepPlan::default()
        };
        let (mut batch, mut outputs) = (Batch::default(), Vec::new());
        assert_eq!(gather(&plan, &Known, &mut batch, &mut outputs), 1);
        assert_eq!(batch.outputs, [2, 0, 1]);
        assert_eq!((outputs[0].prompt.clone(), outputs[0].sample, outputs[0].pools), (1..2, Some(2), true));
        assert_eq!((outputs[1].prompt.clone(), outputs[1].sample, outputs[1].pools), (0..0, Some(0), false));
    }
}
