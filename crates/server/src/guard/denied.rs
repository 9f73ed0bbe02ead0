//! Shows of a whole router that nothing of it is reached without a key, however a request is
//! dressed up.

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{Request, StatusCode, Uri, Version, header};
use axum::response::Response;
use tower::ServiceExt;

use super::OPEN_PATHS;

const METHODS: [&str; 10] =
    ["GET", "POST", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PROPFIND"];

/// Wrong in every way that has let a client in somewhere.
const HEADERS: [&[(&str, &str)]; 18] = [
    &[],
    &[("authorization", "")],
    &[("authorization", "Bearer")],
    &[("authorization", "Bearer ")],
    &[("authorization", "Bearer wrong-key-wrong-key")],
    &[("authorization", "Bearer null")],
    &[("authorization", "Basic d3Jvbmc6a2V5")],
    &[("authorization", "Bearer a"), ("authorization", "Bearer b")],
    &[("x-api-key", "")],
    &[("x-api-key", "wrong-key-wrong-key")],
    &[("x-api-key", "key-1")],
    &[("x-forwarded-for", "127.0.0.1"), ("x-real-ip", "127.0.0.1")],
    &[("x-original-url", "/health"), ("x-rewrite-url", "/health")],
    &[("x-forwarded-host", "localhost"), ("x-forwarded-prefix", "/health")],
    &[("x-http-method-override", "GET")],
    &[("cookie", "authorization=Bearer")],
    &[("upgrade", "websocket"), ("connection", "upgrade")],
    &[("access-control-request-method", "POST")],
];

const HOSTS: [&str; 6] =
    ["localhost", "evil.example", "localhost.", "127.0.0.1:99", "localhost/health?", "a@localhost"];

/// Other spellings of a path that a careless comparison might take for an open path, or that a
/// router further in might read as the path itself.
fn spellings(path: &str) -> Vec<String> {
    let tail = &path[1..];
    let encoded = |letter: u8| format!("/%{letter:02x}{}", tail.get(1..).unwrap_or_default());
    let mut spellings = vec![
        path.to_string(),
        format!("/{path}"),
        format!("//{path}"),
        format!("/.{path}"),
        format!("/%2f{tail}"),
        format!("/%2F{tail}"),
        format!("{path}/"),
        format!("{path}."),
        format!("{path}/."),
        format!("{path}/.."),
        format!("{path}%2f"),
        format!("{path}%00"),
        format!("{path};x=/health"),
        format!("{path}?/health"),
        format!("{path}?api_key=wrong-key-wrong-key"),
        format!("{path}%3f/health"),
        format!("/health/..{path}"),
        format!("/health/../..{path}"),
        format!("/health%2f..{path}"),
        format!("/health{path}"),
        format!("/health;{path}"),
        format!("/ready//..{path}"),
        path.to_uppercase(),
    ];
    spellings.extend(tail.bytes().next().map(encoded));
    spellings.extend(tail.contains('/').then(|| path.replacen("/", "%2f", 2).replacen("%2f", "/", 1)));
    spellings
}

async fn ask(router: &Router, method: &str, uri: &str, version: Version, headers: &[(&str, &str)]) -> Response {
    let mut request = Request::builder().method(method).uri(uri).version(version);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    router.clone().oneshot(request.body(Body::empty()).unwrap()).await.unwrap()
}

async fn assert_refused(response: Response, allowed: &[StatusCode], what: &str) {
    let status = response.status();
    assert!(allowed.contains(&status), "{what}: {status}");
    assert!(!response.headers().contains_key(header::ALLOW), "{what}: reveals the methods");
    if status == StatusCode::UNAUTHORIZED {
        assert_eq!(response.headers()[header::WWW_AUTHENTICATE], "Bearer", "{what}");
        let body = to_bytes(response.into_body(), 1 << 16).await.unwrap();
        let text = std::str::from_utf8(&body).unwrap();
        assert!(what.starts_with("HEAD") || text.contains("the API key is missing or wrong"), "{what}: {text}");
    }
}

/// `routes`: all paths of a guarded router that has keys. A client without a key gets 401 for every
/// route, existing or not, or a refusal of the host or the target, 400 or 403; only GET and HEAD of
/// the exact open paths are excepted. With `secret`, every route answers with another status.
pub(crate) async fn assert_denied(router: &Router, routes: &[&str], secret: &str) {
    const ONLY_401: &[StatusCode] = &[StatusCode::UNAUTHORIZED];
    const REFUSED: &[StatusCode] = &[StatusCode::UNAUTHORIZED, StatusCode::BAD_REQUEST, StatusCode::FORBIDDEN];
    let localhost = ("host", "localhost");
    for path in routes.iter().chain(&["/nowhere", "/v1", "/"]) {
        let open = |method: &str, path: &str| OPEN_PATHS.contains(&path) && ["GET", "HEAD"].contains(&method);
        for method in METHODS.into_iter().filter(|method| !open(method, path)) {
            for wrong in HEADERS {
                let headers = [&[localhost], wrong].concat();
                let response = ask(router, method, path, Version::HTTP_11, &headers).await;
                assert_refused(response, ONLY_401, &format!("{method} {path} with {wrong:?}")).await;
            }
            for host in HOSTS {
                let response = ask(router, method, path, Version::HTTP_11, &[("host", host)]).await;
                assert_refused(response, REFUSED, &format!("{method} {path} at {host}")).await;
                for version in [Version::HTTP_11, Version::HTTP_2] {
                    let Ok(uri) = format!("http://{host}{path}").parse::<Uri>() else { continue };
                    let response = ask(router, method, &uri.to_string(), version, &[localhost]).await;
                    // `http://localhost/health?/v1/models` is the open route with a query, and
                    // rightly so.
                    if open(method, uri.path()) {
                        continue;
                    }
                    assert_refused(response, REFUSED, &format!("{method} {uri}")).await;
                }
            }
            let response = ask(router, method, &format!("http://localhost{path}"), Version::HTTP_2, &[]).await;
            assert_refused(response, ONLY_401, &format!("{method} {path} over HTTP/2")).await;
        }
        for spelling in spellings(path) {
            let Ok(uri) = spelling.parse::<Uri>() else { continue };
            for method in ["GET", "POST"].into_iter().filter(|method| !open(method, uri.path())) {
                let response = ask(router, method, &spelling, Version::HTTP_11, &[localhost]).await;
                // A path that begins with two slashes may be read as a host, which then differs
                // from the header's.
                let allowed = if uri.authority().is_some() { REFUSED } else { ONLY_401 };
                assert_refused(response, allowed, &format!("{method} {spelling}")).await;
            }
        }
    }
    for path in routes {
        for header in [("authorization", format!("Bearer {secret}")), ("x-api-key", secret.into())] {
            let headers = [localhost, (header.0, header.1.as_str())];
            for method in ["GET", "POST"] {
                let status = ask(router, method, path, Version::HTTP_11, &headers).await.status();
                assert!(!REFUSED[..1].contains(&status), "{method} {path} with the key: {status}");
            }
        }
    }
}
