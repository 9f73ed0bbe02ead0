//! The body of an answer as it leaves: it holds the request's permit, and a panic in what makes it ends it with an
//! error instead of the connection, which other requests may share.

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
