//! Helpers that the tests of all crates share. No product code depends on this crate. Without
//! features it depends on the standard library alone, so that every crate's unit tests can use it.

pub mod folder;
pub mod http;
pub mod rng;
pub mod skip;
pub mod wait;
#[cfg(feature = "weights")]
pub mod weights;

pub use folder::Folder;
pub use rng::{Rng, fnv1a, noise};
#[cfg(feature = "weights")]
pub use weights::{Tensor, Weights};
