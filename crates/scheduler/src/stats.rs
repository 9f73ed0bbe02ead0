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
    pub drafts: DraftStats,
    /// Chunks that were read from disk into the host tier, and those that could not be.
    pub disk_fetched: u64,
    pub disk_failed: u64,
}

/// What became of drafts, since the start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DraftStats {
    /// Times that a request had drafts in a step.
    pub trees: u64,
    /// Their nodes, as planned.
    pub planned: u64,
    /// `accepted[d]`: times that a draft held which was `d + 1` tokens behind its request's last one. As long as the
    /// longest path that ever held.
    pub accepted: Vec<u64>,
}

impl DraftStats {
    /// A request has `nodes` drafts in a step.
    pub fn plan(&mut self, nodes: usize) {
        self.trees += u64::from(nodes > 0);
        self.planned += nodes as u64;
    }

    /// The first `path` tokens of a way through a tree held.
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
    /// A prefix hit can find them on the device, whether held or free.
    pub blocks_cached: usize,
    /// Tokens that the blocks held could store.
    pub slots_held: usize,
    /// Tokens that they do store.
    pub tokens_stored: usize,
    pub host_slots_total: usize,
    pub host_slots_used: usize,
}
