//! Drafts by an EAGLE head: a small layer that follows the decoder row by row and then continues by
//! itself.
//!
//! **Following.** The head stores keys and values for every settled row, computed from the
//! decoder's state and the next token, which is known even for the last row of a chunk. They are in
//! storage of the head's own, in blocks numbered as those of one layer group of the decoder. Prefix
//! hits, preempted requests and chunks of prompts therefore need no care: the rows of every step
//! are computed in the same blocks as the decoder's. [`Held`] knows the contents of a block. If a
//! request's blocks have other contents, as after a time without drafts, the head attends to no
//! rows before them.
//!
//! **Drafting.** The row that gave the last sampled token proposes tokens after it, and a tree of
//! candidates grows from there, a pass of the head for each level ([`Tree`]): the likeliest nodes
//! are expanded while they are likely enough to be worth a pass, and the likeliest of all become
//! the draft. Rows of a level read the keys and values of earlier levels; places beyond the
//! request's own blocks are scratch.
//!
//! **Without drafts** for a while, the head stops following a request, or all of them, because a
//! step of many sequences would take time for nothing. It starts again at the next block.
//!
//! A model's own layers for multi-token prediction would be drafters of this kind: the first of
//! them is an EAGLE-1 head with norms before `fc`, and each further one is that of the next level.

mod held;
mod tree;

use std::collections::HashMap;

use folio_device::{BLOCK_TOKENS, Backend, Batch, tree::TREE_ROWS};
use folio_formats::WeightSource;
use folio_model::{
    Decoder, MemoryUse,
    heads::{Eagle, EagleRoom, Feature},
};
use folio_scheduler::RequestId;

use super::{Ahead, Draft, Drafter, Settled, SettledRequest, likely::likeliest, salts::Salts, trust::Trust};
use crate::Result;
use held::Held;
use tree::{Growth, Tree};

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EagleOptions {
    /// Tokens after a row that are candidates.
    pub candidates: usize,
    /// Most rows of a level.
    pub width: usize,
    /// Most levels of a draft.
    pub depth: usize,
    /// Least probability of a drafted node.
    pub least: f32,
    /// Least probability of a node that is expanded.
    pub least_expanded: f32,
}

impl Default for EagleOptions {
    fn default() -> Self {
        Self { candidates: 6, width: 4, depth: 8, least: 0.1, least_expanded: 0.3 }
    }
}

/// Rows of one tree that the head computes, all levels together.
const MOST_ROWS: usize = 32;
const _: () = assert!(MOST_ROWS <= TREE_ROWS);
/// Drafted rows of one pass, if there are fewer sequences.
const LEVEL_ROWS: usize = 64;
/// Steps without drafts after which the head stops following.
const MOST_QUIET_STEPS: u32 = 32;

pub struct EagleDrafter<B: Backend> {
    head: Eagle<B>,
    ahead: Ahead,
    held: Held,
    trust: Trust,
    options: EagleOptions,
    /// Steps of each request without a draft, since its last one.
    quiet: HashMap<RequestId, u32>,
    /// Steps in which answers of a salt continued and none of them had a draft, since the last one.
    idle: Salts<u32>,
    trees: Vec<Tree>,
    batch: Batch,
    features: Vec<Feature>,
    logits: Vec<f32>,
    guesses: Vec<(u32, f32)>,
}

impl<B: Backend> EagleDrafter<B> {
    /// Loads a head for this decoder, whose states it taps from now on.
    pub fn load(decoder: &mut Decoder<B>, source: &dyn WeightSource, options: EagleOptions) -> Result<Self> {
        let limits = decoder.limits();
        let sequences = limits.spans;
        // The head names its group; no group has more blocks than the largest.
        let blocks = limits.blocks.iter().copied().max().unwrap_or(0);
        let room = Ahead::new(0, blocks, sequences, MOST_ROWS);
        let room = EagleRoom { blocks: room.num_blocks(), drafts: sequences.max(LEVEL_ROWS) };
        let head = Eagle::load_with(decoder, source, room)?;
        Ok(Self {
            ahead: Ahead::new(head.group(), blocks, sequences, MOST_ROWS),
            held: Held::new(room.blocks),
            head,
            trust: Trust::default(),
            options,
            quiet: HashMap::new(),
            idle: Salts::default(),
            trees: Vec::new(),
            batch: Batch::default(),
            features: Vec::new(),
            logits: Vec::new(),
            guesses: Vec::new(),
        })
    }

    pub fn memory(&self) -> MemoryUse {
        self.head.memory()
    }

    /// Whether the head follows a request.
    fn keeps_up(&mut self, request: &SettledRequest<'_>) -> bool {
        if request.tokens.len() <= request.computed || request.rows.is_empty() {
            return false;
        }
        let is_prompt = request.output.is_none();
        let quiet = self.quiet.entry(request.id).or_default();
        *quiet = match request.most {
            0 if is_prompt => *quiet,
            0 => quiet.saturating_add(1),
            _ => 0,
        };
        let idle = self.idle.get(request.owner.salt).copied().unwrap_or(0);
        *quiet < MOST_QUIET_STEPS && (idle < MOST_QUIET_STEPS || request.most > 0)
    }

