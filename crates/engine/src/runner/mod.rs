//! Runs the steps of one decoder on one device, from a plan to tokens.
//!
//! A step goes from top to bottom through this file: [`Runner::begin`] trims its drafts, starts its
//! transfers, computes its rows, and either samples on the host ([`Runner::sample_on_host`]) or has
//! the device sample ([`Runner::ask_device`]), whose tokens [`Runner::take_device_tokens`] waits
//! for. [`Runner::settle`] then makes drafts for the next step.

mod answers;
mod block_transfers;
pub(crate) mod request_state;
mod trim_drafts;

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use folio_device::{Backend, Batch, Drawn, Draws, Pulse, tree};
use folio_model::Decoder;
use folio_scheduler::{RequestId, StepPlan};

use self::{
    answers::{DeviceTokens, HostLogits},
    block_transfers::BlockTransfers,
    request_state::{Asked, Outcome, PANICKED, RequestState, RequestStates},
    trim_drafts::trim_drafts,
};
use crate::{
    Admission, Error, HostTier, Result, RowOutput, StepRunner,
    background::guarded,
    inputs::{OutputRows, gather, slot},
    sampling::likeliest,
    speculate::{Part, Speculation, StepTimes, ancestors},
};

/// Turns plans into forward passes and logits into tokens. The state of a request outlasts steps;
/// everything else is made anew from each plan.
pub struct Runner<B: Backend> {
    decoder: Decoder<B>,
    /// Set if the runner drafts.
    speculation: Option<Speculation<B>>,
    /// Transfers between the device and the host tier.
    transfers: BlockTransfers,
    requests: RequestStates,
    batch: Batch,
    /// An unused batch, for its memory.
    spare: Batch,
    /// Output rows of the step that is computed, in the order of its plan.
    outputs: Vec<OutputRows>,
    logits: Vec<f32>,
    hidden: Vec<f32>,
    /// Draws that a device that samples is asked for, and their results.
    draws: Draws,
    drawn: Vec<Drawn>,
    /// Steps whose tokens the device has not returned, oldest first.
    in_flight: VecDeque<DeviceStep>,
    /// Time at which the last step ended.
    free_since: Instant,
    num_admissions: u64,
    num_steps: u64,
}

/// A step whose tokens the device has not returned.
struct DeviceStep {
    number: u64,
    started: Instant,
    asked: Vec<Asked>,
    /// Empty unless the runner drafts.
    batch: Batch,
}

impl<B: Backend> Runner<B> {
    /// `host` is the engine's host tier, if it has one.
    pub fn new(decoder: Decoder<B>, host: Option<Arc<HostTier>>) -> Self {
        Self {
            decoder,
            speculation: None,
            transfers: BlockTransfers::new(host),
            requests: RequestStates::default(),
            batch: Batch::default(),
            spare: Batch::default(),
            outputs: Vec::new(),
            logits: Vec::new(),
            hidden: Vec::new(),
            draws: Draws::default(),
            drawn: Vec::new(),
            in_flight: VecDeque::new(),
            free_since: Instant::now(),
            num_admissions: 0,
            num_steps: 0,
        }
    }

    /// The same runner with drafting. Called before any request is admitted.
    pub fn with_speculation(mut self, speculation: Speculation<B>) -> Self {
        assert!(self.requests.0.is_empty(), "a drafter has to know requests from their beginning");
        self.speculation = Some(speculation);
        self
    }

    pub fn decoder(&self) -> &Decoder<B> {
        &self.decoder
    }

