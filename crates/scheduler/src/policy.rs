//! The choices among which the scheduler is free: how many tokens a request gets, who gives way, who may start.
//!
//! First come, first served: running requests are kept in order of arrival and served in it, the newest gives way.

use crate::{SchedulerConfig, request::Request};

#[derive(Debug)]
pub(crate) struct Policy {
    max_chunk: usize,
    max_seqs: usize,
    budget_tokens: usize,
    prompt_logit_rows: usize,
    force_preempt_every: Option<u64>,
}

/// What a step may still hand out.
#[derive(Debug)]
pub(crate) struct Allowance {
    pub tokens: usize,
    pub prompt_logit_rows: usize,
}

impl Policy {
    pub fn new(config: &SchedulerConfig) -> Self {
        Self {
            max_chunk: config.max_chunk.unwrap_or(usize::MAX),
            max_seqs: config.max_seqs,
            budget_tokens: config.budget_tokens,
            prompt_logit_rows: config.prompt_logit_rows,
            force_preempt_every: config.force_preempt_every,
        }
    }

    pub fn allowance(&self) -> Allowance {
        Allowance { tokens: self.budget_tokens, prompt_logit_rows: self.prompt_logit_rows }
    }

    /// Tokens of `request` in this step.
    pub fn chunk(&self, request: &Request, left: &Allowance) -> usize {
        let chunk = request.remaining().min(left.tokens).min(self.max_chunk);
        if request.owes_prompt_logits() { chunk.min(left.prompt_logit_rows) } else { chunk }
    }

    /// The running request that gives way when blocks run out; it has no tokens in this step yet, because those who
    /// came before it are served before it.
    pub fn victim(&self, running: &[Request]) -> usize {
        running.len() - 1
    }

    pub fn has_seat(&self, num_running: usize) -> bool {
        num_running < self.max_seqs
    }

    /// Free blocks to leave alone when another request starts: what those already running need for the tokens they
    /// have, and one more each, so that a newcomer is not sent back at once.
    pub fn headroom(&self, running: &[Request], group: usize, block_tokens: usize) -> usize {
        let still_needs = |r: &Request| r.tokens.len().div_ceil(block_tokens) - r.tables[group].num_blocks() + 1;
        running.iter().map(still_needs).sum()
    }

    /// Test hook: whom to preempt in step number `step`, taking turns.
    pub fn forced_victim(&self, step: u64, running: &[Request]) -> Option<usize> {
        let every = self.force_preempt_every?;
        if every == 0 || !step.is_multiple_of(every) || running.is_empty() {
            return None;
        }
        let start = (step / every) as usize % running.len();
        let turns = (0..running.len()).map(|i| (start + i) % running.len());
        turns.into_iter().find(|&i| running[i].computed > running[i].forced_at)
    }
}
