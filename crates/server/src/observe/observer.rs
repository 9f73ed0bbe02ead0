//! The handle that the server reports events through.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::exposition::Exposition;
use super::log::{Field, Level, Log};
use super::metrics::Metrics;
use super::otlp::Traces;
use super::record::{RequestRecord, RequestStart};
use super::snapshot::Snapshot;

/// How long the log may take to be written out at the end.
const LOG_FLUSH: Duration = Duration::from_millis(500);

#[derive(Debug)]
pub struct ObserverConfig {
    pub model_name: Arc<str>,
    pub max_model_len: usize,
    /// When the process started.
    pub started: SystemTime,
    pub log: Log,
    pub traces: Option<Traces>,
}

/// A handle; clones tell the same.
#[derive(Clone, Debug)]
pub struct Observer(pub(super) Arc<Inner>);

#[derive(Debug)]
pub(super) struct Inner {
    pub metrics: Metrics,
    pub model_name: Arc<str>,
    pub log: Log,
    pub traces: Option<Traces>,
}

/// A request that was answered with an error before it generated anything.
#[derive(Clone, Copy, Debug)]
pub struct Refusal<'a> {
    pub route: &'a str,
    pub request_id: &'a str,
    pub key_name: Option<&'a str>,
    pub status: u16,
    /// The error's code or kind, of our own catalogue.
    pub code: Option<&'a str>,
    pub arrived: Instant,
}

impl Observer {
    pub fn new(config: ObserverConfig) -> Self {
        let ObserverConfig { model_name, max_model_len, started, log, traces } = config;
        let started = started.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        let metrics = Metrics::new(&model_name, max_model_len, started);
        Self(Arc::new(Inner { metrics, model_name, log, traces }))
    }

    /// An observer that only counts, without log and traces.
    pub fn quiet(model_name: &str, max_model_len: usize) -> Self {
        let (started, log) = (SystemTime::now(), Log::off());
        Self::new(ObserverConfig { model_name: model_name.into(), max_model_len, started, log, traces: None })
    }

    /// A request that will generate has come in.
    pub fn begin(&self, start: RequestStart<'_>) -> RequestRecord {
        RequestRecord::new(self.clone(), start)
    }

    /// A request was refused; for those also that have no record.
    pub fn refused(&self, refusal: &Refusal<'_>) {
        self.0.metrics.refusals(refusal.status).add(1);
        let level = if refusal.status >= 500 { Level::Warn } else { Level::Info };
        let mut fields: Vec<(&str, Field<'_>)> = vec![("request_id", refusal.request_id.into())];
        fields.extend(refusal.key_name.map(|name| ("key", name.into())));
        fields.push(("route", refusal.route.into()));
        fields.push(("status", refusal.status.into()));
        fields.extend(refusal.code.map(|code| ("code", code.into())));
        fields.push(("total_ms", refusal.arrived.elapsed().into()));
        self.0.log.write(level, "refused", &fields);
    }

    /// A panic was caught, in the part of the server that is named.
    pub fn panicked(&self, place: &str) {
        self.0.metrics.panics.add(1);
        self.0.log.error("panic caught", &[("in", place.into())]);
    }

    pub fn log(&self) -> &Log {
        &self.0.log
    }

    /// All metrics as of now, as [`super::CONTENT_TYPE`]. The observer fills in the values that it
    /// holds itself.
    pub fn render(&self, mut snapshot: Snapshot) -> String {
        snapshot.log_lines_dropped = self.0.log.dropped();
        if let Some(traces) = &self.0.traces {
            snapshot.spans_exported = traces.exported();
            snapshot.spans_dropped = traces.dropped();
        }
        let mut out = Exposition::default();
        snapshot.write_vllm(&mut out, &self.0.model_name);
        self.0.metrics.write(&mut out);
        snapshot.write_folio(&mut out);
        out.into_text()
    }

    /// Hands what is left to the collector and to the log's reader, or gives up after two seconds
    /// and a half.
    pub async fn shutdown(&self) {
        if let Some(traces) = &self.0.traces {
            traces.flush().await;
        }
        let log = self.0.log.clone();
        // A log that cannot be flushed is not waited for.
        let _ = tokio::task::spawn_blocking(move || log.flush(LOG_FLUSH)).await;
    }
}
