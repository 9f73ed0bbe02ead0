//! Figures that the engine keeps about itself.

use std::time::Duration;

use folio_scheduler::SchedulerStats;

use crate::tiers::DiskStats;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EngineStats {
    /// As of the last step's end, before those that it finished left; and of now, when the engine is idle.
    pub scheduler: SchedulerStats,
    /// How long a request that came now would wait for its first token.
    pub expected_wait: Duration,
    /// Steps that ended well.
    pub steps_done: u64,
    /// Rows of the last of them.
    pub last_step_tokens: usize,
    /// Rows of each of them.
    pub iteration_tokens: IterationTokens,
    /// Rows that computed a token of a prompt, each time that they did.
    pub prompt_tokens_computed: u64,
    /// Times that a step failed, with whatever was in flight beside it.
    pub steps_failed: u64,
    /// Times that a sample was tried alone, after a step that failed with it.
    pub samples_tried_again: u64,
    /// Executors that were built anew.
    pub restarts: u64,
    /// Samples that ended, for whatever reason.
    pub samples_ended: u64,
    /// Tokens that belong to an answer.
    pub tokens_sampled: u64,
    /// Rows of all steps, those included that ran beyond an answer's end.
    pub tokens_computed: u64,
    /// Batches of [`crate::KvEvent`]s that found the listener's queue full.
    pub kv_event_batches_lost: u64,
    /// Of the disk tier, where there is one; as of now.
    pub disk: Option<DiskStats>,
    pub occupancy: Occupancy,
    pub speculation: SpeculationStats,
}

/// Upper bounds of [`IterationTokens::counts`], each included; one more count is for what lies above the last.
pub const ITERATION_BOUNDS: [u64; 13] = [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384];

/// How many steps had how many rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IterationTokens {
    /// Steps whose rows are above the bound before and not above the one of the same index.
    pub counts: [u64; ITERATION_BOUNDS.len() + 1],
    /// Rows of all steps together.
    pub sum: u64,
}

impl IterationTokens {
    pub(crate) fn add(&mut self, rows: u64) {
        self.counts[ITERATION_BOUNDS.partition_point(|&bound| bound < rows)] += 1;
        self.sum += rows;
    }
}

/// What became of drafts, since the start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpeculationStats {
    /// Times that a request had drafts in a step.
    pub drafts: u64,
    /// Tokens of them, every node of a tree counted.
    pub draft_tokens: u64,
    /// Tokens of them that the model said too.
    pub accepted_tokens: u64,
    /// The same by how far behind the request's last token they were: the first entry is the token next to it.
    pub accepted_per_position: Vec<u64>,
    /// Steps without a row of a prompt, drafts or not.
    pub passes: u64,
    /// Time in drafting behind those.
    pub drafting: Duration,
    /// Time in those, that included.
    pub steps: Duration,
}

impl SpeculationStats {
    /// What came behind an earlier count of the same engine.
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

    /// A request had `planned` drafts in a step, and a path of `accepted` of them holds.
    pub(crate) fn add(&mut self, planned: usize, accepted: usize) {
        self.drafts += u64::from(planned > 0);
        self.draft_tokens += planned as u64;
        self.accepted_tokens += accepted as u64;
        self.accepted_per_position.resize(self.accepted_per_position.len().max(accepted), 0);
        self.accepted_per_position[..accepted].iter_mut().for_each(|count| *count += 1);
    }
}

/// Sums over steps of how full the KV blocks were, all layer groups together, taken when a step's keys are stored and
/// before finished requests leave.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Occupancy {
    pub slots_held: u64,
    pub tokens_stored: u64,
    /// Running requests, once for each layer group.
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
