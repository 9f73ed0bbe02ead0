//! The catalogue of refusals: everything that a client may be told of what went wrong, in OpenAI's
//! form or Anthropic's.
//!
//! A text holds only what is written here, names of fields, and numbers: never a value that a
//! client sent, never a path, an address or another program's words.

use std::time::Duration;

use axum::Json;
use axum::http::StatusCode;
use axum::http::header::RETRY_AFTER;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ApiError {
    /// The request makes no sense or asks too much; `field` names where.
    #[error("{}{message}", field.as_ref().map(|field| format!("{field}: ")).unwrap_or_default())]
    Invalid { field: Option<String>, message: String },
    /// Prompt and answer do not fit the context; OpenAI has a code of its own for it.
    #[error("{field}: {tokens} tokens, but this model's context has room for {most}")]
    ContextLength { field: &'static str, tokens: usize, most: usize },
    #[error("the API key is missing or wrong")]
    Unauthorized,
    #[error("{0}")]
    Forbidden(&'static str),
    #[error("the model does not exist; see /v1/models")]
    NoSuchModel,
    #[error("the route does not exist")]
    NoSuchRoute,
    #[error("the response does not exist or is no longer stored")]
    NoSuchResponse,
    #[error("this route does not support the method")]
    NoSuchMethod,
    #[error("the request's body did not arrive within {} s", .0.as_secs())]
    TooSlow(Duration),
    #[error("the request's body is larger than {0} bytes")]
    TooLarge(usize),
    #[error("the request's body must be JSON, with content-type application/json")]
    NotJson,
    /// The engine's queue is full.
    #[error("too many requests are waiting; try again in {} s", whole_seconds(*retry_after))]
    Overloaded { retry_after: Duration },
    /// The key, or the server, has its maximum of requests in flight.
    #[error("{most} requests are in flight, the most that are allowed; try again in {} s", whole_seconds(*retry_after))]
    TooManyInFlight { most: usize, retry_after: Duration },
    /// Bodies of other requests take all the memory that there is for bodies.
    #[error("no memory is free for the request's body; try again in {} s", whole_seconds(*retry_after))]
    NoBodyMemory { retry_after: Duration },
    #[error("the model is being loaded")]
    Loading,
    #[error("the server is shutting down and accepts no more requests")]
    Draining,
    #[error("the request waited too long in the queue")]
    QueueTimeout,
    #[error("the request exceeded its time limit")]
    RequestTimeout,
    #[error("the engine has stopped")]
    Stopped,
    /// The engine was shut down while it ran.
    #[error("the server is shutting down and aborted this request")]
    Aborted,
    /// The server's fault; the text is one of ours.
    #[error("{0}")]
    Failed(&'static str),
}

/// Wire format of an error.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ErrorStyle {
    #[default]
    OpenAi,
    Anthropic,
}

impl ErrorStyle {
    /// The error format for requests that are refused before a route is reached.
    pub fn of_path(path: &str) -> Self {
        if path.starts_with("/v1/messages") { Self::Anthropic } else { Self::OpenAi }
    }
}

impl ApiError {
    pub fn invalid(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Invalid { field: Some(field.into()), message: message.into() }
    }

    pub fn status(&self) -> StatusCode {
        match self {
            Self::Invalid { .. } | Self::ContextLength { .. } => StatusCode::BAD_REQUEST,
            Self::Unauthorized => StatusCode::UNAUTHORIZED,
            Self::Forbidden(_) => StatusCode::FORBIDDEN,
            Self::NoSuchModel | Self::NoSuchRoute | Self::NoSuchResponse => StatusCode::NOT_FOUND,
            Self::NoSuchMethod => StatusCode::METHOD_NOT_ALLOWED,
            Self::TooSlow(_) => StatusCode::REQUEST_TIMEOUT,
            Self::TooLarge(_) => StatusCode::PAYLOAD_TOO_LARGE,
            Self::NotJson => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Self::Overloaded { .. } | Self::TooManyInFlight { .. } | Self::NoBodyMemory { .. } => {
                StatusCode::TOO_MANY_REQUESTS
            }
            Self::Loading | Self::Draining | Self::Aborted | Self::QueueTimeout | Self::Stopped => {
                StatusCode::SERVICE_UNAVAILABLE
            }
            Self::RequestTimeout => StatusCode::GATEWAY_TIMEOUT,
            Self::Failed(_) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// This refusal with the names that a route has for its fields.
    pub fn renamed(self, names: &[(&'static str, &'static str)]) -> Self {
        let own = |field: &str| names.iter().find(|(common, _)| *common == field).map(|(_, own)| *own);
        match self {
            Self::Invalid { field: Some(field), message } => {
                Self::Invalid { field: Some(own(&field).map_or(field, str::to_owned)), message }
            }
            Self::ContextLength { field, tokens, most } => {
                Self::ContextLength { field: own(field).unwrap_or(field), tokens, most }
            }
            error => error,
        }
    }

    /// Error code that OpenAI's clients check beside the status.
    pub fn code(&self) -> Option<&'static str> {
        match self {
            Self::ContextLength { .. } => Some("context_length_exceeded"),
            Self::Unauthorized => Some("invalid_api_key"),
            Self::NoSuchModel => Some("model_not_found"),
            Self::Overloaded { .. } | Self::TooManyInFlight { .. } | Self::NoBodyMemory { .. } => {
                Some("rate_limit_exceeded")
            }
            Self::Loading => Some("model_loading"),
            Self::Draining | Self::Aborted => Some("server_draining"),
            Self::QueueTimeout => Some("queue_timeout"),
            Self::RequestTimeout => Some("request_timeout"),
            _ => None,
        }
    }

    fn field(&self) -> Option<&str> {
        match self {
            Self::Invalid { field, .. } => field.as_deref(),
            Self::ContextLength { field, .. } => Some(field),
            _ => None,
        }
    }

    /// The error object as clients of this style read it, also inside a stream.
    pub fn body(&self, style: ErrorStyle) -> Value {
        let message = self.to_string();
        match style {
            ErrorStyle::OpenAi => {
                let kind = openai_type(self.status());
                json!({"error": {"message": message, "type": kind, "param": self.field(), "code": self.code()}})
            }
            ErrorStyle::Anthropic => {
                json!({"type": "error", "error": {"type": anthropic_type(self.status()), "message": message}})
            }
        }
    }

    pub fn respond(&self, style: ErrorStyle) -> Response {
        let mut response = (self.status(), Json(self.body(style))).into_response();
        // The observer counts it, and the other style is written from it.
        response.extensions_mut().insert(self.clone());
        if let Some(delay) = self.retry_after() {
            response.headers_mut().insert(RETRY_AFTER, whole_seconds(delay).into());
        }
        response
    }

    fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Overloaded { retry_after }
            | Self::TooManyInFlight { retry_after, .. }
            | Self::NoBodyMemory { retry_after } => Some(*retry_after),
            Self::Loading | Self::Draining | Self::Aborted | Self::QueueTimeout => Some(Duration::from_secs(1)),
            _ => None,
        }
    }
}

fn openai_type(status: StatusCode) -> &'static str {
    match status {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::FORBIDDEN => "permission_error",
        StatusCode::NOT_FOUND => "not_found_error",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        status if status.is_client_error() => "invalid_request_error",
        _ => "server_error",
    }
}

