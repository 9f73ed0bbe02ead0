//! A tree of candidates that grows level by level and is cut to its likeliest nodes at the end.
//!
//! The probability of a candidate is the product of the head's probabilities on its path. Some
//! candidates of a level are expanded: they become rows of the head's next pass, which gives the
//! candidates of the next level. A candidate that could not have a child among the likeliest nodes
//! is not expanded, because no child is likelier than its parent.

use super::super::Draft;

pub(super) struct Tree {
    /// Index of the request in the step.
    pub request: usize,
    /// The first of the request's blocks that the head attends to.
    pub start: usize,
    /// Most nodes of the draft.
    pub most: usize,
    candidates: Vec<Candidate>,
    /// Candidate of each row that was computed, level by level.
    rows: Vec<usize>,
    /// First row of the last level, and of the level before it.
    level: usize,
    level_before: usize,
    /// A word of ancestors for each row, as [`tree`](folio_device::tree) has them.
    words: Vec<u64>,
    /// The rows of the last level in the head's step; at first the row of the last token.
    first_row: u32,
    /// Whether the last pass had rows of this tree.
    is_growing: bool,
    /// The first candidate of the level that may be expanded.
    fresh: usize,
}

struct Candidate {
    token: u32,
    parent: Option<usize>,
    /// The row that proposed it; none: the row of the last token.
    behind: Option<usize>,
    /// The head's probability of it after its parent.
    said: f32,
    /// Probability of its path from the last token on.
    likely: f32,
    depth: usize,
}

/// Limits of a level.
pub(super) struct Growth {
    pub width: usize,
    pub least: f32,
}

impl Tree {
    /// `row` is that of the last token in the head's step.
    pub fn new(request: usize, start: usize, row: u32, most: usize) -> Self {
        Self {
            request,
            start,
            most,
            candidates: Vec::new(),
            rows: Vec::new(),
            level: 0,
            level_before: 0,
            words: Vec::new(),
            first_row: row,
            is_growing: true,
            fresh: 0,
        }
    }

    pub fn num_rows(&self) -> usize {
        self.rows.len()
    }

    /// Rows of the last pass that propose candidates.
    pub fn level_rows(&self) -> usize {
        match (self.is_growing, self.rows.len()) {
            (false, _) => 0,
            (true, 0) => 1,
            (true, rows) => rows - self.level,
        }
    }

    /// Depth of the candidates that are added next.
    pub fn next_depth(&self) -> usize {
        self.rows[self.level..].first().map_or(1, |&candidate| self.candidates[candidate].depth + 1)
    }

    /// Adds candidates after a row of the last level, with the head's probabilities, which are
    /// multiplied by `trust`.
    pub fn offer(&mut self, row: usize, guesses: impl Iterator<Item = (u32, f32)>, trust: f32) {
        let behind = (!self.rows.is_empty()).then_some(self.level + row);
        let parent = behind.map(|row| self.rows[row]);
        let (before, depth) = parent.map_or((1.0, 1), |parent| {
            let parent = &self.candidates[parent];
            (parent.likely, parent.depth + 1)
        });
        self.candidates.extend(guesses.map(|(token, said)| {
            let likely = before * (said * trust).min(1.0);
            Candidate { token, parent, behind, said, likely, depth }
        }));
    }

    /// Expands the likeliest candidates of the last level, as far as they can have children in the
    /// draft: they become rows of the next level.
    pub fn expand(&mut self, growth: &Growth) {
        let deepest = self.candidates[self.fresh..].iter().map(|candidate| candidate.depth).max();
        let mut chosen: Vec<usize> = (self.fresh..self.candidates.len()).collect();
        self.fresh = self.candidates.len();
        let likely = |candidate: usize| self.candidates[candidate].likely;
        chosen.sort_by(|&a, &b| likely(b).total_cmp(&likely(a)));
        // As many nodes as the draft may have, which leaves no room for a child.
        let mut all: Vec<f32> = self.candidates.iter().map(|candidate| candidate.likely).collect();
        all.sort_by(|a, b| b.total_cmp(a));
        let last = self.most.checked_sub(2).map(|last| all.get(last).copied().unwrap_or(0.0));
        let least = last.map_or(f32::INFINITY, |last| last.max(growth.least));
        chosen.retain(|&candidate| likely(candidate) >= least && likely(candidate) > 0.0);
        chosen.truncate(growth.width);
        self.is_growing = !chosen.is_empty() && deepest.is_some();
        if !self.is_growing {
            return;
        }
        (self.level_before, self.level) = (self.level, self.rows.len());
        for candidate in chosen {
            let above = self.candidates[candidate].behind.map_or(0, |row| self.words[row]);
            self.words.push(above | 1 << self.rows.len());
            self.rows.push(candidate);
        }
    }

    /// Whether every row follows the one before it.
    pub fn is_chain(&self) -> bool {
        self.words.last().is_some_and(|&word| word.count_ones() as usize == self.rows.len())
    }

    /// Words of ancestors of the last level's rows.
    pub fn words(&self) -> &[u64] {
        &self.words[self.level..]
    }

    pub fn tokens(&self) -> Vec<u32> {
        self.rows[self.level..].iter().map(|&candidate| self.candidates[candidate].token).collect()
    }

