//! What the scheduler says and hears: requests in, a plan a step out, results back in.

/// Made by the engine, never by a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

/// A request as the scheduler sees it: tokens and where it may share.
#[derive(Clone, Debug)]
pub struct NewRequest {
    pub id: RequestId,
    pub prompt: Vec<u32>,
    /// Most tokens the sequence may ever hold, prompt included; checked against the pool on `add`.
    pub max_len: usize,
    /// Prompt positions whose logits are wanted too (prompt logprobs): such a request takes no prefix hit over
    /// positions it has not reported yet.
    pub wants_prompt_logits: bool,
    /// Requests of different salts never share blocks.
    pub cache_salt: u64,
}

/// Rows of one request in a step: tokens `first .. first + tokens.len()` of its sequence are computed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assignment {
    pub id: RequestId,
    /// Position of the first token computed in this step.
    pub first: usize,
    /// The tokens to compute.
    pub tokens: Vec<u32>,
    /// True when this step computes the sequence's last known token, so that its logits give the next one.
    pub samples: bool,
    /// Rows whose logits are wanted because they predict a token of the prompt; mostly empty.
    pub prompt_targets: PromptTargets,
    /// One block table a layer group, covering `first + tokens.len()` tokens.
    pub tables: Vec<Vec<BlockId>>,
}

/// The row at position `first + i` is asked how likely `tokens[i]` was to follow it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PromptTargets {
    pub first: usize,
    pub tokens: Vec<u32>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepPlan {
    pub assignments: Vec<Assignment>,
    /// Requests that lost their blocks in this step and will be recomputed.
    pub preempted: Vec<RequestId>,
}

impl StepPlan {
    pub fn is_empty(&self) -> bool {
        self.assignments.is_empty()
    }

    pub fn num_tokens(&self) -> usize {
        self.assignments.iter().map(|a| a.tokens.len()).sum()
    }
}

/// What is left of a request that has gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Departed {
    /// Tokens that the prefix cache gave when the request first ran.
    pub cached_tokens: usize,
    pub preemptions: u32,
}
