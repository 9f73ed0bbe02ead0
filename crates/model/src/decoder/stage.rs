//! A part of a model: some consecutive layers, with or without the embedding before and the head
//! behind them.
//!
//! Stages pass hidden states on to each other, so that a model can be run layer by layer in little
//! memory, or divided among devices.

use std::ops::Range;

use crate::ModelSpec;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stage {
    pub layers: Range<usize>,
    /// Whether it begins with token ids; otherwise with hidden states.
    pub embeds: bool,
    /// Whether it ends in logits; otherwise in hidden states.
    pub ends: bool,
}

impl Stage {
    pub fn whole(spec: &ModelSpec) -> Self {
        Self { layers: 0..spec.layers.len(), embeds: true, ends: true }
    }

    /// Only layers, from hidden states to hidden states.
    pub fn layers(layers: Range<usize>) -> Self {
        Self { layers, embeds: false, ends: false }
    }

    /// The spec of this part.
    pub fn spec(&self, whole: &ModelSpec) -> ModelSpec {
        ModelSpec { layers: whole.layers[self.layers.clone()].to_vec(), ..whole.clone() }
    }
}
