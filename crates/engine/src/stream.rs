//! What a client hears of its request, and how it says that it has heard enough.
//!
//! The engine never waits for a reader: events queue up, at most one a token and two more, so the request's own limit
//! bounds them.

use std::time::Duration;

use folio_scheduler::{Miss, RequestId};

use crate::{
    Logprobs,
    command::{Line, Message},
};

#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// One entry a prompt token, the first of which nothing predicts; once, before any token of sample 0.
    PromptLogprobs(Vec<Option<Logprobs>>),
    Token {
        sample: usize,
        token: u32,
        logprobs: Option<Logprobs>,
    },
    /// The token that ended the answer, which is no part of it; only where logprobs were asked for, and just before
    /// the sample's end.
    StopToken {
        sample: usize,
        token: u32,
        logprobs: Option<Logprobs>,
    },
    /// The pooled prompt of a request for one, and all there is of its answer.
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
    /// This token ended the answer; it is counted, but not sent as one of its tokens.
    Stop(u32),
    Length,
    /// This request or the step it was in went wrong.
    Error(String),
    /// Its deadline passed before it had ended by itself.
    Deadline,
    /// It waited longer than [`crate::EngineConfig::queue_timeout`] without ever running.
    QueueTimeout,
    Aborted,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub prompt_tokens: usize,
    pub completion_tokens: usize,
    /// Prompt tokens that the prefix cache gave when the request first ran.
    pub cached_tokens: usize,
    /// Why they were not more; none if they are all there could be.
    pub cache_miss: Option<Miss>,
    /// How often it lost its blocks to others and started anew.
    pub preemptions: u32,
    /// Tokens that were guessed ahead and that the model then said, or did not say.
    pub accepted_drafts: usize,
    pub rejected_drafts: usize,
    pub timing: Timing,
}

/// Where a sample's time went, as the engine's thread saw it. What never began took no time, and what came before it
/// took all of it: a sample that never ran was queued its whole life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timing {
    /// From submission to the first step it was in.
    pub queued: Duration,
    /// From then to the first token.
    pub prefill: Duration,
    /// From the first token to the last.
    pub decode: Duration,
}

/// Events of one request, all its samples interleaved. Dropping it aborts what still runs.
#[derive(Debug)]
pub struct RequestStream {
    events: flume::Receiver<Event>,
    commands: Line,
    /// The samples' ids follow each other.
    first_id: RequestId,
    num_samples: usize,
    num_finished: usize,
}

impl RequestStream {
    pub(crate) fn new(events: flume::Receiver<Event>, commands: Line, first_id: RequestId, num_samples: usize) -> Self {
        Self { events, commands, first_id, num_samples, num_finished: 0 }
    }

    /// Waits for the next event; none when every sample has ended or the engine is gone.
    pub fn recv(&mut self) -> Option<Event> {
        let event = self.events.recv().ok();
        self.note(event)
    }

    /// As [`RequestStream::recv`], for asynchronous callers.
    pub async fn next(&mut self) -> Option<Event> {
        let event = self.events.recv_async().await.ok();
        self.note(event)
    }

    /// One sample is no longer wanted; it ends with [`FinishReason::Aborted`].
    pub fn abort(&mut self, sample: usize) {
        if sample < self.num_samples {
            // An engine that is gone has nothing left to abort.
            self.commands.send(Message::Abort(RequestId(self.first_id.0 + sample as u64)));
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
