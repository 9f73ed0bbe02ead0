//! The contents of a method's own blocks, by the tokens they were computed from.
//!
//! A method with keys and values beside the decoder's does not know when blocks change hands: a
//! request finds a prefix in the cache, is preempted and returns, continues without drafts for a
//! while, or has its blocks loaded from the host tier, which has nothing of the method's. Instead
//! of following all that, each block records the tokens of its contents and the hash of those
//! before them. The length for which a block table is right then follows from the table and the
//! tokens alone, and no state by request is needed. The hash begins with the request's salt:
//! contents of another salt are never used. A collision of two hashes would cost a draft and no
//! more.

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    ops::Range,
};

use folio_device::BLOCK_TOKENS;

/// See the [module](self).
#[derive(Clone, Debug)]
pub struct Written {
    blocks: Vec<Contents>,
}

/// Contents of one block, from its first place on.
#[derive(Clone, Debug, Default)]
struct Contents {
    /// Hash of the salt and of all tokens before the block.
    before: u64,
    /// The same with the block's tokens, if it is full.
    with: u64,
    len: u8,
    tokens: [u32; BLOCK_TOKENS],
}

impl Contents {
    fn held(&self) -> &[u32] {
        &self.tokens[..usize::from(self.len)]
    }
}

impl Written {
    pub fn new(num_blocks: usize) -> Self {
        Self { blocks: vec![Contents::default(); num_blocks] }
    }

    /// Number of first tokens that are in the blocks of `table`, for a request of this salt.
    pub fn reach(&self, salt: u64, table: &[u32], tokens: &[u32]) -> usize {
        self.mark(salt, table, tokens).len
    }

    /// The same, as a mark to continue from.
    pub fn mark(&self, salt: u64, table: &[u32], tokens: &[u32]) -> Mark {
        let mut mark = Mark { len: 0, hash: salt };
        for (&block, wanted) in table.iter().zip(tokens.chunks(BLOCK_TOKENS)) {
            let contents = &self.blocks[block as usize];
            if contents.before != mark.hash {
                break;
            }
            let same = contents.held().iter().zip(wanted).take_while(|(held, wanted)| held == wanted).count();
            mark.len += same;
            if same < BLOCK_TOKENS {
                break;
            }
            mark.hash = contents.with;
        }
        mark
    }

    /// A pass wrote `tokens` to the places after `mark`, which moves to their end; tokens beyond
    /// the table are forgotten.
    pub fn extend(&mut self, mark: &mut Mark, table: &[u32], mut tokens: &[u32]) {
        while let Some(&block) = table.get(mark.len / BLOCK_TOKENS).filter(|_| !tokens.is_empty()) {
            let first = mark.len % BLOCK_TOKENS;
            let (here, behind) = tokens.split_at(tokens.len().min(BLOCK_TOKENS - first));
            let contents = &mut self.blocks[block as usize];
            contents.before = mark.hash;
            contents.len = (first + here.len()) as u8;
            contents.tokens[first..first + here.len()].copy_from_slice(here);
            mark.len += here.len();
            if mark.len.is_multiple_of(BLOCK_TOKENS) {
                contents.with = chain(mark.hash, &contents.tokens);
                mark.hash = contents.with;
            }
            tokens = behind;
        }
    }

    /// A pass wrote the places of `range`, of a sequence of these tokens, to the blocks of `table`.
    /// The places before them must have been written.
    pub fn note(&mut self, salt: u64, table: &[u32], tokens: &[u32], range: Range<usize>) {
        let mut mark = self.mark(salt, table, &tokens[..range.start]);
        assert_eq!(mark.len, range.start, "places before {range:?} that the table holds");
        self.extend(&mut mark, table, &tokens[range]);
    }
}

/// The length for which a block table holds a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    len: usize,
    /// Hash of the salt and all full blocks up to there.
    hash: u64,
}

impl Mark {
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

fn chain(before: u64, tokens: &[u32]) -> u64 {
    let mut hasher = DefaultHasher::new();
    (before, tokens).hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SALT: u64 = 3;

    #[test]
    fn a_table_reaches_as_far_as_it_was_written() {
        let (mut written, tokens) = (Written::new(8), (0..40).collect::<Vec<u32>>());
        let table = [3, 5, 1];
        assert_eq!(written.reach(SALT, &table, &tokens), 0);
        for (range, reach) in [(0..5, 5), (5..16, 16), (16..33, 33), (20..21, 21), (21..40, 40)] {
            written.note(SALT, &table, &tokens, range);
            assert_eq!(written.reach(SALT, &table, &tokens), reach);
        }
        assert_eq!(written.reach(SALT, &table[..2], &tokens), 32, "no further than the table");
        assert_eq!(written.reach(SALT, &table, &tokens[..7]), 7, "no further than the tokens");
        assert_eq!(written.reach(SALT, &[3, 1], &tokens), 16, "a block of other contents");
        assert_eq!(written.reach(SALT, &[5], &tokens[16..]), 0, "the same tokens behind others");
        assert_eq!(written.reach(4, &table, &tokens), 0, "the same tokens of another salt");
        written.note(4, &table, &tokens, 0..3);
        assert_eq!((written.reach(4, &table, &tokens), written.reach(SALT, &table, &tokens)), (3, 0));
    }

    #[test]
    fn other_tokens_end_it() {
        let (mut written, mut tokens) = (Written::new(4), (0..32).collect::<Vec<u32>>());
        written.note(SALT, &[0, 1], &tokens, 0..30);
        tokens[20] = 7;
        assert_eq!(written.reach(SALT, &[0, 1], &tokens), 20);
        written.note(SALT, &[0, 1], &tokens, 20..22);
        assert_eq!(written.reach(SALT, &[0, 1], &tokens), 22, "what lay behind is gone");
        tokens[3] = 7;
        assert_eq!(written.reach(SALT, &[0, 1], &tokens), 3);
    }

    #[test]
    fn blocks_change_hands() {
        let (mut written, ours, theirs) = (Written::new(4), [1; 20], [2; 20]);
        written.note(SALT, &[0, 1], &ours, 0..20);
        written.note(SALT, &[2, 1], &theirs, 0..20);
        assert_eq!((written.reach(SALT, &[0, 1], &ours), written.reach(SALT, &[2, 1], &theirs)), (16, 20));
        // The same prefix in another request, which did not compute it.
        assert_eq!(written.reach(SALT, &[0, 3], &[1; 40]), 16);
        // The second of three drafted tokens turns out to be wrong.
        let mut mark = written.mark(SALT, &[0, 3], &[1; 16]);
        written.extend(&mut mark, &[0, 3], &[5, 6, 7]);
        assert_eq!(mark.len(), 19);
        assert_eq!(written.reach(SALT, &[0, 3], &[&[1; 16][..], &[5, 9, 7]].concat()), 17);
        written.extend(&mut mark, &[0, 3], &[8; 20]);
        assert_eq!(mark.len(), 32, "no further than the table");
    }

    #[test]
    #[should_panic(expected = "places before 5..6 that the table holds")]
    fn gaps_are_refused() {
        Written::new(1).note(SALT, &[0], &[1; 6], 5..6);
    }
}
