//! Steps that were submitted and not collected.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use folio_scheduler::{Assignment, DiskTask, Draft, RequestId, StepPlan};

use super::durations::StepDurations;
use crate::{Error, Result, StepOutput, prefetch};

/// The parts of a plan that are needed when its results arrive.
pub(super) struct Step {
    pub rows: Vec<Row>,
    pub num_tokens: usize,
    /// Rows that compute a token of a prompt.
    pub num_prompt_tokens: usize,
    /// Tasks for the disk tier, started when this step and all earlier ones are done.
    pub tasks: Vec<DiskTask>,
}

/// The rows of one sample in a step.
pub(super) struct Row {
    pub id: RequestId,
    pub samples: bool,
    /// The draft that the step verifies.
    pub drafts: Draft,
    /// Number of the sample's tokens that are computed after the step.
    pub end: usize,
}

impl Step {
    pub fn new(plan: &StepPlan, num_prompt_tokens: usize, tasks: Vec<DiskTask>) -> Self {
        let row = |a: &Assignment| Row { id: a.id, samples: a.samples, drafts: a.draft(), end: a.first + a.num_rows() };
        let rows = plan.assignments.iter().map(row).collect();
        Self { rows, num_tokens: plan.num_rows(), num_prompt_tokens, tasks }
    }

    /// Checks that results belong to the plan. If they do not, the executor is at fault and none of
    /// them can be trusted.
    pub fn check(&self, output: StepOutput) -> Result<StepOutput> {
        prefetch::output(&output);
        let (found, expected) = (output.rows.len(), self.rows.len());
        if found != expected {
            return Err(Error::Step(format!("the step gave {found} results for {expected} requests")));
        }
        for (output, row) in output.rows.iter().zip(&self.rows) {
            let (found, expected) = (output.id.0, row.id.0);
            if found != expected {
                return Err(Error::Step(format!("the step gave a result for request {found} in place of {expected}")));
            }
            if row.samples && !row.drafts.has_path(&output.accepted_tokens()) {
                return Err(Error::Step(format!("the step accepted drafts of request {found} that it did not have")));
            }
        }
        Ok(output)
    }
}

/// Steps in flight, oldest first, and the time that steps take.
pub(super) struct InFlight {
    steps: VecDeque<Step>,
    /// Time at which the oldest one began.
    began: Instant,
    durations: StepDurations,
}

impl InFlight {
    pub fn new(now: Instant) -> Self {
        Self { steps: VecDeque::new(), began: now, durations: StepDurations::default() }
    }

    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    pub fn len(&self) -> usize {
        self.steps.len()
    }

    pub fn num_rows(&self) -> usize {
        self.steps.iter().map(|step| step.num_tokens).sum()
    }

    /// A step that was submitted at `now`.
    pub fn push(&mut self, step: Step, now: Instant) {
        if self.steps.is_empty() {
            self.began = now;
        }
        self.steps.push_back(step);
    }

    /// The oldest step, which has ended; the next one begins.
    pub fn pop(&mut self) -> Option<Step> {
        let step = self.steps.pop_front()?;
        self.began = Instant::now();
        Some(step)
    }

    pub fn newest_mut(&mut self) -> Option<&mut Step> {
        self.steps.back_mut()
    }

    pub fn clear(&mut self) {
        self.steps.clear();
    }

    pub fn note_duration(&mut self, step: &Step, took: Duration) {
        self.durations.note(step.num_tokens, took);
    }

    /// Time to plan the step after the one that runs; none without one.
    pub fn plan_at(&self) -> Option<Instant> {
        let running = self.steps.front()?;
        Some(self.began + self.durations.plan_after(running.num_tokens))
    }

    /// Time at which a single step in flight began, and how long it is expected to take.
    pub fn expected_end(&self) -> Option<(Instant, Duration)> {
        let step = self.steps.front().filter(|_| self.steps.len() == 1)?;
        Some((self.began, self.durations.expected(step.num_tokens)?))
    }
}
