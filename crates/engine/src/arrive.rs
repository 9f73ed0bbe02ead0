//! What another core has just written is in that core's cache, and comes over line by line, a hundred nanoseconds each,
//! where one line says where the next is to be found. Plans and results are small things in many places: looked at once
//! from end to end, with nothing done in between, most of their lines are on the way at the same time.

use std::hint::black_box;

use folio_scheduler::StepPlan;

use crate::StepOutput;

/// Numbers of four bytes in a line.
const LINE: usize = 16;

pub(crate) fn plan(plan: &StepPlan) {
    let mut seen = 0;
    for assignment in &plan.assignments {
        seen ^= ends(&assignment.tokens) ^ named(&assignment.parents);
        for table in assignment.tables.iter() {
            seen ^= table.iter().step_by(LINE).fold(0, |seen, block| seen ^ block.0);
        }
    }
    black_box(seen);
}

pub(crate) fn output(output: &StepOutput) {
    let mut seen = 0;
    for row in &output.rows {
        seen ^= row.sampled.iter().fold(0, |seen, sampled| seen ^ sampled.token);
        seen ^= row.draft.as_ref().map_or(0, |draft| ends(draft.tokens()) ^ named(draft.parents()));
    }
    black_box(seen);
}

fn named(parents: &[Option<u16>]) -> u32 {
    u32::from(parents.last().is_some_and(Option::is_some))
}

fn ends(numbers: &[u32]) -> u32 {
    numbers.first().unwrap_or(&0) ^ numbers.last().unwrap_or(&0)
}
