//! One sample of a request, from submission to its last event.

use std::{sync::Arc, time::Instant};

use folio_scheduler::{Departed, Miss, NewRequest, RequestId};

use crate::{
    Admission, Event, FinishReason, Logprobs, Pooling, RequestOptions, RowOutput, Sampled, SamplingParams,
    SamplingState, Timing, Usage, config::nanos, mail::Mail, speculate::Owner,
};

pub(crate) struct Sample {
    pub index: usize,
    pub params: Arc<SamplingParams>,
    pub events: flume::Sender<Event>,
    pub prompt: Arc<[u32]>,
    /// The answer so far, a token that ended it included.
    pub output: Vec<u32>,
    pub max_len: usize,
    /// What is wanted in place of an answer.
    pub pooling: Option<Pooling>,
    pub options: RequestOptions,
    /// The sample of the same prompt that came first.
    pub fork_of: Option<RequestId>,
    pub times: Times,
    /// When it must have ended.
    pub deadline: Option<Instant>,
    /// Collected until the prompt is done; only sample 0 has any.
    pub prompt_logprobs: Option<Vec<Option<Logprobs>>>,
    pub lives: Lives,
    pub drafts: Drafts,
}

/// What outlives a sample's time in the scheduler, where it has to go in more than once.
#[derive(Debug, Default)]
pub(crate) struct Lives {
    /// Whether it has run since it last went in.
    has_run: bool,
    /// What the prefix cache gave when it first ran.
    first_hit: Option<usize>,
    /// Why it was not more, if it is known, and how often it gave way, in lives before.
    miss: Option<Miss>,
    preemptions: u32,
    /// How much of an answer there was when it was last tried alone.
    tried_at: Option<usize>,
}

/// What became of guesses at a sample's answer.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Drafts {
    planned: usize,
    accepted: usize,
}

impl Drafts {
    /// A step had so many.
    pub fn note(&mut self, planned: usize, accepted: usize) {
        self.planned += planned;
        self.accepted += accepted;
    }
}

impl Lives {
    /// It is in a step, and `first` tokens were there before.
    pub fn start(&mut self, first: usize) {
        self.has_run = true;
        self.first_hit.get_or_insert(first);
    }
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

    pub fn has_started(&self) -> bool {
        self.started.is_some()
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
    pub fn take_prompt_logprobs(&mut self, logprobs: Vec<Logprobs>, mail: &mut Mail) {
        let Some(collected) = &mut self.prompt_logprobs else { return };
        collected.extend(logprobs.into_iter().map(Some));
        if collected.len() == self.prompt.len() {
            let all = self.prompt_logprobs.take().unwrap_or_default();
            mail.post(&self.events, Event::PromptLogprobs(all));
        }
    }

    /// What is wrong with a row that must end the prompt: each request gets what it asked for, and nothing else.
    pub fn find_fault(&self, row: &RowOutput, embedding_width: usize) -> Option<&'static str> {
        match (self.pooling, row.sampled.is_empty(), &row.pooled) {
            (None, false, None) => None,
            (None, ..) => Some("the step gave no token"),
            (Some(_), true, Some(vector)) if vector.len() == embedding_width => None,
            (Some(_), ..) => Some("the step gave no embedding"),
        }
    }

    /// The next token of the answer, which its reader hears of; why the answer ends with it, if it does.
    pub fn take_token(&mut self, sampled: Sampled, eos: &[u32], now: Instant, mail: &mut Mail) -> Option<FinishReason> {
        let (sample, Sampled { token, logprobs }) = (self.index, sampled);
        self.output.push(token);
        self.times.token(now);
        if self.stops_at(token, eos) {
            if self.params.logprobs.is_some() {
                mail.post(&self.events, Event::StopToken { sample, token, logprobs });
            }
            return Some(FinishReason::Stop(token));
        }
        mail.post(&self.events, Event::Token { sample, token, logprobs });
        self.is_at_length().then_some(FinishReason::Length)
    }

