//! What the scheduler says and hears: requests in, a plan a step out, results back in.

use std::sync::Arc;

use crate::draft::{Draft, depths};

/// Made by the engine, never by a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// A KV block of the device, in one layer group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

impl BlockId {
    /// Stands in a table for a block that fell out of a sliding window: its keys are not there any more, and no row of
    /// the plan sees them.
    pub const GONE: BlockId = BlockId(u32::MAX);
}

/// A place for one block in the host tier, in one layer group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HostSlot(pub u32);

/// Nanoseconds since a start that the caller chose. Time comes in as an argument and never runs by itself.
pub type Nanos = u64;

/// A request as the scheduler sees it: tokens, where it may share, and whom it may overtake.
#[derive(Clone, Debug)]
pub struct NewRequest {
    pub id: RequestId,
    pub prompt: Vec<u32>,
    /// Most tokens the sequence may ever hold, prompt included; checked against the pools on `add`.
    pub max_len: usize,
    /// Prompt positions whose logits are wanted too (prompt logprobs): such a request takes no prefix hit over
    /// positions it has not reported yet.
    pub wants_prompt_logits: bool,
    /// Requests of different salts never share blocks.
    pub cache_salt: u64,
    /// Lower runs sooner. Each level is worth [`crate::SchedulerConfig::aging`] of waiting.
    pub priority: i32,
    /// Whose share of the machine this uses.
    pub tenant: u64,
    /// The tenant's share against others'; the last request's word counts. At least 1.
    pub weight: u32,
    /// When it must have ended; later it is expired, wherever it is.
    pub deadline: Option<Nanos>,
    /// A request with the same beginning (another sample of the same prompt, or what this one continues): while it
    /// runs, this one waits for the part they share and copies its partial block.
    pub fork_of: Option<RequestId>,
}

impl NewRequest {
    /// A request without wishes.
    pub fn new(id: RequestId, prompt: Vec<u32>, max_len: usize) -> Self {
        Self {
            id,
            prompt,
            max_len,
            wants_prompt_logits: false,
            cache_salt: 0,
            priority: 0,
            tenant: 0,
            weight: 1,
            deadline: None,
            fork_of: None,
        }
    }
}

/// Rows of one request in a step. Row `i` leaves its keys and values at place `first + i` of the sequence, and stands at
/// that position too, unless it is a draft: see [`Assignment::positions`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assignment {
    pub id: RequestId,
    /// Position of the first token computed in this step.
    pub first: usize,
    /// The tokens to compute, as far as they are known.
    pub tokens: Vec<u32>,
    /// One more row follows `tokens`: that of the token which this request's last assignment samples. It may still be
    /// under way when this plan is made, so only the executor knows it.
    pub awaits_token: bool,
    /// How many of `tokens`, at their end, are drafts to be verified. Never together with `awaits_token`, and always
    /// behind exactly one other row, that of the sequence's last token. Where the accepted path does not lie behind that
    /// row without gaps, the executor moves its keys and values there: before any transfer or row of a later plan, as the
    /// blocks may be somebody else's by then.
    pub num_drafts: usize,
    /// For each draft the draft that it follows, counted among drafts, which comes before it; none: it follows the
    /// sequence's last token.
    pub parents: Vec<Option<u16>>,
    /// True when this step computes the sequence's last token, so that its logits give the next one. With drafts, the
    /// `num_drafts + 1` last rows give logits.
    pub samples: bool,
    /// Rows whose logits are wanted because they predict a token of the prompt; mostly empty.
    pub prompt_targets: PromptTargets,
    /// One block table a layer group, covering `first + num_rows()` tokens; [`BlockId::GONE`] where a window has passed.
    /// Shared with the plans before, as long as it does not change.
    pub tables: Arc<[Vec<BlockId>]>,
}

impl Assignment {
    pub fn num_rows(&self) -> usize {
        self.tokens.len() + usize::from(self.awaits_token)
    }

    /// The tokens to be verified.
    pub fn drafts(&self) -> &[u32] {
        &self.tokens[self.tokens.len() - self.num_drafts..]
    }

