//! A smaller model that drafts for a larger one.
//!
//! The draft model is a decoder beside the one that verifies, and follows it from step to step: one
//! pass over the tokens that were settled since its last draft for a request, then one row of a
//! request and pass for every further token of the draft. [`Ahead`] numbers its blocks, and
//! [`Written`] knows their contents: accepted tokens that the model drafted itself are there
//! already, and it holds no state by request. A request without drafts costs nothing; when it is to
//! have one, the model catches up with it, a bounded number of rows a step.
//!
//! Its blocks are those of the decoder's layer group without a window, for all its own layers, even
//! those with a window. If every layer of the decoder has a window there is no such group: blocks
//! that the draft model would have to read are freed as the window moves on. A decoder of this kind
//! is refused.

mod guess;
mod translated;

use folio_device::{BLOCK_TOKENS, Backend, Batch};
use folio_model::{Decoder, DecoderLimits, MemoryUse, ModelSpec, OpenModel};
use folio_scheduler::RequestId;

use super::{Ahead, Draft, Drafter, Mark, Settled, Written};
use crate::{Error, Result};
use guess::{Guess, Guesses};
pub use translated::{BeginTranslation, TranslatedModel, Translation};

/// Options of a draft model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DraftModelOptions {
    /// Most tokens of a draft.
    pub most_tokens: usize,
    /// Most rows of a pass that catches up with a request.
    pub most_rows: usize,
    /// Least probability of a whole draft, in the draft model's estimate, for its last token to be
    /// used.
    pub keeps_above: f32,
    /// Least probability of a whole draft for another token to be drafted.
    pub goes_on_above: f32,
    /// Token ids below this are the same in both vocabularies.
    pub shared_tokens: usize,
    /// Tokens of the draft model for one of the target's if they are translated, otherwise 1.
    pub stretch: f32,
}

impl Default for DraftModelOptions {
    fn default() -> Self {
        Self {
            most_tokens: 8,
            most_rows: 512,
            keeps_above: 0.1,
            goes_on_above: 0.3,
            shared_tokens: usize::MAX,
            stretch: 1.0,
        }
    }
}

impl DraftModelOptions {
    /// The draft model's number of tokens, or blocks, for `count` of the target's.
    fn stretched(&self, count: usize) -> usize {
        (count as f64 * f64::from(self.stretch)).ceil() as usize
    }

    /// Most tokens of a draft in the draft model's vocabulary.
    fn most_own(&self) -> usize {
        self.stretched(self.most_tokens).min(Draft::MOST_NODES)
    }
}

/// See the [module](self).
pub struct DraftModel<B: Backend> {
    decoder: Decoder<B>,
    options: DraftModelOptions,
    ahead: Ahead,
    written: Written,
    batch: Batch,
    guesses: Guesses,
    /// The pass in which each block was last written: two requests that share a block take turns.
    claims: Vec<u64>,
    passes: u64,
}

/// A request that the model follows or drafts for.
struct Growing {
    /// Index of the request in the step.
    request: usize,
    /// Number of its tokens in the model's own blocks.
    mark: Mark,
    /// Tokens that may still be drafted.
    left: usize,
    /// Probability of the draft so far.
    likelihood: f32,
}

impl<B: Backend> DraftModel<B> {
    /// Loads a model that drafts for `target`, with another backend on the same device.
    pub fn load(backend: B, model: &OpenModel, target: &Decoder<B>, options: DraftModelOptions) -> Result<Self> {
        let shared_tokens = options.shared_tokens.min(model.spec.vocab_size).min(target.spec().vocab_size);
        Self::load_with(backend, model, target, options, shared_tokens)
    }

    fn load_with(
        backend: B,
        model: &OpenModel,
        target: &Decoder<B>,
        options: DraftModelOptions,
        shared_tokens: usize,
    ) -> Result<Self> {
        let (ahead, limits) = Self::layout(&model.spec, target.spec(), target.limits(), &options)?;
        let options = DraftModelOptions { shared_tokens, ..options };
        let decoder = Decoder::load(backend, model, limits, &mut |_| {})?;
        let blocks = ahead.num_blocks();
        Ok(Self {
            guesses: Guesses::new(shared_tokens),
            decoder,
            options,
            ahead,
            written: Written::new(blocks),
            batch: Batch::default(),
            claims: vec![0; blocks],
            passes: 0,
        })
    }

    /// The limits that the model will have beside a decoder of these limits, for planning memory
    /// before anything is loaded.
    pub fn limits(
        model: &ModelSpec,
        target: &ModelSpec,
        limits: &DecoderLimits,
        options: &DraftModelOptions,
    ) -> Result<DecoderLimits> {
        Self::layout(model, target, limits, options).map(|(_, limits)| limits)
    }

    fn layout(
        model: &ModelSpec,
        target: &ModelSpec,
        limits: &DecoderLimits,
        options: &DraftModelOptions,
    ) -> Result<(Ahead, DecoderLimits)> {
        for (field, value) in [("tokens of a draft", options.most_tokens), ("rows of a draft model", options.most_rows)]
        {
            if value == 0 {
                return Err(Error::Config { field, value, least: 1 });
            }
        }
        let group = Ahead::full_group(target).ok_or(Error::OnlyWindows { family: target.family })?;
        let ahead = Ahead::new(group, options.stretched(limits.blocks[group]), limits.spans, options.most_own());
        let limits = DecoderLimits {
            rows: limits.rows.min(options.most_rows).max(limits.spans),
            spans: limits.spans,
            outputs: limits.spans,
            table_entries: ahead.table_entries(options.stretched(limits.table_entries)),
            blocks: vec![ahead.num_blocks(); model.kv_groups().len()],
            kv_format: limits.kv_format,
        };
        Ok((ahead, limits))
    }

