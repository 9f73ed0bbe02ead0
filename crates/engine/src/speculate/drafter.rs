//! What a method of drafting is to the runner: it follows the decoder from step to step, and says what may come next.

use folio_device::{Backend, Batch};
use folio_model::Decoder;
use folio_scheduler::RequestId;

use super::{Draft, Known, Owner, Propose};
use crate::Result;

/// A method of drafting, next to the decoder that verifies its drafts. One that fails costs its drafts and nothing else.
pub trait Drafter<B: Backend>: Send {
    /// Takes in a step whose tokens are known, and adds to the draft of every request as many nodes as it may have at
    /// most. `drafts` are as many as the step's requests, and come empty.
    ///
    /// A request that may have none is told all the same: where a method keeps something of its own for every token, it
    /// decides itself whether to keep up or to catch up later.
    fn draft(&mut self, decoder: &mut Decoder<B>, step: &Settled<'_>, drafts: &mut [Draft]) -> Result<()>;

    /// Whether it looks at states, rows or blocks of the step: the next one then waits until the drafts are there. While
    /// nobody has had a draft for long, steps do not wait, and those that another has followed by then it is not told of.
    fn reads_step(&self) -> bool;

    /// Takes in an answer that has ended, without its prompt, for the good of other requests of the owner's salt. Others
    /// must never notice.
    fn learn(&mut self, _owner: Owner, _answer: &[u32]) {}

    /// Whether it wants [`SettledRequest::guesses`].
    fn reads_guesses(&self) -> bool {
        false
    }

    /// The request has left, and its id may come again for another.
    fn forget(&mut self, id: RequestId);
}

/// A step whose tokens are known.
pub struct Settled<'a> {
    /// What the decoder was given; its span `i` belongs to request `i`.
    pub batch: &'a Batch,
    pub requests: &'a [SettledRequest<'a>],
}

/// What a step settled of one request.
pub struct SettledRequest<'a> {
    pub id: RequestId,
    /// Whatever is learned from the request is for those of its salt.
    pub owner: Owner,
    /// Prompt and answer, with all tokens that the step gave. Empty where there is nothing to be known of the request: it
    /// wants no tokens, or has left or failed.
    pub tokens: &'a [u32],
    /// How many of them have their keys and values in the request's blocks, in order. All but the last, once the prompt
    /// is done.
    pub computed: usize,
    /// The rows of the batch that computed the last of those, by position: a chunk of a prompt, or the way through a draft
    /// that was accepted.
    pub rows: &'a [u32],
    /// Where the last of these rows is among the batch's outputs, if it is.
    pub output: Option<u32>,
    /// The likeliest token behind the request's last token before the step and behind every node of its draft, in the order
    /// of rows: the last rows of its span. Empty unless asked for, and while its prompt is not done. Where the device draws
    /// tokens, what it drew there.
    pub guesses: &'a [u32],
    /// Nodes that its draft may have; 0 while its prompt is not done, and where no draft would pay.
    pub most: usize,
}

/// A method on the host, which needs nothing but the tokens.
pub struct OnHost<P>(pub P);

impl<B: Backend, P: Propose> Drafter<B> for OnHost<P> {
    fn draft(&mut self, _: &mut Decoder<B>, step: &Settled<'_>, drafts: &mut [Draft]) -> Result<()> {
        for (request, draft) in step.requests.iter().zip(drafts) {
            if request.tokens.is_empty() {
                continue;
            }
            let &SettledRequest { id, owner, tokens, .. } = request;
            let known = Known { id, owner, tokens };
            if request.most > 0 {
                self.0.propose(known, request.most, draft);
            } else {
                self.0.observe(known);
            }
        }
        Ok(())
    }

    fn reads_step(&self) -> bool {
        false
    }

    fn learn(&mut self, owner: Owner, answer: &[u32]) {
        self.0.learn(owner, answer);
    }

    fn forget(&mut self, id: RequestId) {
        self.0.forget(id);
    }
}
