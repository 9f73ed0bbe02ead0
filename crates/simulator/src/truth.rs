//! The answer that a request would get if it had the model for itself.
//!
//! The sums that a row reads are running totals, so that a token costs the same in a sequence of
//! any length.

use crate::hash;

/// Facts that a request's answer depends on, beside its tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sampling {
    /// Seed of sampling.
    pub seed: u64,
    pub vocab: u32,
    /// Affects every value in the cache, like an adapter would: sharing across salts shows.
    pub salt: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { seed: 0, vocab: 1_000_000, salt: 0 }
    }
}

/// One sequence with the digest that each of its rows must read.
#[derive(Clone, Debug)]
pub struct Truth {
    windows: Vec<Option<usize>>,
    salt: u64,
    tokens: Vec<u32>,
    digests: Vec<u64>,
    /// `totals[position * groups + group]`: the sum of weighted values before that position.
    totals: Vec<u64>,
}

impl Truth {
    pub fn new(windows: &[Option<usize>], salt: u64, tokens: &[u32]) -> Self {
        let mut truth = Self {
            windows: windows.to_vec(),
            salt,
            tokens: Vec::with_capacity(tokens.len() + 16),
            digests: Vec::with_capacity(tokens.len() + 16),
            totals: vec![0; windows.len()],
        };
        for &token in tokens {
            truth.push(token);
        }
        truth
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

    /// The digests that the rows at all positions read.
    pub fn digests(&self) -> &[u64] {
        &self.digests
    }

    pub fn push(&mut self, token: u32) {
        let (position, groups) = (self.tokens.len(), self.windows.len());
        let before = |group: usize| {
            let first = self.windows[group].map_or(0, |w| (position + 1).saturating_sub(w));
            self.totals[position * groups + group].wrapping_sub(self.totals[first * groups + group])
        };
        let context = (0..groups).fold(self.salt, |sum, group| hash::mix(sum, before(group)));
        let entry = hash::entry(token, position, context);
        let mut digest = 0;
        for group in 0..groups {
            let own = hash::weighted(hash::in_group(entry, group), position);
            digest = hash::mix(digest, before(group).wrapping_add(own));
        }
        for group in 0..groups {
            let own = hash::weighted(hash::in_group(entry, group), position);
            self.totals.push(self.totals[position * groups + group].wrapping_add(own));
        }
        self.tokens.push(token);
        self.digests.push(digest);
    }

    pub fn truncate(&mut self, len: usize) {
        self.tokens.truncate(len);
        self.digests.truncate(len);
        self.totals.truncate((len + 1) * self.windows.len());
    }

    /// The next token.
    pub fn next(&self, sampling: Sampling) -> u32 {
        let digest = *self.digests.last().expect("a sequence has a token");
        hash::sampled(digest, sampling.seed, sampling.vocab)
    }
}

/// The answer of a request that has the model for itself.
pub fn reference(windows: &[Option<usize>], prompt: &[u32], num_tokens: usize, sampling: Sampling) -> Vec<u32> {
    let mut truth = Truth::new(windows, sampling.salt, prompt);
    for _ in 0..num_tokens {
        truth.push(truth.next(sampling));
    }
    truth.tokens.split_off(prompt.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_truth_cut_back_goes_on_as_if_nothing_had_been() {
        let windows = [None, Some(3)];
        let whole = Truth::new(&windows, 0, &[1, 2, 3, 4, 5, 6]);
        let mut cut = Truth::new(&windows, 0, &[1, 2, 3, 9, 9]);
        cut.truncate(3);
        for token in [4, 5, 6] {
            cut.push(token);
        }
        assert_eq!(whole.digests(), cut.digests());
    }

    #[test]
    fn the_salt_counts_in_every_row() {
        let truth = |salt| Truth::new(&[None], salt, &[1, 2, 3]);
        assert!(truth(0).digests().iter().zip(truth(1).digests()).all(|(a, b)| a != b));
    }

    #[test]
    fn every_token_counts_for_all_that_follow() {
        let windows = [Some(2)];
        let (a, b) = (Truth::new(&windows, 0, &[1, 2, 3, 4, 5]), Truth::new(&windows, 0, &[7, 2, 3, 4, 5]));
        for position in 0..5 {
            assert_ne!(a.digests()[position], b.digests()[position], "through what stands in the cache");
        }
    }
}
