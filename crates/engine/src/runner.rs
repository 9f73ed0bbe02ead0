//! Steps of one decoder on one device, from a plan to tokens.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
};

use folio_model::{
    Decoder,
    device::{Backend, Batch, DRAWN_TOKEN, Drawn, Draws},
};
use folio_scheduler::{RequestId, StepPlan};

use crate::{
    Error, HostTier, Result, RowOutput, Sampled, StepRunner,
    background::guarded,
    inputs::{OutputRows, Requests, gather},
    moves::Moves,
    pooling::Pool,
    sampling::{NotFinite, SamplingState, sampled},
};

/// Turns plans into forward passes and logits into tokens. What belongs to a request outlives steps; everything else is
/// made anew from each plan.
pub struct Runner<B: Backend> {
    decoder: Decoder<B>,
    /// Where blocks are saved to and loaded from.
    moves: Moves,
    requests: Known,
    batch: Batch,
    /// Of the step under way, in the order of its plan.
    outputs: Vec<OutputRows>,
    logits: Vec<f32>,
    hidden: Vec<f32>,
    /// Where the device draws tokens itself: what is asked of it, and what it said.
    draws: Draws,
    drawn: Vec<Drawn>,
    /// Oldest first.
    under_way: VecDeque<UnderWay>,
    /// Requests taken in so far.
    admissions: u64,
    /// Steps begun so far.
    steps: u64,
}

/// A step whose tokens the device has not told yet.
struct UnderWay {
    number: u64,
    asked: Vec<Asked>,
}

#[derive(Default)]
struct Known(HashMap<RequestId, Kept>);

/// What the device was asked about one request.
struct Asked {
    rows: OutputRows,
    /// Who it was then: one of the same id may have come since.
    admission: u64,
    num_questions: usize,
    /// Why it was not asked.
    failure: Option<&'static str>,
}

/// What is kept of a request between steps.
struct Kept {
    admission: u64,
    sampling: SamplingState,
    /// The token sampled last and its position: the next plan may ask for it without knowing it.
    last: Option<(usize, u32)>,
    /// The position of a token that the device is about to draw, and the number of its draw in the last step.
    pending: Option<(usize, u32)>,
    /// A row of it went wrong: what was asked in the meantime, behind a token that there never was, means nothing.
    has_failed: bool,
    /// For requests that want a vector and no token.
    pool: Option<Pool>,
}

impl Requests for Known {
    fn awaited(&self, id: RequestId, position: usize) -> Option<u32> {
        let kept = self.0.get(&id)?;
        let at = |known: Option<(usize, u32)>| known.filter(|known| known.0 == position).map(|known| known.1);
        at(kept.last).or_else(|| at(kept.pending).map(|number| DRAWN_TOKEN | number))
    }

    fn pools(&self, id: RequestId) -> bool {
        self.0.get(&id).is_some_and(|kept| kept.pool.is_some())
    }
}

impl<B: Backend> Runner<B> {
    /// `host` is the tier that the engine is given too, where there is one.
    pub fn new(decoder: Decoder<B>, host: Option<Arc<HostTier>>) -> Self {
        Self {
            decoder,
            moves: Moves::new(host),
            requests: Known::default(),
            batch: Batch::default(),
            outputs: Vec::new(),
            logits: Vec::new(),
            hidden: Vec::new(),
            draws: Draws::default(),
            drawn: Vec::new(),
            under_way: VecDeque::new(),
            admissions: 0,
            steps: 0,
        }
    }

    pub fn decoder(&self) -> &Decoder<B> {
        &self.decoder
    }

    /// Transfers, rows and draws; none if the device is to tell its tokens later.
    fn begin(&mut self, plan: &StepPlan) -> Result<Option<Vec<RowOutput>>> {
        // The engine proposes none yet, and to verify them is the business of who does.
        if let Some(assignment) = plan.assignments.iter().find(|a| a.num_drafts > 0) {
            return Err(Error::Drafts { id: assignment.id, drafts: assignment.num_drafts });
        }
        self.moves.start(&mut self.decoder, &plan.transfers, self.steps)?;
        let num_logits = gather(plan, &self.requests, &mut self.batch, &mut self.outputs);
        self.decoder.forward_with(&self.batch, num_logits)?;
        if num_logits < self.batch.outputs.len() {
            self.decoder.hidden(&mut self.hidden);
        }
        if self.decoder.draws_tokens() {
            // The last that is asked of the device: a step that failed has no draw under way.
            return self.draw().map(|()| None);
        }
        if num_logits > 0 {
            self.decoder.logits(&mut self.logits);
        }
        let rows = std::mem::take(&mut self.outputs);
        let outputs = self.sample_all(&rows);
        self.outputs = rows;
        outputs.map(Some)
    }

