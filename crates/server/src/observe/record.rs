//! One record for each request that generates: it feeds the metrics as tokens go out, and when it
//! is dropped it becomes a line of the log and a trace.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use folio_engine::{Timing, Usage};

use super::log::{Field, Level};
use super::metrics::Metrics;
use super::observer::Observer;
use super::otlp::{Attribute, Trace, TraceContext};

/// Status in the log of a request whose client disconnected before it was answered.
const CLIENT_LEFT: u16 = 499;

/// How an answer ended; of several the greatest stands for the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum EndReason {
    Stop,
    Length,
    Abort,
    Timeout,
    Error,
}

impl EndReason {
    pub const ALL: [Self; 5] = [Self::Stop, Self::Length, Self::Abort, Self::Timeout, Self::Error];

    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Abort => "abort",
            Self::Timeout => "timeout",
            Self::Error => "error",
        }
    }
}

#[derive(Clone, Debug)]
pub struct RequestStart<'a> {
    pub route: &'static str,
    pub request_id: Arc<str>,
    pub key_name: Option<Arc<str>>,
    /// The header of that name, as it came.
    pub traceparent: Option<&'a str>,
    pub arrived: Instant,
}

/// One request that generates, from its arrival to its drop. A request that is dropped before it
/// was submitted reports nothing: its refusal is reported elsewhere. One that is dropped before all
/// its answers ended was left by its client.
#[derive(Debug)]
pub struct RequestRecord {
    observer: Observer,
    route: &'static str,
    request_id: Arc<str>,
    key_name: Option<Arc<str>>,
    context: Option<TraceContext>,
    arrived: Instant,
    submitted: Option<Instant>,
    first_token: Option<Instant>,
    ended: Option<Instant>,
    prompts: Vec<Prompt>,
    choices: Vec<Choice>,
    max_tokens: usize,
    prompt_tokens: usize,
    cached_tokens: usize,
    completion_tokens: usize,
    /// Times of the answer that took longest.
    timing: Timing,
    reason: Option<EndReason>,
    /// Its client left, or took nothing of it for too long, before all was there.
    is_abandoned: bool,
    status: Option<u16>,
}

#[derive(Debug)]
struct Prompt {
    first_choice: usize,
    unfinished: usize,
    /// Tokens of its longest answer.
    longest: usize,
}

#[derive(Debug)]
struct Choice {
    prompt: usize,
    last_token: Option<Instant>,
    num_tokens: usize,
    is_finished: bool,
}

impl RequestRecord {
    pub(super) fn new(observer: Observer, start: RequestStart<'_>) -> Self {
        let RequestStart { route, request_id, key_name, traceparent, arrived } = start;
        let context = observer.0.traces.as_ref().and_then(|traces| traces.context(traceparent));
        Self {
            observer,
            route,
            request_id,
            key_name,
            context,
            arrived,
            submitted: None,
            first_token: None,
            ended: None,
            prompts: Vec::new(),
            choices: Vec::new(),
            max_tokens: 0,
            prompt_tokens: 0,
            cached_tokens: 0,
            completion_tokens: 0,
            timing: Timing::default(),
            reason: None,
            is_abandoned: false,
            status: None,
        }
    }

    /// A prompt went to the engine, for `n` answers; choices are numbered on from one prompt to the
    /// next.
    pub fn submitted(&mut self, prompt_tokens: usize, n: usize, max_tokens: usize) {
        self.submitted.get_or_insert_with(Instant::now);
        self.prompt_tokens += prompt_tokens;
        self.max_tokens = max_tokens;
        self.metrics().params_n.count(n as u64);
        let prompt = self.prompts.len();
        self.prompts.push(Prompt { first_choice: self.choices.len(), unfinished: n, longest: 0 });
        let choice = || Choice { prompt, last_token: None, num_tokens: 0, is_finished: false };
        self.choices.extend(std::iter::repeat_with(choice).take(n));
    }

