//! Figures of the moment, for gauges and for the waste bound.

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SchedulerStats {
    pub running: usize,
    pub waiting: usize,
    /// Tokens of waiting requests: prompts, and the answers so far of those who gave way.
    pub waiting_tokens: usize,
    pub groups: Vec<GroupStats>,
    /// Tokens that requests found in the prefix cache when they first ran, since the start.
    pub hit_tokens: u64,
    /// Of those, the ones that came from the host tier, fetched from disk or not.
    pub host_hit_tokens: u64,
    /// Tokens of those requests' prompts, since the start.
    pub prompt_tokens: u64,
    pub preemptions: u64,
    /// Requests whose deadline passed.
    pub expired: u64,
    pub steps: u64,
    /// Chunks that were read from disk into the host tier, and those that could not be.
    pub disk_fetched: u64,
    pub disk_failed: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupStats {
    pub blocks_total: usize,
    /// Held by running requests.
    pub blocks_used: usize,
    /// A prefix hit can find them on the device, whether held or free.
    pub blocks_cached: usize,
    /// Tokens that the blocks held could store.
    pub slots_held: usize,
    /// Tokens that they do store.
    pub tokens_stored: usize,
    pub host_slots_total: usize,
    pub host_slots_used: usize,
}
