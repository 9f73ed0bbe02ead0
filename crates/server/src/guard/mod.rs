//! What stands between a connection and a route: who is let in, to what, and how many at once.
//!
//! `protect` puts all of it around a whole router, fallbacks included, in this order: a request id, the host, the
//! origin, the key, the server's phase, the number of requests under way. Nothing is routed before all have agreed, and
//! none of them reads a request's body. A panic behind the guard ends its request and nothing else.

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
pub use keys::{Key, Keys, MOST_KEYS, Salt};
pub use lifecycle::{Lifecycle, Phase};
pub use origin::Origins;
pub use request_id::{RequestId, RequestIds, X_REQUEST_ID};

use crate::config::Limits;
use crate::error::{ApiError, ErrorStyle};
use body::GuardedBody;
use in_flight::{InFlight, Permit};
use origin::Source;

/// Answered while the model is being loaded, by those with a key where one is needed.
const OPEN_WHILE_LOADING: [&str; 4] = ["/health", "/ready", "/version", "/metrics"];

/// What the guard is built from.
#[derive(Clone)]
pub struct GuardConfig {
    pub keys: Keys,
    pub hosts: Hosts,
    pub origins: Origins,
    pub lifecycle: Lifecycle,
    /// `in_flight`, `in_flight_per_key` and `request_id_bytes` are read.
    pub limits: Limits,
    /// When a client that was turned away for want of a place should come back.
    pub retry_after: Arc<dyn Fn() -> Duration + Send + Sync>,
    /// Told of every request that ended in a panic.
    pub on_panic: Arc<dyn Fn(&RequestId) + Send + Sync>,
    /// Told of every request that the guard turned away: its id and path, who sent it if that is known, and why.
    pub on_refusal: Arc<dyn Fn(Refusal<'_>) + Send + Sync>,
}

impl GuardConfig {
    /// No keys, every host, no pages of other origins, default limits, nobody told.
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

/// A request that was turned away. The path is the client's: to be escaped where it is logged, and no label of a metric.
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

/// Puts the guard around all of a router: its routes, its fallbacks, and what it answers to wrong methods.
pub fn protect(router: Router, guard: Arc<Guard>) -> Router {
    // The router becomes the fallback of an empty one: nothing is matched against the path before the guard has run.
    Router::new().fallback_service(router).layer(from_fn_with_state(guard, pass))
}

async fn pass(State(guard): State<Arc<Guard>>, mut request: Request, next: Next) -> Response {
    let id = guard.ids.next(request.headers());
    request.extensions_mut().insert(id.clone());
    let mut response = guard.pass_origin(request, &id, next).await;
    let headers = response.headers_mut();
    headers.insert(X_REQUEST_ID, id.header());
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
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

    /// Requests under way now.
    pub fn in_flight(&self) -> usize {
        self.in_flight.now()
    }

    /// ... by the name of their key.
    pub fn in_flight_by_key(&self) -> Vec<(Arc<str>, usize)> {
        self.callers.in_flight()
    }

    /// Requests that ended in a panic, since the start.
    pub fn panics(&self) -> u64 {
        self.panics.load(Ordering::Relaxed)
    }

    async fn pass_origin(self: Arc<Self>, request: Request, id: &RequestId, next: Next) -> Response {
        match self.source(&request) {
            Ok(source @ Source::Preflight { .. }) => self.preflight(&source),
            Ok(source) => {
                let mut response = self.pass_key(request, id, next).await;
                self.config.origins.mark(&source, &mut response);
                response
            }
            Err(error) => self.refuse(&request, id, None, &error),
        }
    }

    fn source(&self, request: &Request) -> Result<Source, ApiError> {
        let host = self.config.hosts.check(request.version(), request.uri(), request.headers())?;
        self.config.origins.check(request.method(), request.headers(), host.as_ref())
    }

    async fn pass_key(self: &Arc<Self>, mut request: Request, id: &RequestId, next: Next) -> Response {
        let (path, headers) = (request.uri().path(), request.headers());
        let caller = match auth::authenticate(&self.callers, request.method(), path, headers) {
            Ok(caller) => caller,
            Err(error) => {
                let mut response = self.refuse(&request, id, None, &error);
                auth::challenge(&mut response);
                return response;
            }
        };
        let permit = match self.admit(&request, caller.as_ref()) {
            Ok(permit) => permit,
            Err(error) => return self.refuse(&request, id, caller.as_ref(), &error),
        };
        if let Some(caller) = caller {
            request.extensions_mut().insert(caller);
        }
        if let Some(permit) = &permit {
            request.extensions_mut().insert(permit.body.clone());
        }
        self.run(request, id, permit, next).await
    }

    /// A permit, if the request needs one and the server takes it now.
    fn admit(&self, request: &Request, caller: Option<&Caller>) -> Result<Option<Permit>, ApiError> {
        let lifecycle = &self.config.lifecycle;
        if lifecycle.is_loading() && !OPEN_WHILE_LOADING.contains(&request.uri().path()) {
            return Err(ApiError::Loading);
        }
        let Some(caller) = caller.filter(|_| request.method() == Method::POST) else { return Ok(None) };
        if lifecycle.is_draining() {
            return Err(ApiError::Draining);
        }
        let full = |most| ApiError::TooManyInFlight { most, retry_after: (self.config.retry_after)() };
        let permit = self.in_flight.take(caller).map_err(full)?;
        // Asked again now that the request counts: either it sees the end coming, or the end waits for it.
        if lifecycle.is_draining() { Err(ApiError::Draining) } else { Ok(Some(permit)) }
    }

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

    fn preflight(&self, source: &Source) -> Response {
        let mut response = match source {
            Source::Preflight { client_headers, .. } => origin::preflight(client_headers),
            _ => Response::default(),
        };
        self.config.origins.mark(source, &mut response);
        response
    }

    fn refuse(&self, request: &Request, id: &RequestId, caller: Option<&Caller>, error: &ApiError) -> Response {
        let (method, path) = (request.method(), request.uri().path());
        (self.config.on_refusal)(Refusal { id, method, path, caller, error });
        error.respond(ErrorStyle::of_path(path))
    }
}
