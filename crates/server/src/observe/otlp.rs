//! Traces for an OpenTelemetry collector: OTLP over HTTP with JSON bodies.
//!
//! Requests hand their traces to a bounded queue and go on; a task gathers and posts them. A trace
//! that finds the queue full, or a collector that does not accept it at the second attempt, is
//! dropped and counted.

mod endpoint;
mod span;

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::registry::Counter;
pub use endpoint::{Endpoint, EndpointError};
use endpoint::{Posted, post};
pub use span::{Attribute, Trace, TraceContext};

/// Most spans of one post.
const BATCH_SPANS: usize = 512;
/// How long the first of them waits for others.
const BATCH_WAIT: Duration = Duration::from_secs(5);
/// Traces that wait to be gathered.
const QUEUE_TRACES: usize = 2048;
const RETRY_AFTER: Duration = Duration::from_millis(500);
const FLUSH: Duration = Duration::from_secs(2);

/// A handle on the exporter; clones feed the same one.
#[derive(Clone, Debug)]
pub struct Traces(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    queue: mpsc::Sender<Message>,
    exported: Counter,
    dropped: Counter,
    /// Keyed by the system's random numbers: ids cannot be foreseen from others.
    random: [RandomState; 2],
    next: AtomicU64,
}

#[derive(Debug)]
enum Message {
    Trace(Box<Trace>),
    /// Answered when everything before it was posted or given up.
    Flush(oneshot::Sender<()>),
}

impl Traces {
    /// Starts the exporter's task on the runtime that this is called on. Nothing is connected to
    /// before the first trace.
    pub fn start(endpoint: Endpoint, service_name: &str) -> Traces {
        let (queue, receiver) = mpsc::channel(QUEUE_TRACES);
        let (exported, dropped) = (Counter::default(), Counter::default());
        let service_name = service_name.to_owned();
        let exporter =
            Exporter { endpoint, service_name, exported: exported.clone(), dropped: dropped.clone(), receiver };
        tokio::spawn(exporter.run());
        let random = [RandomState::new(), RandomState::new()];
        Traces(Arc::new(Inner { queue, exported, dropped, random, next: AtomicU64::new(0) }))
    }

    /// The context of a request's trace, from its `traceparent` header; none if its sender does not
    /// trace it.
    pub fn context(&self, traceparent: Option<&str>) -> Option<TraceContext> {
        let parent = traceparent.and_then(span::parse_traceparent);
        if parent.is_some_and(|parent| !parent.sampled) {
            return None;
        }
        let next = self.0.next.fetch_add(1, Relaxed);
        let trace_id = parent.map_or_else(|| self.number(next, 0), |parent| parent.trace_id);
        // A span's id is half of a number; its children's are found from it.
        let span_id = (self.number(next, 1) as u64).max(1);
        Some(TraceContext { trace_id: trace_id.max(1), span_id, parent: parent.map(|parent| parent.span_id) })
    }

    fn number(&self, index: u64, kind: u8) -> u128 {
        let [high, low] = [0, 1].map(|half: usize| self.0.random[half].hash_one((index, kind)));
        u128::from(high) << 64 | u128::from(low)
    }

    /// Queues a trace without waiting; it is dropped if the queue is full.
    pub fn submit(&self, trace: Trace) {
        let num_spans = trace.num_spans();
        if self.0.queue.try_send(Message::Trace(Box::new(trace))).is_err() {
            self.0.dropped.add(num_spans as u64);
        }
    }

    /// Waits until what was submitted so far is posted or given up, two seconds at most.
    pub async fn flush(&self) {
        let (sender, done) = oneshot::channel();
        let flushed = async {
            if self.0.queue.send(Message::Flush(sender)).await.is_ok() {
                let _ = done.await;
            }
        };
        // Traces that the collector has not accepted by then are lost.
        let _ = timeout(FLUSH, flushed).await;
    }

    /// Spans that the collector took.
    pub fn exported(&self) -> u64 {
        self.0.exported.get()
    }

    /// Spans that it did not take, or that found the queue full.
    pub fn dropped(&self) -> u64 {
        self.0.dropped.get()
    }
}

struct Exporter {
    endpoint: Endpoint,
    service_name: String,
    exported: Counter,
    dropped: Counter,
    receiver: mpsc::Receiver<Message>,
}

impl Exporter {
    async fn run(mut self) {
        while let Some(message) = self.receiver.recv().await {
            let (batch, flush) = self.gather(message).await;
            if !batch.is_empty() {
                self.export(&batch).await;
            }
            if let Some(done) = flush {
                // The receiver may have given up.
                let _ = done.send(());
            }
        }
    }

    /// Messages that arrive within the wait, up to a full batch.
    async fn gather(&mut self, first: Message) -> (Vec<Trace>, Option<oneshot::Sender<()>>) {
        let (mut batch, mut num_spans, deadline) = (Vec::new(), 0, Instant::now() + BATCH_WAIT);
        let mut message = first;
        loop {
            match message {
                Message::Flush(done) => return (batch, Some(done)),
                Message::Trace(trace) => {
                    num_spans += trace.num_spans();
                    batch.push(*trace);
                }
            }
            if num_spans >= BATCH_SPANS {
                return (batch, None);
            }
            match timeout_at(deadline, self.receiver.recv()).await {
                Ok(Some(next)) => message = next,
                Ok(None) | Err(_) => return (batch, None),
            }
        }
    }

    async fn export(&self, batch: &[Trace]) {
        let num_spans = batch.iter().map(|trace| trace.num_spans() as u64).sum();
        let body = span::body(batch, &self.service_name).to_string();
        let mut posted = post(&self.endpoint, &body).await;
        if posted == Posted::Failed {
            sleep(RETRY_AFTER).await;
            posted = post(&self.endpoint, &body).await;
        }
        let counter = if posted == Posted::Taken { &self.exported } else { &self.dropped };
        counter.add(num_spans);
    }
}

#[cfg(test)]
pub mod tests;
