//! `/v1/messages` and `/v1/messages/count_tokens`, as Anthropic's clients speak to them.

mod object;
mod request;
mod stream;

use axum::Json;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use self::object::{Envelope, Usage};
pub use self::request::{CountRequest, MessagesRequest};
use crate::body::JsonBody;
use crate::error::ApiError;
use crate::request::Generate;
use crate::service::{Call, Service};
use crate::sse;

const ROUTE: &str = "/v1/messages";

/// Everything that is cheap to check is checked before the prompt is made.
pub async fn create(service: Service, call: Call, body: JsonBody) -> Result<Response, ApiError> {
    let request: MessagesRequest = body.read(&service).await?;
    let generate = Generate::new(request.params, 1, &service.bounds).map_err(in_own_words)?;
    let (prompt, bad_words) = service.text_pool.chat(request.conversation, &generate).await.map_err(in_own_words)?;
    let answers = service.submit(ROUTE, &call, std::slice::from_ref(&prompt), bad_words, generate);
    let answers = answers.map_err(in_own_words)?;
    let (envelope, num_input_tokens) = (Envelope::new(&service, &call), prompt.tokens.len());
    if request.stream {
        let write = |writer| stream::write(envelope, num_input_tokens, answers, writer);
        return Ok(sse::stream(&service, &call, write));
    }
    let answer = answers.collect().await?.swap_remove(0);
    let usage = Usage::new(num_input_tokens, &answer.usage);
    Ok(Json(envelope.whole(&answer.text, answer.finish.as_ref(), usage)).into_response())
}

/// How long a prompt would be; nothing is generated.
pub async fn count_tokens(service: Service, body: JsonBody) -> Result<Json<Value>, ApiError> {
    let request: CountRequest = body.read(&service).await?;
    let prompt = service.text_pool.count_chat(request.conversation).await.map_err(in_own_words)?;
    Ok(Json(json!({"input_tokens": prompt.tokens.len()})))
}

/// Refusals name fields as this route's clients know them.
fn in_own_words(error: ApiError) -> ApiError {
    error.renamed(&[("prompt", "messages"), ("continue_final_message", "messages")])
}
