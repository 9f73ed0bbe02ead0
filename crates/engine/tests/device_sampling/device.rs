//! A device that draws tokens itself and is never done at once, around one that computes on this thread; and, for
//! comparison, the same one without that gift.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use folio_device::{
    Activation, Attention, Backend, Batch, DRAWN_TOKEN, Drawn, Draws, Error, ExpertsSource, HostMemory, InputLimits,
    KvShape, PrepareQkv, Result, Routing, StepSize, TensorKind,
};
use folio_formats::Matrix;

use crate::sampler;

/// A row of this token has logits that are no numbers.
pub const POISON: u32 = 13;

/// What a test sets, and what it finds.
#[derive(Debug, Default)]
pub struct Notes {
    /// Draws that began while another was under way.
    pub overlapped: usize,
    /// Tokens of a batch that were not known when it was handed over.
    pub awaited: usize,
    /// Draws so far.
    pub draws: usize,
    /// Blocks that began to move while a draw was under way.
    pub moved_ahead: usize,
    pub moves: usize,
    /// The draw of this number fails when it is asked for.
    pub broken_draw: Option<usize>,
    /// The step of this number fails when it begins.
    pub broken_step: Option<usize>,
    pub steps: usize,
    /// Once something was broken, everything is.
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
    /// What the last draw gave, for ids that were not known.
    last: Vec<u32>,
    under_way: VecDeque<UnderWay>,
    /// Memory of copies that nobody has asked about.
    moving: VecDeque<Box<dyn HostMemory>>,
    fault: bool,
}

struct UnderWay {
    number: usize,
    drawn: Vec<Drawn>,
    /// Questions whether it is done that are still answered with no.
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

impl<B: Backend> Backend for Drawing<B> {
    type Tensor = B::Tensor;
    type Vector = B::Vector;
    type Weight = B::Weight;
    type Experts = B::Experts;
    type Kv = B::Kv;
    type Inputs = B::Inputs;

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

    fn download(&mut self, tensor: &B::Tensor, rows: usize, out: &mut Vec<f32>) {
        self.inner.download(tensor, rows, out);
        // Logits, by their width: of the first outputs alone, where others are pooled.
        if out.len() == rows * self.vocab {
            self.poison(out);
        }
    }

    // ---- handed on ----

    fn tensor(&mut self, rows: usize, cols: usize, kind: TensorKind) -> Result<B::Tensor> {
        self.inner.tensor(rows, cols, kind)
    }

    fn vector(&mut self, values: &[f32]) -> Result<B::Vector> {
        self.inner.vector(values)
    }

    fn weight(&mut self, matrix: &Matrix<'_>) -> Result<B::Weight> {
        self.inner.weight(matrix)
    }

    fn experts(&mut self, source: ExpertsSource<'_>) -> Result<B::Experts> {
        self.inner.experts(source)
    }

    fn kv(&mut self, shape: KvShape) -> Result<B::Kv> {
        self.inner.kv(shape)
    }

    fn inputs(&mut self, limits: InputLimits) -> Result<B::Inputs> {
        self.inner.inputs(limits)
    }

    fn numerics(&self) -> String {
        self.inner.numerics()
    }

    fn weight_bytes(&self, weight: &B::Weight) -> u64 {
        self.inner.weight_bytes(weight)
    }

    fn experts_bytes(&self, experts: &B::Experts) -> u64 {
        self.inner.experts_bytes(experts)
    }

    fn rope_angles(&mut self, inputs: &mut B::Inputs, rope: usize, inv_freq: &B::Vector, magnitude: f32) {
        self.inner.rope_angles(inputs, rope, inv_freq, magnitude);
    }

    fn embed(&mut self, out: &mut B::Tensor, table: &B::Weight, inputs: &B::Inputs, scale: f32) {
        self.inner.embed(out, table, inputs, scale);
    }

    fn rms_norm(&mut self, out: &mut B::Tensor, x: &B::Tensor, weight: &B::Vector, eps: f32, rows: usize) {
        self.inner.rms_norm(out, x, weight, eps, rows);
    }

