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
mod speculation;
mod suffix;
mod synthetic;
mod trust;
mod verify;
mod written;

pub use adapt::{Adapt, AdaptOptions};
pub use ahead::Ahead;
pub use draft_model::{DraftModel, DraftModelOptions};
pub use drafter::{Drafter, OnHost, Settled, SettledRequest};
pub use eagle::{EagleDrafter, EagleOptions};
use folio_model::device::tree;
use folio_scheduler::{Assignment, DraftTree, RequestId};
pub use lookahead::Lookahead;
pub use lookahead_pool::{LookaheadOptions, LookaheadPools, NgramPool};
pub use medusa::{MedusaDrafter, MedusaOptions};
pub use ngram::{Ngram, NgramOptions};
pub use speculation::Speculation;
pub(crate) use speculation::{Part, StepTimes};
pub use suffix::{Suffix, SuffixOptions};
pub use synthetic::Synthetic;
pub use verify::{Place, Walk, ask, verify, verify_drawn, walk};
pub use written::{Mark, Written};

/// A method on the host.
pub trait Propose: Send {
    /// Adds to `draft` what may follow `tokens`, a request's prompt and its answer so far, until the draft has `most`
    /// nodes or the method nothing more to say. What is likeliest comes first, as far as parents come before children.
    fn propose(&mut self, id: RequestId, tokens: &[u32], most: usize, draft: &mut Draft);

    /// Takes in what is known of a request, which a proposal does otherwise: worth a call while the device computes a
    /// long prompt. A request's tokens only ever grow until it is forgotten.
    fn observe(&mut self, _id: RequestId, _tokens: &[u32]) {}

    /// Takes in an answer that has ended, without its prompt, for the good of other requests.
    fn learn(&mut self, _answer: &[u32]) {}

    /// The request is gone, and its id may come again for another.
    fn forget(&mut self, id: RequestId);
}

/// Tokens that may follow a request's last one: a tree, parents before children.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Draft {
    tokens: Vec<u32>,
    /// As long as `tokens`. None: follows the last token. No two children of one node carry the same token, since the
    /// second would never be reached.
    parents: Vec<Option<u16>>,
}

impl Draft {
    /// A tree's first row is the last token itself.
    pub const MOST_NODES: usize = tree::TREE_ROWS - 1;

    /// What an assignment has to verify.
    pub(crate) fn of(assignment: &Assignment) -> Self {
        Self { tokens: assignment.drafts().to_vec(), parents: assignment.parents.clone() }
    }

    pub fn chain(tokens: impl IntoIterator<Item = u32>) -> Self {
        let mut draft = Self::default();
        tokens.into_iter().fold(None, |parent, token| Some(draft.push(token, parent)));
        draft
    }

    /// The node that carries `token` behind `parent`, which is made if it is not there.
    pub fn push(&mut self, token: u32, parent: Option<u16>) -> u16 {
        if let Some(node) = self.child(parent, token) {
            return node;
        }
        let node = self.len();
        assert!(node < Self::MOST_NODES, "a draft of more than {} nodes", Self::MOST_NODES);
        assert!(parent.is_none_or(|parent| usize::from(parent) < node), "node {node} comes before {parent:?}");
        self.tokens.push(token);
        self.parents.push(parent);
        node as u16
    }

    /// The child of a node, or of the last token, that carries `token`.
    pub fn child(&self, parent: Option<u16>, token: u32) -> Option<u16> {
        let found = self.tokens.iter().zip(&self.parents).position(|(&t, &p)| (t, p) == (token, parent));
        found.map(|node| node as u16)
    }

    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    pub fn parents(&self) -> &[Option<u16>] {
        &self.parents
    }

    pub fn clear(&mut self) {
        self.truncate(0);
    }

    /// Keeps the first `most` nodes. Children come behind their parents, and so go with them.
    pub fn truncate(&mut self, most: usize) {
        self.tokens.truncate(most);
        self.parents.truncate(most);
    }

    /// Whether every node follows the one before it.
    pub fn is_chain(&self) -> bool {
        let before = |node: usize| node.checked_sub(1).map(|parent| parent as u16);
        self.parents.iter().enumerate().all(|(node, &parent)| parent == before(node))
    }

