//! An answer as server-sent events.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::response::sse::{Event, Sse};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::answer::{Envelope, Shape, total_usage};
use crate::error::ApiError;
use crate::{Finish, Service, TextStream};

/// Events written ahead of a slow reader. What comes after waits as tokens in the request's stream, which its own
/// max_tokens bounds; the engine waits for nobody.
const EVENTS_AHEAD: usize = 32;

pub fn streamed(
    service: Service,
    stream: TextStream,
    num_samples: usize,
    shape: Shape,
    include_usage: bool,
) -> Response {
    let (sender, events) = mpsc::channel(EVENTS_AHEAD);
    tokio::spawn(async move {
        // An error here says that the client has left. Either way the stream is dropped, and that aborts what runs.
        let _ = write(&service, stream, num_samples, &shape, include_usage, &Events(sender)).await;
    });
    Sse::new(EventStream(events)).into_response()
}

struct Gone;

struct Events(mpsc::Sender<Event>);

impl Events {
    async fn send(&self, data: impl ToString) -> Result<(), Gone> {
        self.0.send(Event::default().data(data.to_string())).await.map_err(|_| Gone)
    }
}

async fn write(
    service: &Service,
    mut stream: TextStream,
    num_samples: usize,
    shape: &Shape,
    include_usage: bool,
    events: &Events,
) -> Result<(), Gone> {
    let envelope = Envelope::new(service, shape);
    let chunk = |choices: Vec<Value>| envelope.around(shape.chunk_object, choices);
    if let Some(opening) = shape.opening {
        for sample in 0..num_samples {
            events.send(chunk(vec![opening(sample)])).await?;
        }
    }
    let mut usages = Vec::with_capacity(num_samples);
    loop {
        let piece = tokio::select! {
            piece = stream.next() => piece,
            () = events.0.closed() => return Err(Gone),
        };
        let Some(piece) = piece else { break };
        if let Some((finish, usage)) = &piece.finish {
            if let Finish::Failed(message) = finish {
                return events.send(ApiError::Failed(message.clone()).body()).await;
            }
            usages.push(*usage);
        }
        let is_silent = piece.text.is_empty() && piece.finish.is_none();
        if !is_silent || piece.tokens.iter().any(|token| token.logprobs.is_some()) {
            events.send(chunk(vec![(shape.delta)(service, &piece)])).await?;
        }
    }
    if include_usage {
        let mut last = chunk(Vec::new());
        last["usage"] = json!(total_usage(&usages));
        events.send(last).await?;
    }
    events.send("[DONE]").await
}

struct EventStream(mpsc::Receiver<Event>);

impl futures_core::Stream for EventStream {
    type Item = Result<Event, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_recv(context).map(|event| event.map(Ok))
    }
}
