//! Figures of the engine.

use std::time::Duration;

use folio_scheduler::SchedulerStats;

use crate::tiers::DiskStats;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EngineStats {
    /// As of the end of the last step, before requests that it completed leave; while the engine is
    /// idle, as of now.
    pub scheduler: SchedulerStats,
    /// Expected wait of a new request for its first token.
    pub expected_wait: Duration,
    /// Steps that ended without error.
    pub steps_done: u64,
    /// Rows of the last step.
    pub last_step_tokens: usize,
    /// Distribution of the steps' rows.
    pub iteration_tokens: IterationTokens,
    /// Rows that computed a token of a prompt; a token that is computed again counts again.
    pub prompt_tokens_computed: u64,
    /// Failures of a step, with the step in flight beside it.
    pub steps_failed: u64,
    /// Number of times that a sample was tried alone, after a step with it had failed.
    pub samples_tried_again: u64,
    /// Executors that were rebuilt.
    pub restarts: u64,
    /// Samples that ended, for any reason.
    pub samples_ended: u64,
    /// Tokens of answers.
    pub tokens_sampled: u64,
    /// Rows of all steps, with those that were computed after an answer's end.
    pub tokens_computed: u64,
    /// Batches of [`crate::KvEvent`]s that found the listener's queue full.
    pub kv_event_batches_lost: u64,
    /// Figures of the disk tier, if there is one; as of now.
    pub disk: Option<DiskStats>,
    pub occupancy: Occupancy,
    pub speculation: SpeculationStats,
}

/// Upper bounds of [`IterationTokens::counts`], inclusive; one more count is for rows above the
/// last bound.
pub const ITERATION_BOUNDS: [u64; 13] = [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384];

/// A histogram of steps by their number of rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IterationTokens {
    /// Number of steps with more rows than the bound before, and at most the bound of the same
    /// index.
    pub counts: [u64; ITERATION_BOUNDS.len() + 1],
    /// Rows of all steps.
    pub sum: u64,
}

impl IterationTokens {
    pub(crate) fn add(&mut self, rows: u64) {
        self.counts[ITERATION_BOUNDS.partition_point(|&bound| bound < rows)] += 1;
        self.sum += rows;
    }
}

/// Counts of drafts since the start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpeculationStats {
    /// Number of times that a request had a draft in a step.
    pub drafts: u64,
    /// Tokens of these drafts, every node of a tree counted.
    pub draft_tokens: u64,
    /// Tokens of drafts that were accepted.
    pub accepted_tokens: u64,
    /// Accepted tokens by depth: the first entry is for tokens right after the request's last one.
    pub accepted_per_position: Vec<u64>,
    /// Steps without a row of a prompt, with drafts or not.
    pub passes: u64,
    /// Time spent on drafts after those steps.
    pub drafting: Duration,
    /// Time of those steps, with drafting.
    pub steps: Duration,
}

impl SpeculationStats {
    /// The difference to an earlier count of the same engine.
    pub fn since(&self, before: &Self) -> Self {
        let earlier = before.accepted_per_position.iter().copied().chain(std::iter::repeat(0));
        Self {
            drafts: self.drafts - before.drafts,
            draft_tokens: self.draft_tokens - before.draft_tokens,
            accepted_tokens: self.accepted_tokens - before.accepted_tokens,
            accepted_per_position: self
                .accepted_per_position
                .iter()
                .zip(earlier)
                .map(|(now, then)| now - then)
                .collect(),
            passes: self.passes - before.passes,
            drafting: self.drafting - before.drafting,
            steps: self.steps - before.steps,
        }
    }

    /// A request had a draft of `planned` nodes in a step, and `accepted` of them were accepted.
    pub(crate) fn add(&mut self, planned: usize, accepted: usize) {
        self.drafts += u64::from(planned > 0);
        self.draft_tokens += planned as u64;
        self.accepted_tokens += accepted as u64;
        self.accepted_per_position.resize(self.accepted_per_position.len().max(accepted), 0);
        self.accepted_per_position[..accepted].iter_mut().for_each(|count| *count += 1);
    }
}

/// Sums over steps of the use of KV blocks, all layer groups together, taken when a step's keys are
/// stored and before completed requests leave.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Occupancy {
    pub slots_held: u64,
    pub tokens_stored: u64,
    /// Number of running requests, once for each layer group.
    pub sequences: u64,
}

impl Occupancy {
    pub(crate) fn add(&mut self, stats: &SchedulerStats) {
        for group in &stats.groups {
            self.slots_held += group.slots_held as u64;
            self.tokens_stored += group.tokens_stored as u64;
            self.sequences += stats.running as u64;
        }
    }

    /// Slots held over tokens stored: 1 is perfect.
    pub fn slots_per_token(&self) -> f64 {
        self.slots_held as f64 / self.tokens_stored.max(1) as f64
    }

    pub fn mean_live_length(&self) -> f64 {
        self.tokens_stored as f64 / self.sequences.max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_belongs_to_the_bucket_below_it() {
        let mut tokens = IterationTokens::default();
        [0, 1, 2, 8, 9, 16_384, 16_385].into_iter().for_each(|rows| tokens.add(rows));
        assert_eq!(tokens.counts, [2, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1]);
        assert_eq!(tokens.sum, 32_789);
    }
}
