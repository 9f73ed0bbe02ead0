//! Refusals, as OpenAI clients read them.

use axum::Json;
use axum::http::StatusCode;
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
    #[error("too many requests are waiting; try again later")]
    Overloaded,
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
            Self::Overloaded => StatusCode::TOO_MANY_REQUESTS,
            Self::Stopped => StatusCode::SERVICE_UNAVAILABLE,
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

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status(), Json(self.body())).into_response();
        if matches!(self, Self::Overloaded) {
            response.headers_mut().insert("retry-after", axum::http::HeaderValue::from_static("1"));
        }
        response
    }
}
