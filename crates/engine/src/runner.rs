//! Steps of one decoder on one device, from a plan to tokens.

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use folio_device::{Backend, Batch, Drawn, Draws, Pulse, tree};
use folio_model::Decoder;
use folio_scheduler::{RequestId, StepPlan};

use crate::{
    Admission, Error, HostTier, Result, RowOutput, Sampled, StepRunner,
    background::guarded,
    fit::fit,
    inputs::{OutputRows, gather, slot},
    kept::{Asked, Kept, Known, Outcome, PANICKED, Question},
    moves::Moves,
    sampling::{NotFinite, SamplingState, likeliest, sampled},
    speculate::{Part, Speculation, StepTimes, ancestors},
};

/// Turns plans into forward passes and logits into tokens. What belongs to a request outlives steps; everything else is
/// made anew from each plan.
pub struct Runner<B: Backend> {
    decoder: Decoder<B>,
    /// Who drafts, where somebody does.
    speculation: Option<Speculation<B>>,
    /// Where blocks are saved to and loaded from.
    moves: Moves,
    requests: Known,
    batch: Batch,
    /// The memory of one that is not in use.
    spare: Batch,
    /// Of the step under way, in the order of its plan.
    outputs: Vec<OutputRows>,
    logits: Vec<f32>,
    hidden: Vec<f32>,
    /// Where the device draws tokens itself: what is asked of it, and what it said.
    draws: Draws,
    drawn: Vec<Drawn>,
    /// Oldest first.
    under_way: VecDeque<UnderWay>,
    /// When the last step ended.
    free_since: Instant,
    /// Requests taken in so far.
    admissions: u64,
    /// Steps begun so far.
    steps: u64,
}

/// A step whose tokens the device has not told yet.
struct UnderWay {
    number: u64,
    started: Instant,
    asked: Vec<Asked>,
    /// Empty where nobody drafts.
    batch: Batch,
}

impl<B: Backend> Runner<B> {
    /// `host` is the tier that the engine is given too, where there is one.
    pub fn new(decoder: Decoder<B>, host: Option<Arc<HostTier>>) -> Self {
        Self {
            decoder,
            speculation: None,
            moves: Moves::new(host),
            requests: Known::default(),
            batch: Batch::default(),
            spare: Batch::default(),
            outputs: Vec::new(),
            logits: Vec::new(),
            hidden: Vec::new(),
            draws: Draws::default(),
            drawn: Vec::new(),
            under_way: VecDeque::new(),
            free_since: Instant::now(),
            admissions: 0,
            steps: 0,
        }
    }

    /// One that drafts. Comes before any request.
    pub fn with_speculation(mut self, speculation: Speculation<B>) -> Self {
        assert!(self.requests.0.is_empty(), "who drafts has to know requests from their beginning");
        self.speculation = Some(speculation);
        self
    }

    pub fn decoder(&self) -> &Decoder<B> {
        &self.decoder
    }

    /// Transfers, rows and draws; none if the device is to tell its tokens later.
    fn begin(&mut self, plan: &StepPlan) -> Result<Option<Vec<RowOutput>>> {
        let started = Instant::now();
        let fitted = fit(plan, self.decoder.limits());
        let plan = fitted.as_ref().unwrap_or(plan);
        self.moves.start(&mut self.decoder, &plan.transfers, self.steps)?;
        let num_logits = gather(plan, &self.requests, &mut self.batch, &mut self.outputs);
        self.decoder.forward_with(&self.batch, num_logits)?;
        if num_logits < self.batch.outputs.len() {
            self.decoder.hidden(&mut self.hidden);
        }
        if self.decoder.draws_tokens() {
            // The last that is asked of the device: a step that failed has no draw under way.
            return self.draw(started).map(|()| None);
        }
        if num_logits > 0 {
            self.decoder.logits(&mut self.logits);
        }
        let rows = std::mem::take(&mut self.outputs);
        let (mut outputs, outcomes) = self.sample_all(&rows)?;
        let batch = std::mem::take(&mut self.batch);
        self.settle(&batch, &rows.iter().collect::<Vec<_>>(), &outcomes, &mut outputs, started);
        (self.batch, self.outputs) = (batch, rows);
        Ok(Some(outputs))
    }

