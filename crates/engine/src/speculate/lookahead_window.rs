//! The window of lookahead decoding: guessed tokens at many later places of the text, which every
//! step improves.
//!
//! Column `i` is for a place `i` tokens further on. It holds a run of guessed tokens from that
//! place on, as long as an n-gram without its last token. The first tokens of all columns are one
//! chain after the text, and the rest of each is a branch after its first: one draft, in which
//! every node attends to the text, the chain before it and its own column. The model's token after
//! the last node of a column completes an n-gram of its own tokens, and the column moves on by one
//! place, as the text does. Columns begin with one guess, taken from the text, and grow by one a
//! step.

use std::collections::VecDeque;

use super::{Draft, mix::mix};

/// The columns of one request.
#[derive(Debug, Default)]
pub(super) struct Window {
    /// `columns[i].guesses[depth]` is a guess at the token `1 + i + depth` places after the last
    /// one. All columns are equally deep.
    columns: VecDeque<Column>,
    /// The last node of each column in the draft.
    ends: Vec<u16>,
    /// The draft of these nodes, and the length of the text at that time.
    drafted: Vec<u32>,
    text_len: usize,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Column {
    guesses: Vec<u32>,
    /// Number of its last tokens that came from the model.
    said: usize,
}

impl Window {
    /// Removes all columns.
    pub fn clear(&mut self) {
        self.columns.clear();
        self.ends.clear();
        self.drafted.clear();
    }

    /// Whether rows that began with the token at position `first`, and the nodes with these tokens
    /// after it, are its last draft, or the beginning of it.
    pub fn is_of(&self, first: usize, nodes: &[u32]) -> bool {
        first + 1 == self.text_len && self.drafted.starts_with(nodes)
    }

    /// Takes the model's tokens after the nodes of the last draft (`guesses[i]` after node `i`),
    /// with which the text has grown to `text_len` tokens. Calls `found` with every complete n-gram
    /// of `size` tokens. Columns that were cut off are dropped.
    pub fn advance(&mut self, text_len: usize, guesses: &[u32], size: usize, mut found: impl FnMut(&[u32])) {
        assert!(text_len > self.text_len, "a text of {} tokens has {text_len}", self.text_len);
        let known = self.ends.iter().take_while(|&&end| usize::from(end) < guesses.len()).count();
        self.columns.truncate(known);
        let mut passed = text_len - self.text_len;
        let mut is_complete = false;
        for (column, &end) in self.columns.iter_mut().zip(&self.ends) {
            column.guesses.push(guesses[usize::from(end)]);
            column.said += 1;
            is_complete = column.guesses.len() == size;
            if is_complete {
                // The first token of an n-gram need not be the model's.
                if column.said + 1 >= size {
                    found(&column.guesses);
                }
                column.guesses.remove(0);
            }
        }
        // Without their first guesses the columns are at the places after one more token.
        passed -= usize::from(is_complete);
        self.columns.drain(..passed.min(self.columns.len()));
        self.ends.clear();
    }

    /// Adds at most `width` columns to a draft after `text`, as far as there is room for `most`
    /// nodes.
    pub fn draft(&mut self, text: &[u32], width: usize, most: usize, draft: &mut Draft) {
        self.fill(text, width);
        self.ends.clear();
        let mut first = None;
        for column in &self.columns {
            let Some(node) = grow(draft, column.guesses[0], first, most) else { break };
            let below =
                column.guesses[1..].iter().try_fold(node, |parent, &token| grow(draft, token, Some(parent), most));
            let Some(end) = below else { break };
            self.ends.push(end);
            first = Some(node);
        }
        self.columns.truncate(self.ends.len());
        self.drafted.clear();
        self.drafted.extend_from_slice(draft.tokens());
        self.text_len = text.len();
    }

    /// Extends the window to `width` columns. A new one begins at the end of the one before it,
    /// with a token from the text: the model replaces wrong tokens.
    fn fill(&mut self, text: &[u32], width: usize) {
        self.columns.truncate(width);
        while self.columns.len() < width && !text.is_empty() {
            let mut guesses = self.columns.back().map_or_else(Vec::new, |last| last.guesses[1..].to_vec());
            let at = mix((text.len() + self.columns.len()) as u64) % text.len() as u64;
            guesses.push(text[at as usize]);
            self.columns.push_back(Column { guesses, said: 0 });
        }
    }

