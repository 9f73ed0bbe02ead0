//! `/v1/chat/completions`.

use axum::Json;
use axum::extract::State;
use axum::extract::rejection::JsonRejection;
use axum::response::Response;
use folio_engine::Logprobs;
use folio_text::ChatRender;
use serde_json::{Value, json};

use super::{Collected, Shape, answer_streamed, answer_whole, body, check_model, finish_reason, new_id, submit};
use crate::error::ApiError;
use crate::openai::types::ChatRequest;
use crate::openai::validate::{self, RouteParams};
use crate::{Piece, Service, TextTokens, now};

const MAX_MESSAGES: usize = 2048;

pub async fn create(
    State(service): State<Service>,
    request: Result<Json<ChatRequest>, JsonRejection>,
) -> Result<Response, ApiError> {
    let request = body(request)?;
    check_model(&service, request.model.as_deref())?;
    let prompt = prompt(&service, &request).await?;
    let text = request.text_options();
    validate::check_text(&text)?;
    validate::check_user(request.user())?;
    let logprobs = match (request.logprobs.unwrap_or(false), request.top_logprobs) {
        (true, top) => Some(top.unwrap_or(0)),
        (false, None) => None,
        (false, Some(_)) => return Err(ApiError::Invalid("top_logprobs: needs logprobs to be true".into())),
    };
    let mut fields = request.sampling();
    fields.max_tokens = request.max_completion_tokens.or(fields.max_tokens);
    let room = service.engine.max_model_len().saturating_sub(prompt.len()).max(1);
    let params = validate::sampling(&fields, RouteParams { logprobs, room: Some(room) }, service.defaults)?;
    let num_samples = params.n;
    let stream = submit(&service, prompt, params, &text)?;
    let shape = Shape {
        object: "chat.completion",
        chunk_object: "chat.completion.chunk",
        choice,
        delta,
        opening: Some(opening),
        id: new_id(&service, "chatcmpl"),
        include_usage: request.include_usage(),
    };
    match request.stream.unwrap_or(false) {
        true => Ok(answer_streamed(service, stream, num_samples, shape)),
        false => answer_whole(&service, stream, num_samples, shape).await,
    }
}

/// Rendering and tokenizing are work of unknown size: off the async threads.
async fn prompt(service: &Service, request: &ChatRequest) -> Result<Vec<u32>, ApiError> {
    let Some(template) = service.template.clone() else {
        return Err(ApiError::Invalid("this model has no chat template; use /v1/completions".into()));
    };
    if request.messages.is_empty() || request.messages.len() > MAX_MESSAGES {
        return Err(ApiError::Invalid(format!("messages: 1 to {MAX_MESSAGES} are needed")));
    }
    for message in &request.messages {
        let fields = message.as_object();
        let has = |key| fields.and_then(|fields| fields.get(key)).is_some_and(Value::is_string);
        if !has("role") || !has("content") {
            return Err(ApiError::Invalid("messages: each needs a role and a content, both strings".into()));
        }
    }
    let render = ChatRender {
        messages: request.messages.clone(),
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

fn logprobs(service: &Service, tokens: &[TextTokens]) -> Value {
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
    json!({"token": String::from_utf8_lossy(bytes), "logprob": logprob, "bytes": bytes})
}