    /// Starts a step's transfers and computes its rows. None if the device samples its tokens,
    /// which [`Self::take_device_tokens`] waits for.
    fn begin(&mut self, plan: &StepPlan) -> Result<Option<Vec<RowOutput>>> {
        let started = Instant::now();
        let trimmed = trim_drafts(plan, self.decoder.limits());
        let plan = trimmed.as_ref().unwrap_or(plan);
        self.transfers.start(&mut self.decoder, &plan.transfers, self.num_steps)?;
        let num_logits = gather(plan, &self.requests, &mut self.batch, &mut self.outputs);
        self.decoder.forward_with(&self.batch, num_logits)?;
        if num_logits < self.batch.outputs.len() {
            self.decoder.hidden(&mut self.hidden);
        }
        if self.decoder.draws_tokens() {
            // The device is asked last, so that a step that failed has no draw in flight.
            return self.ask_device(started).map(|()| None);
        }
        if num_logits > 0 {
            self.decoder.logits(&mut self.logits);
        }
        self.sample_on_host(started).map(Some)
    }

    /// Samples all rows of the step from logits on the host.
    fn sample_on_host(&mut self, started: Instant) -> Result<Vec<RowOutput>> {
        let rows = std::mem::take(&mut self.outputs);
        let mut outputs = Vec::with_capacity(rows.len());
        let mut outcomes = Vec::with_capacity(rows.len());
        for rows in &rows {
            // A sampler that panics fails its own request.
            let failed = || Ok((RowOutput::failed(rows.id, PANICKED), Outcome::default()));
            let (output, outcome) = guarded(|| self.sample_request(rows)).unwrap_or_else(failed)?;
            outputs.push(output);
            outcomes.push(outcome);
        }
        let batch = std::mem::take(&mut self.batch);
        self.settle(&batch, &rows.iter().collect::<Vec<_>>(), &outcomes, &mut outputs, started);
        (self.batch, self.outputs) = (batch, rows);
        Ok(outputs)
    }

    /// Samples the rows of one request from logits on the host.
    fn sample_request(&mut self, rows: &OutputRows) -> Result<(RowOutput, Outcome)> {
        // Read first, because sampling overwrites the logits.
        let guesses = self.likeliest_tokens(rows);
        let spec = self.decoder.spec();
        let mut answers = HostLogits {
            logits: &mut self.logits,
            width: spec.vocab_size,
            first_target: rows.prompt.start,
            first_sample: rows.sample.unwrap_or(0),
        };
        let request = self.requests.0.get_mut(&rows.id).ok_or(Error::UnknownRequest(rows.id))?;
        let (output, outcome) = request.take_results(rows, &self.hidden, spec.hidden, &mut answers);
        Ok((output, Outcome { guesses, ..outcome }))
    }

    /// The likeliest token of each sampled row, if the drafter reads them.
    fn likeliest_tokens(&self, rows: &OutputRows) -> Vec<u32> {
        let Some(first) = rows.sample.filter(|_| self.reads_guesses() && !rows.pools) else { return Vec::new() };
        let width = self.decoder.spec().vocab_size;
        self.logits[first * width..].chunks(width).take(rows.draft.len() + 1).map(likeliest).collect()
    }

    /// Asks the device to sample all tokens of the step, without waiting.
    fn ask_device(&mut self, started: Instant) -> Result<()> {
        let vocab = self.decoder.spec().vocab_size;
        self.draws.clear();
        let mut asked = Vec::with_capacity(self.outputs.len());
        for rows in self.outputs.drain(..) {
            let request = self.requests.0.get_mut(&rows.id).ok_or(Error::UnknownRequest(rows.id))?;
            asked.push(request.ask(rows, &mut self.draws, vocab));
        }
        self.decoder.draw(&self.draws);
        let batch = match self.speculation {
            Some(_) => std::mem::replace(&mut self.batch, std::mem::take(&mut self.spare)),
            None => Batch::default(),
        };
        self.in_flight.push_back(DeviceStep { number: self.num_steps, started, asked, batch });
        Ok(())
    }

