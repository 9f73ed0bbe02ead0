//! Which pages in browsers may use the server: none but its own, unless their origins were named
//! (CORS).
//!
//! Credentials are never allowed across origins: a key is a header that a page sets itself, and
//! there are no cookies.

use axum::body::Body;
use axum::http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_HEADERS,
    ACCESS_CONTROL_REQUEST_METHOD, ORIGIN, VARY,
};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use axum::response::Response;

use super::SetupError;
use super::hosts::HostPort;
use crate::error::ApiError;

const METHODS: &str = "GET, HEAD, POST, DELETE";
const HEADERS: &str = "authorization, content-type, x-api-key, anthropic-version, anthropic-beta, \
                       anthropic-dangerous-direct-browser-access, x-request-id";
/// OpenAI's and Anthropic's clients describe themselves in headers with names of this kind.
const CLIENT_HEADERS: &str = "x-stainless-";
const CLIENT_HEADERS_MOST: usize = 32;

/// The origins that were named.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Origins {
    /// No web page is admitted: CORS is off.
    #[default]
    None,
    Any,
    /// Admitted origins, in the form of `normal_form`.
    List(Vec<String>),
}

/// Relation of a request's page to the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// No page, or one of the server's own.
    Own,
    /// An allowed page of another origin; the answer names it.
    Page { allowed: HeaderValue },
    /// A preflight request of such a page's browser.
    Preflight { allowed: HeaderValue, client_headers: String },
}

impl Origins {
    /// Reads origins of the form `SCHEME://HOST[:PORT]`, or `*`.
    pub fn new(texts: &[String]) -> Result<Self, SetupError> {
        if texts.is_empty() {
            return Ok(Self::None);
        }
        let mut list = Vec::new();
        let mut any = false;
        for text in texts {
            match normal_form(text) {
                _ if text == "*" => any = true,
                Some(origin) => list.push(origin),
                None => return Err(SetupError::Origin(text.clone())),
            }
        }
        Ok(if any { Self::Any } else { Self::List(list) })
    }

    pub(super) fn check(
        &self,
        method: &Method,
        headers: &HeaderMap,
        host: Option<&HostPort>,
    ) -> Result<Source, ApiError> {
        let refused = ApiError::Forbidden("the origin is not allowed; see --allowed-origins");
        let mut given = headers.get_all(ORIGIN).iter();
        let Some(origin) = given.next() else { return Ok(Source::Own) };
        if given.next().is_some() {
            return Err(refused);
        }
        let normal = origin.to_str().ok().and_then(normal_form);
        if let (Some(origin), Some(host)) = (&normal, host)
            && is_own(origin, host)
        {
            return Ok(Source::Own);
        }
        let allowed = match (self, normal) {
            (Self::Any, _) => HeaderValue::from_static("*"),
            (Self::List(list), Some(normal)) if list.contains(&normal) => origin.clone(),
            _ => return Err(refused),
        };
        if method == Method::OPTIONS && headers.contains_key(ACCESS_CONTROL_REQUEST_METHOD) {
            return Ok(Source::Preflight { allowed, client_headers: client_headers(headers) });
        }
        Ok(Source::Page { allowed })
    }

    /// Adds the headers that allow the page to read the answer.
    pub(super) fn mark(&self, source: &Source, response: &mut Response) {
        if matches!(self, Self::None) {
            return;
        }
        let headers = response.headers_mut();
        headers.append(VARY, HeaderValue::from_static("origin"));
        if let Source::Page { allowed } | Source::Preflight { allowed, .. } = source {
            headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, allowed.clone());
            headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static("x-request-id, retry-after"));
        }
    }
}