    fn note_idleness(&mut self, requests: &[SettledRequest<'_>]) {
        let mut seen: Vec<u64> = Vec::new();
        for request in requests.iter().filter(|request| request.output.is_some()) {
            let owner = request.owner;
            if !seen.contains(&owner.salt) {
                seen.push(owner.salt);
                let is_drafting = |other: &SettledRequest<'_>| other.owner.salt == owner.salt && other.most > 0;
                let idle = self.idle.of(owner, || 0);
                *idle = if requests.iter().any(is_drafting) { 0 } else { idle.saturating_add(1) };
            }
        }
    }

    /// One pass over the settled rows of a step. Every request that is to have a draft then has a
    /// tree with its first candidates.
    fn follow(&mut self, decoder: &mut Decoder<B>, step: &Settled<'_>) -> Result<()> {
        Ahead::clear(&mut self.batch, 1);
        self.features.clear();
        self.trees.clear();
        self.note_idleness(step.requests);
        let mut written = Vec::new();
        for (number, request) in step.requests.iter().enumerate() {
            self.trust.settle(request.id, request.tokens);
            if !self.keeps_up(request) {
                continue;
            }
            let (computed, table) = (request.computed, self.ahead.table(step.batch, number));
            let base = computed - request.rows.len();
            let start = self.held.start(request.owner.salt, table, request.tokens, base);
            let first = base.max(start * BLOCK_TOKENS);
            if first >= computed {
                continue;
            }
            let place = first - start * BLOCK_TOKENS;
            let tokens = &request.tokens[first + 1..=computed];
            let row = self.ahead.push_to(&table[start..], number, place, tokens, &[], &mut self.batch);
            self.features.extend(request.rows[first - base..].iter().map(|&row| Feature::Decoder(row)));
            written.push((number, first));
            if request.most > 0 {
                let last_row = row + tokens.len() as u32 - 1;
                self.batch.outputs.push(last_row);
                self.trees.push(Tree::new(number, start, last_row, request.most.min(Draft::MOST_NODES)));
            }
        }
        self.head.forward(decoder, &self.batch, &self.features)?;
        for (number, first) in written {
            let (request, table) = (&step.requests[number], self.ahead.table(step.batch, number));
            self.held.note(request.owner.salt, table, request.tokens, first..request.computed);
        }
        self.read_guesses(decoder, step);
        Ok(())
    }

    /// Grows another level of all trees that continue; false if none does.
    fn grow(&mut self, decoder: &mut Decoder<B>, step: &Settled<'_>) -> Result<bool> {
        Ahead::clear(&mut self.batch, 1);
        self.features.clear();
        let (limits, max_context) = (self.head.limits(), decoder.spec().max_context);
        let (mut spans, mut entries) = (limits.spans.min(limits.rows).min(limits.outputs), limits.table_entries);
        for tree in &mut self.trees {
            let request = &step.requests[tree.request];
            let base = request.computed - tree.start * BLOCK_TOKENS;
            // Each row of a tree counts as a span with a table.
            let per_row = (base + MOST_ROWS).div_ceil(BLOCK_TOKENS);
            let room = (spans.min(entries / per_row)).min(max_context.saturating_sub(base + tree.num_rows()));
            let width = self.options.width.min(room).min(MOST_ROWS - tree.num_rows());
            let growth = Growth { width, least: self.options.least_expanded };
            let before = tree.num_rows();
            tree.expand(&growth);
            let new = tree.num_rows() - before;
            if new == 0 {
                continue;
            }
            (spans, entries) = (spans - new, entries - new * per_row);
            let table = &self.ahead.table(step.batch, tree.request)[tree.start..];
            let words = if tree.is_chain() { &[] } else { tree.words() };
            let row = self.ahead.push_to(table, tree.request, base + before, &tree.tokens(), words, &mut self.batch);
            self.features.extend(tree.places(row).map(Feature::After));
        }
        if self.batch.num_rows() == 0 {
            return Ok(false);
        }
        self.batch.outputs.extend(0..self.batch.tokens.len() as u32);
        self.head.forward(decoder, &self.batch, &self.features)?;
        self.read_guesses(decoder, step);
        Ok(true)
    }

    /// Reads the pass's logits as candidates after the rows of the trees, in their order.
    fn read_guesses(&mut self, decoder: &mut Decoder<B>, step: &Settled<'_>) {
        if self.batch.outputs.is_empty() {
            return;
        }
        self.head.logits(decoder, &mut self.logits);
        let mut rows = self.logits.chunks_exact(self.head.vocab_size());
        for tree in &mut self.trees {
            let salt = step.requests[tree.request].owner.salt;
            let (candidates, trust) = (self.options.candidates.min(tree.most), self.trust.of(salt, tree.next_depth()));
            for row in 0..tree.level_rows() {
                let logits = rows.next().expect("a row of logits for each row of a level");
                likeliest(logits, candidates, &mut self.guesses);
                let guesses = self.guesses.iter().map(|&(column, said)| (self.head.token(column as usize), said));
                tree.offer(row, guesses, trust);
            }
        }
    }
}

impl<B: Backend> Drafter<B> for EagleDrafter<B> {
    fn draft(&mut self, decoder: &mut Decoder<B>, step: &Settled<'_>, drafts: &mut [Draft]) -> Result<()> {
        self.follow(decoder, step)?;
        // The first level exists already.
        for _ in 1..self.options.depth {
            if !self.grow(decoder, step)? {
                break;
            }
        }
        for tree in &self.trees {
            let (request, draft) = (&step.requests[tree.request], &mut drafts[tree.request]);
            let said = tree.finish(self.options.least, draft);
            self.trust.expect(request, draft, said);
        }
        Ok(())
    }

    fn reads_step(&self) -> bool {
        true
    }

    fn forget(&mut self, id: RequestId) {
        self.trust.forget(id);
        self.quiet.remove(&id);
    }
}

#[cfg(test)]
mod tests;
