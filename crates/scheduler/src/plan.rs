//! The scheduler's interface: requests in, one plan a step out, results back in.

use std::sync::Arc;

use crate::draft::{Draft, depths};

/// Assigned by the engine, never by a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// A KV block of the device, in one layer group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

impl BlockId {
    /// Takes the place of a block behind a sliding window in a block table: the block was freed,
    /// and no row of the plan reads it.
    pub const GONE: BlockId = BlockId(u32::MAX);
}

/// Room for one block in the host tier, in one layer group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HostSlot(pub u32);

/// Nanoseconds since a start that the caller chose. Time is an argument: the scheduler has no
/// clock.
pub type Nanos = u64;

/// A request as the scheduler sees it: its tokens, what it shares, and its place in the order.
#[derive(Clone, Debug)]
pub struct NewRequest {
    pub id: RequestId,
    pub prompt: Vec<u32>,
    /// Most tokens that the sequence may have, prompt included; checked against the pools by
    /// [`crate::Scheduler::add`].
    pub max_len: usize,
    /// Whether logits of prompt rows are needed too, for prompt logprobs: such a request takes no
    /// prefix hit over positions whose logits it still needs.
    pub wants_prompt_logits: bool,
    /// Requests of different salts never share blocks.
    pub cache_salt: u64,
    /// Lower runs sooner. Each level is worth [`crate::SchedulerConfig::aging`] of waiting time.
    pub priority: i32,
    /// The owner of the share of the machine that the request uses.
    pub tenant: u64,
    /// The tenant's share relative to others; the newest request's value counts. At least 1.
    pub weight: u32,
    /// Time after which the request expires, in any state.
    pub deadline: Option<Nanos>,
    /// A request with the same first tokens: another sample of the same prompt, or the sequence
    /// that this one continues. While it runs, this request waits for the tokens that both share,
    /// and copies its partial block.
    pub fork_of: Option<RequestId>,
}

impl NewRequest {
    /// A request with default options.
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

/// Rows of one request in a step. Row `i` writes its keys and values to place `first + i` of the
/// sequence. That is its position too, unless it is a draft: see [`Assignment::positions`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assignment {
    pub id: RequestId,
    /// Place of the first token computed in this step.
    pub first: usize,
    /// The tokens to compute, as far as they are known.
    pub tokens: Vec<u32>,
    /// Whether one more row follows `tokens`: that of the token which this request's last
    /// assignment samples. Only the executor knows the token, because its step may be in flight
    /// when this plan is made.
    pub awaits_token: bool,
    /// Number of drafts to verify, at the end of `tokens`. An assignment with drafts has exactly
    /// one row before them, that of the sequence's last token, and no `awaits_token`. If the
    /// accepted path is not right after that row, the executor moves its keys and values there
    /// before any transfer or row of a later plan, because the blocks may belong to another request
    /// by then.
    pub num_drafts: usize,
    /// Parent of each draft, as a number among the drafts before it. None: the draft follows the
    /// sequence's last token.
    pub parents: Vec<Option<u16>>,
    /// Whether this step computes the sequence's last token, so that its logits give the next one.
    /// With drafts, the last `num_drafts + 1` rows give logits.
    pub samples: bool,
    /// Rows whose logits give logprobs of prompt tokens; mostly empty.
    pub prompt_targets: PromptTargets,
    /// Block table of each layer group, for `first + num_rows()` tokens; [`BlockId::GONE`] behind a
    /// window. Shared with earlier plans as long as it does not change.
    pub tables: Arc<[Vec<BlockId>]>,
}

impl Assignment {
    pub fn num_rows(&self) -> usize {
        self.tokens.len() + usize::from(self.awaits_token)
    }

    /// The tokens to verify.
    pub fn drafts(&self) -> &[u32] {
        &self.tokens[self.tokens.len() - self.num_drafts..]
    }

    /// The same as a tree.
    pub fn draft(&self) -> Draft {
        Draft::new(self.drafts(), &self.parents)
    }

