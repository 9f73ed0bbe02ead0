//! Bodies on their way in and out, in pieces of a size that bounds what they cost.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};

use axum::body::{Body as AxumBody, Bytes};
use hyper::body::{Body, Frame, Incoming, SizeHint};

use super::activity::{Activity, Receiving, UnderWay};
use super::streams::Blocked;

/// Smaller pieces of a request are gathered up to this size. A client may send a body in chunks of
/// one byte, and separate buffers for them would take many times the body's size.
const GATHER_BYTES: usize = 4 << 10;

/// Larger pieces of an answer are cut to this, so that an answer made in one piece is still given
/// up piece by piece when its client does not read.
const PIECE_BYTES: usize = 16 << 10;

/// A request's body as hyper gives it, and its progress. The connection keeps hold of it beside the
/// route that reads it, and can continue from the same place.
pub(super) struct Source {
    incoming: Incoming,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// No route has asked for it, so a client that expects `100 Continue` has not got it.
    Unasked,
    Coming,
    Ended,
    /// It will not come to its end.
    Broken,
}

impl Source {
    pub fn new(incoming: Incoming) -> Self {
        let state = if incoming.is_end_stream() { State::Ended } else { State::Unasked };
        Self { incoming, state }
    }

    pub fn unasked(&self) -> bool {
        self.state == State::Unasked
    }

    pub fn ended(&self) -> bool {
        self.state == State::Ended
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        if self.state == State::Unasked {
            self.state = State::Coming;
        }
        let frame = ready!(Pin::new(&mut self.incoming).poll_frame(cx));
        match &frame {
            Some(Err(_)) => self.state = State::Broken,
            // hyper ends a body that has failed like any other.
            _ if self.state == State::Broken => {}
            None => self.state = State::Ended,
            Some(Ok(_)) if self.incoming.is_end_stream() => self.state = State::Ended,
            Some(Ok(_)) => {}
        }
        Poll::Ready(frame)
    }

    /// Reads and forgets what is left. False, once it is known to be more than `most` bytes or not
    /// to come whole.
    pub async fn read_off(&mut self, most: u64) -> bool {
        let mut bytes = 0;
        while matches!(self.state, State::Unasked | State::Coming) {
            if self.incoming.size_hint().lower().saturating_add(bytes) > most {
                return false;
            }
            if let Some(Ok(frame)) = poll_fn(|cx| self.poll(cx)).await {
                bytes += frame.data_ref().map_or(0, |data| data.len() as u64);
            }
        }
        self.ended()
    }
}

/// A request's body as routes read it. Small pieces wait for more: routes read bodies whole.
pub(super) struct Received {
    source: Arc<Mutex<Source>>,
    gathered: Vec<u8>,
    receiving: Option<Receiving>,
}

impl Received {
    pub fn new(source: Arc<Mutex<Source>>, activity: &Arc<Activity>) -> Self {
        let ended = lock(&source).ended();
        let receiving = (!ended).then(|| activity.body_began());
        Self { source, gathered: Vec::new(), receiving }
    }

    fn gathered(&mut self) -> Frame<Bytes> {
        Frame::data(std::mem::take(&mut self.gathered).into())
    }
}

impl Body for Received {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        loop {
            let (frame, ended) = {
                let mut source = lock(&self.source);
                let frame = ready!(source.poll(cx)).transpose()?;
                let ended = frame.is_none() || source.ended();
                (frame, ended)
            };
            if ended {
                self.receiving = None;
            }
            match frame.map(Frame::into_data) {
                Some(Ok(data)) if self.gathered.is_empty() && (ended || data.len() >= GATHER_BYTES) => {
                    return Poll::Ready(Some(Ok(Frame::data(data))));
                }
                Some(Ok(data)) => self.gathered.extend_from_slice(&data),
                // Trailers: no route has a use for them.
                Some(Err(_)) => {}
                None if self.gathered.is_empty() => return Poll::Ready(None),
                None => {}
            }
            if ended && self.gathered.is_empty() {
                return Poll::Ready(None);
            }
            if ended || self.gathered.len() >= GATHER_BYTES {
                return Poll::Ready(Some(Ok(self.gathered())));
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.gathered.is_empty() && lock(&self.source).incoming.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        plus(lock(&self.source).incoming.size_hint(), self.gathered.len())
    }
}

pub(super) fn lock(source: &Mutex<Source>) -> MutexGuard<'_, Source> {
    // A panic while it is held is one of hyper's, which ends the connection.
    source.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An answer's body. Its request is under way until this is dropped.
pub(super) struct Sent {
    inner: AxumBody,
    rest: Bytes,
    /// On HTTP/2: whether the client has taken the last piece.
    blocked: Option<Arc<Blocked>>,
    _under_way: UnderWay,
}

impl Sent {
    pub fn new(inner: AxumBody, blocked: Option<Arc<Blocked>>, under_way: UnderWay) -> Self {
        Self { inner, rest: Bytes::new(), blocked, _under_way: under_way }
    }

    fn next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if self.rest.is_empty() {
            match ready!(Pin::new(&mut self.inner).poll_frame(cx)?).map(Frame::into_data) {
                Some(Ok(data)) => self.rest = data,
                Some(Err(other)) => return Poll::Ready(Some(Ok(other))),
                None => return Poll::Ready(None),
            }
        }
        let piece = self.rest.split_to(self.rest.len().min(PIECE_BYTES));
        Poll::Ready(Some(Ok(Frame::data(piece))))
    }
}

impl Body for Sent {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        // Being asked for more means that the piece before has gone.
        let next = self.next(cx);
        if let Some(blocked) = &self.blocked {
            blocked.set(matches!(next, Poll::Ready(Some(Ok(_)))));
        }
        next
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        plus(self.inner.size_hint(), self.rest.len())
    }
}

fn plus(hint: SizeHint, bytes: usize) -> SizeHint {
    let mut sum = SizeHint::new();
    sum.set_lower(hint.lower().saturating_add(bytes as u64));
    if let Some(upper) = hint.upper() {
        sum.set_upper(upper.saturating_add(bytes as u64));
    }
    sum
}
