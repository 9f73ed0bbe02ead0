//! The checks between a connection and a route.
//!
//! `protect` puts the guard around a whole router, fallbacks included. [`Guard::check`] is the list
//! of checks: host, origin, key, phase of the server, requests in flight. No request is routed
//! before it has passed all of them, and none of them reads its body. A panic behind the guard ends
//! its request and nothing else.

mod auth;
mod body;
mod callers;
#[cfg(test)]
pub(crate) mod denied;
mod error;
mod exposure;
mod hosts;
mod in_flight;
mod keys;
mod lifecycle;
mod origin;
mod request_id;
#[cfg(test)]
mod tests;

use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::header::{CACHE_CONTROL, X_CONTENT_TYPE_OPTIONS};
use axum::http::{HeaderValue, Method};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;

pub use auth::{OPEN_PATHS, X_API_KEY};
pub use callers::{Caller, Callers};
pub use error::{Place, SetupError};
pub use exposure::check_exposure;
pub use hosts::Hosts;
pub use in_flight::InFlightCounts;
pub use keys::{Key, Keys, MOST_KEYS, Salt};
pub use lifecycle::{Lifecycle, Phase};
pub use origin::Origins;
pub use request_id::{RequestId, RequestIds, X_REQUEST_ID};

use crate::config::Limits;
use crate::error::{ApiError, ErrorStyle};
use body::GuardedBody;
use in_flight::{InFlight, Permit};
use origin::Source;

/// Answered while the model is being loaded, with a key if the server has keys.
const OPEN_WHILE_LOADING: [&str; 4] = ["/health", "/ready", "/version", "/metrics"];

/// The parts of a guard.
#[derive(Clone)]
pub struct GuardConfig {
    pub keys: Keys,
    pub hosts: Hosts,
    pub origins: Origins,
    pub lifecycle: Lifecycle,
    /// `in_flight`, `in_flight_per_key` and `request_id_bytes` are read.
    pub limits: Limits,
    /// The delay before a client that was refused for too many requests in flight should try again.
    pub retry_after: Arc<dyn Fn() -> Duration + Send + Sync>,
    /// Called for every request that ended in a panic.
    pub on_panic: Arc<dyn Fn(&RequestId) + Send + Sync>,
    /// Called for every request that the guard refused.
    pub on_refusal: Arc<dyn Fn(Refusal<'_>) + Send + Sync>,
}

impl GuardConfig {
    /// No keys, every host, no pages of other origins, default limits, no callbacks.
    pub fn new(lifecycle: Lifecycle) -> Self {
        Self {
            keys: Keys::none(),
            hosts: Hosts::any(),
            origins: Origins::None,
            lifecycle,
            limits: Limits::default(),
            retry_after: Arc::new(|| Duration::from_secs(1)),
            on_panic: Arc::new(|_| {}),
            on_refusal: Arc::new(|_| {}),
        }
    }
}

/// A refused request. The path is the client's: it must be escaped in a log and is no label of a
/// metric.
#[derive(Clone, Copy, Debug)]
pub struct Refusal<'a> {
    pub id: &'a RequestId,
    pub method: &'a Method,
    pub path: &'a str,
    pub caller: Option<&'a Caller>,
    pub error: &'a ApiError,
}

pub struct Guard {
    config: GuardConfig,
    ids: RequestIds,
    callers: Callers,
    in_flight: InFlight,
    panics: AtomicU64,
}

/// Puts the guard around all of a router: its routes, its fallbacks, and its answers to wrong
/// methods.
pub fn protect(router: Router, guard: Arc<Guard>) -> Router {
    // The router becomes the fallback of an empty one: nothing is matched against the path before
    // the guard has run.
    Router::new().fallback_service(router).layer(from_fn_with_state(guard, pass))
}

