//! Speculation: drafts of a request's next tokens, so that one pass of the model verifies several
//! tokens.
//!
//! A [`Draft`] is a tree of tokens after a request's last one. [`Propose`] is the interface of
//! methods that need no device and draft from the tokens they have seen. A draft may be arbitrarily
//! bad: verification gives the tokens of plain decoding in any case, so drafts change only how soon
//! they come. [`Drafter`] is the runner's interface to a method, and [`walk`] verifies a draft.

mod adapt;
mod ahead;
mod automaton;
mod draft_model;
mod drafter;
mod eagle;
mod likely;
mod lookahead;
mod lookahead_pool;
mod lookahead_window;
mod medusa;
mod mix;
mod ngram;
#[cfg(test)]
mod rig;
mod salts;
mod speculation;
mod suffix;
mod synthetic;
mod trust;
mod verify;
mod written;

pub use adapt::{Adapt, AdaptOptions};
pub use ahead::Ahead;
pub use draft_model::{BeginTranslation, DraftModel, DraftModelOptions, TranslatedModel, Translation};
pub use drafter::{Drafter, OnHost, Settled, SettledRequest};
pub use eagle::{EagleDrafter, EagleOptions};
use folio_device::tree;
pub use folio_scheduler::Draft;
use folio_scheduler::RequestId;
pub use lookahead::Lookahead;
pub use lookahead_pool::{LookaheadOptions, LookaheadPools, NgramPool};
pub use medusa::{MedusaDrafter, MedusaOptions};
pub use ngram::{Ngram, NgramOptions};
pub use salts::Owner;
pub use speculation::Speculation;
pub(crate) use speculation::{Part, StepTimes};
pub use suffix::{Suffix, SuffixOptions};
pub use synthetic::Synthetic;
pub use verify::{Place, Walk, ask, walk};
pub use written::{Mark, Written};

/// The tokens of a request, for a method on the host.
#[derive(Clone, Copy, Debug)]
pub struct Known<'a> {
    pub id: RequestId,
    pub owner: Owner,
    /// Its prompt and its answer so far.
    pub tokens: &'a [u32],
}

/// A method on the host.
pub trait Propose: Send {
    /// Adds nodes to `draft` that may follow the tokens of a request, until it has `most` nodes or
    /// the method has no more. The likeliest nodes come first, except that parents come before
    /// children.
    fn propose(&mut self, request: Known<'_>, most: usize, draft: &mut Draft);

    /// Reads the tokens of a request, as a proposal does: useful while the device computes a long
    /// prompt. A request's tokens only ever grow until it is forgotten.
    fn observe(&mut self, _request: Known<'_>) {}

    /// Learns from an answer that has ended, without its prompt, for other requests of the owner's
    /// salt. Requests of other salts must not be affected.
    fn learn(&mut self, _owner: Owner, _answer: &[u32]) {}

    /// The request has ended, and its id may be used again.
    fn forget(&mut self, id: RequestId);
}

/// The ancestors of each row of a draft: a word a row, as [`tree`] has them. Row 0 is the last
/// token, and node `i` is row `i + 1`.
pub fn ancestors(draft: &Draft) -> Vec<u64> {
    const { assert!(Draft::MOST_NODES < tree::TREE_ROWS) };
    let row = |parent: &Option<u16>| Some(parent.map_or(0, |node| usize::from(node) + 1));
    let rows: Vec<_> = std::iter::once(None).chain(draft.parents().iter().map(row)).collect();
    tree::ancestors(&rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// ```text
    /// last - 7 - 8
    ///      \ 9 - 7 - 5
    /// ```
    #[test]
    fn rows_see_the_way_to_them() {
        let mut bush = Draft::new(&[7, 9, 8, 7, 5], &[None, None, Some(0), Some(1), Some(3)]);
        assert_eq!(ancestors(&bush), [0b1, 0b11, 0b101, 0b1011, 0b10101, 0b110101]);
        bush.truncate(3);
        assert_eq!(ancestors(&bush), [0b1, 0b11, 0b101, 0b1011]);
        assert_eq!(ancestors(&Draft::chain([4, 4, 4])), [0b1, 0b11, 0b111, 0b1111]);
        assert_eq!(ancestors(&Draft::default()), [1]);
        assert_eq!(ancestors(&Draft::chain(0..63))[63], u64::MAX);
    }
}
