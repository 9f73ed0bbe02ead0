//! One file a route. Chat and completions differ in how a prompt is made and how a choice is written; what lies
//! between is here.

pub mod chat;
pub mod completions;
pub mod health;
pub mod models;

use std::convert::Infallible;

use axum::Json;
use axum::extract::rejection::JsonRejection;
use axum::http::Uri;
use axum::response::sse::{Event as SseEvent, Sse};
use axum::response::{IntoResponse, Response};
use folio_engine::{SamplingParams, SubmitError};
use serde_json::{Value, json};

use crate::error::ApiError;
use crate::openai::types::{TextOptions, Usage};
use crate::{Finish, Piece, Service, TextStream};

pub async fn not_found(uri: Uri) -> ApiError {
    ApiError::NoSuchRoute(uri.path().chars().take(128).collect())
}

/// The body, or why it is none.
fn body<T>(body: Result<Json<T>, JsonRejection>) -> Result<T, ApiError> {
    match body {
        Ok(Json(request)) => Ok(request),
        Err(rejection) => Err(ApiError::Invalid(rejection.body_text())),
    }
}

fn check_model(service: &Service, model: Option<&str>) -> Result<(), ApiError> {
    match model {
        Some(name) if name != &*service.model_name => Err(ApiError::NoSuchModel(name.chars().take(128).collect())),
        _ => Ok(()),
    }
}

fn submit(
    service: &Service,
    prompt: Vec<u32>,
    params: SamplingParams,
    text: &TextOptions,
) -> Result<TextStream, ApiError> {
    let num_samples = params.n;
    let request = service.engine.request(prompt, params).map_err(|error| ApiError::Invalid(error.to_string()))?;
    let stream = service.engine.submit(request).map_err(|error| match error {
        SubmitError::QueueFull => ApiError::Overloaded,
        SubmitError::Stopped => ApiError::Stopped,
    })?;
    Ok(TextStream::new(stream, &service.tokenizer, num_samples, &text.stop, text.include_stop, text.skip_special))
}

/// How a route writes its answers.
struct Shape {
    object: &'static str,
    chunk_object: &'static str,
    /// One choice of a finished answer.
    choice: fn(&Service, usize, &Collected) -> Value,
    /// One choice of a streamed piece.
    delta: fn(&Service, &Piece) -> Value,
    /// Sent for each sample before its first piece.
    opening: Option<fn(usize) -> Value>,
    id: String,
    include_usage: bool,
}

/// A sample, whole.
#[derive(Default)]
struct Collected {
    text: String,
    tokens: Vec<crate::TextTokens>,
    finish: Option<Finish>,
}

impl Shape {
    fn envelope(&self, service: &Service, object: &str, choices: Vec<Value>) -> Value {
        json!({
            "id": self.id, "object": object, "created": service.started, "model": &*service.model_name,
            "choices": choices,
        })
    }
}

async fn answer_whole(
    service: &Service,
    mut stream: TextStream,
    num_samples: usize,
    shape: Shape,
) -> Result<Response, ApiError> {
    let mut samples: Vec<Collected> = (0..num_samples).map(|_| Collected::default()).collect();
    let mut total = Usage::default();
    while let Some(piece) = stream.next().await {
        let sample = &mut samples[piece.sample];
        sample.text.push_str(&piece.text);
        sample.tokens.extend(piece.tokens);
        if let Some((finish, usage)) = piece.finish {
            if let Finish::Failed(message) = finish {
                return Err(ApiError::Failed(message));
            }
            add_usage(&mut total, usage);
            sample.finish = Some(finish);
        }
    }
    let choices = samples.iter().enumerate().map(|(index, sample)| (shape.choice)(service, index, sample)).collect();
    let mut answer = shape.envelope(service, shape.object, choices);
    answer["usage"] = json!(total);
    Ok(Json(answer).into_response())
}

fn answer_streamed(service: Service, stream: TextStream, num_samples: usize, shape: Shape) -> Response {
    let (sender, receiver) = tokio::sync::mpsc::unbounded_channel();
    tokio::spawn(write_events(service, stream, num_samples, shape, sender));
    Sse::new(EventStream(receiver)).into_response()
}

type EventSender = tokio::sync::mpsc::UnboundedSender<SseEvent>;

/// Writes every piece as an event. A send that fails means that the client has left: returning drops the stream, and
/// that aborts the request. What can pile up unread is bounded by the request's own max_tokens.
async fn write_events(service: Service, mut stream: TextStream, num_samples: usize, shape: Shape, sender: EventSender) {
    let send = |value: Value| sender.send(SseEvent::default().data(value.to_string())).is_ok();
    for sample in 0..num_samples {
        if let Some(opening) = shape.opening
            && !send(shape.envelope(&service, shape.chunk_object, vec![opening(sample)]))
        {
            return;
        }
    }
    let mut total = Usage::default();
    loop {
        let piece = tokio::select! {
            piece = stream.next() => piece,
            () = sender.closed() => return,
        };
        let Some(piece) = piece else { break };
        if let Some((finish, usage)) = &piece.finish {
            if let Finish::Failed(message) = finish {
                send(ApiError::Failed(message.clone()).body());
                return;
            }
            add_usage(&mut total, *usage);
        }
        let silent =
            piece.text.is_empty() && piece.finish.is_none() && piece.tokens.iter().all(|t| t.logprobs.is_none());
        if !silent && !send(shape.envelope(&service, shape.chunk_object, vec![(shape.delta)(&service, &piece)])) {
            return;
        }
    }
    if shape.include_usage {
        let mut last = shape.envelope(&service, shape.chunk_object, Vec::new());
        last["usage"] = json!(total);
        send(last);
    }
    let _ = sender.send(SseEvent::default().data("[DONE]"));
}

/// The prompt is counted once, the answers together.
fn add_usage(total: &mut Usage, sample: folio_engine::Usage) {
    total.prompt_tokens = sample.prompt_tokens.max(total.prompt_tokens);
    total.completion_tokens += sample.completion_tokens;
    total.total_tokens = total.prompt_tokens + total.completion_tokens;
    let cached = &mut total.prompt_tokens_details.cached_tokens;
    *cached = sample.cached_tokens.max(*cached);
}

fn finish_reason(finish: Option<&Finish>) -> Value {
    match finish {
        Some(Finish::Stop) => json!("stop"),
        Some(Finish::Length) => json!("length"),
        Some(Finish::Failed(_)) => json!("error"),
        None => Value::Null,
    }
}

struct EventStream(tokio::sync::mpsc::UnboundedReceiver<SseEvent>);

impl futures_core::Stream for EventStream {
    type Item = Result<SseEvent, Infallible>;

    fn poll_next(
        mut self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Self::Item>> {
        self.0.poll_recv(context).map(|event| event.map(Ok))
    }
}

/// Ids are ours: a counter behind the time of start.
fn new_id(service: &Service, prefix: &str) -> String {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("{prefix}-{:x}-{:x}", service.started, NEXT.fetch_add(1, Ordering::Relaxed))
}
