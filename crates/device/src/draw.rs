//! Sampling where the logits are: what each row of a step's logits is to become, and what became of it.
//!
//! A device that draws tokens ([`Backend::draws_tokens`](crate::Backend::draws_tokens)) does for each [`Draw`] what the
//! engine's sampler does on the host, in the same order: logprobs of the raw logits; masks; biases; penalties; then the
//! best token for a temperature of 0 (the lowest id wins a tie), or temperature, min-p, top-k, top-p and one draw, which
//! falls on the token where `uniform` of all weight, laid out in order of token, lies.

use std::ops::Range;

/// What a step's rows of logits are to become. Lists of all draws lie one after the other; each draw has ranges of them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Draws {
    pub draws: Vec<Draw>,
    /// Tokens that may be chosen, or that may not.
    pub tokens: Vec<u32>,
    /// Added to a token's logit.
    pub biases: Vec<(u32, f32)>,
    /// Tokens that penalties look at, each at most once a draw.
    pub seen: Vec<SeenToken>,
}

impl Draws {
    /// Forgets all draws; memory stays for the next step's.
    pub fn clear(&mut self) {
        self.draws.clear();
        self.tokens.clear();
        self.biases.clear();
        self.seen.clear();
    }
}

/// How one row of logits becomes a token, or its logprobs.
#[derive(Clone, Debug, PartialEq)]
pub struct Draw {
    /// Row of the logits.
    pub row: u32,
    /// A prompt token whose logprobs are wanted; nothing is drawn then.
    pub target: Option<u32>,
    /// 0: the best token.
    pub temperature: f32,
    /// 0: all.
    pub top_k: u32,
    /// 1: all.
    pub top_p: f32,
    /// 0: all.
    pub min_p: f32,
    /// Of [0, 1).
    pub uniform: f64,
    /// 1: none.
    pub repetition_penalty: f32,
    pub frequency_penalty: f32,
    pub presence_penalty: f32,
    /// In [`Draws::tokens`]: no other token may be chosen. None: all may.
    pub allowed: Option<Range<u32>>,
    /// In [`Draws::tokens`]: these may not.
    pub banned: Range<u32>,
    /// In [`Draws::biases`]; a token comes at most once.
    pub biases: Range<u32>,
    /// In [`Draws::seen`].
    pub seen: Range<u32>,
    /// How many best tokens' logprobs are wanted beside the token's own; none: no logprobs at all.
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
    /// How often it was put out.
    pub outputs: u32,
}

/// What one [`Draw`] gave, in their order.
#[derive(Clone, Debug, PartialEq)]
pub struct Drawn {
    /// The token drawn, or the target; of no meaning where there is a failure.
    pub token: u32,
    pub failure: Option<DrawFailure>,
    /// Where they were asked for.
    pub logprobs: Option<DrawnLogprobs>,
}

/// Why a row of logits gives no token.
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
    /// 1 for the most likely token.
    pub rank: u32,
    /// The most likely tokens, best first; the lower id first where two are equal.
    pub top: Vec<(u32, f32)>,
}

/// Marks a token id of a batch that is not known yet: the rest of it is the number of a draw of the step before, whose
/// token takes its place on the device. Only for devices that draw tokens.
pub const DRAWN_TOKEN: u32 = 1 << 31;
