//! `/v1/models`: the one model that is served.

use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};

use crate::Service;

pub async fn list(State(service): State<Service>) -> Json<Value> {
    let model = json!({
        "id": &*service.model_name, "object": "model", "created": service.started, "owned_by": "folio",
        "max_model_len": service.engine.max_model_len(),
    });
    Json(json!({"object": "list", "data": [model]}))
}
