//! Turns hyper's requests into the router's, and its answers back.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::Body as AxumBody;
use axum::http::header::{CONNECTION, EXPECT};
use axum::http::{HeaderValue, Request, Response, StatusCode, Version};
use hyper::body::Incoming;
use hyper::service::Service;
use tower_service::Service as _;

use super::activity::Activity;
use super::body::{Received, Sent, Source, lock};
use super::streams::Streams;

/// More of an unread body than this is not worth reading for the sake of its connection.
const UNREAD_BYTES: u64 = 64 << 10;

/// Address of a request's client; one of the request's extensions.
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
    pub unread_timeout: Duration,
    pub activity: Arc<Activity>,
    /// Progress of the connection's streams, only on HTTP/2.
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
        let (activity, mut router, unread_timeout) = (self.activity.clone(), self.router.clone(), self.unread_timeout);
        let too_many_fields = request.headers().len() > self.header_fields;
        let asks_first = request.headers().contains_key(EXPECT);
        let is_http1 = request.version() < Version::HTTP_2;
        let (head, incoming) = request.into_parts();
        let source = Arc::new(Mutex::new(Source::new(incoming)));
        // On HTTP/2 what is left of a body is its stream's affair, and the connection goes on in
        // any case.
        let kept = is_http1.then(|| source.clone());
        let mut request = Request::from_parts(head, Received::new(source, &activity));
        request.extensions_mut().insert(self.peer);
        Box::pin(async move {
            let mut answer = if too_many_fields {
                drop(request);
                refusal(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE)
            } else {
                let Ok(answer) = router.call(request).await;
                answer
            };
            if let Some(source) = kept {
                // A body that has timed out gets no more time.
                let too_slow = answer.status() == StatusCode::REQUEST_TIMEOUT;
                let within = if too_slow { Duration::ZERO } else { unread_timeout };
                if !read_off(source, within, asks_first, &activity).await {
                    activity.input_is_unread();
                    answer.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
                }
            }
            Ok(answer.map(|body| Sent::new(body, blocked, under_way)))
        })
    }
}

/// Reads the rest of a request's body that a route has left; it may arrive after the answer is
/// made. hyper keeps a connection only if an unread body is complete when it has answered;
/// otherwise it closes the connection silently, and the client would find out with its next
/// request. False: the connection has to end, and the client is told.
async fn read_off(source: Arc<Mutex<Source>>, within: Duration, asks_first: bool, activity: &Arc<Activity>) -> bool {
    if lock(&source).ended() {
        return true;
    }
    // A body that the answer itself goes on reading is not waited for.
    let Some(source) = Arc::into_inner(source) else { return false };
    let mut source = source.into_inner().unwrap_or_else(PoisonError::into_inner);
    // A client that expects `100 Continue` and gets a refusal need not send its body.
    if asks_first && source.unasked() {
        return false;
    }
    // Meanwhile the connection can give way, like any other whose body is still to come.
    let _receiving = activity.body_began();
    tokio::time::timeout(within, source.read_off(UNREAD_BYTES)).await.unwrap_or(false)
}

fn refusal(status: StatusCode) -> Response<AxumBody> {
    let mut answer = Response::new(AxumBody::empty());
    *answer.status_mut() = status;
    answer
}