    /// The same as the tree that they are.
    pub fn draft(&self) -> Draft {
        Draft::new(self.drafts(), &self.parents)
    }

    /// Position of every row in its own sequence: a draft stands behind its parent, wherever its slot is.
    pub fn positions(&self) -> impl Iterator<Item = usize> {
        let end = self.first + self.num_rows() - self.num_drafts;
        let drafts = depths(&self.parents).into_iter().map(move |depth| end - 1 + depth);
        (self.first..end).chain(drafts)
    }
}

/// The row at position `first + i` is asked how likely `tokens[i]` was to follow it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PromptTargets {
    pub first: usize,
    pub tokens: Vec<u32>,
}

/// Whole blocks on the move. A plan's transfers are done in order, before its rows and after those of the plan before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// Within the device: a partial block that two sequences had in common.
    Copy { group: usize, from: BlockId, to: BlockId },
    /// From the device to the host tier.
    Save { group: usize, from: BlockId, to: HostSlot },
    /// From the host tier to the device.
    Load { group: usize, from: HostSlot, to: BlockId },
}

/// Work for the disk tier, done beside the steps. It may begin when its plan's transfers and all before them are done:
/// until then its host slots may be read or written by those. Its end is told with [`crate::Scheduler::disk_done`]; until
/// then its host slots belong to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskTask {
    pub ticket: u64,
    pub kind: DiskTaskKind,
    pub chunk: DiskChunk,
    /// Where the blocks lie in the host tier: `slots[group][block]`.
    pub slots: Vec<Vec<HostSlot>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskTaskKind {
    /// From host slots to disk.
    Store,
    /// From disk to host slots.
    Fetch,
}

/// Some consecutive full blocks of a sequence, which the disk tier keeps as one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskChunk {
    /// Keyed hash of the sequence up to the chunk's end.
    pub key: u128,
    /// The same up to its beginning; 0 at the start of a sequence.
    pub parent: u128,
    pub salt: u64,
    pub tokens: Vec<u32>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepPlan {
    pub transfers: Vec<Transfer>,
    pub assignments: Vec<Assignment>,
    pub disk_tasks: Vec<DiskTask>,
    /// Requests that lost their blocks in this step and will go on later.
    pub preempted: Vec<Preempted>,
    /// Requests whose deadline has passed: they are gone.
    pub expired: Vec<(RequestId, Departed)>,
}

impl StepPlan {
    /// Whether there is nothing for the executor in it.
    pub fn is_empty(&self) -> bool {
        self.assignments.is_empty() && self.transfers.is_empty()
    }

    pub fn num_rows(&self) -> usize {
        self.assignments.iter().map(Assignment::num_rows).sum()
    }
}

/// A request that gave way, and what bringing it back costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preempted {
    pub id: RequestId,
    /// Computing its tokens again.
    pub computing: Nanos,
    /// Copying its full blocks to the host tier and back; none without a host tier. Its blocks go to the host tier when
    /// others need their place, if this is less than computing them.
    pub copying: Option<Nanos>,
}

/// What a step found out about one request. No token where the assignment did not sample, or its row failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowResult {
    pub id: RequestId,
    /// The drafts that hold, a path through the tree from its root; mostly empty. Their keys and values lie behind the
    /// sequence's last token, without gaps.
    pub accepted: Vec<u32>,
    /// What follows them.
    pub token: Option<u32>,
}

/// What is left of a request that has gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Departed {
    /// Tokens that the prefix cache gave when the request first ran, and what came between it and more.
    pub cached_tokens: usize,
    pub miss: Option<Miss>,
    pub preemptions: u32,
}

/// Why a prefix hit ended where it did, short of the whole prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Miss {
    /// The prefix cache is off.
    Disabled,
    /// The prompt has no full block that could be shared.
    Short,
    /// Prompt logprobs need every position computed.
    PromptLogits,
    /// The next block was in the cache once and has been evicted.
    Evicted,
    /// Nothing computed so far goes on like this prompt.
    New,
    /// The request ended before it ran.
    NeverRan,
}
