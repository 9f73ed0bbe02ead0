//! Tokens of a pass: a chain of `k` nodes, each correct with probability `a`, gives `1 + a + ... +
//! a^k = (1 - a^(k + 1)) / (1 - a)` of them.

use std::sync::Arc;

use folio_engine::{
    SamplingParams, SamplingState,
    speculate::{Draft, Place, walk},
};

use crate::model::{Random, logits};

const VOCAB: usize = 16;
const PASSES: usize = 10_000;
const PROMPT: [u32; 2] = [3, 5];

/// A model of the last two tokens.
struct Model(Vec<Vec<f32>>);

impl Model {
    fn new() -> Self {
        let pairs = (0..VOCAB * VOCAB).map(|pair| [(pair / VOCAB) as u32, (pair % VOCAB) as u32]);
        Self(pairs.map(|pair| logits(11, &pair, VOCAB, 2.0)).collect())
    }

    /// The row after the first `len` of `tokens`.
    fn row(&self, tokens: &[u32], len: usize) -> Vec<f32> {
        self.0[tokens[len - 2] as usize * VOCAB + tokens[len - 1] as usize].clone()
    }
}

fn state(temperature: f32) -> SamplingState {
    let params = SamplingParams { temperature, seed: 8, ..SamplingParams::default() };
    SamplingState::new(Arc::new(params), &PROMPT, &[], 0)
}

/// Prompt and a long answer.
fn plain(model: &Model, temperature: f32, len: usize) -> Vec<u32> {
    let (mut state, mut tokens) = (state(temperature), PROMPT.to_vec());
    while tokens.len() < len {
        let sampled = state.sample(&mut model.row(&tokens, tokens.len()), tokens.len()).expect("finite logits");
        state.observe(sampled.token);
        tokens.push(sampled.token);
    }
    tokens
}

#[test]
fn tokens_a_pass_are_what_theory_says() {
    let model = Model::new();
    let temperature = 0.9;
    let tokens = plain(&model, temperature, 9 * PASSES + 16);
    let mut random = Random(2);
    for agreement in [0.0, 0.3, 0.6, 0.8, 0.95, 1.0] {
        for k in 1..=8usize {
            let (mut state, mut len) = (state(temperature), PROMPT.len());
            for _ in 0..PASSES {
                let guess = |&token: &u32| match random.chance(agreement) {
                    true => token,
                    false => (token + 1 + random.below(VOCAB - 1) as u32) % VOCAB as u32,
                };
                let draft = Draft::chain(tokens[len..len + k].iter().map(guess));
                let place = Place { position: len, max_len: usize::MAX };
                // Only rows after correct nodes are asked for, so the answer gives their tokens.
                let walk = walk(&draft, &mut state, place, |state, row, position| {
                    assert_eq!(row, position - len);
                    state.sample(&mut model.row(&tokens, position), position)
                });
                assert!(walk.sampled.iter().map(|sampled| &sampled.token).eq(&tokens[len..len + walk.sampled.len()]));
                len += walk.sampled.len();
            }
            let found = (len - PROMPT.len()) as f64 / PASSES as f64;
            let expected: f64 = (0..=k).map(|depth| agreement.powi(depth as i32)).sum();
            assert!((found / expected - 1.0).abs() < 0.03, "{agreement} x {k}: {found:.3}, expected {expected:.3}");
        }
    }
}
