//! Sampling on the device that has the logits: the parameters for each row of a step's logits, and
//! the results.
//!
//! A device that samples ([`Sampling::draws_tokens`](crate::Sampling::draws_tokens)) does for each
//! [`Draw`] what the engine's sampler does on the host, in the same order: logprobs of the raw
//! logits; masks; biases; penalties; then the best token for a temperature of 0 (the lowest id wins
//! a tie), or temperature, min-p, top-k, top-p and one random choice: the token at which the
//! cumulated weights, in order of token, reach the share `uniform`.

use std::ops::Range;

/// Sampling of a step's rows of logits. Lists of all draws are stored one after the other; each
/// draw has ranges of them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Draws {
    pub draws: Vec<Draw>,
    /// Tokens that may be chosen, or that may not.
    pub tokens: Vec<u32>,
    /// Added to a token's logit.
    pub biases: Vec<(u32, f32)>,
    /// Tokens that penalties apply to, each at most once per draw.
    pub seen: Vec<SeenToken>,
}

impl Draws {
    /// Removes all draws; memory stays for the next step's.
    pub fn clear(&mut self) {
        self.draws.clear();
        self.tokens.clear();
        self.biases.clear();
        self.seen.clear();
    }
}

/// Parameters of one row of logits, for a token or its logprobs.
#[derive(Clone, Debug, PartialEq)]
pub struct Draw {
    /// Row of the logits.
    pub row: u32,
    /// A prompt token with requested logprobs; nothing is sampled then.
    pub target: Option<u32>,
    /// Temperature; 0 takes the best token.
    pub temperature: f32,
    /// 0: all.
    pub top_k: u32,
    /// 1: all.
    pub top_p: f32,
    /// 0: all.
    pub min_p: f32,
    /// The random number of this draw, from 0 to below 1.
    pub uniform: f64,
    /// 1: none.
    pub repetition_penalty: f32,
    pub frequency_penalty: f32,
    pub presence_penalty: f32,
    /// Range in [`Draws::tokens`]: no other token may be chosen. None: all may.
    pub allowed: Option<Range<u32>>,
    /// Range in [`Draws::tokens`]: these may not be chosen.
    pub banned: Range<u32>,
    /// Range in [`Draws::biases`]; each token occurs at most once.
    pub biases: Range<u32>,
    /// Range in [`Draws::seen`].
    pub seen: Range<u32>,
    /// Number of best tokens with requested logprobs, beside the token's own; none: no logprobs at
    /// all.
    pub logprobs: Option<u32>,
}

impl Draw {
    /// The best token of a row, and nothing else.
    pub fn greedy(row: u32) -> Self {
        Self {
            row,
            target: None,
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            uniform: 0.0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            allowed: None,
            banned: 0..0,
            biases: 0..0,
            seen: 0..0,
            logprobs: None,
        }
    }
}

/// A token of the prompt (0 outputs) or of the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeenToken {
    pub token: u32,
    /// How often it was generated.
    pub outputs: u32,
}

/// Result of one [`Draw`], in the draws' order.
#[derive(Clone, Debug, PartialEq)]
pub struct Drawn {
    /// The sampled token, or the target; meaningless after a failure.
    pub token: u32,
    pub failure: Option<DrawFailure>,
    /// Present if they were requested.
    pub logprobs: Option<DrawnLogprobs>,
}

/// The reason why a row of logits gives no token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum DrawFailure {
    /// A logit is NaN or infinity.
    NotFinite { token: u32, value: f32 },
    /// All tokens are masked out.
    NothingLeft,
}

/// Natural logarithms of probabilities under the raw logits.
#[derive(Clone, Debug, PartialEq)]
pub struct DrawnLogprobs {
    pub logprob: f32,
    /// Rank of the token's probability, 1 for the most likely one.
    pub rank: u32,
    /// The most likely tokens, best first; of equals, the lower id first.
    pub top: Vec<(u32, f32)>,
}

/// Marks a token id of a batch that is not known yet: its other bits are the number of a draw of
/// the previous step, and the device replaces it by the sampled token. Only for devices that
/// sample.
pub const DRAWN_TOKEN: u32 = 1 << 31;
