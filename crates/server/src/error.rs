//! Refusals, as OpenAI clients read them.

use std::time::Duration;

use axum::Json;
use axum::http::StatusCode;
use axum::http::header::RETRY_AFTER;
use axum::response::{IntoResponse, Response};
use serde_json::json;

#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// The client's fault; the text names the field.
    #[error("{0}")]
    Invalid(String),
    #[error("the model `{0}` does not exist")]
    NoSuchModel(String),
    #[error("there is no route {0}")]
    NoSuchRoute(String),
    #[error("{0} is not a method of this route")]
    NoSuchMethod(String),
    #[error("the request's body is larger than {} bytes", crate::BODY_BYTES)]
    TooLarge,
    #[error("too many requests are waiting; try again in {} s", whole_seconds(*retry_after))]
    Overloaded { retry_after: Duration },
    #[error("the server is shutting down and takes no more requests")]
    Draining,
    #[error("the engine has stopped")]
    Stopped,
    /// The engine's fault; the text is ours and holds nothing of the request.
    #[error("{0}")]
    Failed(String),
}

impl ApiError {
    fn status(&self) -> StatusCode {
        match self {
            Self::Invalid(_) => StatusCode::BAD_REQUEST,
            Self::NoSuchModel(_) | Self::NoSuchRoute(_) => StatusCode::NOT_FOUND,
            Self::NoSuchMethod(_) => StatusCode::METHOD_NOT_ALLOWED,
            Self::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::Overloaded { .. } => StatusCode::TOO_MANY_REQUESTS,
            Self::Draining | Self::Stopped => StatusCode::SERVICE_UNAVAILABLE,
            Self::Failed(_) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// The `error` object of the OpenAI API.
    pub fn body(&self) -> serde_json::Value {
        let status = self.status();
        let kind = if status.is_client_error() { "invalid_request_error" } else { "server_error" };
        json!({"error": {"message": self.to_string(), "type": kind, "param": null, "code": status.as_u16()}})
    }
}

/// As the header wants it: rounded up, and never "at once".
fn whole_seconds(duration: Duration) -> u64 {
    duration.as_secs().saturating_add(u64::from(duration.subsec_nanos() > 0)).max(1)
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status(), Json(self.body())).into_response();
        if let Self::Overloaded { retry_after } = self {
            response.headers_mut().insert(RETRY_AFTER, whole_seconds(retry_after).into());
        }
        response
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
}
