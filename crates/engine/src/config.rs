//! What an engine is started with.

use std::hash::{BuildHasher, Hasher, RandomState};

use folio_scheduler::{BLOCK_TOKENS, SchedulerConfig};

use crate::{Error, Result};

#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Most sequences running at once.
    pub max_seqs: usize,
    /// Sequences that may wait besides; more are refused.
    pub max_waiting: usize,
    /// Most tokens computed in a step.
    pub budget_tokens: usize,
    /// Most tokens of one sequence in a step.
    pub max_chunk: Option<usize>,
    /// The longest sequence, prompt and answer together.
    pub max_model_len: usize,
    /// KV blocks of each layer group.
    pub blocks: Vec<usize>,
    pub prefix_caching: bool,
    /// Most rows a step whose logits are wanted for prompt logprobs; the executor must have room for these and for
    /// `max_seqs` more.
    pub prompt_logit_rows: usize,
    /// Logits a row: token ids lie below this.
    pub logits_width: usize,
    /// Tokens that end an answer.
    pub eos: Vec<u32>,
    /// Test hook: every so many steps a running sequence loses its blocks.
    pub force_preempt_every: Option<u64>,
}

impl Default for EngineConfig {
    /// Sizes that depend on the model (`max_model_len`, `blocks`, `logits_width`, `eos`) are left for the caller.
    fn default() -> Self {
        Self {
            max_seqs: 64,
            max_waiting: 1024,
            budget_tokens: 512,
            max_chunk: None,
            max_model_len: 0,
            blocks: Vec::new(),
            prefix_caching: true,
            prompt_logit_rows: 256,
            logits_width: 0,
            eos: Vec::new(),
            force_preempt_every: None,
        }
    }
}

impl EngineConfig {
    pub(crate) fn validate(&self) -> Result<()> {
        let sizes = [("max_model_len", self.max_model_len, 2), ("logits_width", self.logits_width, 1)];
        for (field, value, least) in sizes {
            if value < least {
                return Err(Error::Config { field, value, least });
            }
        }
        Ok(())
    }

    pub(crate) fn scheduler(&self) -> SchedulerConfig {
        SchedulerConfig {
            block_tokens: BLOCK_TOKENS,
            blocks: self.blocks.clone(),
            budget_tokens: self.budget_tokens,
            max_chunk: self.max_chunk,
            max_seqs: self.max_seqs,
            prompt_logit_rows: self.prompt_logit_rows,
            prefix_caching: self.prefix_caching,
            hash_key: [fresh_key(), fresh_key()],
            hash_bits: 128,
            force_preempt_every: self.force_preempt_every,
        }
    }

    /// The longest sequence that the smallest pool holds.
    pub(crate) fn pool_tokens(&self) -> usize {
        self.blocks.iter().min().map_or(0, |&blocks| blocks * BLOCK_TOKENS)
    }
}

/// A number that clients cannot know, from the source that also keys std's hash maps.
fn fresh_key() -> u64 {
    RandomState::new().build_hasher().finish()
}
