//! The one validated request. Routes fill in [`RawParams`], each from its own wire format;
//! [`Generate::new`] alone turns them into something that can run, with every default and every
//! limit applied.

use std::hash::{BuildHasher, RandomState};

use folio_engine::{InvalidRequest, SamplingParams};

use super::Bounds;
use crate::error::ApiError;

/// A route's sampling fields, unchecked and without defaults; none where the client set nothing.
#[derive(Clone, Debug, Default)]
pub struct RawParams {
    pub n: Option<usize>,
    pub max_tokens: Option<usize>,
    /// Default length of answers; none leaves only the context's end.
    pub max_tokens_unsaid: Option<usize>,
    pub min_tokens: Option<usize>,
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    /// -1 and 0 switch it off.
    pub top_k: Option<i64>,
    pub min_p: Option<f32>,
    pub seed: Option<i64>,
    pub repetition_penalty: Option<f32>,
    pub frequency_penalty: Option<f32>,
    pub presence_penalty: Option<f32>,
    pub logit_bias: Vec<(u32, f32)>,
    pub allowed_token_ids: Option<Vec<u32>>,
    pub bad_words: Vec<String>,
    pub stop: Vec<String>,
    pub stop_token_ids: Vec<u32>,
    pub include_stop: bool,
    pub ignore_eos: bool,
    pub show_special: bool,
    /// Number of most likely tokens to return with each token.
    pub logprobs: Option<u32>,
    pub prompt_logprobs: Option<u32>,
    /// Keep this many of the prompt's last tokens; -1: as many as fit.
    pub truncate_prompt: Option<i64>,
    pub priority: Option<i32>,
    pub cache_salt: Option<String>,
}

/// A request that can run.
#[derive(Clone, Debug)]
pub struct Generate {
    /// The seed is missing if the request names none: see [`Generate::params_of_a_prompt`].
    pub(crate) params: SamplingParams,
    /// Whether the client named the seed.
    is_seeded: bool,
    pub(crate) text: TextOptions,
    /// Tokenized together with the prompt.
    pub(crate) bad_words: Vec<String>,
    /// Most tokens of the prompt that are kept, from its end.
    pub(crate) keep_tokens: Option<usize>,
    pub(crate) priority: i32,
    pub(crate) cache_salt: Option<String>,
}

/// How tokens become the answer's text.
#[derive(Clone, Debug, Default)]
pub struct TextOptions {
    pub stop: Vec<String>,
    pub include_stop: bool,
    pub skip_special: bool,
    /// Until this many tokens are out, no stop string ends the answer.
    pub min_tokens: usize,
    /// Tokens that the client named to end it; the model's own ends are none of its doing.
    pub stop_token_ids: Vec<u32>,
}

impl Generate {
    /// `num_prompts`: how many prompts the request has.
    pub fn new(raw: RawParams, num_prompts: usize, bounds: &Bounds) -> Result<Self, ApiError> {
        let n = raw.n.unwrap_or(1);
        let sequences = n.saturating_mul(num_prompts);
        if sequences > bounds.max_seqs {
            let most = bounds.max_seqs;
            let field = if n > 1 { "n" } else { "prompt" };
            return Err(ApiError::invalid(
                field,
                format!("{sequences} answers requested, but at most {most} can run at once"),
            ));
        }
        let asked = raw.max_tokens.or(raw.max_tokens_unsaid);
        let max_tokens = bounds.defaults.max_tokens(asked, bounds.max_model_len);
        let min_tokens = raw.min_tokens.unwrap_or(0);
        let params = SamplingParams { max_tokens, min_tokens, n, ..sampling(&raw, bounds) };
        params.validate(bounds.vocab_size).map_err(|error| invalid(InvalidRequest::Sampling(error)))?;
        // A negative number: as many as fit with one for the answer.
        let all = bounds.max_model_len.saturating_sub(1);
        let keep_tokens = raw.truncate_prompt.map(|keep| usize::try_from(keep).unwrap_or(all));
        Ok(Self {
            params,
            is_seeded: raw.seed.is_some(),
            text: TextOptions {
                stop: raw.stop,
                include_stop: raw.include_stop,
                skip_special: !raw.show_special,
                min_tokens,
                stop_token_ids: raw.stop_token_ids,
            },
            bad_words: raw.bad_words,
            keep_tokens,
            priority: raw.priority.unwrap_or(0),
            cache_salt: raw.cache_salt,
        })
    }

    /// How one of the request's prompts is sampled. A seed that the client named holds for all of
    /// them; without one each prompt draws from a fresh seed, or equal prompts would have equal
    /// answers.
    pub fn params_of_a_prompt(&self) -> SamplingParams {
        let seed = if self.is_seeded { self.params.seed } else { fresh_seed() };
        SamplingParams { seed, ..self.params.clone() }
    }
}

