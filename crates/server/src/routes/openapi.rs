//! `/openapi.json`: what this server, with its model and its limits, takes and answers.
//!
//! Requests are described by the readers that read them, so what is written here is what is done.
//! Answers are described by hand, field by field, and held to it by tests that compare the two.

mod answers;
mod conditions;
mod failures;
mod operations;
mod schema;

use axum::body::Bytes;
use axum::extract::State;
use axum::http::HeaderName;
use axum::http::header::CONTENT_TYPE;
use serde_json::{Map, Value, json};

use self::operations::{Content, Operation};
use crate::guard::{OPEN_PATHS, X_API_KEY};
use crate::service::{App, Service, Serving};

/// Written once: it takes milliseconds, and nothing in it changes while the server runs.
pub async fn show(State(app): State<App>, service: Service) -> ([(HeaderName, &'static str); 1], Bytes) {
    let needs_key = app.surroundings().is_some_and(|surroundings| surroundings.needs_key);
    let written = service.openapi.get_or_init(|| Bytes::from(document(&service, needs_key).to_string()));
    ([(CONTENT_TYPE, "application/json")], written.clone())
}

/// `needs_key`: whether a client needs one.
fn document(serving: &Serving, needs_key: bool) -> Value {
    let mut paths: Map<String, Value> = Map::new();
    for operation in operations::all(serving) {
        let path = paths.entry(operation.path).or_insert_with(|| json!({}));
        path[operation.method] = describe(&operation, needs_key);
    }
    let mut document = json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Folio", "version": env!("CARGO_PKG_VERSION"),
            "summary": "A language model with the APIs of OpenAI and Anthropic.",
            "license": {"name": "MIT OR Apache-2.0", "identifier": "MIT OR Apache-2.0"},
        },
        "paths": paths,
        "components": {"schemas": schemas(serving), "responses": failures::responses()},
    });
    if needs_key {
        document["components"]["securitySchemes"] = json!({
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": X_API_KEY.as_str()},
        });
        document["security"] = json!([{"bearer": []}, {"key": []}]);
    }
    document
}

fn schemas(serving: &Serving) -> Map<String, Value> {
    let mut schemas = operations::request_schemas(serving);
    schemas.extend(answers::schemas());
    schemas.extend(failures::schemas());
    schemas
}

fn describe(operation: &Operation, needs_key: bool) -> Value {
    let is_open = OPEN_PATHS.contains(&operation.path);
    let mut responses = Map::new();
    responses.insert("200".into(), success(operation));
    for &status in operation.failures {
        responses.insert(status.to_string(), failures::of(status, operation.path));
    }
    if needs_key && !is_open {
        responses.insert("401".into(), failures::of(401, operation.path));
    }
    if operation.is_health {
        responses.insert("503".into(), failures::unhealthy());
    }
    let mut described = json!({
        "operationId": operation.id, "summary": operation.about, "tags": [operation.tag], "responses": responses,
    });
    if let Some(name) = operation.body {
        let schema = schema::named(name);
        described["requestBody"] = json!({"required": true, "content": {"application/json": {"schema": schema}}});
    }
    if !operation.parameters.is_empty() {
        described["parameters"] = Value::Array(operation.parameters.clone());
    }
    if needs_key && is_open {
        described["security"] = json!([]);
    }
    described
}

fn success(operation: &Operation) -> Value {
    let json = |name: &str| json!({"schema": schema::named(name)});
    let content = match &operation.content {
        Content::Json(name) => json!({"application/json": json(name)}),
        Content::JsonOrEvents(name) => {
            json!({"application/json": json(name), "text/event-stream": json("ServerSentEvent")})
        }
        Content::Text => json!({"text/plain": {"schema": {"type": "string"}}}),
        Content::Document => json!({"application/json": {"schema": {"type": "object"}}}),
    };
    let mut success = json!({"description": "Success.", "headers": failures::request_id(), "content": content});
    if let Some(links) = operation.links() {
        success["links"] = links;
    }
    success
}

#[cfg(test)]
mod snapshot;
#[cfg(test)]
mod tests;
