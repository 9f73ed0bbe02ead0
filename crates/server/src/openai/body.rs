//! From a JSON object to typed fields. Every route has the shared fields and some of its own; a field that is neither is
//! refused by name, which serde cannot do for structs that are flattened into one.

use axum::Json;
use axum::extract::rejection::JsonRejection;
use axum::http::StatusCode;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::types::SharedFields;
use crate::error::ApiError;

/// Fields that one route has.
pub trait RouteFields: DeserializeOwned {
    /// Their names on the wire.
    const NAMES: &'static [&'static str];
}

pub type Body = Result<Json<Map<String, Value>>, JsonRejection>;

pub fn parse<R: RouteFields>(body: Body) -> Result<(R, SharedFields), ApiError> {
    let Json(fields) = body.map_err(|rejection| match rejection.status() {
        StatusCode::PAYLOAD_TOO_LARGE => ApiError::TooLarge,
        _ => ApiError::Invalid(rejection.body_text()),
    })?;
    let (own, shared): (Map<_, _>, Map<_, _>) =
        fields.into_iter().partition(|(name, _)| R::NAMES.contains(&name.as_str()));
    Ok((typed(own)?, typed(shared)?))
}

fn typed<T: DeserializeOwned>(fields: Map<String, Value>) -> Result<T, ApiError> {
    serde_path_to_error::deserialize(Value::Object(fields)).map_err(|error| {
        let (path, reason) = (error.path().to_string(), error.inner().to_string());
        // A missing field lies at no path, and its message names it.
        ApiError::Invalid(if path == "." { reason } else { format!("{path}: {reason}") })
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::openai::types::{ChatFields, CompletionFields};

    fn refusal<R: RouteFields>(body: Value) -> String {
        let Value::Object(fields) = body else { panic!("an object") };
        parse::<R>(Ok(Json(fields))).err().expect("refused").to_string()
    }

    #[test]
    fn what_is_wrong_is_named() {
        let chat = |field: &str, value: Value| {
            let mut body = json!({"messages": []});
            body[field] = value;
            refusal::<ChatFields>(body)
        };
        for (field, value) in [
            ("temperature", json!("warm")),
            ("n", json!(-1)),
            ("n", json!(1.5)),
            ("n", json!(1e300)),
            ("seed", json!(1u64 << 63)),
            ("logit_bias", json!([1])),
            ("stop", json!(3)),
            ("stop_token_ids", json!([-1])),
            ("logprobs", json!(3)),
            ("priority", json!(1u64 << 31)),
            ("priority", json!("high")),
            ("cache_salt", json!(7)),
            ("stream_options", json!({"x": 1})),
            ("tools", json!([])),
            ("prompt", json!("a completion's field")),
        ] {
            let message = chat(field, value);
            assert!(message.contains(field), "{message}");
        }
        assert!(refusal::<ChatFields>(json!({})).contains("missing field `messages`"));
        assert!(refusal::<CompletionFields>(json!({})).contains("missing field `prompt`"));
        assert_eq!(
            refusal::<CompletionFields>(json!({"prompt": [[1]]})),
            "prompt: invalid value: expected a text or a list of token ids"
        );
    }

    /// A name that is missing from the list would be refused, one too many would be refused by the type.
    #[test]
    fn every_route_field_is_listed() {
        let chat = json!({
            "messages": [], "max_completion_tokens": 1, "logprobs": true, "top_logprobs": 1,
            "add_generation_prompt": true,
        });
        let completion = json!({"prompt": "a", "logprobs": 1});
        let names = |body: &Value| body.as_object().expect("an object").keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(&chat), ChatFields::NAMES);
        assert_eq!(names(&completion), CompletionFields::NAMES);
        typed::<ChatFields>(chat.as_object().expect("an object").clone()).expect("all are known");
        typed::<CompletionFields>(completion.as_object().expect("an object").clone()).expect("all are known");
    }
}