/// Answered before any key is asked for: browsers send none here.
pub(super) fn preflight(client_headers: &str) -> Response {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::NO_CONTENT;
    let headers = response.headers_mut();
    headers.insert(ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static(METHODS));
    let allowed = HeaderValue::try_from(format!("{HEADERS}{client_headers}"));
    headers.insert(ACCESS_CONTROL_ALLOW_HEADERS, allowed.unwrap_or(HeaderValue::from_static(HEADERS)));
    headers.insert(ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
    for asked in [ACCESS_CONTROL_REQUEST_METHOD, ACCESS_CONTROL_REQUEST_HEADERS] {
        headers.append(VARY, asked.into());
    }
    response
}

/// Those of the clients' own headers that the browser asks for, as the tail of a list.
fn client_headers(headers: &HeaderMap) -> String {
    let asked = headers.get(ACCESS_CONTROL_REQUEST_HEADERS).and_then(|asked| asked.to_str().ok()).unwrap_or_default();
    let names = asked.split(',').filter_map(|name| HeaderName::from_bytes(name.trim().as_bytes()).ok());
    let names = names.filter(|name| name.as_str().starts_with(CLIENT_HEADERS) && name.as_str().len() <= 64);
    names.take(CLIENT_HEADERS_MOST).map(|name| format!(", {name}")).collect()
}

fn default_port(scheme: &str) -> Option<u16> {
    match scheme {
        "http" => Some(80),
        "https" => Some(443),
        _ => None,
    }
}

/// One spelling for each origin: lower case, without the scheme's own port.
fn normal_form(origin: &str) -> Option<String> {
    let (scheme, rest) = origin.split_once("://")?;
    let scheme = scheme.to_ascii_lowercase();
    if !scheme.starts_with(|first: char| first.is_ascii_lowercase())
        || !scheme.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+.-".contains(&byte))
    {
        return None;
    }
    let HostPort { host, port } = HostPort::parse(rest)?;
    match port.filter(|port| Some(*port) != default_port(&scheme)) {
        Some(port) => Some(format!("{scheme}://{host}:{port}")),
        None => Some(format!("{scheme}://{host}")),
    }
}

/// Whether a page of `origin`, in normal form, came from the host that the request is for. The
/// scheme is not compared: TLS may end at a proxy in front.
fn is_own(origin: &str, host: &HostPort) -> bool {
    let Some((scheme, rest)) = origin.split_once("://") else { return false };
    let Some(default) = default_port(scheme) else { return false };
    let Some(page) = HostPort::parse(rest) else { return false };
    page.host == host.host && page.port.unwrap_or(default) == host.port.unwrap_or(default)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(origins: &Origins, method: Method, fields: &[(&'static str, &str)]) -> Option<Source> {
        let mut headers = HeaderMap::new();
        for (name, value) in fields {
            headers.append(*name, HeaderValue::from_str(value).unwrap());
        }
        origins.check(&method, &headers, HostPort::parse("localhost:8000").as_ref()).ok()
    }

    fn list(texts: &[&str]) -> Origins {
        Origins::new(&texts.iter().map(ToString::to_string).collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn without_cors_only_own_pages_come_in() {
        for own in [&[][..], &[("origin", "http://localhost:8000")], &[("origin", "https://LOCALHOST:8000")]] {
            assert_eq!(ask(&Origins::None, Method::POST, own), Some(Source::Own), "{own:?}");
        }
        for other in ["http://localhost", "http://localhost:8001", "http://evil.example", "null", "", "localhost:8000"]
        {
            assert_eq!(ask(&Origins::None, Method::POST, &[("origin", other)]), None, "{other}");
        }
        let twice = [("origin", "http://localhost:8000"), ("origin", "http://localhost:8000")];
        assert_eq!(ask(&Origins::None, Method::POST, &twice), None);
        let preflight = [("origin", "http://evil.example"), ("access-control-request-method", "POST")];
        assert_eq!(ask(&Origins::None, Method::OPTIONS, &preflight), None);
    }

    #[test]
    fn the_scheme_s_own_port_may_be_left_out() {
        let check = |origin: &str, host: &str| is_own(&normal_form(origin).unwrap(), &HostPort::parse(host).unwrap());
        assert!(check("http://a", "a:80") && check("http://a:80", "a") && check("https://a", "a:443"));
        assert!(!check("http://a", "a:443") && !check("https://a", "a:80") && !check("ftp://a", "a"));
    }

    #[test]
    fn named_origins_come_in_and_others_do_not() {
        let origins = list(&["https://App.example:443", "tauri://localhost"]);
        for allowed in ["https://app.example", "tauri://localhost"] {
            let source = Source::Page { allowed: HeaderValue::from_str(allowed).unwrap() };
            assert_eq!(ask(&origins, Method::POST, &[("origin", allowed)]), Some(source));
        }
        for other in ["http://app.example", "https://app.example.evil.example", "https://app.example:444", "null"] {
            assert_eq!(ask(&origins, Method::POST, &[("origin", other)]), None, "{other}");
        }
        let any = list(&["*"]);
        let star = Source::Page { allowed: HeaderValue::from_static("*") };
        assert_eq!(ask(&any, Method::GET, &[("origin", "null")]), Some(star));
        for wrong in ["", "app.example", "https://", "https://a/", "https://a b", "null", "://a", "https://u@a"] {
            assert!(Origins::new(&[wrong.into()]).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_preflight_names_methods_and_headers_but_no_credentials() {
        let origins = list(&["https://app.example"]);
        let asked = "authorization, X-Stainless-OS,x-stainless-b\u{7f}d, cookie";
        let fields = [("origin", "https://app.example"), ("access-control-request-method", "POST")];
        let Some(Source::Preflight { client_headers, .. }) = ask(&origins, Method::OPTIONS, &fields) else {
            panic!("not a preflight")
        };
        assert_eq!(client_headers, "");
        let mut headers = HeaderMap::new();
        headers.insert(
            ACCESS_CONTROL_REQUEST_HEADERS,
            HeaderValue::from_bytes(asked.replace('\u{7f}', "(").as_bytes()).unwrap(),
        );
        let response = preflight(&super::client_headers(&headers));
        let allowed = response.headers()[ACCESS_CONTROL_ALLOW_HEADERS].to_str().unwrap();
        assert!(allowed.starts_with("authorization, content-type, x-api-key"), "{allowed}");
        assert!(allowed.ends_with(", x-request-id, x-stainless-os"), "{allowed}");
        assert!(!response.headers().contains_key("access-control-allow-credentials"));
    }
}
