//! From hyper's requests to the router's, and back.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::Router;
use axum::body::Body as AxumBody;
use axum::http::header::CONNECTION;
use axum::http::{HeaderValue, Request, Response, StatusCode, Version};
use hyper::body::{Body, Incoming};
use hyper::service::Service;
use tower_service::Service as _;

use super::activity::Activity;
use super::body::{Received, Sent};
use super::streams::Streams;

/// More of an unread body than this is not worth reading for the sake of its connection.
const UNREAD_BYTES: u64 = 64 << 10;

/// Who sent a request; among its extensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// `None` on a Unix socket.
    pub address: Option<SocketAddr>,
    pub tls: bool,
}

/// The service of one connection.
pub(super) struct Requests {
    pub router: Router,
    pub peer: Peer,
    pub header_fields: usize,
    pub activity: Arc<Activity>,
    /// On HTTP/2.
    pub streams: Option<Streams>,
}

impl Service<Request<Incoming>> for Requests {
    type Response = Response<Sent>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Sent>, Infallible>> + Send>>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        let under_way = self.activity.request_began();
        let blocked = self.streams.as_ref().map(|streams| {
            let blocked = Arc::default();
            streams.announce(Arc::clone(&blocked));
            blocked
        });
        let (activity, mut router) = (self.activity.clone(), self.router.clone());
        let too_many_fields = request.headers().len() > self.header_fields;
        let version = request.version();
        let body_bytes = request.body().size_hint().upper();
        let mut request = request.map(|body| Received::new(body, &activity));
        let body_ended = request.body().ended();
        request.extensions_mut().insert(self.peer);
        Box::pin(async move {
            let mut answer = if too_many_fields {
                drop(request);
                refusal(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE)
            } else {
                let Ok(answer) = router.call(request).await;
                answer
            };
            if version < Version::HTTP_2 && !body_ended.load(Ordering::Relaxed) {
                activity.input_is_unread();
                // hyper keeps the connection only if the rest of the body is at hand, and closes it without a word
                // otherwise. Where that is certain the client is told.
                let too_slow = answer.status() == StatusCode::REQUEST_TIMEOUT;
                if too_slow || body_bytes.is_none_or(|bytes| bytes > UNREAD_BYTES) {
                    answer.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
                }
            }
            Ok(answer.map(|body| Sent::new(body, blocked, under_way)))
        })
    }
}

fn refusal(status: StatusCode) -> Response<AxumBody> {
    let mut answer = Response::new(AxumBody::empty());
    *answer.status_mut() = status;
    answer
}