    /// Waits for the tokens that the device sampled in the oldest step in flight.
    fn take_device_tokens(&mut self) -> Result<Vec<RowOutput>> {
        let step = self.in_flight.pop_front().ok_or(Error::NothingSubmitted)?;
        let drawn = self.decoder.drawn(&mut self.drawn);
        self.transfers.finish(&mut self.decoder, step.number);
        drawn?;
        let (asked, drawn) = (step.asked.iter().map(|asked| asked.num_draws).sum::<usize>(), self.drawn.len());
        if asked != drawn {
            return Err(Error::Step(format!("the device drew {drawn} tokens, but was asked for {asked}")));
        }
        let mut drawn = std::mem::take(&mut self.drawn);
        let (mut outputs, mut outcomes) = (Vec::with_capacity(step.asked.len()), Vec::with_capacity(step.asked.len()));
        let mut rest = &mut drawn[..];
        for asked in &step.asked {
            let (own, others) = rest.split_at_mut(asked.num_draws);
            let (output, outcome) = self.take_request_tokens(asked, own);
            outputs.push(output);
            outcomes.push(outcome);
            rest = others;
        }
        drawn.clear();
        self.drawn = drawn;
        let rows: Vec<&OutputRows> = step.asked.iter().map(|asked| &asked.rows).collect();
        self.settle(&step.batch, &rows, &outcomes, &mut outputs, step.started);
        self.spare = step.batch;
        Ok(outputs)
    }

    /// Takes the tokens that the device sampled for one request.
    fn take_request_tokens(&mut self, asked: &Asked, drawn: &mut [Drawn]) -> (RowOutput, Outcome) {
        let (id, num_targets) = (asked.rows.id, asked.rows.prompt_targets.len());
        let reads_guesses = self.reads_guesses() && drawn.len() > num_targets;
        let sampled = drawn.iter().skip(num_targets).filter(|_| reads_guesses);
        let guesses = sampled.map(|drawn| drawn.token).collect();
        let hidden_width = self.decoder.spec().hidden;
        let request = self.requests.0.get_mut(&id).filter(|request| request.admission == asked.admission);
        let failed = |reason: &str| (RowOutput::failed(id, reason), Outcome::default());
        let (output, outcome) = match (asked.failure, request) {
            (Some(reason), _) => failed(reason),
            (None, None) => failed("the request has ended"),
            (None, Some(request)) => {
                let mut answers = DeviceTokens { drawn, num_targets };
                request.take_results(&asked.rows, &self.hidden, hidden_width, &mut answers)
            }
        };
        (output, Outcome { guesses, ..outcome })
    }

    fn reads_guesses(&self) -> bool {
        self.speculation.as_ref().is_some_and(Speculation::reads_guesses)
    }

    /// Ends a step whose tokens are known: accepted rows move to their place in the sequence,
    /// before anything else uses the blocks, and drafts are made for the next step.
    fn settle(
        &mut self,
        batch: &Batch,
        rows: &[&OutputRows],
        outcomes: &[Outcome],
        outputs: &mut [RowOutput],
        started: Instant,
    ) {
        for (rows, outcome) in rows.iter().zip(outcomes) {
            self.move_accepted(rows, outcome);
        }
        let gap = started.saturating_duration_since(self.free_since);
        let took = started.max(self.free_since).elapsed();
        if let Some(speculation) = &mut self.speculation {
            let mut parts = Vec::with_capacity(rows.len());
            for ((&rows, outcome), output) in rows.iter().zip(outcomes).zip(&*outputs) {
                // A request that has left or failed is not drafted for.
                let request = self.requests.0.get(&rows.id).filter(|_| output.failure.is_none());
                let tokens = request.and_then(RequestState::tokens).unwrap_or_default();
                let (max_len, owner) =
                    request.map_or_else(Default::default, |request| (request.max_len, request.owner));
                let has_left = !self.requests.0.contains_key(&rows.id);
                parts.push(Part { rows, outcome, owner, tokens, max_len, has_left });
            }
            let is_last = self.in_flight.is_empty();
            speculation.after_step(&mut self.decoder, batch, &parts, outputs, StepTimes { gap, took }, is_last);
        }
        self.free_since = Instant::now();
    }