    /// What the logits of a request's rows give, on the host.
    fn sample(&mut self, rows: &OutputRows) -> Result<(RowOutput, Outcome)> {
        let width = self.decoder.spec().vocab_size;
        let (hidden, hidden_width) = (&self.hidden, self.decoder.spec().hidden);
        let logits = &mut self.logits;
        let first = rows.sample.unwrap_or(0);
        // Rows that are sampled from are used up.
        let guesses = match &self.speculation {
            Some(speculation) if speculation.reads_guesses() && rows.sample.is_some() && !rows.pools => {
                logits[first * width..].chunks(width).take(rows.draft.len() + 1).map(likeliest).collect()
            }
            _ => Vec::new(),
        };
        let kept = self.requests.0.get_mut(&rows.id).ok_or(Error::UnknownRequest(rows.id))?;
        let (output, outcome) = kept.output(rows, hidden, hidden_width, |sampling, question| match question {
            Question::Prompt { row, target } => {
                let logprobs = sampling.prompt_logprobs(&logits[row * width..(row + 1) * width], target)?;
                Ok(Sampled { token: target, logprobs: Some(logprobs) })
            }
            Question::Next { nth, position } => {
                let row = first + nth;
                sampling.sample(&mut logits[row * width..(row + 1) * width], position)
            }
        });
        Ok((output, Outcome { guesses, ..outcome }))
    }

    fn sample_all(&mut self, rows: &[OutputRows]) -> Result<(Vec<RowOutput>, Vec<Outcome>)> {
        // A sampler that panics is its own request's fault.
        let failed = |id| Ok((RowOutput::failed(id, PANICKED), Outcome::default()));
        rows.iter().map(|rows| guarded(|| self.sample(rows)).unwrap_or_else(|| failed(rows.id))).collect()
    }

    /// Waits for what the device drew of the oldest step under way.
    fn take_drawn(&mut self) -> Result<Vec<RowOutput>> {
        let UnderWay { number, started, asked: step, batch } =
            self.under_way.pop_front().ok_or(Error::NothingSubmitted)?;
        let drawn = self.decoder.drawn(&mut self.drawn);
        self.moves.finish(&mut self.decoder, number);
        drawn?;
        let (asked, answered) = (step.iter().map(|asked| asked.num_questions).sum::<usize>(), self.drawn.len());
        if asked != answered {
            return Err(Error::Step(format!("the device drew {answered} tokens, but was asked for {asked}")));
        }
        let reads_guesses = self.speculation.as_ref().is_some_and(Speculation::reads_guesses);
        let drawn: Vec<u32> =
            if reads_guesses { self.drawn.iter().map(|drawn| drawn.token).collect() } else { Vec::new() };
        let mut next = 0;
        let mut answers = self.drawn.drain(..);
        let (hidden, hidden_width) = (&self.hidden, self.decoder.spec().hidden);
        let (mut outputs, mut outcomes) = (Vec::with_capacity(step.len()), Vec::with_capacity(step.len()));
        for asked in &step {
            let mut own = answers.by_ref().take(asked.num_questions);
            let mut taken = 0;
            let answer = |_: &mut SamplingState, question: Question| {
                // Answers to rows that nobody comes to are left out.
                let skipped = match question {
                    Question::Prompt { .. } => 0,
                    Question::Next { nth, .. } => nth - std::mem::replace(&mut taken, nth + 1),
                };
                own.nth(skipped).map_or(Err(NotFinite::NothingLeft), sampled)
            };
            let id = asked.rows.id;
            let kept = self.requests.0.get_mut(&id).filter(|kept| kept.admission == asked.admission);
            let failed = |reason: &str| (RowOutput::failed(id, reason), Outcome::default());
            let (output, mut outcome) = match (asked.failure, kept) {
                (Some(reason), _) => failed(reason),
                (None, Some(kept)) => kept.output(&asked.rows, hidden, hidden_width, answer),
                (None, None) => failed("the request has left"),
            };
            // A failure leaves answers behind that nobody wants.
            own.for_each(drop);
            if reads_guesses && asked.num_questions > asked.rows.prompt_targets.len() {
                let first = next + asked.rows.prompt_targets.len();
                outcome.guesses = drawn[first..next + asked.num_questions].to_vec();
            }
            next += asked.num_questions;
            outputs.push(output);
            outcomes.push(outcome);
        }
        drop(answers);
        let rows: Vec<&OutputRows> = step.iter().map(|asked| &asked.rows).collect();
        self.settle(&batch, &rows, &outcomes, &mut outputs, started);
        self.spare = batch;
        Ok(outputs)
    }

