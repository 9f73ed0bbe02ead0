//! How OpenAI's routes write answers: what chat and completions have in common.

use std::sync::Arc;

use folio_engine::Logprobs;
use folio_text::Tokenizer;
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::answers::Collected;
use crate::error::ApiError;
use crate::service::{Call, Service};
use crate::text_stream::{Finish, StopCause};

/// What every part of one answer carries.
pub struct Envelope {
    pub id: String,
    pub object: &'static str,
    pub created: u64,
    service: Service,
}

impl Envelope {
    pub fn new(service: &Service, call: &Call, prefix: &str, object: &'static str) -> Self {
        Self {
            id: format!("{prefix}-{}", call.id.id),
            object,
            created: crate::unix_seconds(),
            service: service.clone(),
        }
    }

    /// A part of the answer with these choices.
    pub fn around<'a, C: Serialize>(&'a self, choices: &'a [C]) -> Part<'a, C> {
        let model = self.service.model_name();
        Part {
            id: &self.id,
            object: self.object,
            created: self.created,
            model,
            choices,
            usage: None,
            prompt_token_ids: None,
            prompt_logprobs: None,
        }
    }
}

#[derive(Serialize)]
pub struct Part<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: &'a [C],
    /// Present and null where a later event tells it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Option<Usage>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<Value>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    pub prompt_tokens: usize,
    pub completion_tokens: usize,
    pub total_tokens: usize,
    pub prompt_tokens_details: PromptTokensDetails,
    pub completion_tokens_details: CompletionTokensDetails,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PromptTokensDetails {
    pub cached_tokens: usize,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CompletionTokensDetails {
    /// Nothing tells thoughts from answers yet, so none are counted.
    pub reasoning_tokens: usize,
}

impl Usage {
    pub fn new(prompt_tokens: usize, completion_tokens: usize, cached_tokens: usize) -> Self {
        Self {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
            prompt_tokens_details: PromptTokensDetails { cached_tokens },
            completion_tokens_details: CompletionTokensDetails::default(),
        }
    }
}

/// Adds up what a request's answers used.
pub struct UsageSum {
    num_samples: usize,
    /// Tokens and cached tokens of each prompt.
    prompts: Vec<(usize, Option<usize>)>,
    completion_tokens: usize,
}

impl UsageSum {
    pub fn new(prompt_lens: impl Iterator<Item = usize>, num_choices: usize) -> Self {
        let prompts: Vec<_> = prompt_lens.map(|len| (len, None)).collect();
        Self { num_samples: num_choices / prompts.len().max(1), prompts, completion_tokens: 0 }
    }

    /// A prompt is counted once. Samples find each other's prompt in the cache: what was there before the request is
    /// what the unluckiest found.
    pub fn ended(&mut self, choice: usize, usage: &folio_engine::Usage) {
        let cached = &mut self.prompts[choice / self.num_samples].1;
        *cached = Some(cached.map_or(usage.cached_tokens, |least| least.min(usage.cached_tokens)));
    }

    pub fn tokens(&mut self, count: usize) {
        self.completion_tokens += count;
    }

    pub fn sum(&self) -> Usage {
        let prompt_tokens = self.prompts.iter().map(|(tokens, _)| tokens).sum();
        let cached_tokens = self.prompts.iter().filter_map(|(_, cached)| *cached).sum();
        Usage::new(prompt_tokens, self.completion_tokens, cached_tokens)
    }

    pub fn of(prompt_lens: impl Iterator<Item = usize>, answers: &[Collected]) -> Usage {
        let mut sum = Self::new(prompt_lens, answers.len());
        for (choice, answer) in answers.iter().enumerate() {
            sum.ended(choice, &answer.usage);
            sum.tokens(answer.usage.completion_tokens);
        }
        sum.sum()
    }
}

/// OpenAI's reason, and vLLM's of what made it stop.
pub fn finish_reason(finish: Option<&Finish>) -> (Option<&'static str>, Option<Value>) {
    match finish {
        None => (None, None),
        Some(Finish::Stop(None)) => (Some("stop"), None),
        Some(Finish::Stop(Some(StopCause::Text(text)))) => (Some("stop"), Some(json!(text))),
        Some(Finish::Stop(Some(StopCause::Token(token)))) => (Some("stop"), Some(json!(token))),
        Some(Finish::Length) => (Some("length"), None),
        Some(Finish::Failed(_)) => (Some("error"), None),
    }
}

/// JSON has no infinity; OpenAI writes this for what cannot be.
pub fn finite_logprob(logprob: f32) -> f32 {
    logprob.max(-9999.0)
}

pub fn token_text(tokenizer: &Tokenizer, token: u32) -> String {
    String::from_utf8_lossy(tokenizer.token_bytes(token).unwrap_or_default()).into_owned()
}

/// vLLM's form: one object a token of the prompt, by token id.
pub fn prompt_logprobs(tokenizer: &Arc<Tokenizer>, all: &[Option<Logprobs>]) -> Value {
    let entry = |token: u32, logprob: f32, rank: u32| json!({"logprob": finite_logprob(logprob), "rank": rank, "decoded_token": token_text(tokenizer, token)});
    let one = |logprobs: &Logprobs| {
        let top = logprobs.top.iter().zip(1..);
        let mut map: Map<String, Value> =
            top.map(|(&(token, logprob), rank)| (token.to_string(), entry(token, logprob, rank))).collect();
        map.entry(logprobs.token.to_string()).or_insert_with(|| entry(logprobs.token, logprobs.logprob, logprobs.rank));
        Value::Object(map)
    };
    all.iter().map(|logprobs| logprobs.as_ref().map_or(Value::Null, one)).collect()
}

pub fn check_served(is_served: bool) -> Result<(), ApiError> {
    if is_served { Ok(()) } else { Err(ApiError::NoSuchModel) }
}
