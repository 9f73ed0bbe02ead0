//! Errors, by the call that returns them: starting the engine or running a step, making a request,
//! submitting one.

use std::time::Duration;

use folio_scheduler::{RequestId, SchedulerError};

use crate::InvalidParam;

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The engine could not start, or a step failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{field} is {value}, but at least {least} is needed")]
    Config { field: &'static str, value: usize, least: usize },
    #[error(transparent)]
    Scheduler(#[from] SchedulerError),
    #[error(transparent)]
    Model(#[from] folio_model::Error),
    #[error("layer group {group} needs {wanted} blocks of the host tier, but it has {found}")]
    HostSlots { group: usize, wanted: usize, found: usize },
    #[error("a thread of the engine cannot start: {0}")]
    Thread(#[from] std::io::Error),
    #[error("request {} has no sampling state", .0.0)]
    UnknownRequest(RequestId),
    #[error("no step is in flight")]
    NothingSubmitted,
    #[error("the step panicked")]
    StepPanicked,
    #[error("the executor's thread has ended")]
    ExecutorGone,
    /// A step failed, and every other would fail too: the executor has to be rebuilt.
    #[error("{0}")]
    Lost(String),
    #[error("it was rebuilt too often in the last minute")]
    TooManyRestarts,
    #[error("the function that builds it panicked")]
    RebuildPanicked,
    #[error("a transfer of a block needs a host tier, but there is none")]
    NoHostTier,
    #[error(
        "every layer of this {family} model has a sliding window, but a draft model needs one that keeps all blocks"
    )]
    OnlyWindows { family: &'static str },
    /// An error of another kind of executor.
    #[error("{0}")]
    Step(String),
}

impl Error {
    /// Error of a step that was planned on the tokens of a failed one.
    pub(crate) fn after_failure() -> Self {
        Self::Step("the step before this one failed".to_owned())
    }
}

/// Reason why a request is refused before it is queued.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum InvalidRequest {
    #[error("the prompt is empty, but at least one token is needed")]
    EmptyPrompt,
    #[error("the prompt has {prompt} tokens, but at most {most} fit with one for the answer")]
    PromptTooLong { prompt: usize, most: usize },
    #[error("the input has {input} tokens, but at most {most} fit")]
    InputTooLong { input: usize, most: usize },
    #[error("this engine gives no embeddings")]
    NoEmbeddings,
    #[error("token {token} at position {position} of the prompt is not below the vocabulary's {logits_width}")]
    UnknownToken { token: u32, position: usize, logits_width: usize },
    #[error("prompt and answer together may take {max_len} tokens, but the KV pool holds {most}; lower max_tokens")]
    NeverFits { max_len: usize, most: usize },
    #[error("n is {n}, but at most {most} sequences run at once")]
    TooManySamples { n: usize, most: usize },
    #[error("allowed_tokens, banned_tokens, bad_words and min_tokens together leave no token to choose")]
    NothingToChoose,
    #[error(transparent)]
    Sampling(#[from] InvalidParam),
}

/// Reason why a valid request is not accepted now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// `retry_after`: expected wait of a new request for its first token.
    #[error("the queue is full; try again in {:.1} s", retry_after.as_secs_f64())]
    QueueFull { retry_after: Duration },
    #[error("no request is accepted any more: the engine is about to end")]
    Draining,
    #[error("the engine has stopped")]
    Stopped,
}
