//! Responses as clients read them.

use serde::Serialize;
use serde_json::{Map, Value};

use super::request::Settings;
use crate::error::ApiError;
use crate::request::Generate;
use crate::routes::wire::{Entry, entries};
use crate::service::{Call, Service};
use crate::text_stream::{AnswerToken, Finish};

/// A response before it is known how it ends: everything that stays the same.
pub struct Draft {
    pub id: String,
    /// Id of the one message that it will have.
    pub item_id: String,
    created: u64,
    pub service: Service,
    settings: Settings,
    temperature: f32,
    top_p: f32,
}

impl Draft {
    pub fn new(service: &Service, call: &Call, settings: Settings, generate: &Generate) -> Self {
        let id = service.responses.new_id(&call.id.id);
        Self {
            item_id: id.replacen("resp_", "msg_", 1),
            id,
            created: crate::unix_seconds(),
            service: service.clone(),
            settings,
            temperature: generate.params.temperature,
            top_p: generate.params.top_p,
        }
    }

    pub fn instructions(&self) -> Option<&str> {
        self.settings.instructions.as_deref()
    }

    /// The response whose conversation goes on.
    pub fn previous(&self) -> Option<&str> {
        self.settings.previous_response_id.as_deref()
    }

    /// The whole response, as it stands.
    pub fn object<'a>(&'a self, stage: Stage<'a>, store: bool) -> Object<'a> {
        let settings = &self.settings;
        let mut object = Object {
            id: &self.id,
            object: "response",
            created_at: self.created,
            completed_at: None,
            status: "in_progress",
            background: false,
            error: None,
            incomplete_details: None,
            instructions: settings.instructions.as_deref(),
            max_output_tokens: settings.max_output_tokens,
            max_tool_calls: None,
            model: self.service.model_name(),
            output: Vec::new(),
            parallel_tool_calls: settings.parallel_tool_calls,
            previous_response_id: settings.previous_response_id.as_deref(),
            prompt_cache_key: settings.prompt_cache_key.as_deref(),
            reasoning: Reasoning::default(),
            safety_identifier: settings.safety_identifier.as_deref(),
            service_tier: "default",
            store,
            temperature: self.temperature,
            text: TextConfig { format: Format { kind: "text" }, verbosity: "medium" },
            tool_choice: settings.tool_choice,
            tools: [],
            top_logprobs: settings.top_logprobs,
            top_p: self.top_p,
            truncation: "disabled",
            usage: None,
            user: settings.user.as_deref(),
            metadata: &settings.metadata,
        };
        match stage {
            Stage::Begun => {}
            Stage::Failed(error) => {
                object.status = "failed";
                // OpenAI's code for an error of the server.
                object.error = Some(Failure { code: "server_error", message: error.to_string() });
            }
            Stage::Ended { answer, usage } => {
                object.status = answer.status();
                object.completed_at = answer.is_whole.then(crate::unix_seconds);
                object.incomplete_details =
                    (!answer.is_whole).then_some(IncompleteDetails { reason: "max_output_tokens" });
                object.output.push(self.message(answer));
                object.usage = Some(usage);
            }
        }
        object
    }

    /// The answer as an item of the output.
    pub fn message<'a>(&'a self, answer: &'a Answer) -> OutputMessage<'a> {
        let part = OutputText::new(&answer.text, entries(&self.service.model.tokenizer, &answer.tokens));
        OutputMessage {
            id: &self.item_id,
            kind: "message",
            status: answer.status(),
            role: "assistant",
            content: vec![part],
        }
    }
}

/// How far a response has come.
pub enum Stage<'a> {
    Begun,
    Ended { answer: &'a Answer, usage: Usage },
    Failed(&'a ApiError),
}

/// The model's answer to a request of the responses route.
#[derive(Default)]
pub struct Answer {
    pub text: String,
    /// Tokens with log-probabilities.
    pub tokens: Vec<AnswerToken>,
    /// Whether it ended by itself.
    pub is_whole: bool,
}

impl Answer {
    pub fn end(&mut self, finish: &Finish) {
        self.is_whole = matches!(finish, Finish::Stop(_));
    }

    fn status(&self) -> &'static str {
        if self.is_whole { "completed" } else { "incomplete" }
    }
}

#[derive(Serialize)]
pub struct Object<'a> {
    id: &'a str,
    object: &'static str,
    created_at: u64,
    completed_at: Option<u64>,
    pub status: &'static str,
    background: bool,
    error: Option<Failure>,
    incomplete_details: Option<IncompleteDetails>,
    instructions: Option<&'a str>,
    max_output_tokens: Option<usize>,
    max_tool_calls: Option<usize>,
    model: &'a str,
    output: Vec<OutputMessage<'a>>,
    parallel_tool_calls: bool,
    previous_response_id: Option<&'a str>,
    prompt_cache_key: Option<&'a str>,
    reasoning: Reasoning,
    safety_identifier: Option<&'a str>,
    service_tier: &'static str,
    store: bool,
    temperature: f32,
    text: TextConfig,
    tool_choice: &'static str,
    tools: [(); 0],
    top_logprobs: usize,
    top_p: f32,
    truncation: &'static str,
    usage: Option<Usage>,
    user: Option<&'a str>,
    metadata: &'a Map<String, Value>,
}

#[derive(Serialize)]
struct Failure {
    code: &'static str,
    message: String,
}

#[derive(Serialize)]
struct IncompleteDetails {
    reason: &'static str,
}

#[derive(Default, Serialize)]
struct Reasoning {
    effort: Option<()>,
    summary: Option<()>,
}

#[derive(Serialize)]
struct TextConfig {
    format: Format,
    verbosity: &'static str,
}

#[derive(Serialize)]
struct Format {
    #[serde(rename = "type")]
    kind: &'static str,
}

#[derive(Clone, Copy, Serialize)]
pub struct Usage {
    input_tokens: usize,
    input_tokens_details: InputTokensDetails,
    output_tokens: usize,
    output_tokens_details: OutputTokensDetails,
    total_tokens: usize,
}

#[derive(Clone, Copy, Serialize)]
struct InputTokensDetails {
    cached_tokens: usize,
    /// Writes to the cache are not counted separately.
    cache_write_tokens: usize,
}

#[derive(Clone, Copy, Serialize)]
struct OutputTokensDetails {
    /// Reasoning is not separated from answers yet, so it counts as 0.
    reasoning_tokens: usize,
}

impl Usage {
    pub fn new(input_tokens: usize, used: &folio_engine::Usage) -> Self {
        let output_tokens = used.completion_tokens;
        Self {
            input_tokens,
            input_tokens_details: InputTokensDetails { cached_tokens: used.cached_tokens, cache_write_tokens: 0 },
            output_tokens,
            output_tokens_details: OutputTokensDetails { reasoning_tokens: 0 },
            total_tokens: input_tokens + output_tokens,
        }
    }
}

#[derive(Serialize)]
pub struct OutputMessage<'a> {
    pub id: &'a str,
    #[serde(rename = "type")]
    pub kind: &'static str,
    pub status: &'static str,
    pub role: &'static str,
    pub content: Vec<OutputText<'a>>,
}

#[derive(Serialize)]
pub struct OutputText<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    pub text: &'a str,
    annotations: [(); 0],
    pub logprobs: Vec<Entry<'a>>,
}

impl<'a> OutputText<'a> {
    pub fn new(text: &'a str, logprobs: Vec<Entry<'a>>) -> Self {
        Self { kind: "output_text", text, annotations: [], logprobs }
    }
}