    /// A piece of an answer with `num_tokens` tokens goes out; a piece without any reports nothing.
    pub fn token(&mut self, choice: usize, num_tokens: usize) {
        let Some(choice) = self.choices.get_mut(choice).filter(|_| num_tokens > 0) else { return };
        let (now, metrics) = (Instant::now(), &self.observer.0.metrics);
        match choice.last_token.replace(now) {
            Some(last) => metrics.inter_token_latency.times(now - last, num_tokens as u64),
            None => {
                metrics.time_to_first_token.time(now - self.arrived);
                self.first_token.get_or_insert(now);
            }
        }
        choice.num_tokens += num_tokens;
    }

    /// Records that an answer has ended.
    pub fn finished(&mut self, choice: usize, reason: EndReason, usage: &Usage) {
        if self.choices.get(choice).is_some_and(|entry| entry.last_token.is_none() && !entry.is_finished) {
            // All it had was a token that ends an answer, which is counted and not sent.
            self.token(choice, usage.completion_tokens);
        }
        let Some(entry) = self.choices.get_mut(choice).filter(|entry| !entry.is_finished) else { return };
        entry.is_finished = true;
        let now = Instant::now();
        let prompt = &mut self.prompts[entry.prompt];
        prompt.unfinished -= 1;
        prompt.longest = prompt.longest.max(usage.completion_tokens);
        let metrics = &self.observer.0.metrics;
        if prompt.unfinished == 0 {
            metrics.max_generation_tokens.count(prompt.longest as u64);
        }
        if prompt.first_choice == choice {
            self.cached_tokens += usage.cached_tokens;
        }
        metrics.ended(reason).add(1);
        let Timing { queued, prefill, decode } = usage.timing;
        metrics.e2e.time(now - self.arrived);
        metrics.queue.time(queued);
        metrics.prefill.time(prefill);
        metrics.decode.time(decode);
        metrics.inference.time(prefill + decode);
        if let Some(gaps) = usage.completion_tokens.checked_sub(1).filter(|&gaps| gaps > 0) {
            metrics.time_per_output_token.time(decode / u32::try_from(gaps).unwrap_or(u32::MAX));
        }
        metrics.prompt_tokens.count(usage.prompt_tokens as u64);
        metrics.generation_tokens.count(usage.completion_tokens as u64);
        metrics.prefill_computed.count(usage.prompt_tokens.saturating_sub(usage.cached_tokens) as u64);
        metrics.params_max_tokens.count(self.max_tokens as u64);
        self.completion_tokens += usage.completion_tokens;
        if total(&usage.timing) >= total(&self.timing) {
            self.timing = usage.timing;
        }
        self.ended = Some(now);
        self.reason = self.reason.max(Some(reason));
    }

    /// The status that went out; 200 if this is never said and the client stayed.
    pub fn answered(&mut self, status: u16) {
        self.status = Some(status);
    }

    /// The engine's own words on why an answer failed.
    pub fn failed(&self, reason: &str) {
        let fields = [("request_id", Field::from(&*self.request_id)), ("reason", Field::from(reason))];
        self.observer.log().error("request failed in the engine", &fields);
    }

    fn metrics(&self) -> &Metrics {
        &self.observer.0.metrics
    }

    /// Counts what never ended as given up.
    fn close(&mut self) {
        let unfinished = self.choices.iter().filter(|choice| !choice.is_finished);
        let (mut count, mut num_tokens) = (0, 0);
        unfinished.for_each(|choice| (count, num_tokens) = (count + 1, num_tokens + choice.num_tokens));
        if count > 0 {
            self.completion_tokens += num_tokens;
            self.ended = None;
            self.reason = self.reason.max(Some(EndReason::Abort));
            self.metrics().ended(EndReason::Abort).add(count);
            self.is_abandoned = self.status.is_none();
            self.metrics().abandoned.add(u64::from(self.is_abandoned));
        }
        self.status.get_or_insert(if self.is_abandoned { CLIENT_LEFT } else { 200 });
    }

