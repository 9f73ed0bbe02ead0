//! Lookahead decoding: the model finds n-grams of its own while it verifies those that it found
//! before.
//!
//! A draft has two parts (see [`lookahead_pool`](super::lookahead_pool) for the paper). First are
//! the continuations of the last token in the request's pool, which may be accepted. After them
//! comes the [window](super::lookahead_window), which is there for the model's tokens after its
//! nodes. Both are rows of one tree, and this module does not care which of them is accepted. A
//! request without a draft in a step, or with another one than it was given, begins a new window;
//! its pool stays until the request ends.

use folio_device::{Backend, Batch, Span};
use folio_model::Decoder;
use folio_scheduler::RequestId;

use super::{
    Draft, Drafter, Known, LookaheadOptions, LookaheadPools, Propose, Settled, SettledRequest,
    lookahead_window::Window, mix::Map,
};
use crate::Result;

/// The method, for all requests of an engine. Requests share nothing.
pub struct Lookahead {
    options: LookaheadOptions,
    pools: LookaheadPools,
    windows: Map<u64, Window>,
}

impl Lookahead {
    pub fn new(options: LookaheadOptions) -> Self {
        Self { options, pools: LookaheadPools::new(options), windows: Map::default() }
    }

    /// The tokens that follow a request's last one in its pool and its window.
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
        // Nodes of the pool are worth more than those of the window. The window gets the rest, at
        // most half of all; without room for one whole column, no n-gram would ever be complete.
        self.pools.propose(known, most, draft);
        let width = width.min(most / (2 * (size - 1)));
        if guesses.is_empty() || width == 0 {
            return window.clear();
        }
        window.draft(tokens, width, most, draft);
    }
}

/// The model's tokens after the nodes of the request's last draft, if the step computed that draft.
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