    pub fn memory(&self) -> MemoryUse {
        self.decoder.memory()
    }

    pub fn decoder(&self) -> &Decoder<B> {
        &self.decoder
    }

    /// Computes the missing tokens of every request that may have a draft. Requests that are
    /// complete have logits, in the order returned.
    fn follow(&mut self, step: &Settled<'_>) -> Result<Vec<Growing>> {
        let all = step.requests.iter().enumerate().filter(|(_, request)| request.most > 0);
        let mut behind: Vec<Growing> = all
            .filter_map(|(number, request)| {
                let known = request.tokens.split_last()?.1;
                let room = (self.decoder.spec().max_context + 1).saturating_sub(request.tokens.len());
                let left = request.most.min(self.options.most_own()).min(room);
                let table = self.ahead.table(step.batch, number);
                let mark = self.written.mark(request.owner.salt, table, known);
                (left > 0).then_some(Growing { request: number, mark, left, likelihood: 1.0 })
            })
            .collect();
        // Requests with the fewest missing tokens first: a long prompt must not delay the others.
        behind.sort_by_key(|growing| step.requests[growing.request].tokens.len() - growing.mark.len());
        self.begin_pass();
        let mut places = Vec::with_capacity(behind.len());
        behind.retain(|growing| {
            let tokens = step.requests[growing.request].tokens;
            let room = self.decoder.limits().rows - self.batch.num_rows();
            let (start, end) = (growing.mark.len(), tokens.len().min(growing.mark.len() + room));
            let is_free = end > start && self.claim(self.ahead.table(step.batch, growing.request), start, end);
            if is_free {
                self.push(step.batch, growing.request, start, &tokens[start..end], end == tokens.len());
                places.push(end);
            }
            is_free
        });
        self.pass()?;
        for (growing, &end) in behind.iter_mut().zip(&places) {
            let tokens = step.requests[growing.request].tokens;
            let table = self.ahead.table(step.batch, growing.request);
            let start = growing.mark.len();
            self.written.extend(&mut growing.mark, table, &tokens[start..end]);
        }
        let mut places = places.into_iter();
        behind.retain(|growing| places.next() == Some(step.requests[growing.request].tokens.len()));
        Ok(behind)
    }

    /// Claims these places for a request; false if another request of this pass writes to their
    /// blocks.
    fn claim(&mut self, table: &[u32], start: usize, end: usize) -> bool {
        let blocks = table.iter().take(end.div_ceil(BLOCK_TOKENS)).skip(start / BLOCK_TOKENS);
        if blocks.clone().any(|&block| self.claims[block as usize] == self.passes) {
            return false;
        }
        blocks.for_each(|&block| self.claims[block as usize] = self.passes);
        true
    }

    fn begin_pass(&mut self) {
        self.passes += 1;
        Ahead::clear(&mut self.batch, self.decoder.limits().blocks.len());
    }

    fn push(&mut self, step: &Batch, request: usize, first: usize, tokens: &[u32], gives_logits: bool) {
        let row = self.ahead.push(step, request, first, tokens, &[], &mut self.batch) as usize;
        // A token that the draft model does not have becomes some other token: that costs agreement
        // and no more.
        let shared = self.options.shared_tokens as u32;
        self.batch.tokens[row..].iter_mut().filter(|token| **token >= shared).for_each(|token| *token = 0);
        if gives_logits {
            self.batch.outputs.push(self.batch.num_rows() as u32 - 1);
        }
    }

    fn pass(&mut self) -> Result<()> {
        Ok(self.decoder.forward(&self.batch)?)
    }

    /// Adds a token to a draft. Returns whether another one is to follow.
    fn grow(&self, growing: &mut Growing, guess: Guess, draft: &mut Draft) -> bool {
        growing.likelihood *= guess.probability;
        growing.left -= 1;
        let known = (guess.token as usize) < self.options.shared_tokens;
        if !known || growing.likelihood < self.options.keeps_above {
            return false;
        }
        let parent = draft.len().checked_sub(1).map(|parent| parent as u16);
        draft.push(guess.token, parent);
        growing.left > 0 && growing.likelihood >= self.options.goes_on_above
    }
}

impl<B: Backend> Drafter<B> for DraftModel<B> {
    fn draft(&mut self, _: &mut Decoder<B>, step: &Settled<'_>, drafts: &mut [Draft]) -> Result<()> {
        let mut growing = self.follow(step)?;
        let mut guesses = std::mem::take(&mut self.guesses);
        while !growing.is_empty() {
            guesses.read(&mut self.decoder, growing.len())?;
            let mut guess = guesses.iter();
            growing.retain_mut(|growing| {
                let guess = guess.next().expect("a guess for every output");
                self.grow(growing, guess, &mut drafts[growing.request])
            });
            if growing.is_empty() {
                break;
            }
            self.begin_pass();
            for growing in &growing {
                let (draft, settled) = (&drafts[growing.request], &step.requests[growing.request]);
                let place = settled.tokens.len() + draft.len() - 1;
                self.push(step.batch, growing.request, place, &draft.tokens()[draft.len() - 1..], true);
            }
            self.pass()?;
            for growing in &mut growing {
                let draft = &drafts[growing.request];
                let place = step.requests[growing.request].tokens.len() + draft.len() - 1;
                // Tokens after one in scratch blocks are not in blocks that last.
                if growing.mark.len() == place {
                    let table = self.ahead.table(step.batch, growing.request);
                    self.written.extend(&mut growing.mark, table, &draft.tokens()[draft.len() - 1..]);
                }
            }
        }
        self.guesses = guesses;
        Ok(())
    }

    fn reads_step(&self) -> bool {
        true
    }

    fn forget(&mut self, _: RequestId) {}
}
