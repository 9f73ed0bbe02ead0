//! `/v1/models`: the one model that is served, under each of its names.

use axum::Json;
use axum::extract::Path;
use serde_json::{Value, json};

use crate::error::ApiError;
use crate::service::Service;

pub async fn list(service: Service) -> Json<Value> {
    let models: Vec<Value> = service.model.names.iter().map(|name| model(&service, name)).collect();
    Json(json!({"object": "list", "data": models}))
}

pub async fn one(service: Service, Path(name): Path<String>) -> Result<Json<Value>, ApiError> {
    let known = service.model.names.iter().find(|known| **known == name).ok_or(ApiError::NoSuchModel)?;
    Ok(Json(model(&service, known)))
}

fn model(service: &Service, name: &str) -> Value {
    json!({
        "id": name, "object": "model", "created": service.started, "owned_by": "folio",
        "root": service.model_name(), "parent": null, "max_model_len": service.bounds.max_model_len,
    })
}