    /// Moves the keys and values of accepted nodes next to the last token, if there are gaps.
    fn move_accepted(&mut self, rows: &OutputRows, outcome: &Outcome) {
        let (Some(tables), Some(&last)) = (&rows.tables, outcome.accepted.last()) else { return };
        let word = ancestors(&rows.draft)[usize::from(last) + 1];
        for (group, table) in tables.iter().enumerate() {
            let pairs = tree::moves(rows.first, word).map(|(from, to)| (slot(table, from), slot(table, to)));
            let pairs: Vec<(u32, u32)> = pairs.collect();
            if !pairs.is_empty() {
                self.decoder.move_tokens(group, &pairs);
            }
        }
    }
}

impl<B: Backend> Drop for Runner<B> {
    fn drop(&mut self) {
        // The host tier outlives the device.
        self.transfers.finish(&mut self.decoder, self.num_steps);
    }
}

impl<B: Backend> StepRunner for Runner<B> {
    fn admit(&mut self, id: RequestId, admission: Admission) {
        self.num_admissions += 1;
        let request = RequestState::new(admission, self.num_admissions, self.speculation.is_some());
        self.requests.0.insert(id, request);
    }

    fn run(&mut self, plan: &StepPlan) -> Result<Vec<RowOutput>> {
        match self.start(plan)? {
            Some(rows) => Ok(rows),
            None => self.take_device_tokens(),
        }
    }

    fn start(&mut self, plan: &StepPlan) -> Result<Option<Vec<RowOutput>>> {
        self.num_steps += 1;
        let begun = guarded(|| self.begin(plan)).unwrap_or(Err(Error::StepPanicked));
        if !matches!(begun, Ok(None)) {
            self.transfers.finish(&mut self.decoder, self.num_steps);
        }
        begun
    }

    /// A request's next draw may depend on its last token, accepted rows of the step in flight may
    /// have to be moved first, and the drafter may have to read the states of that step.
    fn may_start(&self, plan: &StepPlan) -> bool {
        let mut asked = self.in_flight.iter().flat_map(|step| &step.asked);
        let in_flight = self.in_flight.iter().flat_map(|step| &step.asked).map(|asked| asked.rows.id);
        let ids = in_flight.chain(plan.assignments.iter().map(|a| a.id));
        let drafted_for = |id| self.requests.0.get(&id).filter(|request| request.history.is_some());
        let salts = ids.filter_map(drafted_for).map(|request| request.owner.salt);
        let is_read = self.speculation.as_ref().is_some_and(|speculation| speculation.reads_step(salts));
        !is_read
            && asked.all(|asked| asked.rows.tables.is_none())
            && plan.assignments.iter().all(|a| self.requests.0.get(&a.id).is_none_or(RequestState::may_start_ahead))
    }

    fn is_done(&mut self) -> bool {
        self.decoder.is_drawn()
    }

    fn finish(&mut self) -> Result<Vec<RowOutput>> {
        self.take_device_tokens()
    }

    fn computes_elsewhere(&self) -> bool {
        self.decoder.draws_tokens()
    }

    fn pulse(&self) -> Option<Pulse> {
        self.decoder.backend().pulse()
    }

    fn take_drafting(&mut self) -> Duration {
        self.speculation.as_mut().map_or(Duration::ZERO, Speculation::take_drafting)
    }

    /// A device that reports an error again after the error was taken is lost.
    fn is_lost(&mut self) -> bool {
        self.decoder.backend_mut().check().is_err()
    }

    fn release(&mut self, id: RequestId) {
        let Some(RequestState { owner, history: Some(history), .. }) = self.requests.0.remove(&id) else { return };
        if let Some(speculation) = &mut self.speculation {
            speculation.forget(id, owner, history.answer());
        }
    }
}
