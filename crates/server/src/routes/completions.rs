//! `/v1/completions`.

use axum::Json;
use axum::extract::State;
use axum::extract::rejection::JsonRejection;
use axum::response::Response;
use serde_json::{Map, Value, json};

use super::{Collected, Shape, answer_streamed, answer_whole, body, check_model, finish_reason, new_id, submit};
use crate::error::ApiError;
use crate::openai::types::{CompletionRequest, Prompt};
use crate::openai::validate::{self, RouteParams};
use crate::{Piece, Service, TextTokens};

pub async fn create(
    State(service): State<Service>,
    request: Result<Json<CompletionRequest>, JsonRejection>,
) -> Result<Response, ApiError> {
    let mut request = body(request)?;
    check_model(&service, request.model.as_deref())?;
    let prompt = prompt(&service, std::mem::replace(&mut request.prompt, Prompt::Tokens(Vec::new()))).await?;
    let text = request.text_options();
    validate::check_text(&text)?;
    validate::check_user(request.user())?;
    let route = RouteParams { logprobs: request.logprobs, room: None };
    let params = validate::sampling(&request.sampling(), route, service.defaults)?;
    let num_samples = params.n;
    let stream = submit(&service, prompt, params, &text)?;
    let shape = Shape {
        object: "text_completion",
        chunk_object: "text_completion",
        choice,
        delta,
        opening: None,
        id: new_id(&service, "cmpl"),
        include_usage: request.include_usage(),
    };
    match request.stream.unwrap_or(false) {
        true => Ok(answer_streamed(service, stream, num_samples, shape)),
        false => answer_whole(&service, stream, num_samples, shape).await,
    }
}

async fn prompt(service: &Service, prompt: Prompt) -> Result<Vec<u32>, ApiError> {
    let text = match prompt {
        Prompt::Tokens(tokens) => return Ok(tokens),
        Prompt::Text(text) => text,
    };
    let tokenizer = service.tokenizer.clone();
    match tokio::task::spawn_blocking(move || tokenizer.encode(&text, true)).await {
        Ok(Ok(tokens)) => Ok(tokens),
        Ok(Err(error)) => Err(ApiError::Invalid(format!("prompt: {error}"))),
        Err(_) => Err(ApiError::Failed("the prompt could not be prepared".into())),
    }
}

fn delta(service: &Service, piece: &Piece) -> Value {
    let finish = piece.finish.as_ref().map(|(finish, _)| finish);
    written(service, piece.sample, &piece.text, &piece.tokens, finish_reason(finish))
}

fn choice(service: &Service, index: usize, sample: &Collected) -> Value {
    written(service, index, &sample.text, &sample.tokens, finish_reason(sample.finish.as_ref()))
}

fn written(service: &Service, index: usize, text: &str, tokens: &[TextTokens], finish: Value) -> Value {
    json!({"index": index, "text": text, "logprobs": logprobs(service, tokens), "finish_reason": finish})
}

fn logprobs(service: &Service, tokens: &[TextTokens]) -> Value {
    let known: Vec<_> = tokens.iter().filter_map(|token| token.logprobs.as_ref()).collect();
    if known.is_empty() {
        return Value::Null;
    }
    let name = |id: u32| String::from_utf8_lossy(service.tokenizer.token_bytes(id).unwrap_or_default()).into_owned();
    let top = |top: &[(u32, f32)]| top.iter().map(|&(id, value)| (name(id), json!(value))).collect::<Map<_, _>>();
    json!({
        "tokens": known.iter().map(|entry| name(entry.token)).collect::<Vec<_>>(),
        "token_logprobs": known.iter().map(|entry| entry.logprob).collect::<Vec<_>>(),
        "top_logprobs": known.iter().map(|entry| top(&entry.top)).collect::<Vec<_>>(),
    })
}