    /// Position of every row in its own sequence: a draft comes after its parent, whatever its
    /// slot.
    pub fn positions(&self) -> impl Iterator<Item = usize> {
        let end = self.first + self.num_rows() - self.num_drafts;
        let drafts = depths(&self.parents).into_iter().map(move |depth| end - 1 + depth);
        (self.first..end).chain(drafts)
    }
}

/// Prompt logprobs: the logits of row `first + i` give the logprob of `tokens[i]`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PromptTargets {
    pub first: usize,
    pub tokens: Vec<u32>,
}

/// A transfer of a whole block. A plan's transfers run in order, before its rows and after those of
/// the plan before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// Within the device, a partial block that two sequences share.
    Copy { group: usize, from: BlockId, to: BlockId },
    /// From the device to the host tier.
    Save { group: usize, from: BlockId, to: HostSlot },
    /// From the host tier to the device.
    Load { group: usize, from: HostSlot, to: BlockId },
}

/// A task for the disk tier, which runs beside the steps. It may start when the transfers of its
/// plan and of all earlier ones are done, since these use its host slots. It owns the slots until
/// its end is reported by [`crate::Scheduler::disk_done`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskTask {
    pub ticket: u64,
    pub kind: DiskTaskKind,
    pub chunk: DiskChunk,
    /// The blocks' slots in the host tier: `slots[group][block]`.
    pub slots: Vec<Vec<HostSlot>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskTaskKind {
    /// From host slots to disk.
    Store,
    /// From disk to host slots.
    Fetch,
}

/// Consecutive full blocks of a sequence, which the disk tier stores as one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskChunk {
    /// Keyed hash of the sequence up to the end of the chunk.
    pub key: u128,
    /// The same up to the chunk's beginning; 0 at the start of a sequence.
    pub parent: u128,
    pub salt: u64,
    pub tokens: Vec<u32>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepPlan {
    pub transfers: Vec<Transfer>,
    pub assignments: Vec<Assignment>,
    pub disk_tasks: Vec<DiskTask>,
    /// Requests that were preempted in this step and will be computed again.
    pub preempted: Vec<Preempted>,
    /// Requests whose deadline has passed, and which were removed.
    pub expired: Vec<(RequestId, Departed)>,
}

impl StepPlan {
    /// Whether the plan has no work for the executor.
    pub fn is_empty(&self) -> bool {
        self.assignments.is_empty() && self.transfers.is_empty()
    }

    pub fn num_rows(&self) -> usize {
        self.assignments.iter().map(Assignment::num_rows).sum()
    }
}

/// A preempted request, and the cost of resuming it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preempted {
    pub id: RequestId,
    /// Time to compute its tokens again.
    pub computing: Nanos,
    /// Time to copy its full blocks to the host tier and back; none without a host tier. If it is
    /// less than `computing`, its blocks go to the host tier when they are evicted.
    pub copying: Option<Nanos>,
}

/// The result of a step for one request. It has no token if the assignment did not sample, or if
/// its row failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowResult {
    pub id: RequestId,
    /// The accepted drafts, a path from the root of the tree; mostly empty. Their keys and values
    /// are right after the sequence's last token.
    pub accepted: Vec<u32>,
    /// The token after them.
    pub token: Option<u32>,
}

/// Figures of a request that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Departed {
    /// Tokens from the prefix cache when the request first ran, and why they were not more.
    pub cached_tokens: usize,
    pub miss: Option<Miss>,
    pub preemptions: u32,
}

/// Reason why a prefix hit did not cover the whole prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Miss {
    /// The prefix cache is off.
    Disabled,
    /// The prompt has no full block that could be shared.
    Short,
    /// Prompt logprobs need every position computed.
    PromptLogits,
    /// The next block was in the cache and has been evicted.
    Evicted,
    /// The next block was never computed.
    New,
    /// The request ended before it ran.
    NeverRan,
}
