//! Trims the drafts of a plan to the limits of the decoder, so that a step never fails for a draft.
//!
//! The scheduler counts rows and blocks. It does not know how many rows of logits the decoder has
//! memory for, nor that each row of a tree is a span of its own, with the tree's block table.

use folio_device::BLOCK_TOKENS;
use folio_model::DecoderLimits;
use folio_scheduler::{Assignment, StepPlan};

/// Room that a decoder has left beside the rows that are no drafts.
struct Room {
    rows: usize,
    outputs: usize,
    spans: usize,
    table_entries: usize,
}

impl Room {
    fn of(plan: &StepPlan, limits: &DecoderLimits) -> Self {
        let sum = |count: fn(&Assignment) -> usize| plan.assignments.iter().map(count).sum::<usize>();
        let entries = (0..limits.blocks.len()).map(|group| {
            let tables = plan.assignments.iter().filter_map(|a| a.tables.get(group));
            tables.map(Vec::len).sum::<usize>()
        });
        Self {
            rows: limits.rows.saturating_sub(sum(|a| a.num_rows() - a.num_drafts)),
            outputs: limits.outputs.saturating_sub(sum(|a| a.prompt_targets.tokens.len() + usize::from(a.samples))),
            spans: limits.spans.saturating_sub(plan.assignments.len()),
            table_entries: limits.table_entries.saturating_sub(entries.max().unwrap_or(0)),
        }
    }

    /// Takes room for the first `nodes` drafts of an assignment, or returns false.
    fn take(&mut self, assignment: &Assignment, nodes: usize) -> bool {
        let mut draft = assignment.draft();
        draft.truncate(nodes);
        let context = assignment.first + assignment.num_rows() - assignment.num_drafts + nodes;
        let spans = if draft.is_chain() { 0 } else { nodes };
        let entries = spans * context.div_ceil(BLOCK_TOKENS);
        let fits = nodes <= self.rows.min(self.outputs) && spans <= self.spans && entries <= self.table_entries;
        if fits {
            self.rows -= nodes;
            self.outputs -= nodes;
            self.spans -= spans;
            self.table_entries -= entries;
        }
        fits
    }
}

/// The plan without the drafts that do not fit; none if all of them fit.
pub(super) fn trim_drafts(plan: &StepPlan, limits: &DecoderLimits) -> Option<StepPlan> {
    if plan.assignments.iter().all(|a| a.num_drafts == 0) {
        return None;
    }
    let mut room = Room::of(plan, limits);
    let mut trimmed: Option<StepPlan> = None;
    for (index, assignment) in plan.assignments.iter().enumerate() {
        let nodes = (0..=assignment.num_drafts).rev().find(|&nodes| room.take(assignment, nodes)).unwrap_or(0);
        if nodes < assignment.num_drafts {
            let shorter = &mut trimmed.get_or_insert_with(|| plan.clone()).assignments[index];
            shorter.tokens.truncate(assignment.tokens.len() - assignment.num_drafts + nodes);
            shorter.parents.truncate(nodes);
            shorter.num_drafts = nodes;
        }
    }
    trimmed
}

#[cfg(test)]
mod tests {
    use folio_device::KvFormat;
    use folio_scheduler::{BlockId, PromptTargets, RequestId};

    use super::*;

    /// An assignment with a draft of four nodes after its 20th token.
    fn assignment(parents: [Option<u16>; 4]) -> Assignment {
        Assignment {
            id: RequestId(1),
            first: 19,
            tokens: vec![9, 1, 2, 3, 4],
            awaits_token: false,
            num_drafts: 4,
            parents: parents.to_vec(),
            samples: true,
            prompt_targets: PromptTargets::default(),
            tables: [vec![BlockId(0), BlockId(1)]].into(),
        }
    }

    fn num_drafts(limits: &DecoderLimits) -> [usize; 2] {
        let chain = assignment([None, Some(0), Some(1), Some(2)]);
        let tree = assignment([None, Some(0), None, Some(2)]);
        let plan = StepPlan { assignments: vec![chain, tree], ..StepPlan::default() };
        match trim_drafts(&plan, limits) {
            None => [4, 4],
            Some(trimmed) => {
                let one = |index: usize| {
                    let a: &Assignment = &trimmed.assignments[index];
                    assert_eq!((a.parents.len(), a.tokens.len()), (a.num_drafts, a.num_drafts + 1));
                    a.num_drafts
                };
                [one(0), one(1)]
            }
        }
    }

    #[test]
    fn drafts_without_room_are_cut() {
        let kv_format = KvFormat::F32;
        let ample = DecoderLimits { rows: 10, spans: 6, outputs: 10, table_entries: 12, blocks: vec![4], kv_format };
        assert_eq!(num_drafts(&ample), [4, 4]);
        assert_eq!(num_drafts(&DecoderLimits { outputs: 9, ..ample.clone() }), [4, 3]);
        assert_eq!(num_drafts(&DecoderLimits { outputs: 4, ..ample.clone() }), [2, 0]);
        assert_eq!(num_drafts(&DecoderLimits { rows: 7, ..ample.clone() }), [4, 1]);
        // The first two nodes of the tree are a chain.
        assert_eq!(num_drafts(&DecoderLimits { spans: 5, ..ample.clone() }), [4, 3]);
        assert_eq!(num_drafts(&DecoderLimits { spans: 4, ..ample.clone() }), [4, 2]);
        assert_eq!(num_drafts(&DecoderLimits { table_entries: 11, ..ample.clone() }), [4, 3]);
        assert_eq!(num_drafts(&DecoderLimits { table_entries: 4, ..ample }), [4, 2]);
    }
}
