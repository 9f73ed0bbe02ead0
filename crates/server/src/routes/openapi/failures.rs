//! Refusals and failures as they are documented: one response for each status, in either style.

use serde_json::{Map, Value, json};

use super::schema::{either, named, object, one_of, or_null, text, word};
use crate::error::ErrorStyle;
use crate::routes::health::STATUSES;

/// Every status but 200 that any route answers, and when.
const FAILURES: [(u16, &str); 12] = [
    (400, "The request is invalid or exceeds a limit; the error names the field."),
    (401, "The API key is missing or wrong."),
    (403, "The host or the origin is not allowed."),
    (404, "The model, or the stored response, does not exist."),
    (408, "The body did not arrive in time."),
    (413, "The body is too large."),
    (415, "The body is not JSON."),
    (429, "Too many requests are queued or in flight."),
    (431, "The request's headers are too large."),
    (500, "Internal error."),
    (503, "The model is being loaded, or the server is shutting down."),
    (504, "The request exceeded its time limit."),
];

fn key(status: u16, style: ErrorStyle) -> String {
    match style {
        ErrorStyle::OpenAi => format!("error_{status}"),
        ErrorStyle::Anthropic => format!("anthropic_error_{status}"),
    }
}

/// The answer of a route of this path with this status.
pub fn of(status: u16, path: &str) -> Value {
    json!({"$ref": format!("#/components/responses/{}", key(status, ErrorStyle::of_path(path)))})
}

pub fn responses() -> Map<String, Value> {
    let styles = [(ErrorStyle::OpenAi, "Error"), (ErrorStyle::Anthropic, "AnthropicError")];
    let one = |(status, about): (u16, &str), style, schema| (key(status, style), response(status, about, schema));
    let of_style = |(style, schema)| FAILURES.map(|failure| one(failure, style, schema));
    styles.into_iter().flat_map(of_style).collect()
}

fn response(status: u16, about: &str, schema: &str) -> Value {
    let content = json!({"application/json": {"schema": named(schema)}});
    let seconds =
        json!({"description": "Seconds to wait before the next attempt.", "schema": {"type": "integer", "minimum": 1}});
    let mut response = json!({"description": about});
    // Too large a header is refused before its request is read.
    if status != 431 {
        response["headers"] = request_id();
        response["content"] = content;
    }
    match status {
        429 => {
            response["headers"]["Retry-After"] = seconds;
            response["headers"]["Retry-After"]["required"] = json!(true);
        }
        503 => response["headers"]["Retry-After"] = seconds,
        401 => {
            response["headers"]["WWW-Authenticate"] = json!({"required": true, "schema": {"type": "string"}});
        }
        _ => {}
    }
    response
}

/// Every answer says which request it is to.
pub fn request_id() -> Value {
    json!({"x-request-id": {"description": "Id of the request: the client's, or one that the server made.", "schema": {"type": "string"}}})
}

/// The 503 of a route that reports the health of the server.
pub fn unhealthy() -> Value {
    let schema = either(named("Health"), named("Error"));
    json!({
        "description": "The server cannot process requests now.", "headers": request_id(),
        "content": {"application/json": {"schema": schema}},
    })
}

pub fn schemas() -> [(String, Value); 3] {
    let openai_types = [
        "authentication_error",
        "permission_error",
        "not_found_error",
        "rate_limit_error",
        "invalid_request_error",
        "server_error",
    ];
    let codes = [
        "context_length_exceeded",
        "invalid_api_key",
        "model_not_found",
        "rate_limit_exceeded",
        "model_loading",
        "server_draining",
        "queue_timeout",
        "request_timeout",
    ];
    let anthropic_types = [
        "authentication_error",
        "permission_error",
        "not_found_error",
        "request_too_large",
        "rate_limit_error",
        "overloaded_error",
        "timeout_error",
        "invalid_request_error",
        "api_error",
    ];
    let error = object(
        [
            ("message", text()),
            ("type", one_of(&openai_types)),
            ("param", or_null(text())),
            ("code", or_null(one_of(&codes))),
        ],
        [],
    );
    let anthropic = object([("type", one_of(&anthropic_types)), ("message", text())], []);
    [
        ("Error".into(), object([("error", error)], [])),
        ("AnthropicError".into(), object([("type", word("error")), ("error", anthropic)], [])),
        ("Health".into(), object([("status", one_of(&STATUSES))], [])),
    ]
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::tests::check;
    use super::*;
    use crate::ApiError;

    #[test]
    fn every_refusal_is_as_documented() {
        let second = Duration::from_secs(1);
        let refusals = [
            ApiError::invalid("top_p", "x"),
            ApiError::Invalid { field: None, message: "x".into() },
            ApiError::ContextLength { field: "prompt", tokens: 9, most: 8 },
            ApiError::Unauthorized,
            ApiError::Forbidden("x"),
            ApiError::NoSuchModel,
            ApiError::NoSuchRoute,
            ApiError::NoSuchResponse,
            ApiError::TooSlow(second),
            ApiError::TooLarge(1),
            ApiError::NotJson,
            ApiError::Overloaded { retry_after: second },
            ApiError::TooManyInFlight { most: 1, retry_after: second },
            ApiError::NoBodyMemory { retry_after: second },
            ApiError::Loading,
            ApiError::Draining,
            ApiError::QueueTimeout,
            ApiError::RequestTimeout,
            ApiError::Stopped,
            ApiError::Aborted,
            ApiError::Failed("x"),
        ];
        let schemas: Map<String, Value> = schemas().into_iter().collect();
        for refusal in refusals {
            let status = refusal.status().as_u16();
            assert!(FAILURES.iter().any(|failure| failure.0 == status), "{refusal:?}");
            for (style, name) in [(ErrorStyle::OpenAi, "Error"), (ErrorStyle::Anthropic, "AnthropicError")] {
                check(&schemas[name], &refusal.body(style)).unwrap_or_else(|why| panic!("{refusal:?}: {why}"));
            }
        }
        let undocumented = json!({"error": {"message": "x", "type": "nonsense", "param": null, "code": null}});
        assert!(check(&schemas["Error"], &undocumented).is_err(), "the check can fail");
    }
}
