//! One sample of a request, from submission to its last event.

use std::{sync::Arc, time::Instant};

use folio_scheduler::Departed;

use crate::{Event, FinishReason, Logprobs, SamplingParams, Usage};

pub(crate) struct Sample {
    pub index: usize,
    pub params: Arc<SamplingParams>,
    pub events: flume::Sender<Event>,
    pub prompt_len: usize,
    pub max_len: usize,
    pub completion_len: usize,
    /// When it must have ended.
    pub deadline: Option<Instant>,
    /// Collected until the prompt is done; only sample 0 has any.
    pub prompt_logprobs: Option<Vec<Option<Logprobs>>>,
}

impl Sample {
    /// A reader that has gone is not an error: its abort is on the way.
    pub fn send(&self, event: Event) {
        let _ = self.events.send(event);
    }

    pub fn take_prompt_logprobs(&mut self, logprobs: Vec<Logprobs>) {
        let Some(collected) = &mut self.prompt_logprobs else { return };
        collected.extend(logprobs.into_iter().map(Some));
        if collected.len() == self.prompt_len {
            let all = self.prompt_logprobs.take().unwrap_or_default();
            self.send(Event::PromptLogprobs(all));
        }
    }

    /// Whether the token just counted ends the answer by itself.
    pub fn stops_at(&self, token: u32, eos: &[u32]) -> bool {
        let is_eos = !self.params.ignore_eos && eos.contains(&token);
        let is_stop = is_eos || self.params.stop_token_ids.contains(&token);
        is_stop && self.completion_len > self.params.min_tokens
    }

    pub fn is_at_length(&self) -> bool {
        self.prompt_len + self.completion_len >= self.max_len
    }

    /// Says the last word. What the scheduler does not know any more was lost with a failed step.
    pub fn finish(self, reason: FinishReason, departed: Option<Departed>) {
        let usage = Usage {
            prompt_tokens: self.prompt_len,
            completion_tokens: self.completion_len,
            cached_tokens: departed.map_or(0, |d| d.cached_tokens),
            cache_miss: departed.and_then(|d| d.miss),
            preemptions: departed.map_or(0, |d| d.preemptions),
        };
        self.send(Event::Finished { sample: self.index, reason, usage });
    }
}
