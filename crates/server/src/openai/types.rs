//! Requests as they arrive and answers as they leave. A field that is not listed is refused by name.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::body::RouteFields;

/// Fields that every route has.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SharedFields {
    pub model: Option<String>,
    pub stream: Option<bool>,
    pub stream_options: Option<StreamOptions>,
    /// Accepted as OpenAI does, and not used.
    pub user: Option<String>,
    pub n: Option<usize>,
    pub max_tokens: Option<usize>,
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<i64>,
    pub min_p: Option<f32>,
    pub seed: Option<i64>,
    pub stop: Option<OneOrMany>,
    pub stop_token_ids: Option<Vec<u32>>,
    pub include_stop_str_in_output: Option<bool>,
    pub skip_special_tokens: Option<bool>,
    pub ignore_eos: Option<bool>,
    pub min_tokens: Option<usize>,
    pub frequency_penalty: Option<f32>,
    pub presence_penalty: Option<f32>,
    pub repetition_penalty: Option<f32>,
    pub logit_bias: Option<Map<String, Value>>,
    pub allowed_token_ids: Option<Vec<u32>>,
    /// Lower runs sooner, as in vLLM.
    pub priority: Option<i32>,
    /// Only requests with the same salt share what the prefix cache holds.
    pub cache_salt: Option<String>,
}

impl SharedFields {
    pub fn is_streamed(&self) -> bool {
        self.stream.unwrap_or(false)
    }

    pub fn include_usage(&self) -> bool {
        self.stream_options.as_ref().and_then(|options| options.include_usage).unwrap_or(false)
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChatFields {
    pub messages: Vec<Value>,
    pub max_completion_tokens: Option<usize>,
    pub logprobs: Option<bool>,
    pub top_logprobs: Option<u32>,
    pub add_generation_prompt: Option<bool>,
}

impl RouteFields for ChatFields {
    const NAMES: &'static [&'static str] =
        &["messages", "max_completion_tokens", "logprobs", "top_logprobs", "add_generation_prompt"];
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CompletionFields {
    pub prompt: Prompt,
    pub logprobs: Option<u32>,
}

impl RouteFields for CompletionFields {
    const NAMES: &'static [&'static str] = &["prompt", "logprobs"];
}

/// How tokens become the answer's text.
#[derive(Clone, Debug, Default)]
pub struct TextOptions {
    pub stop: Vec<String>,
    pub include_stop: bool,
    pub skip_special: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StreamOptions {
    pub include_usage: Option<bool>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(untagged, expecting = "invalid value: expected a text or a list of texts")]
pub enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

impl OneOrMany {
    pub fn into_vec(self) -> Vec<String> {
        match self {
            Self::One(text) => vec![text],
            Self::Many(texts) => texts,
        }
    }
}

/// A prompt as text or as token ids.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "invalid value: expected a text or a list of token ids")]
pub enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    pub prompt_tokens: usize,
    pub completion_tokens: usize,
    pub total_tokens: usize,
    pub prompt_tokens_details: PromptTokensDetails,
}

impl Usage {
    pub fn new(prompt_tokens: usize, completion_tokens: usize, cached_tokens: usize) -> Self {
        Self {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
            prompt_tokens_details: PromptTokensDetails { cached_tokens },
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PromptTokensDetails {
    pub cached_tokens: usize,
}
