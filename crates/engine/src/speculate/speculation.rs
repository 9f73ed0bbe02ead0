//! Drafting behind every step: what became of the last drafts is noted, and the method asked for the next ones.
//!
//! Nothing here touches what a request is answered. A method that fails or panics costs the drafts of its step; one that
//! does nothing else is not asked any more.

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
use crate::{RowOutput, background::guarded, inputs::OutputRows, kept::Outcome};

/// So often in a row a method may fail.
const MOST_FAILURES: u32 = 3;

/// A method of drafting, and how much of it a runner uses.
pub struct Speculation<B: Backend> {
    drafter: Box<dyn Drafter<B>>,
    watches: Watches,
    warn: Option<fn(Arguments<'_>)>,
    /// Failures since it last worked.
    failures: u32,
    has_warned: bool,
    /// Time in drafting that nobody has asked for yet.
    drafting: Duration,
    drafts: Vec<Draft>,
    /// Rows of all requests of a step, one after the other.
    rows: Vec<u32>,
}

/// Where the time of a step went.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepTimes {
    /// From the end of all that came before it to its beginning.
    pub gap: Duration,
    /// From then to its tokens.
    pub took: Duration,
}

/// What a step was to one request.
pub(crate) struct Part<'a> {
    pub rows: &'a OutputRows,
    pub outcome: &'a Outcome,
    /// Of nobody in particular where nothing is to be known of it.
    pub owner: Owner,
    /// Prompt and answer; empty where nothing is to be known of it.
    pub tokens: &'a [u32],
    pub max_len: usize,
    pub has_left: bool,
}

impl Part<'_> {
    /// Nodes that a draft may have if the method has no limit: behind them there must be room for one more token.
    fn room(&self) -> usize {
        self.max_len.saturating_sub(self.tokens.len() + 1).min(Draft::MOST_NODES)
    }

    /// Whether its rows are those of one token and its draft.
    fn decodes(&self) -> bool {
        self.rows.sample.is_some() && self.rows.span.len() == 1 + self.rows.draft.len()
    }

    /// Whether there is something to draft for.
    fn goes_on(&self) -> bool {
        self.outcome.goes_on && !self.tokens.is_empty()
    }

    /// The rows that computed what the sequence has now.
    fn push_rows(&self, out: &mut Vec<u32>) {
        let first = self.rows.span.start as u32;
        let known = self.rows.span.len() - self.rows.draft.len();
        out.extend((0..known as u32).map(|row| first + row));
        out.extend(self.outcome.accepted.iter().map(|&node| first + known as u32 + u32::from(node)));
    }

    /// Where the last of them is among the step's outputs.
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

    /// Where a line goes when drafting fails.
    pub fn with_warn(self, warn: Option<fn(Arguments<'_>)>) -> Self {
        Self { warn, ..self }
    }

    fn is_off(&self) -> bool {
        self.failures >= MOST_FAILURES
    }

    /// Whether a step of requests of these salts has to wait until the method has looked at the one before. Where nobody
    /// drafts for long, none does, and the method misses steps: it would make them slower for nothing.
    pub(crate) fn reads_step(&self, salts: impl Iterator<Item = u64>) -> bool {
        !self.is_off() && self.drafter.reads_step() && self.watches.wait(salts)
    }

    pub(crate) fn reads_guesses(&self) -> bool {
        !self.is_off() && self.drafter.reads_guesses()
    }

    pub(crate) fn take_drafting(&mut self) -> Duration {
        std::mem::take(&mut self.drafting)
    }

    /// A request has left, with this answer.
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
            self.failed("it panicked while it forgot a request");
        }
    }

    /// Drafts behind a step, one part a request of its plan. Where another has begun since, there is nothing left of this
    /// one for a method to look at.
    pub(crate) fn behind(
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
        // A method may have kept something of them, and nobody else would tell it to forget them.
        let left = parts.iter().filter(|part| part.has_left).map(|part| part.rows.id);
        left.for_each(|id| self.forget(id, Owner::default(), &[]));
        let (vocab, mut lengths) = (decoder.spec().vocab_size, Vec::with_capacity(seen.len()));
        for (((part, output), draft), most) in parts.iter().zip(&mut *outputs).zip(&mut self.drafts).zip(mosts) {
            // A chunk of a prompt says it, too: the step that ends the prompt may bring the first draft.
            output.expects_drafts = !part.tokens.is_empty() && self.watches.expects(part.owner.salt);
            keep_sound(draft, most, vocab);
            if !part.tokens.is_empty() {
                lengths.push(draft.len());
            }
            output.draft = (!draft.is_empty()).then(|| std::mem::take(draft));
        }
        self.watches.drafted(step, &seen, &lengths, took);
    }

    /// Lets the method fill `self.drafts`, one a part.
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

    /// The drafts of this step are gone.
    fn failed(&mut self, reason: &str) {
        self.drafts.iter_mut().for_each(Draft::clear);
        self.failures += 1;
        let is_worth_a_line = !std::mem::replace(&mut self.has_warned, true) || self.failures == MOST_FAILURES;
        if let Some(warn) = self.warn.filter(|_| is_worth_a_line) {
            let what =
                if self.is_off() { "drafting failed and ends" } else { "drafting failed, which costs its drafts" };
            warn(format_args!("{what}: {reason}"));
        }
    }
}

/// How many nodes each request may have. `wanted` are those of the parts of which something is known.
fn mosts(limits: &DecoderLimits, parts: &[Part<'_>], wanted: Vec<usize>) -> Vec<usize> {
    let most_of_all = most_of_all(limits, parts.iter().filter(|part| part.goes_on()).count());
    let mut wanted = wanted.into_iter();
    let most = |part: &Part<'_>| match part.tokens.is_empty() {
        true => 0,
        false => wanted.next().unwrap_or(0).min(most_of_all).min(part.room()),
    };
    parts.iter().map(most).collect()
}

/// Nodes that each of so many requests may have if all of them are to fit into the next step.
fn most_of_all(limits: &DecoderLimits, requests: usize) -> usize {
    (limits.outputs.min(limits.rows) / requests.max(1)).saturating_sub(1)
}

/// A method is not trusted with how much it drafts, nor with what.
fn keep_sound(draft: &mut Draft, most: usize, vocab: usize) {
    let known = draft.tokens().iter().take_while(|&&token| (token as usize) < vocab).count();
    draft.truncate(known.min(most));
}
