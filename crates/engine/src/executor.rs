//! The interface between the engine's loop and the code that runs a step: a decoder on some device,
//! several ranks, or a mock.

use std::{sync::Arc, time::Duration};

use folio_device::Pulse;
use folio_scheduler::{RequestId, StepPlan};

use crate::{
    Result,
    sampling::SamplingState,
    speculate::{Draft, Owner},
};

/// Most steps in flight: the one that runs, and the next, so that the device never waits for a
/// plan.
pub(crate) const MOST_IN_FLIGHT: usize = 2;

/// Called by an executor each time a step has ended, from any thread: the next
/// [`Executor::collect`] does not wait.
pub type Wake = Box<dyn Fn() + Send>;

/// Runs steps in the order of submission, at most two in flight. It holds the state of each request
/// between steps: its sampling state, and its last sampled token, which the next step's plan does
/// not name.
///
/// The engine's thread owns it and calls it between other work, so no method but `collect` waits
/// for a step. A fault in a step, panics included, is that step's error; a panic out of one of
/// these methods ends the engine.
pub trait Executor: Send {
    /// Called first, once.
    fn on_done(&mut self, wake: Wake);

    /// Adds a request, whose sampling state stays here until `release`. A request that was released
    /// may return with the same id.
    fn admit(&mut self, id: RequestId, admission: Admission);

    /// Queues a step. Its transfers run in order, before its rows and after the steps before.
    fn submit(&mut self, plan: StepPlan) -> Result<()>;

    /// Waits for the oldest step in flight. The step after a failed one fails too: it was planned
    /// on tokens that were never sampled.
    fn collect(&mut self) -> Result<StepOutput>;

    /// Removes a request, complete or not. Steps in flight may still have rows of it.
    fn release(&mut self, id: RequestId);

    /// Whether steps leave the host's cores free, so that the engine's thread may poll for a step
    /// that is about to end.
    fn computes_elsewhere(&self) -> bool {
        false
    }

    /// A pulse that beats while a step makes progress. None if progress is known at the end of a
    /// step alone.
    fn pulse(&self) -> Option<Pulse> {
        None
    }
}

/// A request that is added, for the first time or again.
#[derive(Clone, Debug)]
pub struct Admission {
    /// The tenant and salt that decide which requests may share the data that drafts are made from.
    pub owner: Owner,
    /// The sampling state after `answer`.
    pub state: SamplingState,
    pub prompt: Arc<[u32]>,
    /// The answer so far, if the request was here before.
    pub answer: Vec<u32>,
    /// Tokens of prompt and answer with which the request ends.
    pub max_len: usize,
}

/// Results of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepOutput {
    /// One for each assignment, in the order of the plan.
    pub rows: Vec<RowOutput>,
    /// Time that the step was computed, without its time in the queue.
    pub took: Duration,
    /// The part of `took` that was spent on drafts for the next step.
    pub drafting: Duration,
}

/// Result of a step for one request.
#[derive(Clone, Debug, PartialEq)]
pub struct RowOutput {
    pub id: RequestId,
    /// The next tokens, if the assignment sampled: the accepted drafts in order, and one more,
    /// which is missing after a failure. Empty for an embedding.
    pub sampled: Vec<Sampled>,
    /// The pooled vector of a request for an embedding ([`SamplingState::pooling`]), in place of a
    /// token: returned for the assignment that has `samples` set, and
    /// [`crate::EngineConfig::embedding_width`] long. For the mean every row of the prompt counts
    /// once: the rows of all assignments' `prompt_targets`, and the last one, which would sample.
    pub pooled: Option<Vec<f32>>,
    /// Logprobs of the assignment's prompt targets, one each.
    pub prompt_logprobs: Vec<Logprobs>,
    /// Set if this row alone failed, because a value is not a number: the request ends after the
    /// tokens in `sampled`, and others are not affected.
    pub failure: Option<String>,
    /// The draft for the next step to verify.
    pub draft: Option<Draft>,
    /// Whether the result of its next step will bring a draft, so that no step should be planned
    /// ahead of it.
    pub expects_drafts: bool,
}

impl RowOutput {
    /// A row without results.
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

/// Natural logarithms of probabilities in the model's distribution, before any option of the
/// request.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprobs {
    pub token: u32,
    pub logprob: f32,
    /// 1 for the most likely token.
    pub rank: u32,
    /// The most likely tokens, best first.
    pub top: Vec<(u32, f32)>,
}
