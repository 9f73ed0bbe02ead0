//! `/metrics`: all metrics in the Prometheus text format.

use axum::Router;
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;
use axum::routing::get;

use crate::error::ApiError;
use crate::observe::{self, Snapshot};
use crate::service::App;

/// `/metrics` alone, for a listener of its own that asks for no key.
pub fn metrics_router(app: App) -> Router {
    Router::new()
        .route("/metrics", get(show))
        .fallback(|| async { ApiError::NoSuchRoute })
        .method_not_allowed_fallback(|| async { ApiError::NoSuchMethod })
        .with_state(app)
}

/// Also while the model is being loaded: what there is none of yet is zero.
pub async fn show(State(app): State<App>) -> impl IntoResponse {
    ([(CONTENT_TYPE, observe::CONTENT_TYPE)], app.observer().render(snapshot(&app)))
}

fn snapshot(app: &App) -> Snapshot {
    let mut snapshot = Snapshot::default();
    if let Some(surroundings) = app.surroundings() {
        snapshot.connections_open = usize::try_from(surroundings.connections.counts().open).unwrap_or(usize::MAX);
        snapshot.in_flight = surroundings.in_flight.by_key();
    }
    if let Some(service) = app.service() {
        let engine = &service.model.engine;
        snapshot.engine = engine.stats();
        snapshot.engine_restarts = snapshot.engine.restarts;
        snapshot.stalled = engine.stalled_for().unwrap_or_default();
        snapshot.block_tokens = service.model.block_tokens();
        snapshot.prompt_pool_queue = service.text_pool.num_waiting();
        snapshot.stored_responses = service.responses.len();
        snapshot.stored_response_bytes = service.responses.bytes();
    }
    snapshot
}
