//! The frame of a step: its inputs, its recording, and the properties of a device that decide how a
//! caller asks for operations.

use crate::{Batch, Handles, Pulse, Result};

/// Begins and ends steps.
pub trait Steps: Handles {
    /// Names the backend and its kernels: all that the bits of a result depend on besides its
    /// inputs. Two backends of one name compute the same bits.
    fn numerics(&self) -> String;

    /// A counter that goes on while operations run. None if a step shows nothing before its end.
    fn pulse(&self) -> Option<Pulse> {
        None
    }

    /// The most rows for which a caller should ask for
    /// [`norm_linear`](crate::Operations::norm_linear),
    /// [`norm_linear_gated`](crate::Operations::norm_linear_gated) and
    /// [`linear_add`](crate::Operations::linear_add): the device computes each of them at once. For
    /// more rows a caller asks for their parts one by one. Zero if the bits of a row must not
    /// depend on the number of rows.
    fn fused_rows(&self) -> usize {
        0
    }

    /// Whether [`copy_columns`](crate::Operations::copy_columns) may be part of a recorded step.
    fn records_copies(&self) -> bool {
        false
    }

    /// Takes over the step's ids, positions, spans and tables.
    ///
    /// The operations that follow are asked for the size returned, which is at least the batch's
    /// own: a device may pad a step of short spans in which every row has an output up to a size
    /// that it has recorded. Padding rows lie behind the others, write no keys, and are ignored.
    fn upload(&mut self, inputs: &mut Self::Inputs, batch: &Batch) -> StepSize;

    /// Called before the operations of an uploaded step; logits are computed for its first
    /// `num_logits` outputs. False if a recording has run all of the operations: the caller then
    /// leaves them out, [`Steps::end`] included.
    fn begin(&mut self, _inputs: &Self::Inputs, _num_logits: usize) -> bool {
        true
    }

    /// Called after the operations of a step if [`Steps::begin`] asked for them.
    fn end(&mut self, _inputs: &Self::Inputs) {}

    /// Drops all recordings: steps from now on ask for other operations than those before.
    fn forget_steps(&mut self) {}

    /// The first error on the device that an operation could not return; called at the end of each
    /// step. It does not wait for the device: a later call returns an error that the device has yet
    /// to find.
    fn check(&mut self) -> Result<()> {
        Ok(())
    }
}

/// The number of rows that the operations of a step are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepSize {
    pub rows: usize,
    pub outputs: usize,
}

impl StepSize {
    /// The batch's own size, without padding.
    pub fn of(batch: &Batch) -> Self {
        Self { rows: batch.num_rows(), outputs: batch.outputs.len() }
    }
}
