//! Simulates the scheduler: the real one, under traffic, clock and faults that all follow from one
//! seed.
//!
//! A mock model answers with a hash of everything read through the block tables, which shows every
//! wrong block, and the invariants are checked at every step. A run is a list of events, so that a
//! failing run can be shrunk to a short one.

pub mod client;
pub mod coverage;
pub mod disk;
pub mod driver;
mod events;
mod fairness;
pub mod hash;
pub mod invariants;
pub mod model;
mod perturb;
mod progress;
pub mod scenario;
pub mod shrink;
pub mod sweep;
mod trace;
pub mod truth;
pub mod world;

pub use client::{Client, End, Wants};
pub use driver::{Departure, Driver, Manners};
pub use invariants::{Invariant, Violation};
pub use perturb::Perturb;
pub use scenario::Scenario;
pub use truth::{Sampling, Truth, reference};
pub use world::{Mode, Outcome, play};