    /// What the logits of a request's rows give, on the host.
    fn sample(&mut self, rows: &OutputRows) -> Result<RowOutput> {
        let width = self.decoder.spec().vocab_size;
        let (hidden, hidden_width) = (&self.hidden, self.decoder.spec().hidden);
        let logits = &mut self.logits;
        let kept = self.requests.0.get_mut(&rows.id).ok_or(Error::UnknownRequest(rows.id))?;
        Ok(kept.output(rows, hidden, hidden_width, |sampling, question| match question {
            Question::Prompt { row, target } => {
                let logprobs = sampling.prompt_logprobs(&logits[row * width..(row + 1) * width], target)?;
                Ok(Sampled { token: target, logprobs: Some(logprobs) })
            }
            Question::Next { row } => sampling.sample(&mut logits[row * width..(row + 1) * width], rows.position),
        }))
    }

    fn sample_all(&mut self, rows: &[OutputRows]) -> Result<Vec<RowOutput>> {
        // A sampler that panics is its own request's fault.
        let failed = |id| Ok(RowOutput::failed(id, PANICKED));
        rows.iter().map(|rows| guarded(|| self.sample(rows)).unwrap_or_else(|| failed(rows.id))).collect()
    }

    /// Waits for what the device drew of the oldest step under way.
    fn take_drawn(&mut self) -> Result<Vec<RowOutput>> {
        let UnderWay { number, asked: step } = self.under_way.pop_front().ok_or(Error::NothingSubmitted)?;
        let drawn = self.decoder.drawn(&mut self.drawn);
        self.moves.finish(&mut self.decoder, number);
        drawn?;
        let (asked, answered) = (step.iter().map(|asked| asked.num_questions).sum::<usize>(), self.drawn.len());
        if asked != answered {
            return Err(Error::Step(format!("the device drew {answered} tokens, but was asked for {asked}")));
        }
        let mut answers = self.drawn.drain(..);
        let (hidden, hidden_width) = (&self.hidden, self.decoder.spec().hidden);
        let mut outputs = Vec::with_capacity(step.len());
        for asked in &step {
            let mut own = answers.by_ref().take(asked.num_questions);
            let answer = |_: &mut SamplingState, _: Question| own.next().map_or(Err(NotFinite::NothingLeft), sampled);
            let id = asked.rows.id;
            let kept = self.requests.0.get_mut(&id).filter(|kept| kept.admission == asked.admission);
            outputs.push(match (asked.failure, kept) {
                (Some(reason), _) => RowOutput::failed(id, reason),
                (None, Some(kept)) => kept.output(&asked.rows, hidden, hidden_width, answer),
                (None, None) => RowOutput::failed(id, "the request has left"),
            });
            // A failure leaves answers behind that nobody wants.
            own.for_each(drop);
        }
        Ok(outputs)
    }

    /// Has the device draw all tokens of the step, and does not wait; answers come in the order of the questions.
    fn draw(&mut self) -> Result<()> {
        let vocab = self.decoder.spec().vocab_size;
        self.draws.clear();
        let mut step = Vec::with_capacity(self.outputs.len());
        for rows in self.outputs.drain(..) {
            let kept = self.requests.0.get_mut(&rows.id).ok_or(Error::UnknownRequest(rows.id))?;
            step.push(kept.ask(rows, &mut self.draws, vocab));
        }
        self.decoder.draw(&self.draws);
        self.under_way.push_back(UnderWay { number: self.steps, asked: step });
        Ok(())
    }
}

impl<B: Backend> Drop for Runner<B> {
    fn drop(&mut self) {
        // The tier outlives the device.
        self.moves.finish(&mut self.decoder, self.steps);
    }
}

/// Why a row fails whose token before it does not exist.
const ORPHAN: &str = "no token was sampled for the position before";
const PANICKED: &str = "its sampler panicked";

/// What is asked of a row of logits.
enum Question {
    Prompt { row: usize, target: u32 },
    Next { row: usize },
}

