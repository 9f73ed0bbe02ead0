//! Reasons why a configuration or a request is refused.

use crate::RequestId;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SchedulerError {
    #[error("{field} is 0, but nothing would ever run")]
    ZeroLimit { field: &'static str },
    #[error("a pool of {blocks} blocks is too large to number")]
    PoolTooLarge { blocks: usize },
    #[error("a disk tier needs a host tier above it, but a layer group has no host slots")]
    DiskWithoutHost,
    #[error("request {} is already known", .0.0)]
    DuplicateId(RequestId),
    #[error("the prompt is empty, but at least one token is needed")]
    EmptyPrompt,
    #[error(
        "the prompt has {prompt} tokens, but the sequence may hold only {max_len} with at least one for the answer"
    )]
    PromptTooLong { prompt: usize, max_len: usize },
    #[error("a sequence of {max_len} tokens needs {needed} blocks of layer group {group}, but its pool has {total}")]
    NeverFits { max_len: usize, group: usize, needed: usize, total: usize },
    #[error("no request is accepted any more: the server is shutting down")]
    Draining,
}
