//! The routes, one file each. [`wire`] holds the common parts of answers.

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
        .route("/v1/embeddings", post(embeddings::create))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*name}", get(models::one))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .route("/health", get(health::health))
        .route("/health_generate", get(health::health))
        .route("/ping", get(health::health).post(health::health))
        .route("/ready", get(health::ready))
        .route("/load", get(health::load))
        .route("/version", get(info::version))
        .route("/server_info", get(info::server))
        .route("/get_server_info", get(info::server))
        .route("/model_info", get(info::model))
        .route("/get_model_info", get(info::model))
        .route("/v1/loads", get(info::loads))
        .route("/loads", get(info::loads))
        .route("/get_load", get(info::load))
        .route("/metrics", get(metrics::show))
        .route("/openapi.json", get(openapi::show))
        .route("/v1/messages", post(messages::create))
        .route("/v1/messages/count_tokens", post(messages::count_tokens))
        .route("/v1/responses", post(responses::create))
        .route("/v1/responses/{id}", get(responses::retrieve).delete(responses::delete))
        .route("/v1/responses/{id}/input_items", get(responses::input_items))
        .fallback(|| async { ApiError::NoSuchRoute })
        .method_not_allowed_fallback(|| async { ApiError::NoSuchMethod })
        .layer(from_fn_with_state(app.clone(), refusals::note))
        .with_state(app)
}
