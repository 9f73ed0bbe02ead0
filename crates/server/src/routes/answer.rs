//! What an answer looks like, and the one that is sent whole.

use std::sync::atomic::{AtomicU64, Ordering};

use axum::Json;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::error::ApiError;
use crate::openai::types::Usage;
use crate::{AnswerToken, Finish, Piece, Service, TextStream, unix_seconds};

/// How a route writes its answers.
pub struct Shape {
    /// What comes before the number in an answer's id.
    pub id_prefix: &'static str,
    pub object: &'static str,
    pub chunk_object: &'static str,
    /// One choice of a finished answer.
    pub choice: fn(&Service, usize, &Collected) -> Value,
    /// One choice of a streamed piece.
    pub delta: fn(&Service, &Piece) -> Value,
    /// Sent for each sample before its first piece.
    pub opening: Option<fn(usize) -> Value>,
}

/// A sample, whole.
#[derive(Default)]
pub struct Collected {
    pub text: String,
    pub tokens: Vec<AnswerToken>,
    pub finish: Option<Finish>,
}

/// What every part of one answer carries.
pub struct Envelope {
    id: String,
    created: u64,
    model: String,
}

impl Envelope {
    /// Ids are ours: a counter behind the time of start.
    pub fn new(service: &Service, shape: &Shape) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        Self {
            id: format!("{}-{:x}-{number:x}", shape.id_prefix, service.started),
            created: unix_seconds(),
            model: service.model_name.to_string(),
        }
    }

    pub fn around(&self, object: &str, choices: Vec<Value>) -> Value {
        json!({"id": self.id, "object": object, "created": self.created, "model": self.model, "choices": choices})
    }
}

pub async fn whole(
    service: &Service,
    mut stream: TextStream,
    num_samples: usize,
    shape: &Shape,
) -> Result<Response, ApiError> {
    let envelope = Envelope::new(service, shape);
    let mut samples: Vec<Collected> = (0..num_samples).map(|_| Collected::default()).collect();
    let mut usages = Vec::with_capacity(num_samples);
    while let Some(piece) = stream.next().await {
        let sample = &mut samples[piece.sample];
        sample.text.push_str(&piece.text);
        sample.tokens.extend(piece.tokens);
        if let Some((finish, usage)) = piece.finish {
            if let Finish::Failed(message) = finish {
                return Err(ApiError::Failed(message));
            }
            usages.push(usage);
            sample.finish = Some(finish);
        }
    }
    let choices = samples.iter().enumerate().map(|(index, sample)| (shape.choice)(service, index, sample)).collect();
    let mut answer = envelope.around(shape.object, choices);
    answer["usage"] = json!(total_usage(&usages));
    Ok(Json(answer).into_response())
}

/// The prompt is counted once, the answers together. Samples find each other's prompt in the cache: what was there
/// before the request is what the unluckiest found.
pub fn total_usage(samples: &[folio_engine::Usage]) -> Usage {
    let prompt_tokens = samples.iter().map(|usage| usage.prompt_tokens).max().unwrap_or(0);
    let completion_tokens = samples.iter().map(|usage| usage.completion_tokens).sum();
    let cached_tokens = samples.iter().map(|usage| usage.cached_tokens).min().unwrap_or(0);
    Usage::new(prompt_tokens, completion_tokens, cached_tokens)
}

pub fn finish_reason(finish: Option<&Finish>) -> Value {
    match finish {
        Some(Finish::Stop) => json!("stop"),
        Some(Finish::Length) => json!("length"),
        Some(Finish::Failed(_)) => json!("error"),
        None => Value::Null,
    }
}

/// JSON has no infinity; OpenAI writes this for what cannot be.
pub fn finite_logprob(logprob: f32) -> f32 {
    logprob.max(-9999.0)
}
