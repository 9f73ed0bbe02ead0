//! Authentication: with keys, a client without one reaches only the two open routes.
//!
//! A route is open if its path, as the router matches it, equals an open path byte for byte. Every
//! other path needs a key, unknown paths too, so that a client without a key cannot find out which
//! routes exist.

use axum::http::header::{AUTHORIZATION, HeaderName, WWW_AUTHENTICATE};
use axum::http::{HeaderMap, HeaderValue, Method};
use axum::response::Response;

use super::callers::{Caller, Callers};
use super::keys::SECRET_CHARS_MOST;
use crate::error::ApiError;

pub const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");
/// Answered without a key, for probes; the answers say yes or no and nothing more.
pub const OPEN_PATHS: [&str; 2] = ["/health", "/ready"];

fn is_open(method: &Method, path: &str) -> bool {
    (method == Method::GET || method == Method::HEAD) && OPEN_PATHS.contains(&path)
}

/// The request's caller; `None` where a stranger asks for an open route.
pub(super) fn authenticate(
    callers: &Callers,
    method: &Method,
    path: &str,
    headers: &HeaderMap,
) -> Result<Option<Caller>, ApiError> {
    if let Some(anonymous) = callers.anonymous() {
        return Ok(Some(anonymous.clone()));
    }
    match caller_of(callers, headers) {
        Some(caller) => Ok(Some(caller.clone())),
        None if is_open(method, path) => Ok(None),
        None => Err(ApiError::Unauthorized),
    }
}

/// Caller of the key in `Authorization: Bearer KEY` or `x-api-key: KEY`. If a client sends both,
/// both must belong to one caller. A malformed or repeated header belongs to none.
fn caller_of<'a>(callers: &'a Callers, headers: &HeaderMap) -> Option<&'a Caller> {
    let find = |secret: &[u8]| if secret.len() > SECRET_CHARS_MOST { None } else { callers.find(secret) };
    match (only(headers, AUTHORIZATION)?, only(headers, X_API_KEY)?) {
        (Some(bearer), None) => find(bearer_token(bearer)?),
        (None, Some(key)) => find(key),
        (Some(bearer), Some(key)) => {
            let (bearer, key) = (find(bearer_token(bearer)?)?, find(key)?);
            (bearer.tenant == key.tenant).then_some(bearer)
        }
        (None, None) => None,
    }
}

/// The outer `None`: more than one.
fn only(headers: &HeaderMap, name: HeaderName) -> Option<Option<&[u8]>> {
    let mut values = headers.get_all(name).iter();
    match (values.next(), values.next()) {
        (value, None) => Some(value.map(HeaderValue::as_bytes)),
        _ => None,
    }
}

fn bearer_token(value: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = value.split_at_checked("bearer".len())?;
    let token = token.strip_prefix(b" ")?.trim_ascii();
    (scheme.eq_ignore_ascii_case(b"bearer") && !token.is_empty()).then_some(token)
}

/// A 401 says how to do better.
pub(super) fn challenge(response: &mut Response) {
    response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
}

#[cfg(test)]
mod tests {
    use super::super::keys::Keys;
    use super::*;

    const KEY: &str = "0123456789abcdef";
    const OTHER: &str = "fedcba9876543210";

    fn ask(method: Method, path: &str, fields: &[(HeaderName, &str)]) -> Result<Option<String>, ApiError> {
        let mut keys = Keys::none();
        keys.add_list(&format!("{KEY},{OTHER}")).unwrap();
        let mut headers = HeaderMap::new();
        for (name, value) in fields {
            headers.append(name, HeaderValue::from_str(value).unwrap());
        }
        let caller = authenticate(&Callers::new(&keys, 256, 256), &method, path, &headers)?;
        Ok(caller.map(|caller| caller.name.to_string()))
    }

    #[test]
    fn either_header_brings_a_key() {
        let key = Ok(Some("key-1".to_string()));
        for value in ["Bearer 0123456789abcdef", "bearer 0123456789abcdef", "BEARER   0123456789abcdef"] {
            assert_eq!(ask(Method::GET, "/v1/models", &[(AUTHORIZATION, value)]), key, "{value}");
        }
        assert_eq!(ask(Method::POST, "/v1/messages", &[(X_API_KEY, KEY)]), key);
        let both = [(AUTHORIZATION, "Bearer 0123456789abcdef"), (X_API_KEY, KEY)];
        assert_eq!(ask(Method::POST, "/v1/messages", &both), key);
        assert_eq!(ask(Method::GET, "/health", &[(X_API_KEY, KEY)]), key, "known where it need not be");
    }

    #[test]
    fn what_is_wrong_missing_malformed_or_double_is_refused() {
        let long = format!("Bearer {}", "x".repeat(5000));
        let values = [
            "",
            "Bearer",
            "Bearer ",
            "Bearer0123456789abcdef",
            "Basic 0123456789abcdef",
            "0123456789abcdef",
            "Bearer 0123456789abcde",
            "Bearer 0123456789abcdeff",
            "Bearer 0123456789ABCDEF",
            "Bearer 0123456789abcdef,fedcba9876543210",
            "Bearer Bearer 0123456789abcdef",
            &long,
        ];
        let denied = Err(ApiError::Unauthorized);
        for value in values {
            assert_eq!(ask(Method::GET, "/v1/models", &[(AUTHORIZATION, value)]), denied, "{value}");
        }
        let bearer = (AUTHORIZATION, "Bearer 0123456789abcdef");
        assert_eq!(ask(Method::GET, "/v1/models", &[bearer.clone(), bearer.clone()]), denied);
        assert_eq!(ask(Method::GET, "/v1/models", &[(X_API_KEY, KEY), (X_API_KEY, KEY)]), denied);
        assert_eq!(ask(Method::GET, "/v1/models", &[bearer.clone(), (X_API_KEY, OTHER)]), denied, "two callers");
        assert_eq!(ask(Method::GET, "/v1/models", &[bearer, (X_API_KEY, "")]), denied);
        assert_eq!(ask(Method::GET, "/v1/models", &[]), denied);
    }

    #[test]
    fn open_is_two_paths_to_the_letter_for_readers() {
        for path in OPEN_PATHS {
            assert_eq!(ask(Method::GET, path, &[]), Ok(None));
            assert_eq!(ask(Method::HEAD, path, &[]), Ok(None));
            assert_eq!(ask(Method::GET, path, &[(AUTHORIZATION, "nonsense")]), Ok(None));
            assert_eq!(ask(Method::POST, path, &[]), Err(ApiError::Unauthorized));
        }
        for path in
            ["", "*", "//health", "/health/", "/health.", "/Health", "/%68ealth", "/health/../v1/models", "/metrics"]
        {
            assert_eq!(ask(Method::GET, path, &[]), Err(ApiError::Unauthorized), "{path}");
        }
    }

    #[test]
    fn without_keys_everybody_is_the_same_caller() {
        let callers = Callers::new(&Keys::none(), 256, 256);
        let mut headers = HeaderMap::new();
        headers.insert(AUTHORIZATION, HeaderValue::from_static("Bearer whatever"));
        for path in ["/v1/models", "/nowhere"] {
            let caller = authenticate(&callers, &Method::GET, path, &headers).unwrap().unwrap();
            assert_eq!((&*caller.name, caller.tenant, caller.cache_salt), ("anonymous", 0, 0));
        }
    }
}
