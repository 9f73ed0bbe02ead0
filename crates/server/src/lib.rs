//! HTTP in, server-sent events out: the OpenAI and Anthropic wire formats over an engine that
//! speaks tokens.
//!
//! The only crate that knows axum and the wire types. A request is refused here, with its field
//! named, or becomes an engine request; nothing a client sends is ignored.

#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

mod answers;
mod body;
mod body_memory;
mod config;
mod error;
mod fields;
pub mod guard;
mod json;
pub mod kv_events;
pub mod net;
pub mod observe;
mod request;
mod routes;
mod service;
mod sse;
mod submit;
mod text_pool;
mod text_stream;

use std::time::{SystemTime, UNIX_EPOCH};

use folio_text::WallTime;

pub use body_memory::{BodyMemory, WHILE_READ as BODY_WHILE_READ, least as least_body_memory};
pub use config::{Limits, Timeouts};
pub use error::{ApiError, ErrorStyle};
pub use request::{ModelNames, SamplingDefaults, TextOptions};
pub use routes::metrics::metrics_router;
pub use routes::router;
pub use service::{App, Model, Service, Surroundings};
pub use text_stream::{AnswerToken, Finish, Piece, TextStream};

/// The date that chat templates may ask for, in UTC.
pub fn now() -> WallTime {
    WallTime::from_unix(unix_seconds() as i64, 0)
}

fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
