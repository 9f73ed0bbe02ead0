//! The body of an answer as it leaves: it holds the request's permit, and a panic of its maker
//! ends it with an error instead of the connection, which other requests may share.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes, HttpBody};
use http_body::{Frame, SizeHint};

use super::in_flight::Permit;

/// Told once, if the body's maker panics.
type OnPanic = Box<dyn FnOnce() + Send>;

pub(super) struct GuardedBody {
    /// All three are gone once the body has ended.
    inner: Option<Body>,
    permit: Option<Permit>,
    on_panic: Option<OnPanic>,
}

#[derive(Debug, thiserror::Error)]
#[error("an internal error has ended this answer")]
struct Panicked;

impl GuardedBody {
    pub fn new(inner: Body, permit: Option<Permit>, on_panic: OnPanic) -> Self {
        Self { inner: Some(inner), permit, on_panic: Some(on_panic) }
    }

    fn end(&mut self) {
        (self.inner, self.permit, self.on_panic) = (None, None, None);
    }
}

impl HttpBody for GuardedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let Some(inner) = &mut self.inner else { return Poll::Ready(None) };
        // Unwind safe: what panicked is dropped and never looked at again.
        match catch_unwind(AssertUnwindSafe(|| Pin::new(inner).poll_frame(context))) {
            Ok(Poll::Ready(Some(Ok(frame)))) => Poll::Ready(Some(Ok(frame))),
            Ok(Poll::Pending) => Poll::Pending,
            Ok(Poll::Ready(last)) => {
                self.end();
                Poll::Ready(last)
            }
            Err(_) => {
                if let Some(on_panic) = self.on_panic.take() {
                    on_panic();
                }
                self.end();
                Poll::Ready(Some(Err(axum::Error::new(Panicked))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.inner.as_ref().is_none_or(HttpBody::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.as_ref().map_or(SizeHint::with_exact(0), HttpBody::size_hint)
    }
}

#[cfg(test)]
mod tests {
    use super::super::callers::Caller;
    use super::super::in_flight::InFlight;
    use super::*;

    #[tokio::test]
    async fn a_body_keeps_its_length_and_its_place_until_it_ends() {
        let all = InFlight::new(1);
        let permit = all.take(&Caller::anonymous(1)).ok();
        let mut body = GuardedBody::new(Body::from("four"), permit, Box::new(|| panic!("nobody panicked")));
        assert_eq!((body.size_hint().exact(), body.is_end_stream()), (Some(4), false));
        let mut next = async || std::future::poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await;
        assert_eq!(next().await.unwrap().unwrap().into_data().unwrap(), "four");
        assert!(next().await.is_none() && next().await.is_none());
        assert_eq!(all.now(), 0, "given back at the end, though the body is still there");
        assert_eq!((body.size_hint().exact(), body.is_end_stream()), (Some(0), true));
        let empty = GuardedBody::new(Body::empty(), None, Box::new(|| {}));
        assert!(empty.is_end_stream());
    }
}
