//! Requests as they arrive and answers as they leave. A field that is not listed is refused by name.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Sampling fields that both routes share. Flattened structs cannot refuse unknown fields, so a macro writes them into
/// each request type.
macro_rules! request {
    ($(#[$doc:meta])* $name:ident { $($field:ident : $type:ty),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct $name {
            pub model: Option<String>,
            $(pub $field: $type,)*
            pub stream: Option<bool>,
            pub stream_options: Option<StreamOptions>,
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
        }

        impl $name {
            /// The fields both routes share.
            pub fn sampling(&self) -> Sampling<'_> {
                Sampling {
                    n: self.n,
                    max_tokens: self.max_tokens,
                    temperature: self.temperature,
                    top_p: self.top_p,
                    top_k: self.top_k,
                    min_p: self.min_p,
                    seed: self.seed,
                    stop_token_ids: self.stop_token_ids.as_deref(),
                    ignore_eos: self.ignore_eos,
                    min_tokens: self.min_tokens,
                    frequency_penalty: self.frequency_penalty,
                    presence_penalty: self.presence_penalty,
                    repetition_penalty: self.repetition_penalty,
                    logit_bias: self.logit_bias.as_ref(),
                    allowed_token_ids: self.allowed_token_ids.as_deref(),
                }
            }

            pub fn text_options(&self) -> TextOptions {
                TextOptions {
                    stop: self.stop.clone().map(OneOrMany::into_vec).unwrap_or_default(),
                    include_stop: self.include_stop_str_in_output.unwrap_or(false),
                    skip_special: self.skip_special_tokens.unwrap_or(true),
                }
            }

            /// Whom the client asks for; accepted as OpenAI does, and not used.
            pub fn user(&self) -> Option<&str> {
                self.user.as_deref()
            }

            pub fn include_usage(&self) -> bool {
                self.stream_options.as_ref().and_then(|options| options.include_usage).unwrap_or(false)
            }
        }
    };
}

request!(ChatRequest {
    messages: Vec<Value>,
    max_completion_tokens: Option<usize>,
    logprobs: Option<bool>,
    top_logprobs: Option<u32>,
    add_generation_prompt: Option<bool>,
});

request!(CompletionRequest { prompt: Prompt, logprobs: Option<u32> });

/// Sampling fields, borrowed from either request.
#[derive(Debug, Default)]
pub struct Sampling<'a> {
    pub n: Option<usize>,
    pub max_tokens: Option<usize>,
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<i64>,
    pub min_p: Option<f32>,
    pub seed: Option<i64>,
    pub stop_token_ids: Option<&'a [u32]>,
    pub ignore_eos: Option<bool>,
    pub min_tokens: Option<usize>,
    pub frequency_penalty: Option<f32>,
    pub presence_penalty: Option<f32>,
    pub repetition_penalty: Option<f32>,
    pub logit_bias: Option<&'a Map<String, Value>>,
    pub allowed_token_ids: Option<&'a [u32]>,
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
#[serde(untagged)]
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
#[serde(untagged)]
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

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PromptTokensDetails {
    pub cached_tokens: usize,
}
