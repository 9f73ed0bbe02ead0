//! The runner's interface to a drafting method, which follows the decoder from step to step and
//! drafts the next tokens.

use folio_device::{Backend, Batch};
use folio_model::Decoder;
use folio_scheduler::RequestId;

use super::{Draft, Known, Owner, Propose};
use crate::Result;

/// A drafting method, beside the decoder that verifies its drafts. A failure costs its drafts and
/// nothing else.
pub trait Drafter<B: Backend>: Send {
    /// Follows a step whose tokens are known, and adds to the draft of every request at most `most`
    /// nodes. `drafts` has an empty draft for each of the step's requests.
    ///
    /// A request that may have no draft is passed, too: a method with state for every token decides
    /// whether to follow at once or to catch up later.
    fn draft(&mut self, decoder: &mut Decoder<B>, step: &Settled<'_>, drafts: &mut [Draft]) -> Result<()>;

    /// Whether the method reads states, rows or blocks of a step: the next step then waits for the
    /// drafts. While no request has had a draft for long, steps do not wait, and the method does
    /// not get a step that was followed by another.
    fn reads_step(&self) -> bool;

    /// Learns from an answer that has ended, without its prompt, for other requests of the owner's
    /// salt. Requests of other salts must not be affected.
    fn learn(&mut self, _owner: Owner, _answer: &[u32]) {}

    /// Whether the method needs [`SettledRequest::guesses`].
    fn reads_guesses(&self) -> bool {
        false
    }

    /// The request has ended, and its id may be used again.
    fn forget(&mut self, id: RequestId);
}

/// A step whose tokens are known.
pub struct Settled<'a> {
    /// The decoder's input; span `i` is that of request `i`.
    pub batch: &'a Batch,
    pub requests: &'a [SettledRequest<'a>],
}

/// A step's results for one request.
pub struct SettledRequest<'a> {
    pub id: RequestId,
    /// Only requests of the owner's salt may profit from data learned from this one.
    pub owner: Owner,
    /// Prompt and answer, with all tokens that the step gave. Empty if the request has ended or
    /// failed, or is for an embedding.
    pub tokens: &'a [u32],
    /// Number of tokens whose keys and values are in the request's blocks, in order: all but the
    /// last, once the prompt is computed.
    pub computed: usize,
    /// Rows of the batch that computed the last of those, by position: a chunk of a prompt, or the
    /// accepted path of a draft.
    pub rows: &'a [u32],
    /// Index of the last of these rows among the batch's outputs, if it is one.
    pub output: Option<u32>,
    /// The likeliest token after the request's last token before the step, and after every node of
    /// its draft, in order of rows: the last rows of its span. Empty unless asked for, and until
    /// the prompt is computed. If the device samples, these are its sampled tokens.
    pub guesses: &'a [u32],
    /// Most nodes of its draft; 0 until its prompt is computed, and when no draft would pay.
    pub most: usize,
}

/// A method on the host, which needs only the tokens.
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
