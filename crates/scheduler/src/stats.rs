//! The scheduler's figures at one moment, for gauges and for the bound on unused slots.

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SchedulerStats {
    pub running: usize,
    pub waiting: usize,
    /// Tokens of waiting requests: prompts, and the answers so far of preempted ones.
    pub waiting_tokens: usize,
    pub groups: Vec<GroupStats>,
    /// Tokens that requests found in the prefix cache when they first ran, since the start.
    pub hit_tokens: u64,
    /// Tokens of `hit_tokens` that came from the host tier, loaded from disk or not.
    pub host_hit_tokens: u64,
    /// Tokens of the same requests' prompts, since the start.
    pub prompt_tokens: u64,
    pub preemptions: u64,
    /// Requests whose deadline passed.
    pub expired: u64,
    pub steps: u64,
    pub drafts: DraftStats,
    /// Chunks that were read from disk into the host tier, and chunks that could not be read.
    pub disk_fetched: u64,
    pub disk_failed: u64,
}

/// Counts of drafts since the start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DraftStats {
    /// Number of times that a request had a draft in a step.
    pub trees: u64,
    /// Nodes of these drafts, as planned.
    pub planned: u64,
    /// `accepted[d]`: number of times that a node of depth `d + 1` was accepted. As long as the
    /// longest accepted path.
    pub accepted: Vec<u64>,
}

impl DraftStats {
    /// A request has a draft of `nodes` nodes in a step.
    pub fn plan(&mut self, nodes: usize) {
        self.trees += u64::from(nodes > 0);
        self.planned += nodes as u64;
    }

    /// A path of `path` nodes was accepted.
    pub fn accept(&mut self, path: usize) {
        self.accepted.resize(self.accepted.len().max(path), 0);
        self.accepted[..path].iter_mut().for_each(|held| *held += 1);
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupStats {
    pub blocks_total: usize,
    /// Held by running requests.
    pub blocks_used: usize,
    /// Blocks that a prefix hit can find on the device, held or free.
    pub blocks_cached: usize,
    /// Tokens that the held blocks have room for.
    pub slots_held: usize,
    /// Tokens that they store.
    pub tokens_stored: usize,
    pub host_slots_total: usize,
    pub host_slots_used: usize,
}
