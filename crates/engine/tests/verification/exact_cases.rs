//! Requests of all kinds, their answers by plain decoding, and drafts for them, good and bad.

use std::sync::Arc;

use folio_engine::{Sampled, SamplingParams, SamplingState, speculate::Draft};

use crate::model::{Random, hash, logits};

pub struct Case {
    pub seed: u64,
    pub vocab: usize,
    pub prompt: Vec<u32>,
    eos: Vec<u32>,
    params: Arc<SamplingParams>,
    pub max_len: usize,
    /// Probability of a value in a row that is not a number.
    wrong: f64,
}

/// The answer to a case by plain decoding. Failures are stored as text.
pub struct Answer {
    pub sampled: Vec<Sampled>,
    pub failure: Option<String>,
    pub state: SamplingState,
    /// Whether its last token is a stop token.
    pub is_stopped: bool,
}

impl Answer {
    pub fn tokens(&self) -> Vec<u32> {
        self.sampled.iter().map(|sampled| sampled.token).collect()
    }
}

impl Case {
    pub fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let vocab = random.of(&[5, 12, 30]);
        let prompt = (0..1 + random.below(6)).map(|_| random.below(vocab) as u32).collect::<Vec<_>>();
        let eos = vec![random.below(vocab) as u32, vocab as u32 + 3];
        let params = params(&mut random, vocab);
        assert_eq!(params.validate(vocab), Ok(()));
        let max_len = prompt.len() + params.max_tokens;
        let wrong = random.of(&[0.0, 0.0, 0.02]);
        Self { seed, vocab, prompt, eos, params: Arc::new(params), max_len, wrong }
    }

    pub fn state(&self) -> SamplingState {
        SamplingState::new(Arc::clone(&self.params), &self.prompt, &self.eos, (self.seed % 3) as usize)
    }

    /// The model's logits after `tokens`.
    pub fn row(&self, tokens: &[u32]) -> Vec<f32> {
        let mut row = logits(self.seed, tokens, self.vocab, 4.0);
        let mut random = Random(hash(!self.seed, tokens));
        if random.chance(self.wrong) {
            row[random.below(self.vocab)] = f32::NAN;
        }
        row
    }

    /// The engine's rule, implemented independently.
    fn is_stop(&self, output: &[u32]) -> bool {
        let params = &self.params;
        output.last().is_some_and(|token| {
            let is_eos = !params.ignore_eos && self.eos.contains(token);
            (is_eos || params.stop_token_ids.contains(token)) && output.len() > params.min_tokens
        })
    }

    /// One token after the other.
    pub fn plain(&self) -> Answer {
        let mut tokens = self.prompt.clone();
        let mut answer = Answer { sampled: Vec::new(), failure: None, state: self.state(), is_stopped: false };
        while tokens.len() < self.max_len && !answer.is_stopped {
            match answer.state.sample(&mut self.row(&tokens), tokens.len()) {
                Ok(sampled) => {
                    answer.state.observe(sampled.token);
                    tokens.push(sampled.token);
                    answer.sampled.push(sampled);
                }
                Err(failure) => {
                    answer.failure = Some(failure.to_string());
                    break;
                }
            }
            answer.is_stopped = self.is_stop(&tokens[self.prompt.len()..]);
        }
        answer
    }
}

/// Each sampling parameter, in a third of the cases.
fn params(random: &mut Random, vocab: usize) -> SamplingParams {
    let mut params = SamplingParams { seed: random.next(), ..SamplingParams::default() };
    let token = |random: &mut Random| random.below(vocab) as u32;
    params.max_tokens = 1 + random.below(40);
    params.temperature = random.of(&[0.0, 0.0, 0.3, 0.7, 1.0, 1.0, 1.6]);
    let mut third = || random.below(3) == 0;
    let [top_k, top_p, min_p, repetition, frequency, presence, bias, allowed, banned, bad, min_tokens, stop] =
        std::array::from_fn(|_| third());
    params.top_k = top_k.then(|| random.of(&[1, 3, 9]));
    params.top_p = if top_p { random.of(&[0.4, 0.9]) } else { 1.0 };
    params.min_p = if min_p { random.of(&[0.05, 0.3]) } else { 0.0 };
    params.repetition_penalty = if repetition { random.of(&[0.7, 1.2, 1.9]) } else { 1.0 };
    params.frequency_penalty = if frequency { random.of(&[-0.5, 0.3, 1.1]) } else { 0.0 };
    params.presence_penalty = if presence { random.of(&[-0.4, 0.8]) } else { 0.0 };
    if bias {
        params.logit_bias = vec![(token(random), random.of(&[-100.0, -1.0, 2.0, 5.0]))];
    }
    if allowed {
        params.allowed_tokens = Some((0..vocab as u32).filter(|_| random.chance(0.7)).chain([0]).take(vocab).collect());
    }
    if banned {
        params.banned_tokens = vec![token(random)];
    }
    if bad {
        let word = |random: &mut Random| (0..1 + random.below(3)).map(|_| token(random)).collect();
        params.bad_words = (0..1 + random.below(2 * vocab)).map(|_| word(random)).collect();
        params.bad_words.retain(|word| word.len() > 1 || word[0] % 3 == 1);
    }
    params.min_tokens = if min_tokens { random.below(params.max_tokens + 1) } else { 0 };
    params.stop_token_ids = if stop { vec![token(random)] } else { Vec::new() };
    params.ignore_eos = random.chance(0.5);
    params.logprobs = random.of(&[None, None, Some(0), Some(3)]);
    params
}

/// The shape of drafts, and the probability that a node is correct.
#[derive(Clone, Copy, Debug)]
pub struct Manner {
    pub is_tree: bool,
    pub most: usize,
    pub good: f64,
}

/// A draft of an answer that `rest` follows.
pub fn draft(manner: Manner, rest: &[u32], vocab: usize, random: &mut Random) -> Draft {
    let mut draft = Draft::default();
    // Number of correct tokens on the path to each node; none if one is wrong.
    let mut rights: Vec<Option<usize>> = Vec::new();
    for _ in 0..random.below(manner.most + 1) {
        let parent = match manner.is_tree {
            true => random.below(draft.len() + 1).checked_sub(1),
            false => draft.len().checked_sub(1),
        };
        let right = parent.map_or(Some(0), |parent| rights[parent]);
        let next = right.and_then(|right| rest.get(right)).filter(|_| random.chance(manner.good));
        let token = next.copied().unwrap_or_else(|| random.below(vocab) as u32);
        draft.push(token, parent.map(|parent| parent as u16));
        // A node that existed already remains as correct as it was.
        rights.push(right.filter(|&right| rest.get(right) == Some(&token)).map(|right| right + 1));
        rights.truncate(draft.len());
    }
    draft
}
