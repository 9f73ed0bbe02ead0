//! The border between the engine's loop and whatever runs a step: a decoder on some device, several ranks, or a mock.

use std::{sync::Arc, time::Duration};

use folio_device::Pulse;
use folio_scheduler::{RequestId, StepPlan};

use crate::{
    Result,
    sampling::SamplingState,
    speculate::{Draft, Owner},
};

/// Most steps in flight: one that runs, and the next, so that the device never waits for a plan.
pub(crate) const MOST_IN_FLIGHT: usize = 2;

/// Called by an executor each time a step has ended, from whatever thread: one [`Executor::collect`] will not wait.
pub type Wake = Box<dyn Fn() + Send>;

/// Runs steps in the order they are submitted, at most two in flight. It keeps what belongs to a request between
/// steps: its sampling state and the token it sampled last, which the next step's plan does not name.
///
/// The engine's thread owns it and calls it between other work, so that no method but `collect` waits for a step. What
/// goes wrong in a step is that step's error, panics included: a panic out of one of these methods ends the engine.
pub trait Executor: Send {
    /// Comes before anything else, once.
    fn on_done(&mut self, wake: Wake);

    /// A request joins: its sampling state stays here until `release`. One that left may come again under the same id.
    fn admit(&mut self, id: RequestId, admission: Admission);

    /// Queues a step. Its transfers are done in order, before its rows and after the steps before.
    fn submit(&mut self, plan: StepPlan) -> Result<()>;

    /// Waits for the oldest step in flight. After a step that failed, the one behind it fails too: it was planned on
    /// tokens that were never sampled.
    fn collect(&mut self) -> Result<StepOutput>;

    /// A request has left, finished or not. Steps in flight may still hold rows of it.
    fn release(&mut self, id: RequestId);

    /// Whether steps leave the host's cores alone, so that the engine's thread may stay awake for one that is about to
    /// end.
    fn computes_elsewhere(&self) -> bool {
        false
    }

    /// What beats while a step gets on, from its beginning to its end. None where only the end is heard of.
    fn pulse(&self) -> Option<Pulse> {
        None
    }
}

/// A request as it joins, for the first time or again.
#[derive(Clone, Debug)]
pub struct Admission {
    /// With whom it may share what drafts are made from.
    pub owner: Owner,
    /// Has observed the answer so far.
    pub state: SamplingState,
    pub prompt: Arc<[u32]>,
    /// What there is of an answer, where it has been here before.
    pub answer: Vec<u32>,
    /// Tokens of prompt and answer with which it ends.
    pub max_len: usize,
}

/// What came of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepOutput {
    /// One an assignment, in the order of the plan.
    pub rows: Vec<RowOutput>,
    /// How long the step itself was computed, without its time in the queue.
    pub took: Duration,
    /// How much of that went into drafts for the next one.
    pub drafting: Duration,
}

/// What a step found out about one request.
#[derive(Clone, Debug, PartialEq)]
pub struct RowOutput {
    pub id: RequestId,
    /// The next tokens, where the assignment sampled: the drafts that hold, in order, and one more, which is missing where
    /// there is a failure. None for a request that wants its prompt pooled.
    pub sampled: Vec<Sampled>,
    /// The vector of a request that wants its prompt pooled ([`SamplingState::pooling`]), in place of a token: with the
    /// assignment that has `samples` set, [`crate::EngineConfig::embedding_width`] long. For the mean, every row of the
    /// prompt counts once: those of all assignments' `prompt_targets`, and at last the row that would sample.
    pub pooled: Option<Vec<f32>>,
    /// Logprobs of the assignment's prompt targets, one each.
    pub prompt_logprobs: Vec<Logprobs>,
    /// Set when this row alone went wrong (not a number): the request ends behind what it sampled, its neighbours go on.
    pub failure: Option<String>,
    /// What may come next, for the next step to verify.
    pub draft: Option<Draft>,
    /// Whether the result of its next step will bring a draft, so that nothing should be planned ahead of it.
    pub expects_drafts: bool,
}

impl RowOutput {
    /// Nothing known yet.
    pub fn new(id: RequestId) -> Self {
        Self {
            id,
            sampled: Vec::new(),
            pooled: None,
            prompt_logprobs: Vec::new(),
            failure: None,
            draft: None,
            expects_drafts: false,
        }
    }

    pub fn failed(id: RequestId, reason: impl ToString) -> Self {
        Self { failure: Some(reason.to_string()), ..Self::new(id) }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    pub token: u32,
    pub logprobs: Option<Logprobs>,
}

/// Natural logarithms of probabilities under the model's raw distribution.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprobs {
    pub token: u32,
    pub logprob: f32,
    /// 1 for the most likely token.
    pub rank: u32,
    /// The most likely tokens, best first.
    pub top: Vec<(u32, f32)>,
}
