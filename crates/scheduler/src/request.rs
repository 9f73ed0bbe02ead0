//! One request's place between nothing computed and everything computed.

use crate::{
    NewRequest, PromptTargets, RequestId,
    blocks::{prefix::ChainHash, table::Table},
};

#[derive(Debug)]
pub(crate) struct Request {
    pub id: RequestId,
    /// Order of arrival, kept through preemption.
    pub arrival: u64,
    /// Prompt and answer so far.
    pub tokens: Vec<u32>,
    pub prompt_len: usize,
    pub max_len: usize,
    pub salt: u64,
    pub wants_prompt_logits: bool,
    /// Rows of the prompt whose logits have been reported, in front.
    pub prompt_logits_done: usize,
    /// Tokens whose keys and values are in the tables; at most `tokens.len()`.
    pub computed: usize,
    /// Tokens of the step under way.
    pub in_flight: usize,
    /// One a layer group; empty while the request waits.
    pub tables: Vec<Table>,
    /// Hashes of the full blocks of `tokens`, as far as anybody asked.
    pub hashes: Vec<ChainHash>,
    /// Prefix hit of the first admission.
    pub cached_tokens: Option<usize>,
    pub preemptions: u32,
    /// `computed` when the test hook last struck: it must be passed before it strikes again, or nothing would finish.
    pub forced_at: usize,
}

impl Request {
    pub fn new(request: NewRequest, arrival: u64, tables: Vec<Table>) -> Self {
        Self {
            id: request.id,
            arrival,
            prompt_len: request.prompt.len(),
            tokens: request.prompt,
            max_len: request.max_len,
            salt: request.cache_salt,
            wants_prompt_logits: request.wants_prompt_logits,
            prompt_logits_done: 0,
            computed: 0,
            in_flight: 0,
            tables,
            hashes: Vec::new(),
            cached_tokens: None,
            preemptions: 0,
            forced_at: 0,
        }
    }

    /// Tokens still to compute.
    pub fn remaining(&self) -> usize {
        self.tokens.len() - self.computed
    }

    /// Rows of the prompt that predict another token of it.
    fn prompt_rows(&self) -> usize {
        if self.wants_prompt_logits { self.prompt_len - 1 } else { 0 }
    }

    pub fn owes_prompt_logits(&self) -> bool {
        self.prompt_logits_done < self.prompt_rows()
    }

    /// Most tokens a prefix hit may cover: never the last one, whose logits are needed, and no prompt row whose logits
    /// are owed.
    pub fn shareable_tokens(&self) -> usize {
        let most = self.tokens.len() - 1;
        if self.owes_prompt_logits() { most.min(self.prompt_logits_done) } else { most }
    }

    /// Of the next `count` tokens, the rows that owe logits.
    pub fn prompt_targets(&self, count: usize) -> PromptTargets {
        let first = self.computed.max(self.prompt_logits_done);
        let end = (self.computed + count).min(self.prompt_rows());
        if first >= end {
            return PromptTargets::default();
        }
        PromptTargets { first, tokens: self.tokens[first + 1..=end].to_vec() }
    }

    /// The step under way is done.
    pub fn advance(&mut self, sampled: Option<u32>) {
        assert!(self.in_flight > 0, "request {} has no step under way", self.id.0);
        self.computed += std::mem::take(&mut self.in_flight);
        self.prompt_logits_done = self.prompt_logits_done.max(self.computed.min(self.prompt_rows()));
        if let Some(token) = sampled {
            assert_eq!(self.computed, self.tokens.len(), "request {} sampled too early", self.id.0);
            assert!(self.tokens.len() < self.max_len, "request {} outgrew its {} tokens", self.id.0, self.max_len);
            self.tokens.push(token);
        }
    }

    /// Slots of its blocks that hold nothing, in one group.
    pub fn unused_slots(&self, group: usize, block_tokens: usize) -> usize {
        self.tables[group].num_blocks() * block_tokens - self.computed
    }
}
