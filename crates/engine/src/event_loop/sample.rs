//! One sample of a request, from its submission to its last event.

use std::{sync::Arc, time::Instant};

use folio_scheduler::{Departed, Miss, NewRequest, RequestId};

use super::outbox::Outbox;
use crate::{
    Admission, EngineRequest, Event, FinishReason, Logprobs, Pooling, RequestOptions, RowOutput, Sampled,
    SamplingParams, SamplingState, Timing, Usage, config::nanos, speculate::Owner,
};

pub(super) struct Sample {
    pub index: usize,
    pub params: Arc<SamplingParams>,
    pub events: flume::Sender<Event>,
    pub prompt: Arc<[u32]>,
    /// The answer so far, with the token that ended it.
    pub output: Vec<u32>,
    pub max_len: usize,
    /// Set if the request is for an embedding.
    pooling: Option<Pooling>,
    options: RequestOptions,
    /// The first sample of the same prompt.
    fork_of: Option<RequestId>,
    pub times: Times,
    /// Time at which it ends, complete or not.
    pub deadline: Option<Instant>,
    /// Collected until the prompt is computed; only sample 0 has any.
    prompt_logprobs: Option<Vec<Option<Logprobs>>>,
    attempts: Attempts,
    pub drafts: DraftCounts,
}

/// State of a sample that outlasts its time in the scheduler, which it may enter more than once.
#[derive(Debug, Default)]
struct Attempts {
    /// Whether it has run since it last entered.
    has_run: bool,
    /// Tokens from the prefix cache when it first ran.
    first_hit: Option<usize>,
    /// Reason for a cache miss, and number of preemptions, of earlier attempts.
    miss: Option<Miss>,
    preemptions: u32,
    /// Length of its answer when it was last tried alone.
    tried_at: Option<usize>,
}

/// Counts of a sample's drafted tokens.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct DraftCounts {
    planned: usize,
    accepted: usize,
}

impl DraftCounts {
    /// A step verified `planned` drafts and accepted `accepted` of them.
    pub fn note(&mut self, planned: usize, accepted: usize) {
        self.planned += planned;
        self.accepted += accepted;
    }
}

/// Times of a sample's submission, first step and tokens.
#[derive(Clone, Copy, Debug)]
pub(super) struct Times {
    submitted: Instant,
    started: Option<Instant>,
    /// First and last token.
    tokens: Option<(Instant, Instant)>,
}

impl Times {
    pub fn new(submitted: Instant) -> Self {
        Self { submitted, started: None, tokens: None }
    }

    /// A step that was submitted at `now` has rows of the sample.
    pub fn start(&mut self, now: Instant) {
        self.started.get_or_insert(now);
    }

    pub fn has_started(&self) -> bool {
        self.started.is_some()
    }

    /// A token was sampled.
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
    /// The samples of a request, whose ids count up from `first_id`.
    pub fn all_of(
        request: EngineRequest,
        first_id: RequestId,
        num_samples: usize,
        submitted: Instant,
        events: &flume::Sender<Event>,
    ) -> Vec<Self> {
        let EngineRequest { prompt, params, max_len, pooling, options } = request;
        let prompt: Arc<[u32]> = prompt.into();
        // A deadline beyond what `Instant` holds is none.
        let deadline = options.deadline.and_then(|after| submitted.checked_add(after));
        let sample = |index| Sample {
            index,
            params: Arc::clone(&params),
            events: events.clone(),
            prompt: Arc::clone(&prompt),
            output: Vec::new(),
            max_len,
            pooling,
            options: options.clone(),
            fork_of: (index > 0).then_some(first_id),
            times: Times::new(submitted),
            deadline,
            prompt_logprobs: (params.prompt_logprobs.is_some() && index == 0).then(|| vec![None]),
            attempts: Attempts::default(),
            drafts: DraftCounts::default(),
        };
        (0..num_samples).map(sample).collect()
    }

    /// A step that was submitted at `now` has rows of the sample; `first` tokens were computed
    /// before.
    pub fn start(&mut self, first: usize, now: Instant) {
        self.times.start(now);
        self.attempts.has_run = true;
        self.attempts.first_hit.get_or_insert(first);
    }

    pub fn take_prompt_logprobs(&mut self, logprobs: Vec<Logprobs>, outbox: &mut Outbox) {
        let Some(collected) = &mut self.prompt_logprobs else { return };
        collected.extend(logprobs.into_iter().map(Some));
        if collected.len() == self.prompt.len() {
            let all = self.prompt_logprobs.take().unwrap_or_default();
            outbox.post(&self.events, Event::PromptLogprobs(all));
        }
    }

