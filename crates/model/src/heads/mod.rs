//! Heads that draft tokens from a decoder's hidden states. They run on the decoder's own backend and lend its embedding
//! table and output matrix; what they say is only ever a guess, which the decoder then verifies.
//!
//! - [`Medusa`]: one small block a token ahead, all reading the same state.
//! - [`Eagle`]: one decoder layer with keys and values of its own, which goes on from its own states.

mod eagle;
mod layer;
mod medusa;
mod stored;

pub use eagle::{Eagle, EagleLayout, EagleRoom, Feature};
pub use medusa::Medusa;
