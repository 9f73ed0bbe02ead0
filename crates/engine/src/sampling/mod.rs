//! Samples the next token from a row of logits, as one request asked for it.
//!
//! The order is vLLM's: logprobs of the raw logits; masks, with those of bad words; biases;
//! penalties; then the best token for a temperature of 0, or temperature, min-p, top-k, top-p and a
//! draw. A draw is a function of (seed, sample, position), so nothing here depends on the batch.
//! Values that make sampling impossible give an error of that row and never a panic.

mod bad_words;
mod defaults;
mod filters;
mod lanes;
mod logprobs;
mod on_device;
mod params;
mod penalties;
mod random;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use bad_words::Recent;
pub use defaults::SamplingDefaults;
pub use params::{InvalidParam, SamplingParams};
use penalties::Seen;
pub(crate) use random::uniform;

use crate::{
    executor::{Logprobs, Sampled},
    pooling::{Pool, Pooling},
};

/// Reason why a row of logits gives no token.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum NotFinite {
    #[error("the logit of token {token} is {value}, but must be a finite number")]
    Logit { token: usize, value: f32 },
    #[error("no token is left to choose from: all of them are masked out")]
    NothingLeft,
}

/// The state of a request's sampling between steps: its parameters and the tokens it has seen.
#[derive(Clone, Debug)]
pub struct SamplingState {
    params: Arc<SamplingParams>,
    seen: Seen,
    recent: Recent,
    /// Tokens that end the answer.
    stops: Vec<u32>,
    sample_index: u32,
    /// Set for an embedding: the pooling and the length of the prompt.
    pooling: Option<(Pooling, usize)>,
}

impl SamplingState {
    /// `params` must be valid for the logits that are sampled. `sample_index` distinguishes the
    /// answers to one prompt.
    pub fn new(params: Arc<SamplingParams>, prompt: &[u32], eos: &[u32], sample_index: usize) -> Self {
        let mut stops = params.stop_token_ids.clone();
        if !params.ignore_eos {
            stops.extend_from_slice(eos);
        }
        let (seen, recent) = (Seen::new(&params, prompt), Recent::new(&params));
        Self { seen, recent, stops, sample_index: sample_index as u32, pooling: None, params }
    }

    /// The states of all answers to a prompt.
    pub(crate) fn for_samples(params: &Arc<SamplingParams>, prompt: &[u32], eos: &[u32]) -> Vec<Self> {
        let first = Self::new(Arc::clone(params), prompt, eos, 0);
        (0..params.n as u32).map(|sample_index| Self { sample_index, ..first.clone() }).collect()
    }

    /// The state of a request for an embedding.
    pub(crate) fn for_pooling(pooling: Pooling, prompt_len: usize) -> Self {
        Self { pooling: Some((pooling, prompt_len)), ..Self::new(Arc::default(), &[], &[], 0) }
    }

    /// Set if the request is for an embedding.
    pub fn pooling(&self) -> Option<Pooling> {
        self.pooling.map(|(pooling, _)| pooling)
    }

    pub(crate) fn pool(&self) -> Option<Pool> {
        self.pooling.map(|(pooling, prompt_len)| Pool::new(pooling, prompt_len))
    }

    /// Notes a token of the answer.
    pub fn observe(&mut self, token: u32) {
        self.seen.observe(token);
        self.recent.observe(token);
    }

    /// Whether the answer ends with `token`, if it is the next one.
    pub(crate) fn stops_at(&self, token: u32) -> bool {
        self.seen.num_outputs() >= self.params.min_tokens && self.stops.contains(&token)
    }

    /// The token at `position` of the sequence, from the logits of the row before. Overwrites the
    /// logits.
    pub fn sample(&mut self, logits: &mut [f32], position: usize) -> Result<Sampled, NotFinite> {
        check_finite(logits)?;
        let raw = self.params.logprobs.map(|count| (logits.to_vec(), count as usize));
        let token = self.choose(logits, position)?;
        let logprobs = raw.map(|(raw, count)| logprobs::logprobs(&raw, token, count));
        Ok(Sampled { token, logprobs })
    }

    /// The logprob of a prompt token, from the logits of the row before.
    pub fn prompt_logprobs(&self, logits: &[f32], target: u32) -> Result<Logprobs, NotFinite> {
        check_finite(logits)?;
        best_token(logits)?;
        Ok(logprobs::logprobs(logits, target, self.params.prompt_logprobs.unwrap_or(0) as usize))
    }

    /// Tokens of a vocabulary that must not come next.
    fn banned(&self, vocab: usize) -> impl Iterator<Item = u32> {
        let params = &*self.params;
        let stops = if self.seen.num_outputs() < params.min_tokens { &self.stops[..] } else { &[] };
        // The end tokens come from the model's configuration, which may name some that have no
        // logit.
        let stops = stops.iter().copied().filter(move |&token| (token as usize) < vocab);
        params.banned_tokens.iter().copied().chain(stops).chain(bad_words::completing(params, &self.recent))
    }

    fn choose(&self, logits: &mut [f32], position: usize) -> Result<u32, NotFinite> {
        let params = &*self.params;
        penalties::keep(logits, params);
        self.banned(logits.len()).for_each(|token| logits[token as usize] = f32::NEG_INFINITY);
        penalties::bias(logits, params);
        penalties::penalize(logits, params, &self.seen);
        let best = best_token(logits)?;
        if params.is_greedy() {
            return Ok(best);
        }
        let best_logit = logits[best as usize];
        if best_logit == f32::INFINITY {
            // A penalty near zero divides a logit beyond the range of f32.
            return Err(NotFinite::Logit { token: best as usize, value: best_logit });
        }
        filters::soften(logits, best_logit, params.temperature);
        filters::min_p(logits, params.min_p);
        if let Some(k) = params.top_k {
            filters::top_k(logits, k as usize);
        }
        filters::top_p(logits, params.top_p);
        Ok(filters::draw(logits, uniform(params.seed, self.sample_index, position)))
    }
}

/// Minus infinity is a token that the model excludes; NaN and infinity are errors of the model.
fn check_finite(logits: &[f32]) -> Result<(), NotFinite> {
    let wrong = lanes::position(logits, |logit| logit.is_nan() || logit == f32::INFINITY);
    wrong.map_or(Ok(()), |token| Err(NotFinite::Logit { token, value: logits[token] }))
}

/// The token of the largest logit of an unchecked row.
pub(crate) fn likeliest(logits: &[f32]) -> u32 {
    best_token(logits).unwrap_or(0)
}

/// The token of the largest logit; the lowest id wins a tie.
fn best_token(logits: &[f32]) -> Result<u32, NotFinite> {
    lanes::largest(logits).map(|token| token as u32).ok_or(NotFinite::NothingLeft)
}
