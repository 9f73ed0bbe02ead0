use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;
use std::task::Context;

use axum::Extension;
use axum::body::{Bytes, HttpBody, to_bytes};
use axum::http::StatusCode;
use axum::http::header::*;
use axum::routing::{delete, get, post};
use http_body::Frame;
use tower::ServiceExt;

use super::*;

const KEY: &str = "right-key-right-key";
const ROUTES: [&str; 8] = [
    "/health",
    "/ready",
    "/version",
    "/metrics",
    "/v1/models",
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/responses/{id}",
];

/// A body that counts how often it is asked, fails in the given way, and otherwise never ends.
struct Endless {
    asked: Arc<AtomicUsize>,
    panics: bool,
}

impl HttpBody for Endless {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        assert!(!self.panics, "a body that panics");
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(b"data: x\n\n")))))
    }
}

fn endless(panics: bool) -> Body {
    Body::new(Endless { asked: Arc::default(), panics })
}

/// A few routes, and how often one of them was reached.
fn routes(reached: &Arc<AtomicUsize>) -> Router {
    let hit = |text: &'static str| {
        let reached = reached.clone();
        move || {
            reached.fetch_add(1, Ordering::Relaxed);
            async move { text }
        }
    };
    Router::new()
        .route("/health", get(|| async { "ok" }))
        .route("/ready", get(|| async { "ok" }))
        .route("/version", get(hit("1")))
        .route("/metrics", get(hit("m")))
        .route("/v1/models", get(hit("models")))
        .route("/v1/chat/completions", post(hit("chat")))
        .route("/v1/messages", post(hit("messages")))
        .route("/v1/responses/{id}", delete(hit("gone")).get(hit("kept")))
        .route("/stream", post(|| async { endless(false) }))
        .route("/bad-stream", post(|| async { endless(true) }))
        .route("/panic", post(|| async { panic!("a handler that panics") as &'static str }))
        .route("/v1/messages/panic", get(|| async { panic!("another") as &'static str }))
        .route("/stuck", post(std::future::pending::<&'static str>))
        .route(
            "/who",
            get(|Extension(caller): Extension<Caller>, Extension(id): Extension<RequestId>| async move {
                format!("{} {} {}", caller.name, id.id.len(), id.client.as_deref().unwrap_or("-"))
            }),
        )
        .fallback(hit("nothing here"))
}

struct Setup {
    guard: Arc<Guard>,
    router: Router,
    reached: Arc<AtomicUsize>,
}

fn setup(change: impl FnOnce(&mut GuardConfig)) -> Setup {
    let mut config = GuardConfig::new(Lifecycle::new());
    config.lifecycle.set_ready();
    config.hosts = Hosts::new("127.0.0.1".parse().unwrap(), &[]).unwrap();
    change(&mut config);
    let (guard, reached) = (Guard::new(config), Arc::default());
    Setup { router: protect(routes(&reached), guard.clone()), guard, reached }
}

fn with_key(config: &mut GuardConfig) {
    config.keys.add_list(KEY).unwrap();
}

impl Setup {
    async fn ask(&self, method: &str, path: &str, fields: &[(&str, &str)]) -> Response {
        self.send(method, path, fields, Body::empty()).await
    }

    async fn send(&self, method: &str, path: &str, fields: &[(&str, &str)], body: Body) -> Response {
        let mut request = Request::builder().method(method).uri(path);
        if !fields.iter().any(|(name, _)| *name == "host") {
            request = request.header(HOST, "localhost:8000");
        }
        for (name, value) in fields {
            request = request.header(*name, *value);
        }
        self.router.clone().oneshot(request.body(body).unwrap()).await.unwrap()
    }

    async fn status(&self, method: &str, path: &str, fields: &[(&str, &str)]) -> u16 {
        self.ask(method, path, fields).await.status().as_u16()
    }
}

async fn text(response: Response) -> String {
    String::from_utf8(to_bytes(response.into_body(), 1 << 16).await.unwrap().into()).unwrap()
}

#[tokio::test]
async fn nothing_is_reached_without_a_key() {
    let strict = setup(with_key);
    denied::assert_denied(&strict.router, &ROUTES, KEY).await;
    // The routes that the right key reached, and no more: all but the open ones, with two headers
    // and two methods.
    assert_eq!(strict.reached.load(Ordering::Relaxed), 2 * (ROUTES.len() - 2));
    let any_host = setup(|config| {
        with_key(config);
        config.hosts = Hosts::any();
        config.origins = Origins::Any;
    });
    denied::assert_denied(&any_host.router, &ROUTES, KEY).await;
}

#[tokio::test]
#[should_panic(expected = "/v1/models")]
async fn the_table_notices_a_route_that_is_open() {
    let open = Router::new().route("/v1/models", get(|| async { "models" }));
    let guarded = setup(with_key);
    let leaky = open.fallback_service(guarded.router);
    denied::assert_denied(&leaky, &ROUTES, KEY).await;
}

#[tokio::test]
async fn the_order_is_host_origin_key_phase() {
    let setup = setup(|config| {
        with_key(config);
        config.lifecycle = Lifecycle::new();
    });
    let key = ("x-api-key", KEY);
    let (bad_host, bad_origin) = (("host", "evil.example"), ("origin", "http://evil.example"));
    assert_eq!(setup.status("GET", "/v1/models", &[bad_host, bad_origin]).await, 403);
    assert_eq!(setup.status("GET", "/health", &[bad_host, key]).await, 403);
    assert_eq!(setup.status("GET", "/health", &[bad_origin, key]).await, 403);
    assert_eq!(setup.status("GET", "/v1/models", &[]).await, 401);
    let loading = setup.ask("GET", "/v1/models", &[key]).await;
    assert_eq!((loading.status().as_u16(), &loading.headers()[RETRY_AFTER]), (503, &HeaderValue::from_static("1")));
    assert!(text(loading).await.contains("model_loading"));
    for path in OPEN_WHILE_LOADING {
        assert_eq!(setup.status("GET", path, &[key]).await, 200, "{path}");
    }
    for path in ["/version", "/metrics", "/nowhere"] {
        assert_eq!(setup.status("GET", path, &[]).await, 401, "{path}");
    }
    assert_eq!(setup.status("GET", "/nowhere", &[key]).await, 503);
    setup.guard.lifecycle().set_ready();
    assert_eq!(setup.status("GET", "/v1/models", &[key]).await, 200);
    assert_eq!(setup.status("POST", "/v1/models", &[key]).await, 405);
    setup.guard.lifecycle().set_draining();
    assert_eq!(setup.status("GET", "/v1/models", &[key]).await, 200);
    assert!(text(setup.ask("POST", "/v1/chat/completions", &[key]).await).await.contains("server_draining"));
    let anthropic = text(setup.ask("POST", "/v1/messages", &[key]).await).await;
    assert!(anthropic.contains("overloaded_error"), "{anthropic}");
    assert_eq!(setup.guard.in_flight(), 0);
}

#[tokio::test]
async fn places_are_kept_as_long_as_answers_last() {
    let setup = setup(|config| {
        config.keys.add_text(&format!("{KEY} name=alice max-in-flight=2\nother-key-other-key name=bob")).unwrap();
        config.limits.in_flight = 3;
        config.retry_after = Arc::new(|| Duration::from_millis(6500));
    });
    let (alice, bob) = (("x-api-key", KEY), ("x-api-key", "other-key-other-key"));
    let first = setup.ask("POST", "/stream", &[alice]).await;
    let second = setup.ask("POST", "/stream", &[alice]).await;
    let asked = Arc::new(AtomicUsize::new(0));
    let body = Body::new(Endless { asked: asked.clone(), panics: false });
    let refused = setup.send("POST", "/v1/chat/completions", &[alice], body).await;
    assert_eq!((refused.status().as_u16(), &refused.headers()[RETRY_AFTER]), (429, &HeaderValue::from_static("7")));
    assert_eq!(asked.load(Ordering::Relaxed), 0, "the body was not read");
    assert!(text(refused).await.contains("2 requests are in flight"));
    assert_eq!(setup.status("GET", "/v1/models", &[alice]).await, 200, "readers need no place");
    let third = setup.ask("POST", "/stream", &[bob]).await;
    assert!(text(setup.ask("POST", "/stream", &[bob]).await).await.contains("3 requests are in flight"));
    assert_eq!(setup.guard.in_flight(), 3);
    assert_eq!(setup.guard.in_flight_counts().by_key(), [("alice".into(), 2), ("bob".into(), 1)]);
    drop(first); // the client leaves
    assert_eq!(setup.guard.in_flight(), 2);
    let whole = setup.ask("POST", "/v1/chat/completions", &[alice]).await;
    assert_eq!((setup.guard.in_flight(), &whole.headers()[CONTENT_LENGTH]), (3, &HeaderValue::from_static("4")));
    assert_eq!(text(whole).await, "chat");
    drop((second, third));
    assert_eq!((setup.guard.in_flight(), setup.reached.load(Ordering::Relaxed)), (0, 2));
}

#[tokio::test]
async fn who_leaves_before_the_answer_gives_its_place_back() {
    let setup = Arc::new(setup(|_| {}));
    let asking = setup.clone();
    let request = tokio::spawn(async move { asking.ask("POST", "/stuck", &[]).await });
    while setup.guard.in_flight() == 0 {
        assert!(!request.is_finished());
        tokio::task::yield_now().await;
    }
    request.abort();
    assert!(request.await.unwrap_err().is_cancelled());
    assert_eq!(setup.guard.in_flight(), 0);
}

#[tokio::test]
async fn a_panic_ends_its_request_alone() {
    let noted = Arc::new(Mutex::new(Vec::new()));
    let setup = setup(|config| {
        let noted = noted.clone();
        config.on_panic = Arc::new(move |id| noted.lock().unwrap().push(id.id.clone()));
    });
    let failed = setup.ask("POST", "/panic", &[]).await;
    let id = failed.headers()[X_REQUEST_ID].to_str().unwrap().to_string();
    assert_eq!(failed.status(), StatusCode::INTERNAL_SERVER_ERROR);
    let body = text(failed).await;
    assert!(body.contains("an internal error has ended this request") && !body.contains("handler"), "{body}");
    assert_eq!(noted.lock().unwrap().as_slice(), [id.into()]);
    assert!(text(setup.ask("GET", "/v1/messages/panic", &[]).await).await.contains("api_error"));
    let broken = setup.ask("POST", "/bad-stream", &[]).await;
    assert_eq!((broken.status(), setup.guard.in_flight()), (StatusCode::OK, 1));
    assert!(to_bytes(broken.into_body(), 1 << 16).await.is_err());
    assert_eq!((setup.guard.in_flight(), setup.guard.panics(), noted.lock().unwrap().len()), (0, 3, 3));
    assert_eq!(setup.status("POST", "/v1/chat/completions", &[]).await, 200);
}

#[tokio::test]
async fn routes_hear_who_asks_and_every_answer_is_marked() {
    let setup = setup(with_key);
    let key = ("authorization", "Bearer right-key-right-key");
    assert_eq!(text(setup.ask("GET", "/who", &[key, ("x-request-id", "mine")]).await).await, "key-1 24 mine");
    assert_eq!(text(setup.ask("GET", "/who", &[key, ("x-request-id", "no good")]).await).await, "key-1 24 -");
    for (path, fields, status) in
        [("/who", &[key][..], 200), ("/who", &[], 401), ("/health", &[("host", "x")], 403), ("/nowhere", &[key], 200)]
    {
        let response = setup.ask("GET", path, &[fields, &[("x-request-id", "mine")]].concat()).await;
        assert_eq!(response.status().as_u16(), status);
        let shown = [X_REQUEST_ID, X_CONTENT_TYPE_OPTIONS, CACHE_CONTROL].map(|name| response.headers()[name].clone());
        assert_eq!(shown, ["mine", "nosniff", "no-store"], "{path} {status}");
    }
}

#[tokio::test]
async fn pages_of_named_origins_may_read_answers_and_refusals() {
    let setup = setup(|config| {
        with_key(config);
        config.origins = Origins::new(&["https://app.example".into()]).unwrap();
    });
    let (app, method) = (("origin", "https://app.example"), ("access-control-request-method", "POST"));
    let preflight = setup.ask("OPTIONS", "/v1/chat/completions", &[app, method]).await;
    assert_eq!(preflight.status(), StatusCode::NO_CONTENT);
    assert_eq!(preflight.headers()[ACCESS_CONTROL_ALLOW_ORIGIN], "https://app.example");
    assert!(preflight.headers().get_all(VARY).iter().any(|value| value == "origin"));
    for (fields, status) in [(&[app, ("x-api-key", KEY)][..], 200), (&[app], 401)] {
        let response = setup.ask("POST", "/v1/chat/completions", fields).await;
        assert_eq!(response.status().as_u16(), status);
        assert_eq!(response.headers()[ACCESS_CONTROL_ALLOW_ORIGIN], "https://app.example");
        assert!(!response.headers().contains_key(ACCESS_CONTROL_ALLOW_CREDENTIALS));
    }
    assert_eq!(setup.status("OPTIONS", "/v1/models", &[("origin", "https://evil.example"), method]).await, 403);
    assert_eq!(setup.status("OPTIONS", "/v1/models", &[method]).await, 401, "no page, no preflight");
    let plain = setup.ask("GET", "/v1/models", &[("x-api-key", KEY)]).await;
    assert_eq!(plain.headers()[VARY], "origin");
    assert!(!plain.headers().contains_key(ACCESS_CONTROL_ALLOW_ORIGIN));
}

#[tokio::test]
async fn every_refusal_is_told_with_its_caller_if_known() {
    let noted = Arc::new(Mutex::new(Vec::new()));
    let setup = setup(|config| {
        with_key(config);
        config.limits.in_flight = 0;
        let noted = noted.clone();
        config.on_refusal = Arc::new(move |refusal| {
            let caller = refusal.caller.map_or("-".into(), |caller| caller.name.to_string());
            noted.lock().unwrap().push((refusal.path.to_string(), caller, refusal.error.status().as_u16()));
        });
    });
    setup.ask("GET", "/health", &[("host", "evil.example")]).await;
    setup.ask("GET", "/a", &[]).await;
    setup.ask("POST", "/b", &[("x-api-key", KEY)]).await;
    setup.ask("GET", "/v1/models", &[("x-api-key", KEY)]).await;
    let expected = [("/health", "-", 403), ("/a", "-", 401), ("/b", "key-1", 429)];
    let expected = expected.map(|(path, caller, status)| (path.to_string(), caller.to_string(), status));
    assert_eq!(noted.lock().unwrap().as_slice(), expected);
}
