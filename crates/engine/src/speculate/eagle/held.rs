//! The rows that the head has computed in each of its blocks, by their tokens: they decide how much
//! of a request's past the head can attend to.
//!
//! Unlike [`Written`](crate::speculate::Written) this looks at the end of a sequence and not at its
//! beginning. A head cannot compute rows that it skipped, because the decoder's states are gone,
//! but it can continue without the rows before them. The contents of a block that a request of
//! another salt left count as missing, so that they have no visible effect.
//!
//! The last row of a block is computed with the first token after the block. If another sequence
//! finds the block in the cache and continues with another token, that row stays as it is: it is
//! one of many, and mostly depends on its state.

use std::ops::Range;

use folio_device::BLOCK_TOKENS;

/// See the [module](self).
pub(super) struct Held {
    blocks: Vec<Contents>,
}

#[derive(Clone, Copy, Default)]
struct Contents {
    len: u8,
    /// Salt of the request that the block was computed for.
    salt: u64,
    /// The token of each row, which is the one after its place.
    tokens: [u32; BLOCK_TOKENS],
}

impl Held {
    pub fn new(num_blocks: usize) -> Self {
        Self { blocks: vec![Contents::default(); num_blocks] }
    }

    /// Index of the first block of a table from which on all rows before place `end` were computed
    /// for a request of this salt. If the block of `end` has missing rows, the index is the one
    /// after it.
    pub fn start(&self, salt: u64, table: &[u32], tokens: &[u32], end: usize) -> usize {
        let is_held = |&number: &usize| {
            let places = number * BLOCK_TOKENS..end.min((number + 1) * BLOCK_TOKENS);
            let contents = &self.blocks[table[number] as usize];
            let wanted = &tokens[places.start + 1..places.end + 1];
            let same = wanted.len().min(BLOCK_TOKENS - 1);
            let is_long = contents.salt == salt && usize::from(contents.len) >= wanted.len();
            is_long && contents.tokens[..same] == wanted[..same]
        };
        let blocks = end.div_ceil(BLOCK_TOKENS);
        blocks - (0..blocks).rev().take_while(is_held).count()
    }

    /// The head has computed these places of a sequence.
    pub fn note(&mut self, salt: u64, table: &[u32], tokens: &[u32], places: Range<usize>) {
        for place in places {
            let contents = &mut self.blocks[table[place / BLOCK_TOKENS] as usize];
            let at = place % BLOCK_TOKENS;
            if contents.salt != salt {
                (contents.salt, contents.len) = (salt, 0);
            }
            // Rows after a missing one are ignored.
            if usize::from(contents.len) >= at {
                contents.tokens[at] = tokens[place + 1];
                contents.len = at as u8 + 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SALT: u64 = 3;

    #[test]
    fn what_is_seen_ends_at_a_hole() {
        let tokens: Vec<u32> = (100..160).collect();
        let mut held = Held::new(5);
        let table = [3, 1, 4, 0];
        assert_eq!((held.start(SALT, &table, &tokens, 0), held.start(SALT, &table, &tokens, 5)), (0, 1));
        held.note(SALT, &table, &tokens, 0..20);
        for end in 0..=20 {
            assert_eq!(held.start(SALT, &table, &tokens, end), 0, "{end}");
        }
        assert_eq!(held.start(SALT, &table, &tokens, 21), 2);
        // Rows 20 to 31 are missing, and later ones are there.
        held.note(SALT, &table, &tokens, 32..40);
        assert_eq!(held.start(SALT, &table, &tokens, 40), 2);
        assert_eq!(held.start(SALT, &table, &tokens, 32), 2);
        // Rows after a missing one in the same block are ignored.
        let mut held = Held::new(5);
        held.note(SALT, &table, &tokens, 0..5);
        held.note(SALT, &table, &tokens, 8..16);
        assert_eq!((held.start(SALT, &table, &tokens, 5), held.start(SALT, &table, &tokens, 16)), (0, 1));
    }

    #[test]
    fn other_tokens_are_not_held() {
        let tokens: Vec<u32> = (100..160).collect();
        let mut held = Held::new(5);
        held.note(SALT, &[3, 1], &tokens, 0..32);
        let mut other = tokens.clone();
        (other[16], other[32]) = (9, 9);
        assert_eq!(held.start(SALT, &[3, 1], &other, 32), 0, "a block may be followed by anything");
        other[4] = 9;
        assert_eq!((held.start(SALT, &[3, 1], &tokens, 32), held.start(SALT, &[3, 1], &other, 32)), (0, 1));
        // Another sequence writes the second block from its fourth place on, and finds the rows
        // before.
        other[20] = 9;
        held.note(SALT, &[3, 1], &other, 19..22);
        assert_eq!((held.start(SALT, &[3, 1], &other, 22), held.start(SALT, &[3, 1], &tokens, 32)), (1, 2));
        assert_eq!((held.start(SALT, &[3, 1], &tokens, 18), held.start(SALT, &[3, 1], &tokens, 16)), (0, 0));
    }

    #[test]
    fn rows_of_another_salt_are_not_held() {
        let tokens: Vec<u32> = (100..160).collect();
        let (mut held, table) = (Held::new(5), [3, 1, 4]);
        held.note(SALT, &table, &tokens, 0..40);
        assert_eq!((held.start(SALT, &table, &tokens, 40), held.start(4, &table, &tokens, 40)), (0, 3));
        // No row is found before those written after another sequence's.
        held.note(4, &table, &tokens, 20..32);
        assert_eq!((held.start(4, &table, &tokens, 32), held.start(SALT, &table, &tokens, 32)), (2, 2));
        held.note(4, &table, &tokens, 0..32);
        assert_eq!(held.start(4, &table, &tokens, 32), 0);
    }
}
