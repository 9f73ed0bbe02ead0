//! Tokens that may follow a request's last one: a tree, parents before children.
//!
//! Whoever proposes them says which token follows which; a step verifies all of them at once and keeps one path. This
//! file knows nothing of blocks: where the nodes lie is told by the plan.

/// Nodes of a tree at most: with the row of the last token they are 64, the bits of a word.
pub const MOST_DRAFTS: usize = 63;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DraftTree {
    tokens: Vec<u32>,
    /// For each token the one before it, which comes earlier in the list; none: it follows the request's last token.
    parents: Vec<Option<u16>>,
}

impl DraftTree {
    /// Panics where that is no tree, or too large a one.
    pub fn new(tokens: Vec<u32>, parents: Vec<Option<u16>>) -> Self {
        assert!(tokens.len() <= MOST_DRAFTS, "{} drafts, at most {MOST_DRAFTS}", tokens.len());
        assert_eq!(tokens.len(), parents.len(), "tokens and parents of a tree");
        for (node, parent) in parents.iter().enumerate() {
            assert!(parent.is_none_or(|parent| usize::from(parent) < node), "draft {node} comes before its parent");
        }
        Self { tokens, parents }
    }

    /// Each token behind the one before it.
    pub fn chain(tokens: Vec<u32>) -> Self {
        let parents = (0..tokens.len() as u16).map(|node| node.checked_sub(1)).collect();
        Self::new(tokens, parents)
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

    /// Keeps the first `most` nodes, which are a tree themselves.
    pub fn truncate(&mut self, most: usize) {
        self.tokens.truncate(most);
        self.parents.truncate(most);
    }

    pub fn clear(&mut self) {
        self.truncate(0);
    }

    /// Whether some path from the root carries these tokens. Siblings may be alike.
    pub fn has_path(&self, path: &[u32]) -> bool {
        // Bit 0 is the request's last token, node `i` is bit `i + 1`.
        let bit = |node: Option<u16>| 1u64 << node.map_or(0, |node| node + 1);
        let mut ends = bit(None);
        for token in path {
            let nodes = (0..self.len() as u16).filter(|&node| {
                self.tokens[usize::from(node)] == *token && bit(self.parents[usize::from(node)]) & ends != 0
            });
            ends = nodes.fold(0, |ends, node| ends | bit(Some(node)));
        }
        ends != 0
    }
}

/// How many tokens behind the request's last one each node is: 1 for those that follow it.
pub fn depths(parents: &[Option<u16>]) -> Vec<usize> {
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
    /// 7 - 8
    ///   \ 9 - 7
    /// 9
    /// ```
    fn tree() -> DraftTree {
        DraftTree::new(vec![7, 8, 9, 9, 7], vec![None, Some(0), Some(0), None, Some(2)])
    }

    #[test]
    fn paths_begin_at_the_root() {
        for path in [&[][..], &[7], &[9], &[7, 8], &[7, 9, 7]] {
            assert!(tree().has_path(path), "{path:?}");
        }
        for path in [&[8][..], &[9, 7], &[7, 7], &[7, 8, 9], &[7, 9, 7, 7]] {
            assert!(!tree().has_path(path), "{path:?}");
        }
        let twins = DraftTree::new(vec![5, 5, 6], vec![None, None, Some(1)]);
        assert!(twins.has_path(&[5, 6]), "behind the second of two that are alike");
    }

    #[test]
    fn a_chain_is_a_tree_and_so_is_the_beginning_of_one() {
        let mut chain = DraftTree::chain(vec![3, 4, 5]);
        assert_eq!((chain.parents(), depths(chain.parents())), (&[None, Some(0), Some(1)][..], vec![1, 2, 3]));
        chain.truncate(1);
        assert_eq!(chain, DraftTree::chain(vec![3]));
        assert_eq!(depths(tree().parents()), [1, 2, 2, 1, 3]);
        assert_eq!(DraftTree::chain(vec![1; MOST_DRAFTS]).len(), MOST_DRAFTS);
    }

    #[test]
    #[should_panic(expected = "draft 1 comes before its parent")]
    fn a_child_before_its_parent_is_refused() {
        DraftTree::new(vec![1, 2], vec![None, Some(1)]);
    }

    #[test]
    #[should_panic(expected = "64 drafts")]
    fn more_nodes_than_a_word_has_bits_are_refused() {
        DraftTree::chain(vec![1; MOST_DRAFTS + 1]);
    }
}