    fn write_log(&self, total: Duration) {
        let reason = self.reason.map_or("none", EndReason::name);
        let level = if self.reason >= Some(EndReason::Timeout) { Level::Warn } else { Level::Info };
        if !self.observer.0.log.shows(level) {
            return;
        }
        let mut fields: Vec<(&str, Field<'_>)> = vec![("request_id", (&*self.request_id).into())];
        fields.extend(self.key_name.as_deref().map(|name| ("key", name.into())));
        fields.push(("route", self.route.into()));
        fields.push(("status", self.status.unwrap_or(200).into()));
        fields.push(("prompt_tokens", self.prompt_tokens.into()));
        fields.push(("cached_tokens", self.cached_tokens.into()));
        fields.push(("completion_tokens", self.completion_tokens.into()));
        fields.extend(self.first_token.map(|first| ("ttft_ms", (first - self.arrived).into())));
        fields.push(("total_ms", total.into()));
        fields.push(("finish_reason", reason.into()));
        self.observer.0.log.write(level, "request", &fields);
    }

    fn trace(&self, context: TraceContext, submitted: Instant, total: Duration) -> Trace {
        let seconds = |duration: Duration| Attribute::Real(duration.as_secs_f64());
        let count = |count: usize| Attribute::Count(count as u64);
        let Timing { queued, prefill, decode } = self.timing;
        let n = self.choices.len() / self.prompts.len().max(1);
        let reason = self.reason.map_or("none", EndReason::name);
        let mut attributes = vec![
            ("gen_ai.request.id", Attribute::Text(self.request_id.to_string())),
            ("gen_ai.response.model", Attribute::Text(self.observer.0.model_name.to_string())),
            ("gen_ai.request.n", count(n)),
            ("gen_ai.request.max_tokens", count(self.max_tokens)),
            ("gen_ai.usage.prompt_tokens", count(self.prompt_tokens)),
            ("gen_ai.usage.completion_tokens", count(self.completion_tokens)),
            ("gen_ai.usage.cached_tokens", count(self.cached_tokens)),
            ("gen_ai.latency.time_in_queue", seconds(queued)),
            ("gen_ai.latency.time_in_model_prefill", seconds(prefill)),
            ("gen_ai.latency.time_in_model_decode", seconds(decode)),
            ("gen_ai.latency.time_in_model_inference", seconds(prefill + decode)),
            ("gen_ai.latency.e2e", seconds(total)),
            ("gen_ai.response.finish_reasons", Attribute::Texts(vec![reason])),
            ("http.route", Attribute::Text(self.route.to_owned())),
            ("http.response.status_code", Attribute::Count(self.status.unwrap_or(200).into())),
        ];
        let first = self.first_token.map(|first| first - self.arrived);
        attributes.extend(first.map(|first| ("gen_ai.latency.time_to_first_token", seconds(first))));
        // The clock is read once: the rest are distances, which no correction of the clock can turn
        // around.
        let start = SystemTime::now().checked_sub(self.arrived.elapsed()).unwrap_or(UNIX_EPOCH);
        let mut at = submitted - self.arrived;
        let mut children = Vec::new();
        for (name, took) in [("queue", queued), ("prefill", prefill), ("decode", decode)] {
            if took > Duration::ZERO {
                children.push((name, at, at + took));
                at += took;
            }
        }
        let error = self.reason.filter(|&reason| reason >= EndReason::Timeout).map(EndReason::name);
        Trace { context, start, took: total, children, attributes, error }
    }
}

fn total(timing: &Timing) -> Duration {
    timing.queued + timing.prefill + timing.decode
}

impl Drop for RequestRecord {
    fn drop(&mut self) {
        let Some(submitted) = self.submitted else { return };
        self.close();
        let total = self.ended.unwrap_or_else(Instant::now) - self.arrived;
        self.write_log(total);
        if let (Some(traces), Some(context)) = (&self.observer.0.traces, self.context) {
            traces.submit(self.trace(context, submitted, total));
        }
    }
}

#[cfg(test)]
mod tests;
