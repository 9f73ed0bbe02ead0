//! `/v1/completions`.

use axum::extract::State;
use axum::response::Response;
use serde_json::{Map, Value, json};

use super::answer::{self, Collected, Shape, finish_reason, finite_logprob};
use super::{check_model, events, submit};
use crate::error::ApiError;
use crate::openai::body::{Body, parse};
use crate::openai::types::{CompletionFields, Prompt};
use crate::openai::validate::{self, RouteParams};
use crate::{AnswerToken, Piece, Service};

/// OpenAI's.
const DEFAULT_MAX_TOKENS: usize = 16;

const SHAPE: Shape = Shape {
    id_prefix: "cmpl",
    object: "text_completion",
    chunk_object: "text_completion",
    choice,
    delta,
    opening: None,
};

/// Everything that is cheap to check is checked before the prompt is made.
pub async fn create(State(service): State<Service>, body: Body) -> Result<Response, ApiError> {
    let (completion, shared) = parse::<CompletionFields>(body)?;
    check_model(&service, shared.model.as_deref())?;
    let route = RouteParams { logprobs: completion.logprobs, max_tokens: DEFAULT_MAX_TOKENS };
    let params = validate::sampling(&shared, route, service.defaults)?;
    let options = validate::request_options(&shared)?;
    let text = validate::text_options(&shared)?;
    let num_samples = params.n;
    let prompt = prompt(&service, completion.prompt).await?;
    let stream = submit(&service, prompt, params, options, &text)?;
    match shared.is_streamed() {
        true => Ok(events::streamed(service, stream, num_samples, SHAPE, shared.include_usage())),
        false => answer::whole(&service, stream, num_samples, &SHAPE).await,
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

fn written(service: &Service, index: usize, text: &str, tokens: &[AnswerToken], finish: Value) -> Value {
    json!({"index": index, "text": text, "logprobs": logprobs(service, tokens), "finish_reason": finish})
}

fn logprobs(service: &Service, tokens: &[AnswerToken]) -> Value {
    let known: Vec<_> = tokens.iter().filter_map(|token| token.logprobs.as_ref()).collect();
    if known.is_empty() {
        return Value::Null;
    }
    let name = |id: u32| String::from_utf8_lossy(service.tokenizer.token_bytes(id).unwrap_or_default()).into_owned();
    let top = |top: &[(u32, f32)]| {
        top.iter().map(|&(id, value)| (name(id), json!(finite_logprob(value)))).collect::<Map<_, _>>()
    };
    json!({
        "tokens": known.iter().map(|entry| name(entry.token)).collect::<Vec<_>>(),
        "token_logprobs": known.iter().map(|entry| finite_logprob(entry.logprob)).collect::<Vec<_>>(),
        "top_logprobs": known.iter().map(|entry| top(&entry.top)).collect::<Vec<_>>(),
    })
}