    /// Has the device draw all tokens of the step, and does not wait; answers come in the order of the questions.
    fn draw(&mut self, started: Instant) -> Result<()> {
        let vocab = self.decoder.spec().vocab_size;
        self.draws.clear();
        let mut step = Vec::with_capacity(self.outputs.len());
        for rows in self.outputs.drain(..) {
            let kept = self.requests.0.get_mut(&rows.id).ok_or(Error::UnknownRequest(rows.id))?;
            step.push(kept.ask(rows, &mut self.draws, vocab));
        }
        self.decoder.draw(&self.draws);
        let batch = match self.speculation {
            Some(_) => std::mem::replace(&mut self.batch, std::mem::take(&mut self.spare)),
            None => Batch::default(),
        };
        self.under_way.push_back(UnderWay { number: self.steps, started, asked: step, batch });
        Ok(())
    }

    /// The tokens of a step are known: what was accepted goes where the sequence has it, before anything else is done
    /// with its blocks, and drafts are made for the next step.
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
                // Of one that has left or failed there is nothing to be known.
                let kept = self.requests.0.get(&rows.id).filter(|_| output.failure.is_none());
                let tokens = kept.and_then(Kept::tokens).unwrap_or_default();
                let (max_len, owner) = kept.map_or_else(Default::default, |kept| (kept.max_len, kept.owner));
                let has_left = !self.requests.0.contains_key(&rows.id);
                parts.push(Part { rows, outcome, owner, tokens, max_len, has_left });
            }
            let is_last = self.under_way.is_empty();
            speculation.behind(&mut self.decoder, batch, &parts, outputs, StepTimes { gap, took }, is_last);
        }
        self.free_since = Instant::now();
    }

    /// Where a path through a draft does not lie behind the last token without gaps.
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
        // The tier outlives the device.
        self.moves.finish(&mut self.decoder, self.steps);
    }
}

impl<B: Backend> StepRunner for Runner<B> {
    fn admit(&mut self, id: RequestId, admission: Admission) {
        self.admissions += 1;
        let kept = Kept::new(admission, self.admissions, self.speculation.is_some());
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

    /// What a request asks of its next token may depend on the one before. What the step under way accepts may have to be
    /// moved first, and who drafts may have to look at what it left.
    fn may_start(&self, plan: &StepPlan) -> bool {
        let mut asked = self.under_way.iter().flat_map(|step| &step.asked);
        let under_way = self.under_way.iter().flat_map(|step| &step.asked).map(|asked| asked.rows.id);
        let ids = under_way.chain(plan.assignments.iter().map(|a| a.id));
        let drafted_for = |id| self.requests.0.get(&id).filter(|kept| kept.history.is_some());
        let salts = ids.filter_map(drafted_for).map(|kept| kept.owner.salt);
        let is_looked_at = self.speculation.as_ref().is_some_and(|speculation| speculation.reads_step(salts));
        !is_looked_at
            && asked.all(|asked| asked.rows.tables.is_none())
            && plan.assignments.iter().all(|a| self.requests.0.get(&a.id).is_none_or(Kept::may_go_ahead))
    }

    fn is_done(&mut self) -> bool {
        self.decoder.is_drawn()
    }

    fn finish(&mut self) -> Result<Vec<RowOutput>> {
        self.take_drawn()
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

    /// A device that still has the same to say after it was told has nothing else to say any more.
    fn is_lost(&mut self) -> bool {
        self.decoder.backend_mut().check().is_err()
    }

    fn release(&mut self, id: RequestId) {
        let Some(Kept { owner, history: Some(history), .. }) = self.requests.0.remove(&id) else { return };
        if let Some(speculation) = &mut self.speculation {
            speculation.forget(id, owner, history.answer());
        }
    }
}