    fn add(&mut self, residual: &mut B::Tensor, x: &B::Tensor, scale: f32, rows: usize) {
        self.inner.add(residual, x, scale, rows);
    }

    fn add_rms_norm(
        &mut self,
        out: &mut B::Tensor,
        residual: &mut B::Tensor,
        x: &B::Tensor,
        scale: f32,
        weight: &B::Vector,
        eps: f32,
        rows: usize,
    ) {
        self.inner.add_rms_norm(out, residual, x, scale, weight, eps, rows);
    }

    fn linear(
        &mut self,
        out: &mut B::Tensor,
        x: &B::Tensor,
        weight: &B::Weight,
        bias: Option<&B::Vector>,
        rows: usize,
    ) {
        self.inner.linear(out, x, weight, bias, rows);
    }

    fn prepare_qkv(
        &mut self,
        qkv: &mut B::Tensor,
        kv: &mut B::Kv,
        layer: usize,
        op: &PrepareQkv<'_, Self>,
        inputs: &B::Inputs,
    ) {
        let &PrepareQkv { heads, kv_heads, head_dim, group, rope, q_norm, k_norm, norm_span, eps } = op;
        let op = PrepareQkv { heads, kv_heads, head_dim, group, rope, q_norm, k_norm, norm_span, eps };
        self.inner.prepare_qkv(qkv, kv, layer, &op, inputs);
    }

    fn attention(
        &mut self,
        out: &mut B::Tensor,
        qkv: &B::Tensor,
        kv: &B::Kv,
        layer: usize,
        op: &Attention<'_, Self>,
        inputs: &B::Inputs,
    ) {
        let &Attention { heads, kv_heads, head_dim, group, scale, window, soft_cap, sinks } = op;
        let op = Attention { heads, kv_heads, head_dim, group, scale, window, soft_cap, sinks };
        self.inner.attention(out, qkv, kv, layer, &op, inputs);
    }

    fn gate(&mut self, out: &mut B::Tensor, gate_up: &B::Tensor, activation: Activation, rows: usize) {
        self.inner.gate(out, gate_up, activation, rows);
    }

    fn experts_forward(
        &mut self,
        out: &mut B::Tensor,
        x: &B::Tensor,
        router_logits: &B::Tensor,
        experts: &B::Experts,
        op: &Routing<'_, Self>,
        rows: usize,
    ) {
        let &Routing { score, top_k, normalize, scale, choice_bias, groups, groups_kept, activation } = op;
        let op = Routing { score, top_k, normalize, scale, choice_bias, groups, groups_kept, activation };
        self.inner.experts_forward(out, x, router_logits, experts, &op, rows);
    }

    fn add_gated(&mut self, out: &mut B::Tensor, x: &B::Tensor, gate: &B::Tensor, rows: usize) {
        self.inner.add_gated(out, x, gate, rows);
    }

    fn gather_outputs(&mut self, out: &mut B::Tensor, x: &B::Tensor, inputs: &B::Inputs) {
        self.inner.gather_outputs(out, x, inputs);
    }

    fn finish_logits(&mut self, logits: &mut B::Tensor, scale: f32, soft_cap: Option<f32>, rows: usize) {
        self.inner.finish_logits(logits, scale, soft_cap, rows);
    }

    fn copy_blocks(&mut self, kv: &mut B::Kv, pairs: &[(u32, u32)]) {
        self.inner.copy_blocks(kv, pairs);
    }

    fn move_tokens(&mut self, kv: &mut B::Kv, pairs: &[(u32, u32)]) {
        self.inner.move_tokens(kv, pairs);
    }

    fn upload_rows(&mut self, tensor: &mut B::Tensor, values: &[f32]) {
        self.inner.upload_rows(tensor, values);
    }

    fn save_block(&mut self, kv: &B::Kv, block: u32, out: &mut [u8]) {
        self.inner.save_block(kv, block, out);
    }

    fn load_block(&mut self, kv: &mut B::Kv, block: u32, bytes: &[u8]) {
        self.inner.load_block(kv, block, bytes);
    }

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
