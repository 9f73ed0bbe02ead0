//! One file a route. What answers have in common is in [`wire`].

pub mod chat;
pub mod completions;
pub mod embeddings;
pub mod health;
pub mod info;
pub mod messages;
pub mod metrics;
pub mod models;
pub mod openapi;
mod refusals;
pub mod responses;
pub mod tokenize;
mod wire;

use axum::Router;
use axum::middleware::from_fn_with_state;
use axum::routing::{get, post};

use crate::error::ApiError;
use crate::service::App;

/// Every route, without what stands before them.
pub fn router(app: App) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(chat::create))
        .route("/v1/completions", post(completions::create))
        .route("/v1/models", get(models::list))
        .fallback(|| async { ApiError::NoSuchRoute })
        .method_not_allowed_fallback(|| async { ApiError::NoSuchMethod })
        .layer(from_fn_with_state(app.clone(), refusals::note))
        .with_state(app)
}
