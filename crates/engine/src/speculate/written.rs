//! What lies in a method's own blocks, by the tokens that led to it.
//!
//! A method that keeps keys and values beside the decoder's is not asked when blocks change hands: a request finds a
//! prefix in the cache, gives way and comes back, goes on without drafts for a while, or has its blocks brought back from
//! the host, which has nothing of the method's. Instead of following all that, each block says which tokens its contents
//! are of and what came before them. How far a table is right then follows from the table and the tokens alone, and no
//! request needs to be known. The hash begins with the request's salt: what a block still holds of a request of another
//! salt is no use, and never shows. A wrong answer, should two hashes ever be the same, costs a draft and no more.

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

/// Of one block, from its first place on.
#[derive(Clone, Debug, Default)]
struct Contents {
    /// Hash of the salt and of everything before the block.
    before: u64,
    /// And of that and the block, where it is full.
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

    /// How many of `tokens`, counted from the first, lie in the blocks of `table`, for a request of this salt.
    pub fn reach(&self, salt: u64, table: &[u32], tokens: &[u32]) -> usize {
        self.mark(salt, table, tokens).len
    }

    /// The same, as a place to go on from.
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

    /// A pass wrote `tokens` to the places behind `mark`, which moves behind them; those beyond the table are forgotten.
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

    /// A pass wrote the places of `range`, of a sequence of these tokens, to the blocks of `table`. What comes before them
    /// must lie there.
    pub fn note(&mut self, salt: u64, table: &[u32], tokens: &[u32], range: Range<usize>) {
        let mut mark = self.mark(salt, table, &tokens[..range.start]);
        assert_eq!(mark.len, range.start, "places before {range:?} that the table holds");
        self.extend(&mut mark, table, &tokens[range]);
    }
}

/// How far a table holds a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    len: usize,
    /// Of the salt and all full blocks up to there.
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
        // The same prefix in another request, which has not seen it computed.
        assert_eq!(written.reach(SALT, &[0, 3], &[1; 40]), 16);
        // Tokens that were written on a guess, of which the second turns out wrong.
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
