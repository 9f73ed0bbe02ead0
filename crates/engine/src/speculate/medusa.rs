//! Drafts by Medusa heads: the likely tokens of each head after the last row, combined to a tree.
//!
//! All heads read the state of one row, the last that is settled, and head `i` predicts the token
//! `i + 2` places after it; the first token after it is sampled and known. Heads do not depend on
//! each other's tokens, so the probability of a node is the product of the heads' probabilities on
//! its path, and the tree is made of the likeliest nodes, best first. A head's probabilities are
//! corrected by its record.

use std::{cmp::Ordering, collections::BinaryHeap};

use folio_device::Backend;
use folio_formats::WeightSource;
use folio_model::{Decoder, MemoryUse, heads::Medusa};
use folio_scheduler::RequestId;

use super::{Draft, Drafter, Settled, SettledRequest, likely::likeliest, trust::Trust};
use crate::Result;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MedusaOptions {
    /// Candidates of each head.
    pub candidates: usize,
    /// Least probability of a drafted node.
    pub least: f32,
}

impl Default for MedusaOptions {
    fn default() -> Self {
        Self { candidates: 8, least: 0.05 }
    }
}

pub struct MedusaDrafter<B: Backend> {
    heads: Medusa<B>,
    options: MedusaOptions,
    trust: Trust,
    logits: Vec<f32>,
    /// Candidates of each head and their probabilities.
    guesses: Vec<Vec<(u32, f32)>>,
}

/// Requests whose heads are computed at once: each head has a row of logits.
const MOST_ROWS: usize = 16;

impl<B: Backend> MedusaDrafter<B> {
    pub fn load(decoder: &mut Decoder<B>, source: &dyn WeightSource, options: MedusaOptions) -> Result<Self> {
        let most_rows = decoder.limits().spans.clamp(1, MOST_ROWS);
        let heads = Medusa::load(decoder, source, most_rows)?;
        let guesses = vec![Vec::new(); heads.num_heads()];
        Ok(Self { heads, options, trust: Trust::default(), logits: Vec::new(), guesses })
    }

    pub fn memory(&self) -> MemoryUse {
        self.heads.memory()
    }

    /// Fills the draft of one request from its rows of logits, `rows` apart for each head.
    fn grow(&mut self, request: &SettledRequest<'_>, row: usize, rows: usize, vocab: usize, draft: &mut Draft) {
        let most = draft.room(request.most);
        let heads = self.logits.len() / (rows * vocab);
        for (head, guesses) in self.guesses[..heads].iter_mut().enumerate() {
            let row = &self.logits[(head * rows + row) * vocab..][..vocab];
            likeliest(row, self.options.candidates.min(most), guesses);
        }
        let trust = |depth: usize| self.trust.of(request.owner.salt, depth);
        let said = tree(&self.guesses[..heads], trust, most, self.options.least, draft);
        self.trust.expect(request, draft, said);
    }
}

impl<B: Backend> Drafter<B> for MedusaDrafter<B> {
    fn draft(&mut self, decoder: &mut Decoder<B>, step: &Settled<'_>, drafts: &mut [Draft]) -> Result<()> {
        step.requests.iter().for_each(|request| self.trust.settle(request.id, request.tokens));
        let vocab = decoder.spec().vocab_size;
        let wanted = step.requests.iter().zip(drafts).filter(|(request, _)| request.most > 0);
        let mut wanted: Vec<_> =
            wanted.filter_map(|(request, draft)| Some((request.output?, request, draft))).collect();
        for some in wanted.chunks_mut(self.heads.most_rows()) {
            let outputs: Vec<u32> = some.iter().map(|(output, ..)| *output).collect();
            let heads = some.iter().map(|(_, request, _)| request.most).max().unwrap_or(0).min(self.heads.num_heads());
            self.heads.start(decoder, &outputs)?;
            self.heads.logits(decoder, heads, &mut self.logits)?;
            let rows = some.len();
            for (row, (_, request, draft)) in some.iter_mut().enumerate() {
                self.grow(request, row, rows, vocab, draft);
            }
        }
        Ok(())
    }

    fn reads_step(&self) -> bool {
        true
    }

    fn forget(&mut self, id: RequestId) {
        self.trust.forget(id);
    }
}

/// A node that may be next: candidate `rank` of the head at its depth.
#[derive(Clone, Copy)]
struct Next {
    likely: f32,
    parent: Option<u16>,
    /// Probability of its parent.
    before: f32,
    depth: usize,
    rank: usize,
}

impl Ord for Next {
    fn cmp(&self, other: &Self) -> Ordering {
        // If two nodes are equally likely, the one nearer to the root is first, so that parents
        // come before children.
        self.likely.total_cmp(&other.likely).then(other.depth.cmp(&self.depth)).then(other.rank.cmp(&self.rank))
    }
}

impl PartialOrd for Next {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Next {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Next {}

/// Adds the likeliest nodes, best first, until there are `most` or none is as likely as `least`.
/// Returns the heads' probability of each.
fn tree(
    guesses: &[Vec<(u32, f32)>],
    trust: impl Fn(usize) -> f32,
    most: usize,
    least: f32,
    draft: &mut Draft,
) -> Vec<f32> {
    let at = |parent: Option<u16>, before: f32, depth: usize, rank: usize| {
        let (_, said) = *guesses.get(depth)?.get(rank)?;
        let likely = before * (said * trust(depth + 1)).min(1.0);
        (likely >= least).then_some(Next { likely, parent, before, depth, rank })
    };
    let (mut heap, mut said) = (BinaryHeap::from_iter(at(None, 1.0, 0, 0)), Vec::new());
    while let Some(Next { likely, parent, before, depth, rank }) = heap.pop() {
        if said.len() == most {
            break;
        }
        let (token, chance) = guesses[depth][rank];
        let node = draft.push(token, parent);
        said.push(chance);
        heap.extend(at(parent, before, depth, rank + 1));
        heap.extend(at(Some(node), likely, depth + 1, 0));
    }
    said
}

#[cfg(test)]
mod tests;