fn anthropic_type(status: StatusCode) -> &'static str {
    match status {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::FORBIDDEN => "permission_error",
        StatusCode::NOT_FOUND => "not_found_error",
        StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
        StatusCode::GATEWAY_TIMEOUT => "timeout_error",
        status if status.is_client_error() => "invalid_request_error",
        _ => "api_error",
    }
}

/// Whole seconds for a `Retry-After` header: rounded up, and at least one.
fn whole_seconds(duration: Duration) -> u64 {
    duration.as_secs().saturating_add(u64::from(duration.subsec_nanos() > 0)).max(1)
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        self.respond(ErrorStyle::OpenAi)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_queue_says_when_to_come_back() {
        for (millis, expected) in [(0, "1"), (1, "1"), (1000, "1"), (1001, "2"), (59_200, "60")] {
            let response = ApiError::Overloaded { retry_after: Duration::from_millis(millis) }.into_response();
            assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
            assert_eq!(response.headers()[RETRY_AFTER], expected, "{millis} ms");
        }
    }

    #[test]
    fn both_styles_name_the_kind_and_the_field() {
        let error = ApiError::invalid("top_p", "must be above 0 and at most 1");
        let body = error.body(ErrorStyle::OpenAi);
        assert_eq!(body["error"]["message"], "top_p: must be above 0 and at most 1");
        assert_eq!(
            (&body["error"]["param"], &body["error"]["type"]),
            (&json!("top_p"), &json!("invalid_request_error"))
        );
        assert_eq!(error.body(ErrorStyle::Anthropic)["error"]["type"], "invalid_request_error");
        assert_eq!(ApiError::Draining.body(ErrorStyle::Anthropic)["error"]["type"], "overloaded_error");
        assert_eq!(ErrorStyle::of_path("/v1/messages/count_tokens"), ErrorStyle::Anthropic);
    }
}