    /// The fault of a row that ends the prompt and lacks the result that the request is for, or has
    /// another one.
    pub fn find_fault(&self, row: &RowOutput, embedding_width: usize) -> Option<&'static str> {
        match (self.pooling, row.sampled.is_empty(), &row.pooled) {
            (None, false, None) => None,
            (None, ..) => Some("the step gave no token"),
            (Some(_), true, Some(vector)) if vector.len() == embedding_width => None,
            (Some(_), ..) => Some("the step gave no embedding"),
        }
    }

    /// Adds the next token to the answer and posts it. Returns the reason if the answer ends with
    /// it.
    pub fn take_token(
        &mut self,
        sampled: Sampled,
        eos: &[u32],
        now: Instant,
        outbox: &mut Outbox,
    ) -> Option<FinishReason> {
        let (sample, Sampled { token, logprobs }) = (self.index, sampled);
        self.output.push(token);
        self.times.token(now);
        if self.stops_at(token, eos) {
            if self.params.logprobs.is_some() {
                outbox.post(&self.events, Event::StopToken { sample, token, logprobs });
            }
            return Some(FinishReason::Stop(token));
        }
        outbox.post(&self.events, Event::Token { sample, token, logprobs });
        self.is_at_length().then_some(FinishReason::Length)
    }

    /// Whether `token`, the last one of the output, ends the answer.
    fn stops_at(&self, token: u32, eos: &[u32]) -> bool {
        let is_eos = !self.params.ignore_eos && eos.contains(&token);
        let is_stop = is_eos || self.params.stop_token_ids.contains(&token);
        is_stop && self.output.len() > self.params.min_tokens
    }

    fn is_at_length(&self) -> bool {
        self.num_tokens() >= self.max_len
    }

    /// Tokens of the prompt and of the answer so far.
    pub fn num_tokens(&self) -> usize {
        self.prompt.len() + self.output.len()
    }

    /// The request for the scheduler, whose time began at `epoch`.
    pub fn to_request(&self, id: RequestId, epoch: Instant) -> NewRequest {
        let options = &self.options;
        NewRequest {
            wants_prompt_logits: self.prompt_logprobs.is_some() || self.pooling.is_some_and(Pooling::needs_all_rows),
            cache_salt: options.cache_salt,
            priority: options.priority,
            tenant: options.tenant,
            weight: options.weight,
            deadline: self.deadline.map(|time| nanos(time.saturating_duration_since(epoch))),
            // A sample with an answer of its own shares no more than the prefix cache holds.
            fork_of: self.fork_of.filter(|_| self.output.is_empty()),
            ..NewRequest::new(id, [&self.prompt[..], &self.output].concat(), self.max_len)
        }
    }

    /// The state that an executor needs to continue the sample.
    pub fn admission(&self, eos: &[u32]) -> Admission {
        let (prompt, answer) = (Arc::clone(&self.prompt), self.output.clone());
        Admission { owner: self.owner(), state: self.sampling_state(eos), prompt, answer, max_len: self.max_len }
    }

    pub fn owner(&self) -> Owner {
        Owner { tenant: self.options.tenant, salt: self.options.cache_salt }
    }

    /// The sampling state after the answer so far.
    fn sampling_state(&self, eos: &[u32]) -> SamplingState {
        if let Some(pooling) = self.pooling {
            return SamplingState::for_pooling(pooling, self.prompt.len());
        }
        let mut state = SamplingState::new(Arc::clone(&self.params), &self.prompt, eos, self.index);
        self.output.iter().for_each(|&token| state.observe(token));
        state
    }

    /// The sample is about to be tried alone. Returns whether its answer is as long as at its last
    /// trial.
    pub fn is_tried_again(&mut self) -> bool {
        self.attempts.tried_at.replace(self.output.len()) == Some(self.output.len())
    }

    /// The sample was taken out of the scheduler, which returned its figures.
    pub fn withdrawn(&mut self, departed: Departed) {
        self.attempts.preemptions += departed.preemptions;
        self.attempts.miss = self.attempts.miss.or(departed.miss.filter(|miss| *miss != Miss::NeverRan));
    }

    /// The sample enters the scheduler again. Returns whether it has run before, so that the
    /// executor's state of it is out of date.
    pub fn start_again(&mut self) -> bool {
        if let Some(logprobs) = &mut self.prompt_logprobs {
            logprobs.truncate(1);
        }
        std::mem::take(&mut self.attempts.has_run)
    }

    /// Posts the last event. `departed` is missing if a failed step removed the sample from the
    /// scheduler.
    pub fn finish(self, reason: FinishReason, departed: Option<Departed>, outbox: &mut Outbox) {
        let (attempts, prompt_tokens) = (self.attempts, self.prompt.len());
        let timing = self.times.until(Instant::now());
        let usage = Usage {
            prompt_tokens,
            completion_tokens: self.output.len(),
            cached_tokens: attempts.first_hit.unwrap_or(0).min(prompt_tokens),
            cache_miss: attempts.miss.or(departed.and_then(|d| d.miss)),
            preemptions: attempts.preemptions + departed.map_or(0, |d| d.preemptions),
            accepted_drafts: self.drafts.accepted,
            rejected_drafts: self.drafts.planned - self.drafts.accepted,
            timing,
        };
        outbox.post(&self.events, Event::Finished { sample: self.index, reason, usage });
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_parts_of_a_samples_time_add_up() {
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
