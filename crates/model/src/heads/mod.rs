//! Heads that draft tokens from a decoder's hidden states. They run on the decoder's own backend
//! and borrow its embedding table and output matrix; their results are drafts, which the decoder
//! then verifies.
//!
//! - [`Medusa`]: one small block per drafted token, all reading the same state.
//! - [`Eagle`]: one decoder layer with keys and values of its own, which continues from its own
//!   states.

mod eagle;
mod layer;
mod medusa;
mod stored;

pub use eagle::{Eagle, EagleLayout, EagleRoom, Feature};
pub use medusa::Medusa;