    /// How many tokens a node is behind the last one: 1 where it follows it.
    pub fn depth_of(&self, node: u16) -> usize {
        std::iter::successors(Some(node), |&node| self.parents[usize::from(node)]).count()
    }

    /// A word a row, as [`tree`] has them: row 0 is the last token itself, and node `i` is row `i + 1`.
    pub fn ancestors(&self) -> Vec<u64> {
        let row = |parent: &Option<u16>| Some(parent.map_or(0, |node| usize::from(node) + 1));
        let rows: Vec<_> = std::iter::once(None).chain(self.parents.iter().map(row)).collect();
        tree::ancestors(&rows)
    }

    /// Nodes that may still come until there are `most`.
    fn room(&self, most: usize) -> usize {
        most.min(Self::MOST_NODES).saturating_sub(self.len())
    }
}

impl From<Draft> for DraftTree {
    fn from(Draft { tokens, parents }: Draft) -> Self {
        DraftTree::new(tokens, parents)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// ```text
    /// last - 7 - 8
    ///      \ 9 - 7 - 5
    /// ```
    fn bush() -> Draft {
        let mut draft = Draft::default();
        let (seven, nine) = (draft.push(7, None), draft.push(9, None));
        draft.push(8, Some(seven));
        let below = draft.push(7, Some(nine));
        draft.push(5, Some(below));
        draft
    }

    #[test]
    fn a_tree_names_depths_and_ways() {
        let draft = bush();
        assert_eq!((draft.tokens(), draft.len()), (&[7, 9, 8, 7, 5][..], 5));
        assert_eq!(draft.parents(), [None, None, Some(0), Some(1), Some(3)]);
        assert_eq!((0..5).map(|node| draft.depth_of(node)).collect::<Vec<_>>(), [1, 1, 2, 2, 3]);
        assert_eq!(draft.ancestors(), [0b1, 0b11, 0b101, 0b1011, 0b10101, 0b110101]);
        assert!(!draft.is_chain());
        assert_eq!((draft.child(None, 9), draft.child(Some(1), 7), draft.child(Some(0), 7)), (Some(1), Some(3), None));
    }

    #[test]
    fn a_chain_is_a_tree_of_one_branch() {
        let draft = Draft::chain([4, 4, 4]);
        assert_eq!(draft.parents(), [None, Some(0), Some(1)]);
        assert_eq!(draft.ancestors(), [0b1, 0b11, 0b111, 0b1111]);
        assert!(draft.is_chain() && Draft::default().is_chain() && Draft::default().is_empty());
        assert_eq!(Draft::default().ancestors(), [1]);
        assert_eq!(Draft::chain(0..63).ancestors()[63], u64::MAX);
    }

    #[test]
    fn the_same_child_is_there_once() {
        let mut draft = bush();
        assert_eq!((draft.push(9, None), draft.push(7, Some(1)), draft.len()), (1, 3, 5));
        assert_eq!(draft.push(9, Some(1)), 5);
        let mut full = Draft::chain(0..63);
        assert_eq!((full.push(62, Some(61)), full.room(64)), (62, 0));
    }

    #[test]
    fn what_is_cut_is_cut_with_its_children() {
        for most in 0..7 {
            let mut draft = bush();
            draft.truncate(most);
            assert_eq!(draft.len(), most.min(5));
            assert!(draft.parents().iter().flatten().all(|&parent| usize::from(parent) < draft.len()));
            assert_eq!(draft.ancestors(), bush().ancestors()[..=draft.len()]);
        }
        let mut draft = bush();
        draft.clear();
        assert_eq!(draft, Draft::default());
    }

    #[test]
    #[should_panic(expected = "a draft of more than 63 nodes")]
    fn a_draft_fits_into_a_word() {
        Draft::chain(0..64);
    }

    #[test]
    #[should_panic(expected = "node 1 comes before Some(1)")]
    fn parents_come_first() {
        Draft::chain([1]).push(2, Some(1));
    }
}
