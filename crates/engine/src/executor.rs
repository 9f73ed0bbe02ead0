//! The border between the engine's loop and whatever runs a step: a decoder on some device, several ranks, or a mock.

use folio_scheduler::{RequestId, StepPlan};

use crate::{Result, sampling::SamplingState};

/// Runs steps. One thread owns it; it keeps what belongs to a request between steps.
pub trait Executor: Send {
    /// A request joins: its sampling state stays here until `release`.
    fn admit(&mut self, id: RequestId, state: SamplingState);

    /// Starts a step. At most one is in flight.
    fn submit(&mut self, plan: &StepPlan) -> Result<()>;

    /// Waits for the step in flight and gives its results, in the order of the plan's assignments.
    fn collect(&mut self) -> Result<Vec<RowOutput>>;

    /// A request has left, finished or not.
    fn release(&mut self, id: RequestId);
}

/// What a step found out about one request.
#[derive(Clone, Debug, PartialEq)]
pub struct RowOutput {
    pub id: RequestId,
    /// The next token, where the assignment sampled.
    pub sampled: Option<Sampled>,
    /// Logprobs of the assignment's prompt targets, one each.
    pub prompt_logprobs: Vec<Logprobs>,
    /// Set when this row alone went wrong (not a number): the request ends, its neighbours go on.
    pub failure: Option<String>,
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
