//! Bad words: sequences of tokens that an answer must never complete. When the answer ends in all
//! tokens of one but the last, that token is masked.

use std::collections::VecDeque;

use super::SamplingParams;

/// The end of an answer, as long as a bad word may need.
#[derive(Clone, Debug, Default)]
pub struct Recent {
    tokens: VecDeque<u32>,
    most: usize,
}

impl Recent {
    pub fn new(params: &SamplingParams) -> Self {
        let most = params.bad_words.iter().map(|word| word.len().saturating_sub(1)).max().unwrap_or(0);
        Self { tokens: VecDeque::new(), most }
    }

    pub fn observe(&mut self, token: u32) {
        if self.most == 0 {
            return;
        }
        if self.tokens.len() == self.most {
            self.tokens.pop_front();
        }
        self.tokens.push_back(token);
    }

    fn ends_with(&self, tokens: &[u32]) -> bool {
        tokens.len() <= self.tokens.len() && tokens.iter().rev().eq(self.tokens.iter().rev().take(tokens.len()))
    }
}

/// Tokens that would complete a bad word.
pub fn completing(params: &SamplingParams, recent: &Recent) -> impl Iterator<Item = u32> {
    let last =
        |word: &Vec<u32>| word.split_last().filter(|(_, before)| recent.ends_with(before)).map(|(&last, _)| last);
    params.bad_words.iter().filter_map(last)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{SamplingState, sampling::random::uniform};

    const VOCAB: u32 = 6;

    fn below(n: u32, seed: u64, at: usize) -> u32 {
        (uniform(seed, 7, at) * f64::from(n)) as u32 % n
    }

    /// Up to nine words of one to four tokens. Token 0 is never the last of a short one, so a token
    /// is always left.
    fn words(seed: u64) -> Vec<Vec<u32>> {
        let word = |w: usize| -> Vec<u32> {
            let len = 1 + below(4, seed, 100 * w) as usize;
            let token = |i: usize| {
                if i + 1 < len {
                    below(VOCAB, seed, 100 * w + i + 1)
                } else {
                    1 + below(VOCAB - 1, seed, 100 * w + i + 1)
                }
            };
            (0..len).map(token).collect()
        };
        (0..1 + below(9, seed, 1_000_000) as usize).map(word).collect()
    }

    #[test]
    fn no_answer_completes_a_bad_word_and_nothing_else_is_masked() {
        let mut num_masked = 0;
        for seed in 0..60 {
            let bad_words = words(seed);
            let params = SamplingParams { bad_words: bad_words.clone(), temperature: 0.0, ..SamplingParams::default() };
            assert_eq!(params.validate(VOCAB as usize), Ok(()));
            let mut state = SamplingState::new(Arc::new(params), &[1, 2, 3], &[], 0);
            let mut output: Vec<u32> = Vec::new();
            for position in 0..80 {
                let logits: Vec<f32> = (0..VOCAB).map(|token| uniform(seed, token, position) as f32).collect();
                let is_bad = |token: u32| {
                    let longer = [&output[..], &[token]].concat();
                    bad_words.iter().any(|word| longer.ends_with(word))
                };
                let best = |tokens: &mut dyn Iterator<Item = u32>| {
                    tokens.max_by(|&a, &b| logits[a as usize].total_cmp(&logits[b as usize]))
                };
                let expected = best(&mut (0..VOCAB).filter(|&token| !is_bad(token))).expect("token 0 at least");
                num_masked += usize::from(best(&mut (0..VOCAB)) != Some(expected));
                let found = state.sample(&mut logits.clone(), position).expect("something is left");
                assert_eq!(found.token, expected, "seed {seed}, {bad_words:?} after {output:?}");
                state.observe(found.token);
                output.push(found.token);
            }
        }
        assert!(num_masked > 500, "{num_masked} masked");
    }

    #[test]
    fn only_as_much_is_remembered_as_a_word_needs() {
        let params = SamplingParams { bad_words: vec![vec![1], vec![2, 3, 4]], ..SamplingParams::default() };
        let mut recent = Recent::new(&params);
        (0..100).for_each(|token| recent.observe(token));
        assert_eq!(recent.tokens, [98, 99]);
        let mut recent = Recent::new(&SamplingParams::default());
        recent.observe(1);
        assert!(recent.tokens.is_empty());
    }

    /// The end of the prompt is no part of the answer.
    #[test]
    fn the_prompt_does_not_count() {
        let params = SamplingParams { bad_words: vec![vec![0, 1]], temperature: 0.0, ..SamplingParams::default() };
        let mut state = SamplingState::new(Arc::new(params), &[0], &[], 0);
        assert_eq!(state.sample(&mut [0.0, 1.0], 1).map(|s| s.token), Ok(1));
    }

    #[test]
    fn a_dead_end_is_an_error_of_its_own() {
        let params = SamplingParams { bad_words: vec![vec![0, 0], vec![0, 1]], ..SamplingParams::default() };
        let mut state = SamplingState::new(Arc::new(params), &[], &[], 0);
        state.observe(0);
        assert_eq!(state.sample(&mut [0.0, 1.0], 1), Err(crate::sampling::NotFinite::NothingLeft));
    }
}
