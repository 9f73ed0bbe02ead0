//! HTTP in, server-sent events out: the OpenAI and Anthropic wire formats over an engine that speaks tokens.
//!
//! The only crate that knows axum and the wire types. A request is refused here, with its field named, or becomes an
//! engine request; nothing a client sends is ignored.

mod config;
mod error;
mod guard;
mod net;
mod observe;

pub use config::{Limits, Timeouts};
pub use error::{ApiError, ErrorStyle};
