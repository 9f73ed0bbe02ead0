//! Limits that the scheduler keeps, checked once.

use crate::SchedulerError;

/// Tokens in a KV block, unless a test says otherwise.
pub const BLOCK_TOKENS: usize = 16;

#[derive(Clone, Debug)]
pub struct SchedulerConfig {
    pub block_tokens: usize,
    /// Blocks in the pool of each layer group.
    pub blocks: Vec<usize>,
    /// Most tokens computed in a step.
    pub budget_tokens: usize,
    /// Most tokens of one request in a step.
    pub max_chunk: Option<usize>,
    /// Most requests running at once.
    pub max_seqs: usize,
    /// Most rows a step whose logits are wanted for prompt logprobs.
    pub prompt_logit_rows: usize,
    pub prefix_caching: bool,
    /// Key of the block hashes: unknown to clients, so that none can craft a collision.
    pub hash_key: [u64; 2],
    /// Bits kept of a block hash: 128, or few in a test of collisions.
    pub hash_bits: u32,
    /// Test hook: every so many steps a running request loses its blocks.
    pub force_preempt_every: Option<u64>,
}

impl SchedulerConfig {
    /// Limits that suit most uses, for pools of the given sizes.
    pub fn new(blocks: Vec<usize>) -> Self {
        Self {
            block_tokens: BLOCK_TOKENS,
            blocks,
            budget_tokens: 2048,
            max_chunk: None,
            max_seqs: 256,
            prompt_logit_rows: 256,
            prefix_caching: true,
            hash_key: [0x6b65_7920_6f66_2061, 0x2074_6573_7420_7275],
            hash_bits: 128,
            force_preempt_every: None,
        }
    }

    /// A limit of nothing would wait for ever without a word, so it is refused here.
    pub(crate) fn validate(&self) -> Result<(), SchedulerError> {
        let limits = [
            ("block_tokens", self.block_tokens),
            ("blocks", self.blocks.iter().copied().min().unwrap_or(0)),
            ("budget_tokens", self.budget_tokens),
            ("max_chunk", self.max_chunk.unwrap_or(1)),
            ("max_seqs", self.max_seqs),
            ("prompt_logit_rows", self.prompt_logit_rows),
            ("hash_bits", self.hash_bits as usize),
        ];
        for (field, value) in limits {
            if value == 0 {
                return Err(SchedulerError::ZeroLimit { field });
            }
        }
        if let Some(&blocks) = self.blocks.iter().find(|&&b| b >= u32::MAX as usize) {
            return Err(SchedulerError::PoolTooLarge { blocks });
        }
        Ok(())
    }
}
