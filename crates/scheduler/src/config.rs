//! The scheduler's limits, checked once.

use crate::{Nanos, SchedulerError};

/// Tokens in a KV block, except in some tests.
pub const BLOCK_TOKENS: usize = 16;

#[derive(Clone, Debug)]
pub struct SchedulerConfig {
    pub block_tokens: usize,
    pub groups: Vec<GroupConfig>,
    /// Most tokens computed in a step.
    pub budget_tokens: usize,
    /// Most tokens of one request in a step.
    pub max_chunk: Option<usize>,
    /// Most requests running at once.
    pub max_seqs: usize,
    /// Most rows of a step whose logits are needed for prompt logprobs.
    pub prompt_logit_rows: usize,
    /// While requests decode, a step has only as many prompt rows as keep it under this time. None:
    /// as many as the budget has.
    pub inter_token_target: Option<Nanos>,
    /// Relaxes `inter_token_target` for a model that is slow by itself, which would otherwise
    /// compute prompts in tiny chunks: a step may take nearly as long as this many steps without
    /// prompt, if that is longer. It then also has a prompt row for each decoding request and, up
    /// to 32, for each request, whatever they cost. 0: the target alone counts.
    pub inter_token_steps: u32,
    /// While no request decodes, a step has only as many prompt rows as keep it under this time, or
    /// under eight steps without prompt, or at 32 rows. None: as many as the budget has.
    pub longest_step: Option<Nanos>,
    /// Waiting time that one level of priority is worth.
    pub aging: Nanos,
    pub prefix_caching: bool,
    /// Key of the block hashes: unknown to clients, so that none can craft a collision. The disk
    /// tier needs the same key after a restart.
    pub hash_key: [u64; 2],
    /// Bits of a block hash: 128, or few in a test of collisions.
    pub hash_bits: u32,
    /// Time to copy a block of all groups between device and host, one way.
    pub copy_cost: Nanos,
    /// Full blocks in one file of the disk tier; none without a disk tier. Needs host slots in
    /// every group.
    pub disk_chunk_blocks: Option<usize>,
    /// Whether to collect [`crate::KvEvent`]s for [`crate::Scheduler::take_events`].
    pub kv_events: bool,
    /// Test hook: a running request is preempted every this many steps.
    pub force_preempt_every: Option<u64>,
}

/// A layer group: layers of the same window and key shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupConfig {
    /// Blocks in the device's pool.
    pub blocks: usize,
    /// A row at position p reads positions p-window+1 ..= p.
    pub window: Option<usize>,
    /// Blocks in the host tier; 0 without one.
    pub host_slots: usize,
}

impl GroupConfig {
    pub fn new(blocks: usize) -> Self {
        Self { blocks, window: None, host_slots: 0 }
    }
}

impl SchedulerConfig {
    /// Default limits, for groups without windows whose pools have the given sizes.
    pub fn new(blocks: Vec<usize>) -> Self {
        Self {
            block_tokens: BLOCK_TOKENS,
            groups: blocks.into_iter().map(GroupConfig::new).collect(),
            budget_tokens: 2048,
            max_chunk: None,
            max_seqs: 256,
            prompt_logit_rows: 256,
            inter_token_target: None,
            inter_token_steps: 0,
            longest_step: None,
            aging: 10_000_000_000,
            prefix_caching: true,
            hash_key: [0x6b65_7920_6f66_2061, 0x2074_6573_7420_7275],
            hash_bits: 128,
            copy_cost: 0,
            disk_chunk_blocks: None,
            kv_events: false,
            force_preempt_every: None,
        }
    }

    /// A limit of zero would make requests wait for ever, so it is refused here.
    pub(crate) fn validate(&self) -> Result<(), SchedulerError> {
        let limits = [
            ("block_tokens", self.block_tokens),
            ("blocks", self.groups.iter().map(|g| g.blocks).min().unwrap_or(0)),
            ("window", self.groups.iter().filter_map(|g| g.window).min().unwrap_or(1)),
            ("budget_tokens", self.budget_tokens),
            ("max_chunk", self.max_chunk.unwrap_or(1)),
            ("max_seqs", self.max_seqs),
            ("prompt_logit_rows", self.prompt_logit_rows),
            ("hash_bits", self.hash_bits as usize),
            ("disk_chunk_blocks", self.disk_chunk_blocks.unwrap_or(1)),
        ];
        for (field, value) in limits {
            if value == 0 {
                return Err(SchedulerError::ZeroLimit { field });
            }
        }
        let sizes = self.groups.iter().flat_map(|g| [g.blocks, g.host_slots]);
        if let Some(blocks) = sizes.into_iter().find(|&b| b >= u32::MAX as usize) {
            return Err(SchedulerError::PoolTooLarge { blocks });
        }
        let has_host = self.groups.iter().map(|g| g.host_slots > 0);
        if self.disk_chunk_blocks.is_some() && !has_host.into_iter().all(|has| has) {
            return Err(SchedulerError::DiskWithoutHost);
        }
        Ok(())
    }

    /// The most blocks of `group` that a sequence of `len` tokens holds at once: all of them, or
    /// those that a window and the chunks after it touch.
    pub fn most_blocks(&self, group: usize, len: usize) -> usize {
        let all = len.div_ceil(self.block_tokens);
        let Some(window) = self.groups[group].window else { return all };
        let chunk = self.budget_tokens.min(self.max_chunk.unwrap_or(usize::MAX));
        // Blocks that the rows of a chunk read or write: the most that a run of this length
        // touches.
        let seen = window.saturating_add(chunk).saturating_sub(2) / self.block_tokens + 2;
        // The last full block always stays. The blocks of the chunk in flight are not full yet, nor
        // are those of the next chunk.
        let filling = chunk.saturating_mul(2).saturating_sub(2) / self.block_tokens + 3;
        all.min(seen.max(filling))
    }
}
