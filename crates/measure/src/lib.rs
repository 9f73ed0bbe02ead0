//! Measures speed: a load generator for any OpenAI endpoint, and the statistics that all
//! measurements share.
//!
//! A measurement takes plain options and returns a report, a struct with `text()` for people and
//! `json()` for programs. Nothing here reads flags or the environment, prints, or draws a progress
//! bar: a caller that wants one passes a [`Progress`].

pub mod load;
mod progress;
pub mod stats;

pub use progress::{Progress, Unwatched};
