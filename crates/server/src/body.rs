//! A request's body: read within its time, bounded in size and depth, and parsed.

use axum::body::{Body, to_bytes};
use axum::extract::{FromRequest, Request};
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use axum::http::request::Parts;
use serde_json::{Map, Value};

use crate::App;
use crate::error::ApiError;
use crate::fields::{self, Request as Fielded};
use crate::strict_json::StrictValue;

/// Bodies beyond this are parsed where prompts are prepared.
const LARGE_BYTES: usize = 64 << 10;

/// A JSON object, as it came.
pub struct JsonBody(Map<String, Value>);

impl JsonBody {
    /// Whether there is a field of this name, for routes that take requests of more than one form.
    pub fn has(&self, field: &str) -> bool {
        self.0.contains_key(field)
    }

    /// What its fields say.
    pub fn read<R: Fielded>(self, bounds: &R::Bounds) -> Result<R, ApiError> {
        fields::read(self.0, bounds)
    }
}

impl FromRequest<App> for JsonBody {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &App) -> Result<Self, ApiError> {
        let (parts, body) = request.into_parts();
        let limits = app.limits();
        check_head(&parts, limits.body_bytes)?;
        let bytes = read(body, limits.body_bytes, app.timeouts().body).await?;
        let (depth, values) = (limits.json_depth, limits.json_values);
        match app.service() {
            // What takes long to read holds up nobody else.
            Some(service) if bytes.len() > LARGE_BYTES => {
                service.prompts.parse(move || parse(&bytes, depth, values)).await
            }
            _ => parse(&bytes, depth, values),
        }
        .map(JsonBody)
    }
}

/// What the header already tells.
fn check_head(parts: &Parts, most: usize) -> Result<(), ApiError> {
    let length = parts.headers.get(CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
    if length.is_some_and(|length| length > most as u64) {
        return Err(ApiError::TooLarge(most));
    }
    let kind = parts.headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let kind = kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    let is_json = kind == "application/json" || (kind.starts_with("application/") && kind.ends_with("+json"));
    if is_json { Ok(()) } else { Err(ApiError::NotJson) }
}

async fn read(body: Body, most: usize, within: std::time::Duration) -> Result<axum::body::Bytes, ApiError> {
    match tokio::time::timeout(within, to_bytes(body, most)).await {
        Err(_) => Err(ApiError::TooSlow(within)),
        Ok(Ok(bytes)) => Ok(bytes),
        // Whoever breaks off in the middle hears nothing of it anyway.
        Ok(Err(error)) => Err(match is_too_large(&error) {
            true => ApiError::TooLarge(most),
            false => ApiError::Invalid { field: None, message: "the body did not arrive whole".into() },
        }),
    }
}

fn is_too_large(error: &axum::Error) -> bool {
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(current) = source {
        if current.is::<http_body_util::LengthLimitError>() {
            return true;
        }
        source = current.source();
    }
    false
}

fn parse(bytes: &[u8], most_depth: usize, most_values: usize) -> Result<Map<String, Value>, ApiError> {
    let invalid = |message: String| ApiError::Invalid { field: None, message };
    let (depth, values) = measure(bytes);
    if depth > most_depth {
        return Err(invalid(format!("the body nests deeper than {most_depth} levels")));
    }
    if values > most_values {
        return Err(invalid(format!("the body has more than {most_values} values")));
    }
    match serde_json::from_slice(bytes) {
        Ok(StrictValue(Value::Object(object))) => Ok(object),
        Ok(_) => Err(invalid("the body must be a JSON object".into())),
        Err(error) if error.is_data() => Err(invalid("a name stands twice in one object of the body".into())),
        Err(error) => {
            let (line, column) = (error.line(), error.column());
            Err(invalid(format!("the body is not valid JSON at line {line}, column {column}")))
        }
    }
}

/// How deep brackets nest and how many values there are at most, what is within texts aside. What is no JSON may give
/// any numbers. A value takes far more memory than the byte or two that it may be written in.
fn measure(bytes: &[u8]) -> (usize, usize) {
    let (mut depth, mut deepest, mut values) = (0usize, 0usize, 1usize);
    let (mut in_text, mut escaped) = (false, false);
    for byte in bytes {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_text => escaped = true,
            b'"' => in_text = !in_text,
            b'[' | b'{' if !in_text => {
                depth += 1;
                deepest = deepest.max(depth);
                values += 1;
            }
            b',' if !in_text => values += 1,
            b']' | b'}' if !in_text => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    (deepest, values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_within_texts_does_not_count() {
        for (text, expected) in [
            ("{}", (1, 2)),
            (r#"{"a": [[1], {"b": 2}]}"#, (3, 6)),
            (r#"{"a": "[[[[,\"[[["}"#, (1, 2)),
            (r#"{"a\\": [1, 2]}"#, (2, 4)),
            ("[[[[", (4, 5)),
            ("", (0, 1)),
        ] {
            assert_eq!(measure(text.as_bytes()), expected, "{text}");
        }
        assert!(parse(&b"[".repeat(100_000), 64, 9).is_err());
    }

    #[test]
    fn only_objects_are_bodies() {
        let message = |text: &str| parse(text.as_bytes(), 4, 9).expect_err("refused").to_string();
        assert!(parse(br#"{"a": [[[1]]]}"#, 4, 9).is_ok());
        assert!(parse(b"{\"a\": [1,1,1,1,1,1,1]}", 4, 9).is_ok());
        assert_eq!(message("{\"a\": [1,1,1,1,1,1,1,1]}"), "the body has more than 9 values");
        assert_eq!(message(r#"{"a": [[[[1]]]]}"#), "the body nests deeper than 4 levels");
        assert_eq!(message("[1]"), "the body must be a JSON object");
        assert_eq!(message(r#"{"a": {"b": 1, "b": 2}}"#), "a name stands twice in one object of the body");
        assert_eq!(message("{\"a\": \n oops"), "the body is not valid JSON at line 2, column 2");
        assert!(parse(b"{\"a\": \"\xff\"}", 4, 9).is_err());
    }
}
