//! The stream of a request's events, and its aborts.
//!
//! The engine never waits for a reader. Events queue up, at most one for each token and two more,
//! so the limits of the request bound them.

use std::time::Duration;

use folio_scheduler::{Miss, RequestId};

use crate::{
    Logprobs,
    messages::{Message, MessageSender},
};

#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// One entry for each prompt token; the first is none, because no row predicts it. Sent once,
    /// before any token of sample 0.
    PromptLogprobs(Vec<Option<Logprobs>>),
    Token {
        sample: usize,
        token: u32,
        logprobs: Option<Logprobs>,
    },
    /// The token that ended the answer and is no part of it; sent just before the sample's end, and
    /// only if the request asked for logprobs.
    StopToken {
        sample: usize,
        token: u32,
        logprobs: Option<Logprobs>,
    },
    /// The pooled prompt: the whole answer to a request for an embedding.
    Embedding(Vec<f32>),
    /// The last event of a sample.
    Finished {
        sample: usize,
        reason: FinishReason,
        usage: Usage,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The answer ended with this token, which is counted, but not sent as a token of it.
    Stop(u32),
    Length,
    /// An error of this request, or of a step that it was in.
    Error(String),
    /// The deadline passed before the sample was complete.
    Deadline,
    /// The request waited longer than [`crate::EngineConfig::queue_timeout`] and never ran.
    QueueTimeout,
    Aborted,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub prompt_tokens: usize,
    pub completion_tokens: usize,
    /// Prompt tokens from the prefix cache when the request first ran.
    pub cached_tokens: usize,
    /// Reason why they were not more; none if no more are possible.
    pub cache_miss: Option<Miss>,
    /// Number of preemptions.
    pub preemptions: u32,
    /// Drafted tokens that were accepted.
    pub accepted_drafts: usize,
    pub rejected_drafts: usize,
    pub timing: Timing,
}

/// Times of a sample, as seen by the engine's thread. A phase that never began took no time, and
/// the one before it took the rest: a sample that never ran was queued until its end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timing {
    /// From submission to the sample's first step.
    pub queued: Duration,
    /// From then to the first token.
    pub prefill: Duration,
    /// From the first token to the last.
    pub decode: Duration,
}

/// Events of one request, all its samples interleaved. Dropping it aborts samples that still run.
#[derive(Debug)]
pub struct RequestStream {
    events: flume::Receiver<Event>,
    messages: MessageSender,
    /// The samples' ids count up from here.
    first_id: RequestId,
    num_samples: usize,
    num_finished: usize,
}

impl RequestStream {
    pub(crate) fn new(
        events: flume::Receiver<Event>,
        messages: MessageSender,
        first_id: RequestId,
        num_samples: usize,
    ) -> Self {
        Self { events, messages, first_id, num_samples, num_finished: 0 }
    }

    /// Waits for the next event; none when every sample has ended or the engine has stopped.
    pub fn recv(&mut self) -> Option<Event> {
        let event = self.events.recv().ok();
        self.note(event)
    }

    /// As [`RequestStream::recv`], for asynchronous callers.
    pub async fn next(&mut self) -> Option<Event> {
        let event = self.events.recv_async().await.ok();
        self.note(event)
    }

    /// Aborts a sample; it ends with [`FinishReason::Aborted`].
    pub fn abort(&mut self, sample: usize) {
        if sample < self.num_samples {
            // A stopped engine has nothing left to abort.
            self.messages.send(Message::Abort(RequestId(self.first_id.0 + sample as u64)));
        }
    }

    fn note(&mut self, event: Option<Event>) -> Option<Event> {
        if let Some(Event::Finished { .. }) = event {
            self.num_finished += 1;
        }
        event
    }
}

impl Drop for RequestStream {
    fn drop(&mut self) {
        if self.num_finished < self.num_samples {
            (0..self.num_samples).for_each(|sample| self.abort(sample));
        }
    }
}
