//! Guesses at what a request says next, so that one pass of the model verifies several tokens.
//!
//! A [`Draft`] is a tree of such guesses behind a request's last token; [`Propose`] is how methods that need no device
//! make one from the tokens that they have seen. A guess may be as bad as it likes: what is verified is what the model
//! would have said anyway, so nothing here touches the output, only how soon it comes. [`Drafter`] is a
//! method as the runner sees it, and [`walk`] how a draft is verified.

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
pub use verify::{Place, Walk, ask, verify, verify_drawn, walk};
pub use written::{Mark, Written};

/// What a method on the host knows of a request.
#[derive(Clone, Copy, Debug)]
pub struct Known<'a> {
    pub id: RequestId,
    pub owner: Owner,
    /// Its prompt, and its answer so far.
    pub tokens: &'a [u32],
}

/// A method on the host.
pub trait Propose: Send {
    /// Adds to `draft` what may follow the tokens of a request, until the draft has `most` nodes or the method nothing more
    /// to say. What is likeliest comes first, as far as parents come before children.
    fn propose(&mut self, request: Known<'_>, most: usize, draft: &mut Draft);

    /// Takes in what is known of a request, which a proposal does otherwise: worth a call while the device computes a
    /// long prompt. A request's tokens only ever grow until it is forgotten.
    fn observe(&mut self, _request: Known<'_>) {}

    /// Takes in an answer that has ended, without its prompt, for the good of other requests of the owner's salt. Others
    /// must never notice.
    fn learn(&mut self, _owner: Owner, _answer: &[u32]) {}

    /// The request is gone, and its id may come again for another.
    fn forget(&mut self, id: RequestId);
}

/// Which rows of a draft see which: a word a row, as [`tree`] has them. Row 0 is the last token itself, and node `i` is row
/// `i + 1`.
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
