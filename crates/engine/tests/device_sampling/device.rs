//! A device that samples tokens itself and is never done at once, around a backend that computes on
//! this thread; and for comparison the same backend without sampling.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use folio_device::{
    Backend, Batch, BlockCopies, DRAWN_TOKEN, Drawn, Draws, Error, HostMemory, Intercept, Op, Result, Sampling,
    StepSize, Steps, Wrapper,
};

use crate::sampler;

/// A row of this token has logits that are not numbers.
pub const POISON: u32 = 13;

/// Settings by a test, and counts for it.
#[derive(Debug, Default)]
pub struct Notes {
    /// Draws that began while another was in flight.
    pub overlapped: usize,
    /// Tokens of a batch that were not known when it was submitted.
    pub awaited: usize,
    /// Draws so far.
    pub draws: usize,
    /// Transfers that began while a draw was in flight.
    pub moved_ahead: usize,
    pub moves: usize,
    /// The draw of this number fails when its result is taken.
    pub broken_draw: Option<usize>,
    /// The step of this number fails when it begins.
    pub broken_step: Option<usize>,
    pub steps: usize,
    /// After a failure, everything fails.
    pub stays_broken: bool,
    pub is_broken: bool,
}

#[derive(Clone, Default)]
pub struct Shared(Arc<Mutex<Notes>>);

impl Shared {
    pub fn notes(&self) -> MutexGuard<'_, Notes> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub struct Drawing<B: Backend> {
    inner: B,
    draws_tokens: bool,
    vocab: usize,
    shared: Shared,
    /// Tokens of the last step's output rows.
    output_tokens: Vec<u32>,
    /// Tokens of the last draw, for ids that were not known.
    last: Vec<u32>,
    under_way: VecDeque<UnderWay>,
    /// Memory of copies that have not been taken.
    moving: VecDeque<Box<dyn HostMemory>>,
    fault: bool,
}

struct UnderWay {
    number: usize,
    drawn: Vec<Drawn>,
    /// Number of calls that still report the draw as not done.
    polls_left: usize,
}

impl<B: Backend> Drawing<B> {
    pub fn new(inner: B, draws_tokens: bool, vocab: usize, shared: Shared) -> Self {
        let (output_tokens, last, under_way, moving) = (Vec::new(), Vec::new(), VecDeque::new(), VecDeque::new());
        Self { inner, draws_tokens, vocab, shared, output_tokens, last, under_way, moving, fault: false }
    }

    /// Every third copy is done at once.
    fn keep(&mut self, memory: Box<dyn HostMemory>) -> Option<Box<dyn HostMemory>> {
        let mut notes = self.shared.notes();
        notes.moved_ahead += usize::from(!self.under_way.is_empty());
        notes.moves += 1;
        if notes.moves.is_multiple_of(3) {
            return Some(memory);
        }
        self.moving.push_back(memory);
        None
    }

    fn poison(&self, logits: &mut [f32]) {
        for (row, _) in
            logits.chunks_exact_mut(self.vocab).zip(&self.output_tokens).filter(|(_, token)| **token == POISON)
        {
            row[7] = f32::NAN;
        }
    }
}

fn broken(what: &str) -> Error {
    Error::Device { device: "drawing".into(), message: format!("{what} was broken") }
}

impl<B: Backend> Wrapper for Drawing<B> {
    type Inner = B;

    fn inner(&self) -> &B {
        &self.inner
    }

    fn inner_mut(&mut self) -> &mut B {
        &mut self.inner
    }
}

impl<B: Backend> Intercept for Drawing<B> {
    fn intercept(&mut self, op: Op<'_, Self>) {
        match op {
            Op::Download { tensor, rows, out } => {
                self.inner.download(tensor, rows, out);
                // Logits, by their width: of the first outputs alone, if others are pooled.
                if out.len() == rows * self.vocab {
                    self.poison(out);
                }
            }
            op => op.inner().run(&mut self.inner),
        }
    }
}

impl<B: Backend> Steps for Drawing<B> {
    fn numerics(&self) -> String {
        self.inner.numerics()
    }

    fn upload(&mut self, inputs: &mut B::Inputs, batch: &Batch) -> StepSize {
        let mut batch = batch.clone();
        let mut notes = self.shared.notes();
        for token in batch.tokens.iter_mut().filter(|token| **token >= DRAWN_TOKEN) {
            *token = self.last[(*token - DRAWN_TOKEN) as usize];
            notes.awaited += 1;
        }
        self.fault = notes.broken_step == Some(notes.steps);
        notes.steps += 1;
        notes.is_broken |= self.fault && notes.stays_broken;
        drop(notes);
        self.output_tokens = batch.outputs.iter().map(|&row| batch.tokens[row as usize]).collect();
        self.inner.upload(inputs, &batch)
    }

    fn check(&mut self) -> Result<()> {
        if std::mem::take(&mut self.fault) || self.shared.notes().is_broken {
            return Err(broken("a step"));
        }
        self.inner.check()
    }
}

impl<B: Backend> Sampling for Drawing<B> {
    fn draws_tokens(&self) -> bool {
        self.draws_tokens
    }

    fn draw(&mut self, logits: &mut B::Tensor, draws: &Draws) {
        assert!(self.under_way.len() < 2, "more than two draws under way");
        assert!(draws.draws.len() <= self.output_tokens.len(), "more draws than outputs");
        let mut rows = Vec::new();
        self.inner.download(logits, self.output_tokens.len(), &mut rows);
        self.poison(&mut rows);
        let row = |number: u32| &rows[number as usize * self.vocab..(number as usize + 1) * self.vocab];
        let drawn: Vec<Drawn> = draws.draws.iter().map(|draw| sampler::draw(row(draw.row), draw, draws)).collect();
        self.last = drawn.iter().map(|drawn| drawn.token).collect();
        let mut notes = self.shared.notes();
        notes.overlapped += usize::from(!self.under_way.is_empty());
        let number = notes.draws;
        notes.draws += 1;
        self.under_way.push_back(UnderWay { number, drawn, polls_left: number * 7 % 40 });
    }

    fn is_drawn(&mut self) -> bool {
        let Some(oldest) = self.under_way.front_mut() else { return true };
        let is_done = oldest.polls_left == 0;
        oldest.polls_left = oldest.polls_left.saturating_sub(1);
        is_done
    }

    fn drawn(&mut self, out: &mut Vec<Drawn>) -> Result<()> {
        let UnderWay { number, drawn, .. } = self.under_way.pop_front().expect("a draw is under way");
        *out = drawn;
        let mut notes = self.shared.notes();
        if notes.broken_draw == Some(number) {
            notes.is_broken = notes.stays_broken;
            return Err(broken("a draw"));
        }
        Ok(())
    }
}

impl<B: Backend> BlockCopies for Drawing<B> {
    fn start_save(&mut self, kv: &B::Kv, block: u32, mut memory: Box<dyn HostMemory>) -> Option<Box<dyn HostMemory>> {
        self.inner.save_block(kv, block, &mut memory);
        self.keep(memory)
    }

    fn start_load(&mut self, kv: &mut B::Kv, block: u32, memory: Box<dyn HostMemory>) -> Option<Box<dyn HostMemory>> {
        self.inner.load_block(kv, block, &memory);
        self.keep(memory)
    }

    fn moved(&mut self) -> Box<dyn HostMemory> {
        self.moving.pop_front().expect("a copy was started")
    }
}
