//! `/health`.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde_json::{Value, json};

use crate::Service;

pub async fn health(State(service): State<Service>) -> (StatusCode, Json<Value>) {
    match service.engine.is_running() {
        true => (StatusCode::OK, Json(json!({"status": "ok"}))),
        false => (StatusCode::SERVICE_UNAVAILABLE, Json(json!({"status": "the engine has stopped"}))),
    }
}
