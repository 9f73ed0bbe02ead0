//! Inputs of heads that draft tokens: states of every row of the last step, and the decoder's two
//! big matrices.
//!
//! Nothing is copied unless it was requested, and then it is one copy of the stream per tapped
//! layer.

use folio_device::{Backend, Product, TensorKind};

use super::{Decoder, check};
use crate::{ModelSpec, Result, linear::Linear};

/// The states of a step that are copied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tap {
    /// The residual stream before each of these layers, side by side in a row.
    Before(Vec<usize>),
    /// The input of the output matrix, for all rows, with or without logits.
    Final,
}

pub(super) struct Taps<B: Backend> {
    tap: Tap,
    hidden: usize,
    /// The copied states, side by side. [rows, widths of all tapped states]
    states: B::Tensor,
    /// Number of rows in the last step.
    num_rows: usize,
}

impl<B: Backend> Taps<B> {
    /// Whether the stream is copied, which not every device can record.
    pub fn copies(&self) -> bool {
        matches!(self.tap, Tap::Before(_))
    }

    pub fn before(&mut self, backend: &mut B, layer: usize, stream: &B::Tensor, rows: usize) {
        let Tap::Before(layers) = &self.tap else { return };
        for (place, _) in layers.iter().enumerate().filter(|(_, tapped)| **tapped == layer) {
            backend.copy_columns(&mut self.states, place * self.hidden, stream, rows);
        }
    }

    pub fn behind(&mut self, backend: &mut B, stream: &B::Tensor, norm: &B::Vector, eps: f32, rows: usize) {
        if self.tap == Tap::Final {
            backend.rms_norm(&mut self.states, stream, norm, eps, rows);
        }
    }
}

/// A decoder's parts, borrowed by a head.
pub(crate) struct Lent<'a, B: Backend> {
    pub backend: &'a mut B,
    pub spec: &'a ModelSpec,
    pub embedding: &'a B::Weight,
    pub output: Product<'a, B>,
    /// States behind the last norm of the output rows.
    pub hidden: &'a B::Tensor,
    /// States requested by [`Decoder::tap`], of all rows.
    pub tapped: Option<&'a B::Tensor>,
}

impl<B: Backend> Decoder<B> {
    /// Copies these states of all rows from the next step on. Only for a decoder of the whole
    /// model.
    pub fn tap(&mut self, tap: Tap) -> Result<()> {
        let hidden = self.spec.hidden;
        let width = match &tap {
            Tap::Before(layers) => {
                let last = layers.iter().copied().max().unwrap_or(0);
                check::most("a tapped layer", last, self.spec.layers.len() - 1)?;
                layers.len() * hidden
            }
            Tap::Final => hidden,
        };
        let states = self.backend.tensor(self.limits.rows, width, TensorKind::Stream)?;
        let bytes = self.limits.rows * width * self.backend.value_bytes(TensorKind::Stream);
        self.memory.activations += bytes as u64;
        self.taps = Some(Taps { tap, hidden, states, num_rows: 0 });
        self.backend.forget_steps();
        Ok(())
    }

    /// The tapped states of all rows of the last step; empty if nothing is tapped.
    pub fn tapped(&mut self, out: &mut Vec<f32>) {
        out.clear();
        if let Some(taps) = &self.taps {
            self.backend.download(&taps.states, taps.num_rows, out);
        }
    }

    pub(super) fn note_tapped(&mut self, rows: usize) {
        if let Some(taps) = &mut self.taps {
            taps.num_rows = rows;
        }
    }

    /// Number of rows with tapped states in the last step.
    pub(crate) fn num_tapped(&self) -> usize {
        self.taps.as_ref().map_or(0, |taps| taps.num_rows)
    }

    /// Number of rows of the last step with states behind the last norm.
    pub(crate) fn num_outputs(&self) -> usize {
        self.num_outputs
    }

    /// Asserts that the decoder is one of a whole model: a stage in the middle has neither table
    /// nor head to lend.
    pub(crate) fn lend(&mut self) -> Lent<'_, B> {
        let embedding = self.embedding.as_ref().expect("a whole model has an embedding table");
        let tied = Product { weight: embedding, bias: None };
        Lent {
            backend: &mut self.backend,
            spec: &self.spec,
            embedding,
            output: self.head.as_ref().map_or(tied, Linear::product),
            hidden: &self.acts.picked_normed,
            tapped: self.taps.as_ref().map(|taps| &taps.states),
        }
    }
}
