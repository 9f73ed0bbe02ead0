//! `/v1/models`: the one model that is served, under each of its names.

use axum::Json;
use axum::extract::Path;
use axum::extract::rejection::PathRejection;
use serde_json::{Value, json};

use crate::error::ApiError;
use crate::service::Service;

pub async fn list(service: Service) -> Json<Value> {
    let models: Vec<Value> = service.model.names.listed.iter().map(|name| model(&service, name)).collect();
    Json(json!({"object": "list", "data": models}))
}

/// Names may hold slashes, written as they are or as %2F. A path that is not UTF-8 names no model.
pub async fn one(service: Service, name: Result<Path<String>, PathRejection>) -> Result<Json<Value>, ApiError> {
    let Path(name) = name.map_err(|_| ApiError::NoSuchModel)?;
    let known = service.model.names.find(&name).ok_or(ApiError::NoSuchModel)?;
    Ok(Json(model(&service, known)))
}

fn model(service: &Service, name: &str) -> Value {
    json!({
        "id": name, "object": "model", "created": service.started, "owned_by": "folio",
        "root": service.model_name(), "parent": null, "max_model_len": service.bounds.max_model_len,
    })
}
