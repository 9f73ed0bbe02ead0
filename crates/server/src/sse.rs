//! Server-sent events, written by a separate task ahead of the reader, up to a limit.
//!
//! The engine does not wait for readers: a task takes its tokens as they come. Events that a slow
//! reader leaves unread fill a buffer of bounded size; when it has been full for as long as a
//! reader may stall, the task gives up, and with it the request.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use axum::response::Response;
use serde::Serialize;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

use crate::error::ApiError;
use crate::service::{Call, Service};

/// The reader has left, or has read nothing for too long.
pub struct Gone;

/// Bytes on their way, and the room that they take.
type Chunk = (Bytes, Option<OwnedSemaphorePermit>);

/// Writes the events of a stream.
pub struct EventWriter {
    sender: mpsc::UnboundedSender<Chunk>,
    /// Bytes that may be written ahead.
    room: Arc<Semaphore>,
    most: usize,
    stall: Duration,
    /// The latest end of the whole stream; none without a limit.
    deadline: Option<Instant>,
    buffer: Vec<u8>,
}

/// Answers with whatever `write` writes.
pub fn stream<W, F>(service: &Service, call: &Call, write: W) -> Response
where
    W: FnOnce(EventWriter) -> F,
    F: Future<Output = Result<(), Gone>> + Send + 'static,
{
    let most = service.bounds.limits.stream_bytes.clamp(1, u32::MAX as usize >> 4);
    let (sender, receiver) = mpsc::unbounded_channel();
    // Keeps the channel open until it is known how the writing ended.
    let open = sender.clone();
    let writer = EventWriter {
        sender,
        room: Arc::new(Semaphore::new(most)),
        most,
        stall: service.timeouts.write_stall,
        deadline: service.deadline(call),
        buffer: Vec::new(),
    };
    let work = write(writer);
    let is_complete = Arc::new(AtomicBool::new(false));
    let events = Events { receiver, is_complete: Arc::clone(&is_complete) };
    let (observer, style) = (service.observer.clone(), call.style);
    tokio::spawn(async move {
        // Whether it wrote all or its reader has gone, what it held is dropped, and that aborts
        // what runs.
        match tokio::spawn(work).await {
            Ok(result) => is_complete.store(result.is_ok(), Ordering::Release),
            Err(_) => {
                observer.panicked("a stream");
                let error = ApiError::Failed("an internal error has ended this stream").body(style);
                // A reader that has disconnected gets nothing.
                let _ = open.send((Bytes::from(format!("event: error\ndata: {error}\n\n")), None));
                is_complete.store(true, Ordering::Release);
            }
        }
        drop(open);
    });
    let mut response = Response::new(Body::from_stream(events));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    // For proxies that would otherwise collect the stream before they pass it on.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

impl EventWriter {
    /// An event without a name, as OpenAI's are.
    pub async fn data(&mut self, data: &impl Serialize) -> Result<(), Gone> {
        self.push(None, data);
        self.flush().await
    }

    /// The last event of an OpenAI stream.
    pub async fn done(&mut self) -> Result<(), Gone> {
        self.buffer.extend_from_slice(b"data: [DONE]\n\n");
        self.flush().await
    }

    /// Adds an event that goes out with the next.
    pub fn push(&mut self, name: Option<&str>, data: &impl Serialize) {
        if let Some(name) = name {
            self.buffer.extend_from_slice(b"event: ");
            self.buffer.extend_from_slice(name.as_bytes());
            self.buffer.push(b'\n');
        }
        self.buffer.extend_from_slice(b"data: ");
        // JSON has no line breaks of its own, and these types have nothing that cannot be written.
        serde_json::to_writer(&mut self.buffer, data).expect("answers can be written as JSON");
        self.buffer.extend_from_slice(b"\n\n");
    }

    /// Resolves when the reader has left.
    pub async fn closed(&self) {
        self.sender.closed().await;
    }

    pub async fn flush(&mut self) -> Result<(), Gone> {
        let bytes = Bytes::from(std::mem::take(&mut self.buffer));
        // One event may be larger than the buffer; it then waits for all of it.
        let size = bytes.len().min(self.most) as u32;
        let permit = match Arc::clone(&self.room).try_acquire_many_owned(size) {
            Ok(permit) => permit,
            Err(_) => self.wait_for_room(size).await?,
        };
        self.sender.send((bytes, Some(permit))).map_err(|_| Gone)
    }

    async fn wait_for_room(&self, size: u32) -> Result<OwnedSemaphorePermit, Gone> {
        let left = self.deadline.map_or(Duration::MAX, |deadline| deadline.saturating_duration_since(Instant::now()));
        tokio::select! {
            room = Arc::clone(&self.room).acquire_many_owned(size) => room.map_err(|_| Gone),
            () = tokio::time::sleep(self.stall.min(left)) => Err(Gone),
            () = self.closed() => Err(Gone),
        }
    }
}

/// The answer's body. An abandoned one ends in an error, so that no client takes it for complete.
struct Events {
    receiver: mpsc::UnboundedReceiver<Chunk>,
    is_complete: Arc<AtomicBool>,
}

#[derive(Debug, thiserror::Error)]
#[error("the stream was abandoned")]
struct GivenUp;

impl futures_core::Stream for Events {
    type Item = Result<Bytes, GivenUp>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.receiver.poll_recv(context).map(|event| match event {
            // The room is free again as soon as the connection has taken the bytes.
            Some((bytes, _room)) => Some(Ok(bytes)),
            None if self.is_complete.load(Ordering::Acquire) => None,
            None => Some(Err(GivenUp)),
        })
    }
}
