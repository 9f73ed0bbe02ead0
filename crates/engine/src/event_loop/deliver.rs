//! Takes the results of a step to the scheduler and to the clients.

use std::time::Instant;

use folio_scheduler::RowResult;

use super::{
    EventLoop,
    step::{Row, Step},
};
use crate::{EngineStats, Event, FinishReason, RowOutput, StepOutput, config::nanos};

impl RowOutput {
    /// Tokens of the accepted drafts.
    pub(super) fn accepted_tokens(&self) -> Vec<u32> {
        let len = if self.failure.is_some() { self.sampled.len() } else { self.sampled.len().saturating_sub(1) };
        self.sampled[..len].iter().map(|sampled| sampled.token).collect()
    }

    /// The result for the scheduler.
    fn result(&self) -> RowResult {
        let accepted = self.accepted_tokens();
        let token = self.sampled.get(accepted.len()).map(|sampled| sampled.token);
        RowResult { id: self.id, accepted, token }
    }
}

impl EventLoop {
    pub(super) fn deliver(&mut self, step: Step, output: StepOutput) {
        let StepOutput { mut rows, took, drafting } = output;
        self.in_flight.note_duration(&step, took);
        self.shared.progress.note();
        for (row, planned) in rows.iter_mut().zip(&step.rows) {
            self.note_computed(planned.id, planned.end);
            self.examine(row, planned);
        }
        let results: Vec<RowResult> = rows.iter().map(RowOutput::result).collect();
        self.scheduler.commit(&results, nanos(took));
        {
            let live = rows.iter().filter(|row| self.samples.contains_key(&row.id));
            let num_new: usize = live.map(|row| row.sampled.len()).sum();
            let mut stats = self.publish_stats();
            let EngineStats { scheduler, occupancy, speculation, .. } = &mut *stats;
            occupancy.add(scheduler);
            if step.num_prompt_tokens == 0 {
                speculation.passes += 1;
                speculation.drafting += drafting;
                speculation.steps += took;
            }
            for (result, planned) in results.iter().zip(&step.rows) {
                speculation.add(planned.drafts.len(), result.accepted.len());
            }
            stats.steps_done += 1;
            stats.last_step_tokens = step.num_tokens;
            stats.iteration_tokens.add(step.num_tokens as u64);
            stats.prompt_tokens_computed += step.num_prompt_tokens as u64;
            stats.tokens_computed += step.num_tokens as u64;
            stats.tokens_sampled += num_new as u64;
        }
        self.start_tasks(step.tasks);
        self.awaits_drafts = false;
        let now = Instant::now();
        for ((row, planned), result) in rows.into_iter().zip(&step.rows).zip(&results) {
            if let Some(sample) = self.samples.get_mut(&row.id) {
                sample.drafts.note(planned.drafts.len(), result.accepted.len());
            }
            self.deliver_row(row, now);
        }
        self.publish_events();
    }

    /// Removes results that were not requested, and sets the row's failure if one is missing.
    fn examine(&self, row: &mut RowOutput, planned: &Row) {
        if !planned.samples {
            // The scheduler accepts no token before the prompt is computed.
            (row.pooled, row.draft) = (None, None);
            row.sampled.clear();
        } else if row.failure.is_none() {
            let sample = self.samples.get(&row.id);
            let width = self.shared.config.embedding_width;
            row.failure = sample.and_then(|sample| sample.find_fault(row, width)).map(str::to_owned);
            if row.failure.is_some() {
                // A faulty result holds no accepted drafts.
                row.sampled.clear();
            }
        }
    }

    fn deliver_row(&mut self, row: RowOutput, now: Instant) {
        // A sample may have ended while the row was in flight.
        let Some(sample) = self.samples.get_mut(&row.id) else { return };
        if let Some(vector) = row.pooled.filter(|_| row.failure.is_none()) {
            self.outbox.post(&sample.events, Event::Embedding(vector));
            return self.end(row.id, FinishReason::Length);
        }
        if row.failure.is_none() {
            sample.take_prompt_logprobs(row.prompt_logprobs, &mut self.outbox);
        }
        let eos = &self.shared.config.eos;
        let ended = row.sampled.into_iter().find_map(|sampled| sample.take_token(sampled, eos, now, &mut self.outbox));
        if let Some(reason) = ended.or(row.failure.map(FinishReason::Error)) {
            return self.end(row.id, reason);
        }
        self.awaits_drafts |= row.expects_drafts;
        self.scheduler.expect_drafts(row.id, row.expects_drafts);
        if let Some(draft) = row.draft {
            self.scheduler.draft(row.id, draft);
        }
    }
}