    /// Whether the token just counted ends the answer by itself.
    fn stops_at(&self, token: u32, eos: &[u32]) -> bool {
        let is_eos = !self.params.ignore_eos && eos.contains(&token);
        let is_stop = is_eos || self.params.stop_token_ids.contains(&token);
        is_stop && self.output.len() > self.params.min_tokens
    }

    fn is_at_length(&self) -> bool {
        self.num_tokens() >= self.max_len
    }

    /// Prompt and answer so far.
    pub fn num_tokens(&self) -> usize {
        self.prompt.len() + self.output.len()
    }

    /// As the scheduler hears of it, whose time began at `epoch`.
    pub fn to_request(&self, id: RequestId, epoch: Instant) -> NewRequest {
        let options = &self.options;
        NewRequest {
            wants_prompt_logits: self.prompt_logprobs.is_some() || self.pooling.is_some_and(Pooling::needs_all_rows),
            cache_salt: options.cache_salt,
            priority: options.priority,
            tenant: options.tenant,
            weight: options.weight,
            deadline: self.deadline.map(|time| nanos(time.saturating_duration_since(epoch))),
            // Once it has an answer of its own, there is no more to share than the prefix cache knows.
            fork_of: self.fork_of.filter(|_| self.output.is_empty()),
            ..NewRequest::new(id, [&self.prompt[..], &self.output].concat(), self.max_len)
        }
    }

    /// What an executor that does not know it has to know.
    pub fn admission(&self, eos: &[u32]) -> Admission {
        let (prompt, answer) = (Arc::clone(&self.prompt), self.output.clone());
        Admission { owner: self.owner(), state: self.sampling_state(eos), prompt, answer, max_len: self.max_len }
    }

    pub fn owner(&self) -> Owner {
        Owner { tenant: self.options.tenant, salt: self.options.cache_salt }
    }

    /// The sampling state that it would have now, had nothing ever gone wrong.
    fn sampling_state(&self, eos: &[u32]) -> SamplingState {
        if let Some(pooling) = self.pooling {
            return SamplingState::for_pooling(pooling, self.prompt.len());
        }
        let mut state = SamplingState::new(Arc::clone(&self.params), &self.prompt, eos, self.index);
        self.output.iter().for_each(|&token| state.observe(token));
        state
    }

    /// It is tried alone. Whether it has got no further than the last time.
    pub fn is_tried_again(&mut self) -> bool {
        self.lives.tried_at.replace(self.output.len()) == Some(self.output.len())
    }

    /// It was taken out of the scheduler, which knew this of it.
    pub fn withdrawn(&mut self, departed: Departed) {
        self.lives.preemptions += departed.preemptions;
        self.lives.miss = self.lives.miss.or(departed.miss.filter(|miss| *miss != Miss::NeverRan));
    }

    /// It goes into the scheduler again. Whether it has run before, so that what the executor knows of it is out of
    /// date.
    pub fn start_anew(&mut self) -> bool {
        if let Some(logprobs) = &mut self.prompt_logprobs {
            logprobs.truncate(1);
        }
        std::mem::take(&mut self.lives.has_run)
    }

    /// Says the last word. What the scheduler does not know any more was lost with a failed step.
    pub fn finish(self, reason: FinishReason, departed: Option<Departed>, mail: &mut Mail) {
        let (lives, prompt_tokens) = (self.lives, self.prompt.len());
        let timing = self.times.until(Instant::now());
        let usage = Usage {
            prompt_tokens,
            completion_tokens: self.output.len(),
            cached_tokens: lives.first_hit.unwrap_or(0).min(prompt_tokens),
            cache_miss: lives.miss.or(departed.and_then(|d| d.miss)),
            preemptions: lives.preemptions + departed.map_or(0, |d| d.preemptions),
            accepted_drafts: self.drafts.accepted,
            rejected_drafts: self.drafts.planned - self.drafts.accepted,
            timing,
        };
        mail.post(&self.events, Event::Finished { sample: self.index, reason, usage });
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
