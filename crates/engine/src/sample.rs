//! One sample of a request, from submission to its last event.

use std::{sync::Arc, time::Instant};

use folio_scheduler::Departed;

use crate::{Event, FinishReason, Logprobs, SamplingParams, Timing, Usage};

pub(crate) struct Sample {
    pub index: usize,
    pub params: Arc<SamplingParams>,
    pub events: flume::Sender<Event>,
    pub prompt_len: usize,
    pub max_len: usize,
    pub completion_len: usize,
    pub times: Times,
    /// When it must have ended.
    pub deadline: Option<Instant>,
    /// Collected until the prompt is done; only sample 0 has any.
    pub prompt_logprobs: Option<Vec<Option<Logprobs>>>,
}

/// Moments of a sample's life, as far as it has come.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    submitted: Instant,
    started: Option<Instant>,
    /// First and last token.
    tokens: Option<(Instant, Instant)>,
}

impl Times {
    pub fn new(submitted: Instant) -> Self {
        Self { submitted, started: None, tokens: None }
    }

    /// It is in a step that was handed over `now`.
    pub fn start(&mut self, now: Instant) {
        self.started.get_or_insert(now);
    }

    /// It got a token.
    pub fn token(&mut self, now: Instant) {
        self.tokens = Some((self.tokens.map_or(now, |(first, _)| first), now));
    }

    pub fn until(&self, end: Instant) -> Timing {
        let started = self.started.unwrap_or(end);
        let (first, last) = self.tokens.unwrap_or((end, end));
        let [queued, prefill, decode] = [(self.submitted, started), (started, first), (first, last)]
            .map(|(from, to)| to.saturating_duration_since(from));
        Timing { queued, prefill, decode }
    }
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
            timing: self.times.until(Instant::now()),
        };
        self.send(Event::Finished { sample: self.index, reason, usage });
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_parts_of_a_life_add_up() {
        let zero = Instant::now();
        let at = |ms| zero + Duration::from_millis(ms);
        let mut times = Times::new(zero);
        let check = |times: Times, end, queued, prefill, decode| {
            let [queued, prefill, decode] = [queued, prefill, decode].map(Duration::from_millis);
            assert_eq!(times.until(at(end)), Timing { queued, prefill, decode });
        };
        check(times, 7, 7, 0, 0);
        times.start(at(10));
        times.start(at(12));
        check(times, 15, 10, 5, 0);
        times.token(at(20));
        check(times, 25, 10, 10, 0);
        times.token(at(30));
        times.token(at(50));
        check(times, 60, 10, 10, 30);
    }
}
