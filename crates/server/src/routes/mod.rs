//! One file a route. Chat and completions differ in how a prompt is made and how a choice is written; what they share
//! is in [`answer`], whole, and in [`events`], streamed.

mod answer;
pub mod chat;
pub mod completions;
mod events;
pub mod health;
pub mod models;

use axum::http::{Method, Uri};
use folio_engine::{RequestOptions, SamplingParams, SubmitError};

use crate::error::ApiError;
use crate::openai::types::TextOptions;
use crate::{Service, TextStream};

pub async fn not_found(uri: Uri) -> ApiError {
    ApiError::NoSuchRoute(uri.path().chars().take(128).collect())
}

pub async fn not_allowed(method: Method) -> ApiError {
    ApiError::NoSuchMethod(method.as_str().chars().take(32).collect())
}

fn check_model(service: &Service, model: Option<&str>) -> Result<(), ApiError> {
    match model {
        Some(name) if name != &*service.model_name => Err(ApiError::NoSuchModel(name.chars().take(128).collect())),
        _ => Ok(()),
    }
}

/// Hands a request to the engine; its answer is dropped with the stream.
fn submit(
    service: &Service,
    prompt: Vec<u32>,
    params: SamplingParams,
    options: RequestOptions,
    text: &TextOptions,
) -> Result<TextStream, ApiError> {
    let num_samples = params.n;
    let request = service.engine.request(prompt, params).and_then(|request| request.with_options(options));
    let request = request.map_err(|error| ApiError::Invalid(error.to_string()))?;
    let stream = service.engine.submit(request).map_err(|error| match error {
        SubmitError::QueueFull { retry_after } => ApiError::Overloaded { retry_after },
        SubmitError::Draining => ApiError::Draining,
        SubmitError::Stopped => ApiError::Stopped,
    })?;
    Ok(TextStream::new(stream, &service.tokenizer, num_samples, &text.stop, text.include_stop, text.skip_special))
}
