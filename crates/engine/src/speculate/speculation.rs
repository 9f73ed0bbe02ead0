//! Drafting after every step: notes the results of the last drafts, and has the method make the
//! next ones.
//!
//! Nothing here changes an answer. A method that fails or panics costs the drafts of its step;
//! after a few failures in a row it is switched off.

use std::{
    fmt::Arguments,
    time::{Duration, Instant},
};

use folio_device::{Backend, Batch};
use folio_model::{Decoder, DecoderLimits};
use folio_scheduler::RequestId;

use super::{
    AdaptOptions, Draft, Drafter, Owner, Settled, SettledRequest,
    adapt::{Seen, StepNote, Watches},
};
use crate::{RowOutput, background::guarded, inputs::OutputRows, runner::request_state::Outcome};

/// Failures in a row after which a method is switched off.
const MOST_FAILURES: u32 = 3;

/// A drafting method, and the number of nodes that the runner gives it.
pub struct Speculation<B: Backend> {
    drafter: Box<dyn Drafter<B>>,
    watches: Watches,
    warn: Option<fn(Arguments<'_>)>,
    /// Failures since its last success.
    failures: u32,
    has_warned: bool,
    /// Time spent on drafts since it was last taken.
    drafting: Duration,
    drafts: Vec<Draft>,
    /// Rows of all requests of a step, one after the other.
    rows: Vec<u32>,
}

/// Times of a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepTimes {
    /// From the end of all earlier work to its beginning.
    pub gap: Duration,
    /// From its beginning to its tokens.
    pub took: Duration,
}

/// The part of one request in a step.
pub(crate) struct Part<'a> {
    pub rows: &'a OutputRows,
    pub outcome: &'a Outcome,
    /// The default owner if the request has ended or failed.
    pub owner: Owner,
    /// Prompt and answer; empty if the request has ended or failed.
    pub tokens: &'a [u32],
    pub max_len: usize,
    pub has_left: bool,
}

impl Part<'_> {
    /// Most nodes of a draft of a method without a limit: one more token must fit after them.
    fn room(&self) -> usize {
        self.max_len.saturating_sub(self.tokens.len() + 1).min(Draft::MOST_NODES)
    }

    /// Whether its rows are those of one token and its draft.
    fn decodes(&self) -> bool {
        self.rows.sample.is_some() && self.rows.span.len() == 1 + self.rows.draft.len()
    }

    /// Whether a draft can be made for it.
    fn goes_on(&self) -> bool {
        self.outcome.goes_on && !self.tokens.is_empty()
    }

    /// Adds the rows that computed tokens of the sequence.
    fn push_rows(&self, out: &mut Vec<u32>) {
        let first = self.rows.span.start as u32;
        let known = self.rows.span.len() - self.rows.draft.len();
        out.extend((0..known as u32).map(|row| first + row));
        out.extend(self.outcome.accepted.iter().map(|&node| first + known as u32 + u32::from(node)));
    }

    /// Index of the last of these rows among the step's outputs.
    fn output(&self) -> Option<u32> {
        let nth = self.outcome.accepted.last().map_or(0, |&node| usize::from(node) + 1);
        self.rows.sample.filter(|_| !self.rows.pools).map(|row| (row + nth) as u32)
    }

    fn seen(&self) -> Seen<'_> {
        let (drafted, accepted) = (&self.rows.draft, &self.outcome.accepted);
        Seen { id: self.rows.id, owner: self.owner, drafted, accepted, goes_on: self.goes_on() }
    }

    fn settled<'a>(&'a self, rows: &'a [u32], most: usize) -> SettledRequest<'a> {
        SettledRequest {
            id: self.rows.id,
            owner: self.owner,
            tokens: self.tokens,
            computed: self.rows.first + rows.len(),
            rows,
            output: self.output(),
            guesses: &self.outcome.guesses,
            most,
        }
    }
}

impl<B: Backend> Speculation<B> {
    pub fn new(drafter: Box<dyn Drafter<B>>, options: AdaptOptions) -> Self {
        Self {
            drafter,
            watches: Watches::new(options),
            warn: None,
            failures: 0,
            has_warned: false,
            drafting: Duration::ZERO,
            drafts: Vec::new(),
            rows: Vec::new(),
        }
    }