    /// Sets the first row of the last level in the head's next step. Returns the rows of the last
    /// step that its rows follow.
    pub fn places(&mut self, first: u32) -> impl Iterator<Item = u32> {
        let before = std::mem::replace(&mut self.first_row, first);
        let Self { candidates, rows, level, level_before, .. } = self;
        rows[*level..].iter().map(move |&candidate| match candidates[candidate].behind {
            None => before,
            Some(row) => before + (row - *level_before) as u32,
        })
    }

    /// The likeliest nodes, parents before children; returns the head's probability of each.
    pub fn finish(&self, least: f32, draft: &mut Draft) -> Vec<f32> {
        let mut order: Vec<usize> = (0..self.candidates.len()).collect();
        // Parents are added before their children and are at least as likely, and the sort is
        // stable.
        order.sort_by(|&a, &b| self.candidates[b].likely.total_cmp(&self.candidates[a].likely));
        let (mut nodes, mut said) = (vec![None; self.candidates.len()], Vec::new());
        for candidate in order.into_iter().take(draft.room(self.most)) {
            let Candidate { token, parent, said: chance, likely, .. } = self.candidates[candidate];
            if likely < least {
                break;
            }
            nodes[candidate] = Some(draft.push(token, parent.and_then(|parent| nodes[parent])));
            said.push(chance);
        }
        said
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(tree: &mut Tree, row: usize, guesses: &[(u32, f32)]) {
        tree.offer(row, guesses.iter().copied(), 1.0);
    }

    /// Grows `levels` levels; every token `t` is followed by `t + 1` with 0.6 and `t + 2` with 0.3.
    fn grown(most: usize, growth: &Growth, levels: usize) -> (Tree, Draft) {
        let mut tree = Tree::new(0, 0, 4, most);
        offer(&mut tree, 0, &[(1, 0.6), (2, 0.3)]);
        for _ in 1..levels {
            let before = tree.num_rows();
            tree.expand(growth);
            assert!(tree.num_rows() - before <= growth.width);
            for (row, token) in tree.tokens().into_iter().enumerate().take(tree.level_rows()) {
                offer(&mut tree, row, &[(token + 1, 0.6), (token + 2, 0.3)]);
            }
        }
        let mut draft = Draft::default();
        let said = tree.finish(0.0, &mut draft);
        assert_eq!(said.len(), draft.len());
        (tree, draft)
    }

    #[test]
    fn the_likeliest_nodes_of_all_are_kept() {
        let (tree, draft) = grown(5, &Growth { width: 8, least: 0.0 }, 4);
        // 1: 0.6, 1-2: 0.36, 2: 0.3, 1-2-3: 0.216, 1-3 and 2-3: 0.18.
        assert_eq!(draft.tokens()[..4], [1, 2, 2, 3]);
        assert_eq!(draft.parents()[..4], [None, Some(0), None, Some(1)]);
        assert_eq!(draft.len(), 5);
        assert!(!tree.is_chain() && tree.num_rows() <= 12);
    }

    #[test]
    fn one_row_a_level_is_a_chain_with_leaves() {
        let (tree, draft) = grown(8, &Growth { width: 1, least: 0.0 }, 4);
        assert!(tree.is_chain());
        assert_eq!((tree.num_rows(), draft.len()), (3, 8));
        assert_eq!(tree.words, [0b1, 0b11, 0b111]);
        let (_, alone) = grown(1, &Growth { width: 1, least: 0.0 }, 4);
        assert_eq!(alone, Draft::chain([1]));
    }

    #[test]
    fn what_cannot_have_a_child_in_the_draft_is_not_expanded() {
        let (tree, _) = grown(1, &Growth { width: 8, least: 0.0 }, 2);
        assert_eq!(tree.num_rows(), 0);
        let (tree, _) = grown(2, &Growth { width: 8, least: 0.0 }, 2);
        assert_eq!((tree.num_rows(), tree.level_rows()), (1, 1));
        let (tree, _) = grown(9, &Growth { width: 8, least: 0.5 }, 4);
        assert_eq!((tree.num_rows(), tree.level_rows()), (1, 0));
    }

    #[test]
    fn rows_follow_rows_of_the_step_before() {
        let mut tree = Tree::new(0, 0, 4, 9);
        offer(&mut tree, 0, &[(1, 0.5), (2, 0.4)]);
        let growth = Growth { width: 4, least: 0.0 };
        tree.expand(&growth);
        assert_eq!(tree.places(10).collect::<Vec<_>>(), [4, 4]);
        assert_eq!(tree.words(), [0b1, 0b10]);
        offer(&mut tree, 0, &[(3, 0.5), (4, 0.4)]);
        offer(&mut tree, 1, &[(5, 0.9)]);
        assert_eq!(tree.next_depth(), 2);
        tree.expand(&growth);
        assert_eq!(tree.tokens(), [5, 3, 4]);
        assert_eq!(tree.places(20).collect::<Vec<_>>(), [11, 10, 10]);
        assert_eq!(tree.words(), [0b110, 0b1001, 0b10001]);
        assert_eq!(tree.next_depth(), 3);
    }
}
