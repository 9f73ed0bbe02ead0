//! HTTP in, server-sent events out: the OpenAI wire format over an engine that speaks tokens.
//!
//! The only crate that knows axum and the wire types. A request is refused here, with its field named, or becomes an
//! engine request; nothing a client sends is ignored.

mod error;
mod openai;
mod routes;
mod text_stream;

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::routing::{get, post};
use folio_engine::Engine;
use folio_text::{ChatTemplate, Tokenizer, WallTime};

pub use text_stream::{AnswerToken, Finish, Piece, TextStream};

/// Largest request body.
const BODY_BYTES: usize = 4 << 20;

/// What every route works with.
#[derive(Clone)]
pub struct Service {
    pub engine: Engine,
    pub tokenizer: Arc<Tokenizer>,
    /// Models without a chat template serve completions only.
    pub template: Option<Arc<ChatTemplate>>,
    /// What a request that gives a `model` must give.
    pub model_name: Arc<str>,
    /// Unix seconds at start.
    pub started: u64,
    /// What requests get that do not say: from the model's generation_config.json.
    pub defaults: SamplingDefaults,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SamplingDefaults {
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<u32>,
}

pub fn router(service: Service) -> Router {
    Router::new()
        .route("/health", get(routes::health::health))
        .route("/v1/models", get(routes::models::list))
        .route("/v1/completions", post(routes::completions::create))
        .route("/v1/chat/completions", post(routes::chat::create))
        .fallback(routes::not_found)
        .method_not_allowed_fallback(routes::not_allowed)
        .layer(DefaultBodyLimit::max(BODY_BYTES))
        .with_state(service)
}

/// The date that chat templates may ask for, in UTC.
pub fn now() -> WallTime {
    WallTime::from_unix(unix_seconds() as i64, 0)
}

fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Serves until `stop` resolves, then lets running requests finish.
pub async fn serve(
    listener: tokio::net::TcpListener,
    service: Service,
    stop: impl Future<Output = ()> + Send + 'static,
) -> std::io::Result<()> {
    axum::serve(listener, router(service)).with_graceful_shutdown(stop).await
}
