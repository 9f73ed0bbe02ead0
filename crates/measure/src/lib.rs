//! Measures speed and quality: a load generator for any OpenAI endpoint, benches of a model and of
//! the machine below it, and evaluations of a model's predictions.
//!
//! A measurement takes plain options and returns a report, a struct with `text()` for people and
//! `json()` for programs. Nothing here reads flags or the environment, prints, or draws a progress
//! bar: a caller that wants one passes a [`Progress`]. Messages of errors call an option by the
//! flag of the `folio` command that sets it.
//!
//! Without the feature `models` no engine is compiled: the load generator, the statistics and the
//! report of [`rates`] remain.

#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

#[cfg(feature = "models")]
pub mod bench;
#[cfg(feature = "models")]
pub mod eval;
pub mod load;
mod progress;
pub mod rates;
pub mod stats;
#[cfg(feature = "models")]
pub mod table;

pub use progress::{Progress, Unwatched};
