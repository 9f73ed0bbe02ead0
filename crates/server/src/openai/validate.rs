//! From wire fields to sampling parameters. Ranges are the engine's to check; what is checked here is only what the
//! engine never hears of: limits on text, and numbers that JSON writes otherwise.

use folio_engine::SamplingParams;

use crate::SamplingDefaults;
use crate::error::ApiError;
use crate::openai::types::{Sampling, TextOptions};

const MAX_STOPS: usize = 4;
const MAX_STOP_BYTES: usize = 256;
const MAX_LOGIT_BIASES: usize = 1024;
const MAX_USER_BYTES: usize = 512;
const MAX_STOP_IDS: usize = 64;
pub const MAX_LOGPROBS: u32 = 20;
const DEFAULT_COMPLETION_TOKENS: usize = 16;

/// What a route adds to the shared fields.
pub struct RouteParams {
    pub logprobs: Option<u32>,
    /// What is left of the context, for requests that do not limit themselves; none for completions, whose default is
    /// OpenAI's 16.
    pub room: Option<usize>,
}

pub fn sampling(
    fields: &Sampling<'_>,
    route: RouteParams,
    defaults: SamplingDefaults,
) -> Result<SamplingParams, ApiError> {
    let standard = SamplingParams::default();
    if fields.stop_token_ids.is_some_and(|ids| ids.len() > MAX_STOP_IDS) {
        return Err(ApiError::Invalid(format!("stop_token_ids: at most {MAX_STOP_IDS} are allowed")));
    }
    if route.logprobs.is_some_and(|count| count > MAX_LOGPROBS) {
        return Err(ApiError::Invalid(format!("logprobs: at most {MAX_LOGPROBS} are allowed")));
    }
    Ok(SamplingParams {
        temperature: fields.temperature.or(defaults.temperature).unwrap_or(standard.temperature),
        top_p: fields.top_p.or(defaults.top_p).unwrap_or(standard.top_p),
        top_k: top_k(fields.top_k)?.or(if fields.top_k.is_none() { defaults.top_k } else { None }),
        min_p: fields.min_p.unwrap_or(standard.min_p),
        repetition_penalty: fields.repetition_penalty.unwrap_or(standard.repetition_penalty),
        frequency_penalty: fields.frequency_penalty.unwrap_or(standard.frequency_penalty),
        presence_penalty: fields.presence_penalty.unwrap_or(standard.presence_penalty),
        logit_bias: logit_bias(fields)?,
        allowed_tokens: fields.allowed_token_ids.map(<[u32]>::to_vec),
        banned_tokens: Vec::new(),
        min_tokens: fields.min_tokens.unwrap_or(0),
        max_tokens: fields.max_tokens.or(route.room).unwrap_or(DEFAULT_COMPLETION_TOKENS),
        stop_token_ids: fields.stop_token_ids.map(<[u32]>::to_vec).unwrap_or_default(),
        ignore_eos: fields.ignore_eos.unwrap_or(false),
        logprobs: route.logprobs,
        prompt_logprobs: None,
        seed: fields.seed.map_or_else(fresh_seed, |seed| seed as u64),
        n: fields.n.unwrap_or(1),
    })
}

/// vLLM's convention: 0 and -1 switch it off.
fn top_k(value: Option<i64>) -> Result<Option<u32>, ApiError> {
    match value {
        None | Some(-1 | 0) => Ok(None),
        Some(k) => match u32::try_from(k) {
            Ok(k) => Ok(Some(k)),
            Err(_) => Err(ApiError::Invalid(format!("top_k: {k} is out of range; -1 or 0 switches it off"))),
        },
    }
}

fn logit_bias(fields: &Sampling<'_>) -> Result<Vec<(u32, f32)>, ApiError> {
    let Some(map) = fields.logit_bias else { return Ok(Vec::new()) };
    if map.len() > MAX_LOGIT_BIASES {
        return Err(ApiError::Invalid(format!("logit_bias: at most {MAX_LOGIT_BIASES} tokens are allowed")));
    }
    let entry = |(token, bias): (&String, &serde_json::Value)| {
        let id = token.parse::<u32>().ok();
        id.zip(bias.as_f64().map(|bias| bias as f32))
            .ok_or_else(|| ApiError::Invalid("logit_bias: maps token ids to numbers".into()))
    };
    map.iter().map(entry).collect()
}

pub fn check_user(user: Option<&str>) -> Result<(), ApiError> {
    match user {
        Some(user) if user.len() > MAX_USER_BYTES => {
            Err(ApiError::Invalid(format!("user: at most {MAX_USER_BYTES} bytes are allowed")))
        }
        _ => Ok(()),
    }
}

pub fn check_text(options: &TextOptions) -> Result<(), ApiError> {
    let bad = options.stop.len() > MAX_STOPS
        || options.stop.iter().any(|stop| stop.is_empty() || stop.len() > MAX_STOP_BYTES);
    if bad {
        return Err(ApiError::Invalid(format!("stop: at most {MAX_STOPS} strings of 1 to {MAX_STOP_BYTES} bytes")));
    }
    Ok(())
}

/// A request without a seed draws anew each time.
fn fresh_seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(0u8)
}
