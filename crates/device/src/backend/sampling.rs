//! Sampling on the device.

use crate::{Drawn, Draws, Handles, Result};

/// Turns rows of logits into tokens, where the device can.
pub trait Sampling: Handles {
    /// Whether [`Sampling::draw`] and [`Sampling::drawn`] may be called, and a batch may contain
    /// ids of
    /// [`DRAWN_TOKEN`](crate::DRAWN_TOKEN).
    fn draws_tokens(&self) -> bool {
        false
    }

    /// Starts to turn rows of the step's logits into tokens: at most one draw an output, perhaps
    /// none. The logits are used up. Does not wait. At most two calls may be in flight.
    fn draw(&mut self, _logits: &mut Self::Tensor, _draws: &Draws) {
        panic!("this device draws no tokens");
    }

    /// Whether [`Sampling::drawn`] would not wait.
    fn is_drawn(&mut self) -> bool {
        true
    }

    /// Waits for the oldest [`Sampling::draw`] in flight and returns its results, one entry a draw.
    fn drawn(&mut self, _out: &mut Vec<Drawn>) -> Result<()> {
        panic!("this device draws no tokens");
    }
}
