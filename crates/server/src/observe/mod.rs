//! Observability: metrics for scrapers, a log for people, traces for collectors.
//!
//! An [`Observer`] is handed to all code that has something to report. Nothing here waits for a
//! reader: lines and spans that a log or a collector does not take are dropped and counted.
//! Prompts, answers and keys are never reported.

mod escape;
mod exposition;
mod log;
mod metrics;
mod observer;
mod otlp;
mod record;
mod registry;
mod snapshot;

pub use exposition::CONTENT_TYPE;
pub use log::{Field, Level, Log, LogFormat};
pub use observer::{Observer, ObserverConfig, Refusal};
pub use otlp::{Endpoint, EndpointError, Traces};
pub use record::{EndReason, RequestRecord, RequestStart};
pub use snapshot::Snapshot;