    /// Nodes of a column.
    #[cfg(test)]
    pub fn depth(&self) -> usize {
        self.columns.front().map_or(1, |column| column.guesses.len())
    }
}

/// The child of a node that carries `token`, added if there is room.
fn grow(draft: &mut Draft, token: u32, parent: Option<u16>, most: usize) -> Option<u16> {
    draft.child(parent, token).or_else(|| (draft.room(most) > 0).then(|| draft.push(token, parent)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn columns(window: &Window) -> Vec<Vec<u32>> {
        window.columns.iter().map(|column| column.guesses.clone()).collect()
    }

    fn window<const N: usize, const D: usize>(columns: [[u32; D]; N]) -> Window {
        let column = |guesses: [u32; D]| Column { guesses: guesses.into(), said: D - 1 };
        Window { columns: columns.map(column).into(), ..Window::default() }
    }

    /// Three columns and n-grams of three, by hand. Guesses are named by their place and their age.
    #[test]
    fn it_moves_as_the_paper_says() {
        let mut window = window([[11], [21], [31], [41]]);
        let mut found = Vec::new();
        let text = [5, 6, 7];
        let mut draft = Draft::default();
        window.draft(&text, 4, 63, &mut draft);
        assert_eq!(draft, Draft::chain([11, 21, 31, 41]));
        assert!(window.is_of(2, &[11, 21, 31, 41]) && window.is_of(2, &[11]) && !window.is_of(2, &[21]));
        assert!(!window.is_of(3, &[11]));

        // One token further: the first column was for its place.
        window.advance(4, &[22, 32, 42, 52], 3, |ngram| found.push(ngram.to_vec()));
        assert_eq!(columns(&window), [[21, 32], [31, 42], [41, 52]]);
        let mut draft = Draft::default();
        window.draft(&[5, 6, 7, 8], 3, 63, &mut draft);
        assert_eq!(draft.tokens(), [21, 32, 31, 42, 41, 52]);
        assert_eq!(draft.parents(), [None, Some(0), Some(0), Some(2), Some(2), Some(4)]);
        assert!(found.is_empty());

        // Columns have their full depth: their first guesses go, and the columns are for the next
        // places.
        window.advance(5, &[0, 43, 0, 53, 0, 63], 3, |ngram| found.push(ngram.to_vec()));
        assert_eq!(found, [[21, 32, 43], [31, 42, 53], [41, 52, 63]]);
        assert_eq!(columns(&window), [[32, 43], [42, 53], [52, 63]]);

        // Two tokens further: one column less, and a new one begins at the end of the last.
        let text = [9; 5];
        window.draft(&text, 3, 63, &mut Draft::default());
        found.clear();
        window.advance(7, &[0, 54, 0, 64, 0, 74], 3, |ngram| found.push(ngram.to_vec()));
        assert_eq!(found, [[32, 43, 54], [42, 53, 64], [52, 63, 74]]);
        assert_eq!(columns(&window), [[53, 64], [63, 74]]);
        window.draft(&[9; 7], 3, 63, &mut Draft::default());
        assert_eq!(columns(&window), [[53, 64], [63, 74], [74, 9]]);

        // A token that is not the model's is no part of an n-gram, except as its first. (74 is one
        // row.)
        found.clear();
        window.advance(8, &[0, 75, 0, 85, 95], 3, |ngram| found.push(ngram.to_vec()));
        assert_eq!(found, [[53, 64, 75], [63, 74, 85]]);
        window.draft(&[9; 8], 3, 63, &mut Draft::default());
        window.advance(9, &[0, 76, 0, 86, 0, 96], 3, |ngram| found.push(ngram.to_vec()));
        assert_eq!(found[2..], [[64, 75, 76], [74, 85, 86], [9, 95, 96]]);
    }

    #[test]
    fn it_keeps_to_its_room() {
        for most in 0..10 {
            let mut window = window([[1, 2], [3, 4], [5, 6]]);
            let mut draft = Draft::default();
            window.draft(&[7, 8], 3, most, &mut draft);
            assert_eq!(draft.len(), most.min(6));
            // Incomplete columns cannot move on.
            assert_eq!((window.columns.len(), window.ends.len()), (draft.len() / 2, draft.len() / 2));
        }
    }

    #[test]
    fn equal_guesses_are_one_row() {
        let mut window = window([[1, 2], [2, 3], [3, 1]]);
        let mut draft = Draft::chain([1, 9]);
        window.draft(&[7, 8], 3, 63, &mut draft);
        // The second guess of a column is the first of the next.
        assert_eq!(draft.tokens(), [1, 9, 2, 3, 1]);
        assert_eq!(draft.parents(), [None, Some(0), Some(0), Some(2), Some(3)]);
        assert_eq!(window.ends, [2, 3, 4]);
        window.advance(3, &[0, 0, 3, 1, 7], 3, |_| ());
        assert_eq!(columns(&window), [[2, 3], [3, 1], [1, 7]]);
    }

    #[test]
    fn what_was_cut_off_is_dropped() {
        let mut window = window([[1, 2], [3, 4], [5, 6]]);
        window.draft(&[7, 8], 3, 63, &mut Draft::default());
        window.advance(3, &[0, 11, 0, 12, 0], 3, |_| ());
        assert_eq!(columns(&window), [[2, 11], [4, 12]]);
        // A text that has passed all columns.
        window.draft(&[7, 8, 9], 2, 63, &mut Draft::default());
        window.advance(9, &[0, 1, 0, 1], 3, |_| ());
        assert!(window.columns.is_empty());
        assert_eq!(window.depth(), 1);
    }
}
