//! How OpenAI's routes write answers: what chat and completions have in common.

use std::sync::Arc;

use folio_engine::Logprobs;
use folio_text::Tokenizer;
use serde::{Serialize, Serializer};
use serde_json::{Value, json};

use crate::answers::Collected;
use crate::service::{Call, Service};
use crate::text_stream::{AnswerToken, Finish, PromptLogprobs, StopCause};

/// The fields that every part of one answer has.
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
    /// Present and null if a later event reports it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Option<Usage>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<PromptTable>,
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
    /// Reasoning is not separated from answers yet, so it counts as 0.
    pub reasoning_tokens: usize,
    /// Tokens that were guessed ahead and are part of the answer, and those that are not.
    pub accepted_prediction_tokens: usize,
    pub rejected_prediction_tokens: usize,
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

/// Adds up what a request's answers used, as far as they have come.
pub struct UsageSum {
    num_samples: usize,
    /// Tokens and cached tokens of each prompt.
    prompts: Vec<(usize, Option<usize>)>,
    /// Number of tokens in each answer.
    answers: Vec<usize>,
    /// Details of answers that have ended.
    details: CompletionTokensDetails,
}

impl UsageSum {
    pub fn new(prompt_lens: impl Iterator<Item = usize>, num_choices: usize) -> Self {
        let prompts: Vec<_> = prompt_lens.map(|len| (len, None)).collect();
        Self {
            num_samples: num_choices / prompts.len().max(1),
            prompts,
            answers: vec![0; num_choices],
            details: CompletionTokensDetails::default(),
        }
    }

    /// Counts further tokens of an answer.
    pub fn tokens(&mut self, choice: usize, count: usize) {
        self.answers[choice] += count;
    }

    /// The last word on an answer. A prompt is counted once. Samples find each other's prompt in
    /// the cache: what was there before the request is what the unluckiest found.
    pub fn ended(&mut self, choice: usize, usage: &folio_engine::Usage) {
        self.answers[choice] = usage.completion_tokens;
        self.details.accepted_prediction_tokens += usage.accepted_drafts;
        self.details.rejected_prediction_tokens += usage.rejected_drafts;
        let cached = &mut self.prompts[choice / self.num_samples].1;
        *cached = Some(cached.map_or(usage.cached_tokens, |least| least.min(usage.cached_tokens)));
    }

    pub fn sum(&self) -> Usage {
        let prompt_tokens = self.prompts.iter().map(|(tokens, _)| tokens).sum();
        let cached_tokens = self.prompts.iter().filter_map(|(_, cached)| *cached).sum();
        let usage = Usage::new(prompt_tokens, self.answers.iter().sum(), cached_tokens);
        Usage { completion_tokens_details: self.details, ..usage }
    }

    pub fn of(prompt_lens: impl Iterator<Item = usize>, answers: &[Collected]) -> Usage {
        let mut sum = Self::new(prompt_lens, answers.len());
        answers.iter().enumerate().for_each(|(choice, answer)| sum.ended(choice, &answer.usage));
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
        // Told as an error, never as an answer's end.
        Some(Finish::Failed(_)) => (None, None),
    }
}

/// JSON has no infinity; OpenAI writes this for what cannot be.
pub fn finite_logprob(logprob: f32) -> f32 {
    logprob.max(-9999.0)
}

pub fn token_text(tokenizer: &Tokenizer, token: u32) -> String {
    String::from_utf8_lossy(tokenizer.token_bytes(token).unwrap_or_default()).into_owned()
}

/// A token and its likeliest rivals.
#[derive(Serialize)]
pub struct Entry<'a> {
    #[serde(flatten)]
    token: Token<'a>,
    top_logprobs: Vec<Token<'a>>,
}

#[derive(Serialize)]
struct Token<'a> {
    token: String,
    logprob: f32,
    bytes: &'a [u8],
}

/// None for tokens whose probabilities were not asked for.
pub fn entries<'a>(tokenizer: &'a Tokenizer, tokens: &[AnswerToken]) -> Vec<Entry<'a>> {
    let token = |id: u32, logprob: f32| Token {
        token: token_text(tokenizer, id),
        logprob: finite_logprob(logprob),
        bytes: tokenizer.token_bytes(id).unwrap_or_default(),
    };
    let entry = |logprobs: &Logprobs| Entry {
        token: token(logprobs.token, logprobs.logprob),
        top_logprobs: logprobs.top.iter().map(|&(id, logprob)| token(id, logprob)).collect(),
    };
    tokens.iter().filter_map(|token| token.logprobs.as_ref()).map(entry).collect()
}

/// vLLM's form of a prompt's log-probabilities: one object a token of the prompt, by token id.
pub struct PromptTable {
    pub tokenizer: Arc<Tokenizer>,
    pub logprobs: PromptLogprobs,
}

impl Service {
    pub fn prompt_table(&self, logprobs: PromptLogprobs) -> PromptTable {
        PromptTable { tokenizer: Arc::clone(&self.model.tokenizer), logprobs }
    }
}

impl Serialize for PromptTable {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let tokenizer = &*self.tokenizer;
        serializer.collect_seq(self.logprobs.iter().map(|entry| entry.as_ref().map(|l| PromptEntry(tokenizer, l))))
    }
}

struct PromptEntry<'a>(&'a Tokenizer, &'a Logprobs);

#[derive(Serialize)]
struct Ranked {
    logprob: f32,
    rank: u32,
    decoded_token: String,
}

impl Serialize for PromptEntry<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self(tokenizer, logprobs) = self;
        let ranked = |token: u32, logprob: f32, rank: u32| {
            let decoded_token = token_text(tokenizer, token);
            (token, Ranked { logprob: finite_logprob(logprob), rank, decoded_token })
        };
        let top = logprobs.top.iter().zip(1..).map(|(&(token, logprob), rank)| ranked(token, logprob, rank));
        let is_among = logprobs.top.iter().any(|(token, _)| *token == logprobs.token);
        let own = (!is_among).then(|| ranked(logprobs.token, logprobs.logprob, logprobs.rank));
        serializer.collect_map(top.chain(own))
    }
}
