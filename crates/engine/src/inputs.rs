//! From a plan's requests to a step's rows: what the device hears.

use std::ops::Range;

use folio_model::device::{BLOCK_TOKENS, Batch, GroupTables, Span};
use folio_scheduler::{Assignment, RequestId, StepPlan};

/// Which rows of the step's logits belong to one request: those of its prompt targets, then that of its sample.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OutputRows {
    pub id: RequestId,
    pub prompt: Range<usize>,
    pub prompt_targets: Vec<u32>,
    pub sample: Option<usize>,
    /// Position of the token that is sampled.
    pub position: usize,
}

/// Fills `batch` anew from `plan`, keeping its memory.
pub(crate) fn gather(plan: &StepPlan, batch: &mut Batch, outputs: &mut Vec<OutputRows>) {
    let num_groups = plan.assignments.first().map_or(0, |a| a.tables.len());
    batch.tokens.clear();
    batch.positions.clear();
    batch.spans.clear();
    batch.outputs.clear();
    batch.groups.resize_with(num_groups, GroupTables::default);
    for group in &mut batch.groups {
        group.slots.clear();
        group.blocks.clear();
        group.first_block.clear();
    }
    outputs.clear();
    for assignment in &plan.assignments {
        outputs.push(push_outputs(assignment, batch));
        push_rows(assignment, batch);
    }
}

/// Comes before the assignment's rows are pushed: row numbers count from there.
fn push_outputs(assignment: &Assignment, batch: &mut Batch) -> OutputRows {
    let first_row = batch.tokens.len();
    let targets = &assignment.prompt_targets;
    let first = batch.outputs.len();
    let rows = (0..targets.tokens.len()).map(|i| first_row + targets.first + i - assignment.first);
    batch.outputs.extend(rows.map(|row| row as u32));
    let prompt = first..batch.outputs.len();
    let sample = assignment.samples.then(|| {
        batch.outputs.push((first_row + assignment.tokens.len() - 1) as u32);
        batch.outputs.len() - 1
    });
    OutputRows {
        id: assignment.id,
        prompt,
        prompt_targets: targets.tokens.clone(),
        sample,
        position: assignment.first + assignment.tokens.len(),
    }
}

fn push_rows(assignment: &Assignment, batch: &mut Batch) {
    let positions = assignment.first..assignment.first + assignment.tokens.len();
    batch.spans.push(Span {
        first_row: batch.tokens.len() as u32,
        num_rows: assignment.tokens.len() as u32,
        context: positions.end as u32,
    });
    batch.tokens.extend(&assignment.tokens);
    batch.positions.extend(positions.clone().map(|position| position as u32));
    for (group, table) in batch.groups.iter_mut().zip(&assignment.tables) {
        let slot = |position: usize| table[position / BLOCK_TOKENS].0 as usize * BLOCK_TOKENS + position % BLOCK_TOKENS;
        group.slots.extend(positions.clone().map(|position| slot(position) as u32));
        group.first_block.push(group.blocks.len() as u32);
        group.blocks.extend(table.iter().map(|block| block.0));
    }
}

#[cfg(test)]
mod tests {
    use folio_scheduler::{BlockId, PromptTargets};

    use super::*;

    #[test]
    fn rows_spans_slots_and_outputs_line_up() {
        let plan = StepPlan {
            assignments: vec![
                Assignment {
                    id: RequestId(1),
                    first: 14,
                    tokens: vec![5, 6, 7],
                    samples: false,
                    prompt_targets: PromptTargets { first: 15, tokens: vec![7, 8] },
                    tables: vec![vec![BlockId(3), BlockId(1)]],
                },
                Assignment {
                    id: RequestId(2),
                    first: 4,
                    tokens: vec![9],
                    samples: true,
                    prompt_targets: PromptTargets::default(),
                    tables: vec![vec![BlockId(2)]],
                },
            ],
            preempted: vec![],
        };
        let (mut batch, mut outputs) = (Batch::default(), Vec::new());
        for _ in 0..2 {
            gather(&plan, &mut batch, &mut outputs);
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
}
