//! Drafts: a tree of tokens that may follow a request's last one, parents before children.
//!
//! A drafter proposes the tree; a step verifies all nodes at once and accepts one path. This file
//! knows nothing of blocks: the plan assigns the slots of the nodes.

/// See the [module](self). A node is named by its index, in the order in which nodes were added.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Draft {
    tokens: Vec<u32>,
    /// As long as `tokens`. None: the node follows the last token. No two children of one node
    /// carry the same token, because the second would never be reached.
    parents: Vec<Option<u16>>,
}

impl Draft {
    /// With the row of the last token there are 64 rows, the bits of a word.
    pub const MOST_NODES: usize = 63;

    /// Panics if the nodes are no tree, or too many.
    pub fn new(tokens: &[u32], parents: &[Option<u16>]) -> Self {
        assert_eq!(tokens.len(), parents.len(), "tokens and parents of a tree");
        let mut draft = Self::default();
        for (&token, &parent) in tokens.iter().zip(parents) {
            assert_eq!(draft.child(parent, token), None, "token {token} follows {parent:?} twice");
            draft.add(token, parent);
        }
        draft
    }

    /// A draft in which each token follows the one before it.
    pub fn chain(tokens: impl IntoIterator<Item = u32>) -> Self {
        let mut draft = Self::default();
        tokens.into_iter().fold(None, |parent, token| Some(draft.push(token, parent)));
        draft
    }

    /// The child of `parent` that carries `token`, added if it does not exist.
    pub fn push(&mut self, token: u32, parent: Option<u16>) -> u16 {
        self.child(parent, token).unwrap_or_else(|| self.add(token, parent))
    }

    fn add(&mut self, token: u32, parent: Option<u16>) -> u16 {
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

    /// Nodes that may be added until there are `most`.
    pub fn room(&self, most: usize) -> usize {
        most.min(Self::MOST_NODES).saturating_sub(self.len())
    }

    pub fn clear(&mut self) {
        self.truncate(0);
    }

    /// Removes all nodes but the first `most`. Children come after their parents, so no node loses
    /// its parent.
    pub fn truncate(&mut self, most: usize) {
        self.tokens.truncate(most);
        self.parents.truncate(most);
    }

    /// Whether every node follows the one before it.
    pub fn is_chain(&self) -> bool {
        (0..).zip(&self.parents).all(|(node, &parent)| parent == u16::checked_sub(node, 1))
    }

    /// A node and its ancestors, the node first.
    pub fn path(&self, node: u16) -> impl Iterator<Item = u16> {
        std::iter::successors(Some(node), |&node| self.parents[usize::from(node)])
    }

    /// Whether a path from the root carries these tokens.
    pub fn has_path(&self, tokens: &[u32]) -> bool {
        tokens.iter().try_fold(None, |at, &token| self.child(at, token).map(Some)).is_some()
    }
}

/// Depth of each node: 1 for those that follow the request's last token.
pub(crate) fn depths(parents: &[Option<u16>]) -> Vec<usize> {
    let mut depths: Vec<usize> = Vec::with_capacity(parents.len());
    for parent in parents {
        depths.push(1 + parent.map_or(0, |parent| depths[usize::from(parent)]));
    }
    depths
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
        assert_eq!(draft, Draft::new(draft.tokens(), draft.parents()));
        assert_eq!(depths(draft.parents()), [1, 1, 2, 2, 3]);
        assert_eq!(draft.path(4).collect::<Vec<_>>(), [4, 3, 1]);
        assert!(!draft.is_chain());
        assert_eq!((draft.child(None, 9), draft.child(Some(1), 7), draft.child(Some(0), 7)), (Some(1), Some(3), None));
    }

    #[test]
    fn paths_begin_at_the_root() {
        for path in [&[][..], &[7], &[9], &[7, 8], &[9, 7, 5]] {
            assert!(bush().has_path(path), "{path:?}");
        }
        for path in [&[8][..], &[7, 7], &[7, 5], &[9, 8], &[7, 8, 9], &[9, 7, 5, 5]] {
            assert!(!bush().has_path(path), "{path:?}");
        }
    }

    #[test]
    fn a_chain_is_a_tree_of_one_branch() {
        let draft = Draft::chain([4, 4, 4]);
        assert_eq!(draft.parents(), [None, Some(0), Some(1)]);
        assert!(draft.is_chain() && Draft::default().is_chain() && Draft::default().is_empty());
        assert_eq!(Draft::chain(0..63).len(), Draft::MOST_NODES);
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
            assert_eq!((draft.len(), draft.room(5)), (most.min(5), 5 - most.min(5)));
            assert_eq!(draft, Draft::new(&bush().tokens()[..draft.len()], &bush().parents()[..draft.len()]));
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
        Draft::new(&[1, 2], &[None, Some(1)]);
    }

    #[test]
    #[should_panic(expected = "token 5 follows Some(0) twice")]
    fn twins_are_refused() {
        Draft::new(&[4, 5, 5], &[None, Some(0), Some(0)]);
    }
}
