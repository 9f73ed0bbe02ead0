//! `/v1/chat/completions`.

use axum::extract::State;
use axum::response::Response;
use folio_engine::Logprobs;
use folio_text::ChatRender;
use serde_json::{Value, json};

use super::answer::{self, Collected, Shape, finish_reason, finite_logprob};
use super::{check_model, events, submit};
use crate::error::ApiError;
use crate::openai::body::{Body, parse};
use crate::openai::types::ChatFields;
use crate::openai::validate::{self, RouteParams};
use crate::{AnswerToken, Piece, Service, now};

const MAX_MESSAGES: usize = 2048;
const MESSAGE_FIELDS: [&str; 3] = ["role", "content", "name"];

const SHAPE: Shape = Shape {
    id_prefix: "chatcmpl",
    object: "chat.completion",
    chunk_object: "chat.completion.chunk",
    choice,
    delta,
    opening: Some(opening),
};

/// Everything that is cheap to check is checked before the prompt is made.
pub async fn create(State(service): State<Service>, body: Body) -> Result<Response, ApiError> {
    let (chat, mut shared) = parse::<ChatFields>(body)?;
    check_model(&service, shared.model.as_deref())?;
    let logprobs = match (chat.logprobs.unwrap_or(false), chat.top_logprobs) {
        (true, top) => Some(top.unwrap_or(0)),
        (false, None) => None,
        (false, Some(_)) => return Err(ApiError::Invalid("top_logprobs: needs logprobs to be true".into())),
    };
    shared.max_tokens = chat.max_completion_tokens.or(shared.max_tokens);
    let route = RouteParams { logprobs, max_tokens: service.engine.max_model_len() };
    let params = validate::sampling(&shared, route, service.defaults)?;
    let options = validate::request_options(&shared)?;
    let text = validate::text_options(&shared)?;
    let num_samples = params.n;
    let prompt = prompt(&service, chat).await?;
    let stream = submit(&service, prompt, params, options, &text)?;
    match shared.is_streamed() {
        true => Ok(events::streamed(service, stream, num_samples, SHAPE, shared.include_usage())),
        false => answer::whole(&service, stream, num_samples, &SHAPE).await,
    }
}

/// Rendering and tokenizing are work of unknown size: off the async threads.
async fn prompt(service: &Service, request: ChatFields) -> Result<Vec<u32>, ApiError> {
    let Some(template) = service.template.clone() else {
        return Err(ApiError::Invalid("this model has no chat template; use /v1/completions".into()));
    };
    if request.messages.is_empty() || request.messages.len() > MAX_MESSAGES {
        return Err(ApiError::Invalid(format!("messages: 1 to {MAX_MESSAGES} are needed")));
    }
    request.messages.iter().try_for_each(check_message)?;
    let render = ChatRender {
        messages: request.messages,
        add_generation_prompt: request.add_generation_prompt.unwrap_or(true),
        now: Some(now()),
        ..ChatRender::default()
    };
    let tokenizer = service.tokenizer.clone();
    let work = move || {
        let text = template.render(&render).map_err(|error| error.to_string())?;
        tokenizer.encode(&text, false).map_err(|error| error.to_string())
    };
    match tokio::task::spawn_blocking(work).await {
        Ok(Ok(tokens)) => Ok(tokens),
        Ok(Err(message)) => Err(ApiError::Invalid(format!("messages: {message}"))),
        Err(_) => Err(ApiError::Failed("the prompt could not be prepared".into())),
    }
}

fn check_message(message: &Value) -> Result<(), ApiError> {
    let Some(fields) = message.as_object() else {
        return Err(ApiError::Invalid("messages: each is an object".into()));
    };
    let has = |key| fields.get(key).is_some_and(Value::is_string);
    if !has("role") || !has("content") {
        return Err(ApiError::Invalid("messages: each needs a role and a content, both strings".into()));
    }
    match fields.keys().find(|key| !MESSAGE_FIELDS.contains(&key.as_str())) {
        Some(key) => Err(ApiError::Invalid(format!("messages: unknown field `{}`", key.escape_default()))),
        None => Ok(()),
    }
}

fn opening(sample: usize) -> Value {
    json!({"index": sample, "delta": {"role": "assistant", "content": ""}, "logprobs": null, "finish_reason": null})
}

fn delta(service: &Service, piece: &Piece) -> Value {
    let finish = piece.finish.as_ref().map(|(finish, _)| finish);
    let content = if piece.text.is_empty() { json!({}) } else { json!({"content": piece.text}) };
    json!({
        "index": piece.sample, "delta": content, "logprobs": logprobs(service, &piece.tokens),
        "finish_reason": finish_reason(finish),
    })
}

fn choice(service: &Service, index: usize, sample: &Collected) -> Value {
    json!({
        "index": index, "message": {"role": "assistant", "content": sample.text},
        "logprobs": logprobs(service, &sample.tokens), "finish_reason": finish_reason(sample.finish.as_ref()),
    })
}

fn logprobs(service: &Service, tokens: &[AnswerToken]) -> Value {
    let content: Vec<Value> = tokens.iter().filter_map(|t| t.logprobs.as_ref()).map(|l| entry(service, l)).collect();
    if content.is_empty() { Value::Null } else { json!({"content": content}) }
}

fn entry(service: &Service, logprobs: &Logprobs) -> Value {
    let mut entry = token(service, logprobs.token, logprobs.logprob);
    entry["top_logprobs"] = logprobs.top.iter().map(|&(id, value)| token(service, id, value)).collect();
    entry
}

fn token(service: &Service, id: u32, logprob: f32) -> Value {
    let bytes = service.tokenizer.token_bytes(id).unwrap_or_default();
    json!({"token": String::from_utf8_lossy(bytes), "logprob": finite_logprob(logprob), "bytes": bytes})
}