    /// Sets the function that gets a line when drafting fails.
    pub fn with_warn(self, warn: Option<fn(Arguments<'_>)>) -> Self {
        Self { warn, ..self }
    }

    fn is_off(&self) -> bool {
        self.failures >= MOST_FAILURES
    }

    /// Whether a step of requests of these salts has to wait until the method has read the one
    /// before. While no request has had a draft for long, steps do not wait, and the method misses
    /// them: waiting would make them slower for nothing.
    pub(crate) fn reads_step(&self, salts: impl Iterator<Item = u64>) -> bool {
        !self.is_off() && self.drafter.reads_step() && self.watches.wait(salts)
    }

    pub(crate) fn reads_guesses(&self) -> bool {
        !self.is_off() && self.drafter.reads_guesses()
    }

    pub(crate) fn take_drafting(&mut self) -> Duration {
        std::mem::take(&mut self.drafting)
    }

    /// A request has ended, with this answer.
    pub(crate) fn forget(&mut self, id: RequestId, owner: Owner, answer: &[u32]) {
        self.watches.forget(id);
        let Self { drafter, .. } = self;
        let forgotten = guarded(|| {
            if !answer.is_empty() {
                drafter.learn(owner, answer);
            }
            drafter.forget(id);
        });
        if forgotten.is_none() {
            self.failed("it panicked while it removed a request");
        }
    }

    /// Makes drafts after a step, one part for each request of its plan. If another step has begun
    /// since, the method cannot read this one any more.
    pub(crate) fn after_step(
        &mut self,
        decoder: &mut Decoder<B>,
        batch: &Batch,
        parts: &[Part<'_>],
        outputs: &mut [RowOutput],
        times: StepTimes,
        is_last: bool,
    ) {
        if self.is_off() {
            return;
        }
        let seen: Vec<Seen<'_>> = parts.iter().filter(|part| !part.tokens.is_empty()).map(Part::seen).collect();
        let is_decode_only = parts.iter().all(Part::decodes);
        let step = StepNote { rows: batch.num_rows(), gap: times.gap, took: times.took, is_decode_only };
        let wanted = self.watches.behind(step, &seen);
        let mosts = mosts(decoder.limits(), parts, wanted);
        let start = Instant::now();
        self.drafts.resize_with(parts.len(), Draft::default);
        self.drafts.iter_mut().for_each(Draft::clear);
        if is_last || !self.drafter.reads_step() {
            self.ask(decoder, batch, parts, &mosts);
        }
        let took = start.elapsed();
        self.drafting += took;
        // A method may have stored data of them, and would not be told otherwise to remove it.
        let left = parts.iter().filter(|part| part.has_left).map(|part| part.rows.id);
        left.for_each(|id| self.forget(id, Owner::default(), &[]));
        let (vocab, mut lengths) = (decoder.spec().vocab_size, Vec::with_capacity(seen.len()));
        for (((part, output), draft), most) in parts.iter().zip(&mut *outputs).zip(&mut self.drafts).zip(mosts) {
            // A chunk of a prompt sets it too: the step that ends the prompt may bring the first
            // draft.
            output.expects_drafts = !part.tokens.is_empty() && self.watches.expects(part.owner.salt);
            keep_sound(draft, most, vocab);
            if !part.tokens.is_empty() {
                lengths.push(draft.len());
            }
            output.draft = (!draft.is_empty()).then(|| std::mem::take(draft));
        }
        self.watches.drafted(step, &seen, &lengths, took);
    }

    /// Has the method fill `self.drafts`, one for each part.
    fn ask(&mut self, decoder: &mut Decoder<B>, batch: &Batch, parts: &[Part<'_>], mosts: &[usize]) {
        self.rows.clear();
        let ranges = parts.iter().map(|part| {
            let first = self.rows.len();
            part.push_rows(&mut self.rows);
            first..self.rows.len()
        });
        let ranges: Vec<_> = ranges.collect();
        let requests = parts.iter().zip(ranges).zip(mosts);
        let requests: Vec<_> = requests.map(|((part, range), &most)| part.settled(&self.rows[range], most)).collect();
        let step = Settled { batch, requests: &requests };
        let Self { drafter, drafts, .. } = self;
        match guarded(|| drafter.draft(decoder, &step, drafts)) {
            Some(Ok(())) => self.failures = 0,
            Some(Err(error)) => self.failed(&error.to_string()),
            None => self.failed("it panicked"),
        }
    }

    /// Drops the drafts of this step.
    fn failed(&mut self, reason: &str) {
        self.drafts.iter_mut().for_each(Draft::clear);
        self.failures += 1;
        let is_worth_a_line = !std::mem::replace(&mut self.has_warned, true) || self.failures == MOST_FAILURES;
        if let Some(warn) = self.warn.filter(|_| is_worth_a_line) {
            let what = if self.is_off() {
                "drafting failed and is switched off"
            } else {
                "drafting failed, and its drafts are lost"
            };
            warn(format_args!("{what}: {reason}"));
        }
    }
}

/// Most nodes of each request. `wanted` has those of the parts with tokens.
fn mosts(limits: &DecoderLimits, parts: &[Part<'_>], wanted: Vec<usize>) -> Vec<usize> {
    let most_of_all = most_of_all(limits, parts.iter().filter(|part| part.goes_on()).count());
    let mut wanted = wanted.into_iter();
    let most = |part: &Part<'_>| match part.tokens.is_empty() {
        true => 0,
        false => wanted.next().unwrap_or(0).min(most_of_all).min(part.room()),
    };
    parts.iter().map(most).collect()
}

/// Most nodes of each of `requests` requests, so that all fit into the next step.
fn most_of_all(limits: &DecoderLimits, requests: usize) -> usize {
    (limits.outputs.min(limits.rows) / requests.max(1)).saturating_sub(1)
}

/// Cuts a draft of a method that exceeds its nodes, or has unknown tokens.
fn keep_sound(draft: &mut Draft, most: usize, vocab: usize) {
    let known = draft.tokens().iter().take_while(|&&token| (token as usize) < vocab).count();
    draft.truncate(known.min(most));
}