impl Kept {
    /// Writes down what the device is asked about the request.
    fn ask(&mut self, rows: OutputRows, draws: &mut Draws, vocab: usize) -> Asked {
        let first = draws.draws.len();
        self.pending = None;
        let mut failure = rows.is_orphan.then_some(ORPHAN);
        if failure.is_none() && !rows.pools {
            let sampling = &self.sampling;
            let write = guarded(|| {
                for (row, &target) in rows.prompt.clone().zip(&rows.prompt_targets) {
                    sampling.push_target(draws, row as u32, target);
                }
                let number = draws.draws.len() as u32;
                let sampled = rows.sample.map(|row| sampling.push_draw(draws, row as u32, rows.position, vocab));
                sampled.map(|()| (rows.position, number))
            });
            match write {
                Some(pending) => self.pending = pending,
                // A sampler that panics is its own request's fault; what it wrote is not asked.
                None => {
                    draws.draws.truncate(first);
                    failure = Some(PANICKED);
                }
            }
        }
        Asked { admission: self.admission, num_questions: draws.draws.len() - first, rows, failure }
    }

    /// What a step found out about the request, with `answer` for each row of logits that it has.
    fn output(
        &mut self,
        rows: &OutputRows,
        hidden: &[f32],
        hidden_width: usize,
        mut answer: impl FnMut(&mut SamplingState, Question) -> Result<Sampled, NotFinite>,
    ) -> RowOutput {
        let id = rows.id;
        self.pending = self.pending.filter(|pending| pending.0 != rows.position);
        if rows.is_orphan || self.has_failed {
            return RowOutput::failed(id, ORPHAN);
        }
        if let Some(pool) = &mut self.pool {
            return take_states(pool, rows, hidden, hidden_width);
        }
        let mut output = RowOutput::new(id);
        for (row, &target) in rows.prompt.clone().zip(&rows.prompt_targets) {
            match answer(&mut self.sampling, Question::Prompt { row, target }) {
                Ok(sampled) => output.prompt_logprobs.extend(sampled.logprobs),
                Err(error) => {
                    self.has_failed = true;
                    return RowOutput { failure: Some(error.to_string()), ..output };
                }
            }
        }
        let Some(row) = rows.sample else { return output };
        match answer(&mut self.sampling, Question::Next { row }) {
            Ok(sampled) => {
                self.sampling.observe(sampled.token);
                self.last = Some((rows.position, sampled.token));
                output.sampled = Some(sampled);
            }
            Err(error) => {
                self.has_failed = true;
                output.failure = Some(error.to_string());
            }
        }
        output
    }
}

/// Adds a step's rows of `width` values to what a request wants pooled; with the last of them comes the vector.
fn take_states(pool: &mut Pool, rows: &OutputRows, hidden: &[f32], width: usize) -> RowOutput {
    for row in rows.prompt.clone().chain(rows.sample) {
        pool.add(&hidden[row * width..(row + 1) * width]);
    }
    let output = RowOutput::new(rows.id);
    match rows.sample.map(|_| pool.finish()) {
        None => output,
        Some(Ok(vector)) => RowOutput { pooled: Some(vector), ..output },
        Some(Err(error)) => RowOutput::failed(rows.id, error),
    }
}

impl<B: Backend> StepRunner for Runner<B> {
    fn admit(&mut self, id: RequestId, state: SamplingState) {
        let pool = state.pool();
        self.admissions += 1;
        let admission = self.admissions;
        let kept = Kept { admission, sampling: state, last: None, pending: None, has_failed: false, pool };
        self.requests.0.insert(id, kept);
    }

    fn run(&mut self, plan: &StepPlan) -> Result<Vec<RowOutput>> {
        match self.start(plan)? {
            Some(rows) => Ok(rows),
            None => self.take_drawn(),
        }
    }

    fn start(&mut self, plan: &StepPlan) -> Result<Option<Vec<RowOutput>>> {
        self.steps += 1;
        let begun = guarded(|| self.begin(plan)).unwrap_or(Err(Error::StepPanicked));
        if !matches!(begun, Ok(None)) {
            self.moves.finish(&mut self.decoder, self.steps);
        }
        begun
    }

    /// What a request asks of its next token may depend on the one before; hidden states come to the host and are waited
    /// for.
    fn may_start(&self, plan: &StepPlan) -> bool {
        let ahead = |kept: &Kept| kept.pool.is_none() && (kept.pending.is_none() || kept.sampling.draws_ahead());
        plan.assignments.iter().all(|a| self.requests.0.get(&a.id).is_none_or(ahead))
    }

    fn is_done(&mut self) -> bool {
        self.decoder.is_drawn()
    }

    fn finish(&mut self) -> Result<Vec<RowOutput>> {
        self.take_drawn()
    }

    /// A device that still has the same to say after it was told has nothing else to say any more.
    fn is_lost(&mut self) -> bool {
        self.decoder.backend_mut().check().is_err()
    }

    fn release(&mut self, id: RequestId) {
        self.requests.0.remove(&id);
    }
}
