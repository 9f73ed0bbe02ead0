//! From wire fields to sampling parameters. Ranges are the engine's to check; what is checked here is only what the
//! engine never hears of: limits on text, and numbers that JSON writes otherwise.

use folio_engine::{RequestOptions, SamplingParams};

use crate::SamplingDefaults;
use crate::error::ApiError;
use crate::openai::types::{OneOrMany, SharedFields, TextOptions};

const MAX_STOPS: usize = 4;
const MAX_STOP_BYTES: usize = 256;
const MAX_LOGIT_BIASES: usize = 1024;
const MAX_USER_BYTES: usize = 512;
const MAX_STOP_IDS: usize = 64;
const MAX_LOGPROBS: u32 = 20;
const MAX_SALT_BYTES: usize = 64;

/// What a route adds to the shared fields, or puts in their place.
pub struct RouteParams {
    pub logprobs: Option<u32>,
    /// For requests that do not limit themselves; the context's end limits all.
    pub max_tokens: usize,
}

pub fn sampling(
    fields: &SharedFields,
    route: RouteParams,
    defaults: SamplingDefaults,
) -> Result<SamplingParams, ApiError> {
    if fields.user.as_ref().is_some_and(|user| user.len() > MAX_USER_BYTES) {
        return Err(ApiError::Invalid(format!("user: at most {MAX_USER_BYTES} bytes are allowed")));
    }
    if fields.stream_options.is_some() && !fields.is_streamed() {
        return Err(ApiError::Invalid("stream_options: needs stream to be true".into()));
    }
    let standard = SamplingParams::default();
    if fields.stop_token_ids.as_ref().is_some_and(|ids| ids.len() > MAX_STOP_IDS) {
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
        allowed_tokens: fields.allowed_token_ids.clone(),
        banned_tokens: Vec::new(),
        min_tokens: fields.min_tokens.unwrap_or(0),
        max_tokens: fields.max_tokens.unwrap_or(route.max_tokens),
        stop_token_ids: fields.stop_token_ids.clone().unwrap_or_default(),
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

fn logit_bias(fields: &SharedFields) -> Result<Vec<(u32, f32)>, ApiError> {
    let Some(map) = &fields.logit_bias else { return Ok(Vec::new()) };
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

pub fn text_options(fields: &SharedFields) -> Result<TextOptions, ApiError> {
    let stop = fields.stop.clone().map(OneOrMany::into_vec).unwrap_or_default();
    if stop.len() > MAX_STOPS || stop.iter().any(|stop| stop.is_empty() || stop.len() > MAX_STOP_BYTES) {
        return Err(ApiError::Invalid(format!("stop: at most {MAX_STOPS} strings of 1 to {MAX_STOP_BYTES} bytes")));
    }
    Ok(TextOptions {
        stop,
        include_stop: fields.include_stop_str_in_output.unwrap_or(false),
        skip_special: fields.skip_special_tokens.unwrap_or(true),
    })
}

/// When a request runs and what it shares.
pub fn request_options(fields: &SharedFields) -> Result<RequestOptions, ApiError> {
    let cache_salt = fields.cache_salt.as_deref().map_or(Ok(0), cache_salt)?;
    Ok(RequestOptions { priority: fields.priority.unwrap_or(0), cache_salt, ..RequestOptions::default() })
}

/// FNV-1a: the same in every process, so that what a disk keeps is found again after a restart. It need not be secret:
/// whoever could find another text with a salt's hash knows that salt. 0 stands for no salt.
fn cache_salt(salt: &str) -> Result<u64, ApiError> {
    if salt.is_empty() || salt.len() > MAX_SALT_BYTES || !salt.is_ascii() {
        return Err(ApiError::Invalid(format!("cache_salt: 1 to {MAX_SALT_BYTES} ASCII characters are needed")));
    }
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    Ok(salt.bytes().fold(0xcbf2_9ce4_8422_2325, step).max(1))
}

/// A request without a seed draws anew each time.
fn fresh_seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(0u8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn salts_are_hashed_or_refused_by_name() {
        let options = |salt: Option<&str>, priority: Option<i32>| {
            let cache_salt = salt.map(str::to_owned);
            request_options(&SharedFields { cache_salt, priority, ..SharedFields::default() })
        };
        assert_eq!(options(None, None).expect("valid"), RequestOptions::default());
        let found = options(Some("foobar"), Some(-3)).expect("valid");
        // Of FNV's published test vectors.
        assert_eq!((found.cache_salt, found.priority), (0x8594_4171_f739_67e8, -3));
        assert_ne!(options(Some("foobaz"), None).expect("valid").cache_salt, found.cache_salt);
        assert!(options(Some(&"a".repeat(64)), None).is_ok());
        for salt in ["", "é", &"a".repeat(65)] {
            let error = options(Some(salt), None).expect_err("refused").to_string();
            assert!(error.starts_with("cache_salt: "), "{error}");
        }
    }
}