/// Everything that is a number for the sampler alone.
fn sampling(raw: &RawParams, bounds: &Bounds) -> SamplingParams {
    let standard = bounds.defaults.params();
    let top_k = match raw.top_k {
        None => standard.top_k,
        Some(k) => u32::try_from(k).ok().filter(|k| *k > 0),
    };
    SamplingParams {
        temperature: raw.temperature.unwrap_or(standard.temperature),
        top_p: raw.top_p.unwrap_or(standard.top_p),
        top_k,
        min_p: raw.min_p.unwrap_or(standard.min_p),
        repetition_penalty: raw.repetition_penalty.unwrap_or(standard.repetition_penalty),
        frequency_penalty: raw.frequency_penalty.unwrap_or(standard.frequency_penalty),
        presence_penalty: raw.presence_penalty.unwrap_or(standard.presence_penalty),
        logit_bias: raw.logit_bias.clone(),
        allowed_tokens: raw.allowed_token_ids.clone(),
        stop_token_ids: raw.stop_token_ids.clone(),
        ignore_eos: raw.ignore_eos,
        logprobs: raw.logprobs,
        prompt_logprobs: raw.prompt_logprobs,
        seed: raw.seed.map_or(standard.seed, |seed| seed as u64),
        ..standard
    }
}

/// A prompt without a seed draws anew each time.
fn fresh_seed() -> u64 {
    RandomState::new().hash_one(0u8)
}

/// The engine's refusal, with the field names of the API.
pub fn invalid(error: InvalidRequest) -> ApiError {
    match error {
        InvalidRequest::PromptTooLong { prompt, most } => {
            ApiError::ContextLength { field: "prompt", tokens: prompt, most }
        }
        InvalidRequest::InputTooLong { input, most } => {
            ApiError::ContextLength { field: "prompt", tokens: input, most }
        }
        InvalidRequest::EmptyPrompt => ApiError::invalid("prompt", "must have at least one token"),
        InvalidRequest::Sampling(error) => {
            let field = if error.field == "allowed_tokens" { "allowed_token_ids" } else { error.field };
            ApiError::invalid(field, format!("is {}, but must be {}", error.value, error.range))
        }
        InvalidRequest::TooManySamples { .. } => ApiError::invalid("n", error.to_string()),
        InvalidRequest::NeverFits { .. } => ApiError::invalid("max_tokens", error.to_string()),
        _ => ApiError::invalid("prompt", error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Limits, SamplingDefaults};

    #[test]
    fn a_model_says_what_its_requests_do_not() {
        let defaults = SamplingDefaults {
            temperature: Some(0.5),
            top_p: Some(0.75),
            top_k: Some(20),
            min_p: Some(0.25),
            repetition_penalty: Some(1.5),
            max_tokens: Some(30),
            most_tokens: Some(40),
        };
        let check = |defaults, raw: RawParams, expect: (f32, f32, Option<u32>, f32, f32, usize)| {
            let bounds = Bounds {
                limits: Limits::default(),
                model_names: vec!["m".into()].into(),
                max_model_len: 64,
                vocab_size: 27,
                max_seqs: 4,
                defaults,
            };
            let said = format!("{raw:?}");
            let params = Generate::new(raw, 1, &bounds).unwrap_or_else(|error| panic!("{said}: {error}")).params;
            let SamplingParams { temperature, top_p, top_k, min_p, repetition_penalty, max_tokens, .. } = params;
            assert_eq!((temperature, top_p, top_k, min_p, repetition_penalty, max_tokens), expect, "{said}");
        };
        let nothing = RawParams::default();
        check(SamplingDefaults::default(), nothing.clone(), (1.0, 1.0, None, 0.0, 1.0, 64));
        check(defaults, nothing.clone(), (0.5, 0.75, Some(20), 0.25, 1.5, 30));
        let other = RawParams {
            temperature: Some(0.0),
            top_p: Some(1.0),
            top_k: Some(-1),
            min_p: Some(0.0),
            repetition_penalty: Some(1.0),
            max_tokens: Some(35),
            ..nothing.clone()
        };
        check(defaults, other.clone(), (0.0, 1.0, None, 0.0, 1.0, 35));
        check(defaults, RawParams { max_tokens: Some(50), ..other }, (0.0, 1.0, None, 0.0, 1.0, 40));
        check(defaults, RawParams { max_tokens_unsaid: Some(16), ..nothing }, (0.5, 0.75, Some(20), 0.25, 1.5, 16));
    }
}
