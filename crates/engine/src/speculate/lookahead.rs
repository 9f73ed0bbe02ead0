//! Lookahead decoding: the model finds n-grams of its own while it verifies those that it found before.
//!
//! A draft is made of two parts (see [`lookahead_pool`](super::lookahead_pool) for the paper). What the request's pool
//! knows to follow the last token comes first, since that is what may be accepted; behind it comes the
//! [window](super::lookahead_window), which is there for what the model says at its ends. Both are rows of one tree, and
//! which of them is accepted is no concern of this module. A request that had no draft in a step, or another one than it
//! was given, starts its window anew; its pool stays until it leaves.

use folio_device::{Backend, Batch, Span};
use folio_model::Decoder;
use folio_scheduler::RequestId;

use super::{
    Draft, Drafter, Known, LookaheadOptions, LookaheadPools, Propose, Settled, SettledRequest,
    lookahead_window::Window, mix::Map,
};
use crate::Result;

/// The method, for all requests of an engine. Nothing passes from one to another.
pub struct Lookahead {
    options: LookaheadOptions,
    pools: LookaheadPools,
    windows: Map<u64, Window>,
}

impl Lookahead {
    pub fn new(options: LookaheadOptions) -> Self {
        Self { options, pools: LookaheadPools::new(options), windows: Map::default() }
    }

    /// What follows a request's last token, as far as its pool and its window know.
    fn draft_one(&mut self, batch: &Batch, span: &Span, request: &SettledRequest<'_>, draft: &mut Draft) {
        let SettledRequest { id, owner, tokens, guesses, most, .. } = *request;
        let known = Known { id, owner, tokens };
        let LookaheadOptions { size, window: width, .. } = self.options;
        if most == 0 {
            self.windows.remove(&id.0);
            return self.pools.observe(known);
        }
        let window = self.windows.entry(id.0).or_default();
        match guesses_of(window, batch, span, request) {
            Some(guesses) => {
                let pool = self.pools.pool(id);
                window.advance(tokens.len(), guesses, size, |ngram| pool.insert(ngram));
            }
            None => window.clear(),
        }
        // What the pool knows is worth more than what the window may find. That has the rest, and half of all at most;
        // where not one whole column has room, none would ever complete an n-gram.
        self.pools.propose(known, most, draft);
        let width = width.min(most / (2 * (size - 1)));
        if guesses.is_empty() || width == 0 {
            return window.clear();
        }
        window.draft(tokens, width, most, draft);
    }
}

/// What the model said behind the nodes of the request's last draft, if that is what the step computed.
fn guesses_of<'a>(window: &Window, batch: &Batch, span: &Span, request: &SettledRequest<'a>) -> Option<&'a [u32]> {
    let (first, num_rows) = (span.first_row as usize, span.num_rows as usize);
    let position = *batch.positions.get(first)? as usize;
    let (_, nodes) = batch.tokens[first..first + num_rows].split_first()?;
    let (_, guesses) = request.guesses.split_first()?;
    let is_own = guesses.len() == nodes.len() && position + 1 < request.tokens.len() && window.is_of(position, nodes);
    is_own.then_some(guesses)
}

impl<B: Backend> Drafter<B> for Lookahead {
    fn draft(&mut self, _: &mut Decoder<B>, step: &Settled<'_>, drafts: &mut [Draft]) -> Result<()> {
        for ((request, span), draft) in step.requests.iter().zip(&step.batch.spans).zip(drafts) {
            self.draft_one(step.batch, span, request, draft);
        }
        Ok(())
    }

    fn reads_step(&self) -> bool {
        true
    }

    fn reads_guesses(&self) -> bool {
        true
    }

    fn forget(&mut self, id: RequestId) {
        self.windows.remove(&id.0);
        self.pools.forget(id);
    }
}

#[cfg(test)]
mod tests;