async fn pass(State(guard): State<Arc<Guard>>, mut request: Request, next: Next) -> Response {
    let id = guard.ids.next(request.headers());
    request.extensions_mut().insert(id.clone());
    let mut found = Found::default();
    let mut response = match guard.check(&request, &mut found) {
        Ok(()) => guard.answer(request, &id, &mut found, next).await,
        Err(error) => guard.refuse(&request, &id, found.caller.as_ref(), &error),
    };
    if let Some(source) = &found.source {
        guard.config.origins.mark(source, &mut response);
    }
    let headers = response.headers_mut();
    headers.insert(X_REQUEST_ID, id.header());
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

/// The results of a request's checks, up to the one that refused it.
#[derive(Default)]
struct Found {
    source: Option<Source>,
    /// The caller; none for an open route without a key.
    caller: Option<Caller>,
    /// The permit of this request; none for requests that need no permit.
    permit: Option<Permit>,
}

impl Guard {
    pub fn new(config: GuardConfig) -> Arc<Self> {
        let limits = &config.limits;
        Arc::new(Self {
            ids: RequestIds::new(limits.request_id_bytes),
            callers: Callers::new(&config.keys, limits.in_flight, limits.in_flight_per_key),
            in_flight: InFlight::new(limits.in_flight),
            panics: AtomicU64::new(0),
            config,
        })
    }

    pub fn lifecycle(&self) -> &Lifecycle {
        &self.config.lifecycle
    }

    /// Number of requests in flight.
    pub fn in_flight(&self) -> usize {
        self.in_flight.now()
    }

    /// The counts of requests in flight, for the routes that report them.
    pub fn in_flight_counts(&self) -> InFlightCounts {
        InFlightCounts::new(&self.in_flight, self.callers.iter())
    }

    /// Requests that ended in a panic, since the start.
    pub fn panics(&self) -> u64 {
        self.panics.load(Ordering::Relaxed)
    }

    /// All checks, in their order.
    fn check(&self, request: &Request, found: &mut Found) -> Result<(), ApiError> {
        let (method, path, headers) = (request.method(), request.uri().path(), request.headers());
        let host = self.config.hosts.check(request.version(), request.uri(), headers)?;
        let source = self.config.origins.check(method, headers, host.as_ref())?;
        if let Source::Preflight { .. } = found.source.insert(source) {
            return Ok(()); // Browsers send no key with a preflight.
        }
        found.caller = auth::authenticate(&self.callers, method, path, headers)?;
        self.check_loaded(path)?;
        found.permit = self.permit(method, found.caller.as_ref())?;
        Ok(())
    }

    fn check_loaded(&self, path: &str) -> Result<(), ApiError> {
        let is_early = self.config.lifecycle.is_loading() && !OPEN_WHILE_LOADING.contains(&path);
        if is_early { Err(ApiError::Loading) } else { Ok(()) }
    }

    /// A permit, if the request needs one and the server takes it now.
    fn permit(&self, method: &Method, caller: Option<&Caller>) -> Result<Option<Permit>, ApiError> {
        let lifecycle = &self.config.lifecycle;
        let Some(caller) = caller.filter(|_| method == Method::POST) else { return Ok(None) };
        if lifecycle.is_draining() {
            return Err(ApiError::Draining);
        }
        let full = |most| ApiError::TooManyInFlight { most, retry_after: (self.config.retry_after)() };
        let permit = self.in_flight.take(caller).map_err(full)?;
        // Checked again now that the request counts: either it sees the drain begin, or the drain
        // waits for it.
        if lifecycle.is_draining() { Err(ApiError::Draining) } else { Ok(Some(permit)) }
    }

    /// The answer to a request that has passed its checks.
    async fn answer(self: &Arc<Self>, mut request: Request, id: &RequestId, found: &mut Found, next: Next) -> Response {
        if let Some(Source::Preflight { client_headers, .. }) = &found.source {
            return origin::preflight(client_headers);
        }
        let permit = found.permit.take();
        if let Some(caller) = found.caller.take() {
            request.extensions_mut().insert(caller);
        }
        if let Some(permit) = &permit {
            request.extensions_mut().insert(permit.body.clone());
        }
        self.run(request, id, permit, next).await
    }

    /// Runs the route. A panic in it becomes an error answer.
    async fn run(self: &Arc<Self>, request: Request, id: &RequestId, permit: Option<Permit>, next: Next) -> Response {
        let style = ErrorStyle::of_path(request.uri().path());
        let mut answer = pin!(next.run(request));
        // Unwind safe: what panicked is dropped and never looked at again.
        let outcome = poll_fn(|context| match catch_unwind(AssertUnwindSafe(|| answer.as_mut().poll(context))) {
            Ok(Poll::Pending) => Poll::Pending,
            Ok(Poll::Ready(response)) => Poll::Ready(Some(response)),
            Err(_) => Poll::Ready(None),
        });
        let response = outcome.await.unwrap_or_else(|| {
            self.count_panic(id);
            ApiError::Failed("an internal error has ended this request").respond(style)
        });
        let (guard, id) = (self.clone(), id.clone());
        let on_panic = Box::new(move || guard.count_panic(&id));
        response.map(|body| Body::new(GuardedBody::new(body, permit, on_panic)))
    }

    fn count_panic(&self, id: &RequestId) {
        self.panics.fetch_add(1, Ordering::Relaxed);
        (self.config.on_panic)(id);
    }

    fn refuse(&self, request: &Request, id: &RequestId, caller: Option<&Caller>, error: &ApiError) -> Response {
        let (method, path) = (request.method(), request.uri().path());
        (self.config.on_refusal)(Refusal { id, method, path, caller, error });
        let mut response = error.respond(ErrorStyle::of_path(path));
        if *error == ApiError::Unauthorized {
            auth::challenge(&mut response);
        }
        response
    }
}
