//! Shape of a packed part, before anything is packed: the arrangement of its values, and their
//! number.

use super::LANES;
use super::packing::Packing;

/// Size `[outputs, inputs]` and packing of a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartShape {
    pub(crate) packing: Packing,
    pub(crate) outputs: usize,
    pub(crate) inputs: usize,
}

impl PartShape {
    fn panels(&self) -> usize {
        self.outputs.div_ceil(LANES)
    }

    /// Bytes of all panels, padding included.
    pub(crate) fn data_bytes(&self) -> usize {
        self.panels().saturating_mul(self.packing.panel_bytes(self.inputs))
    }

    pub(crate) fn num_factors(&self) -> usize {
        if self.packing.has_factors() { self.panels() * LANES } else { 0 }
    }

    /// Bytes of panels and factors.
    pub fn bytes(&self) -> u64 {
        self.data_bytes() as u64 + (self.num_factors() * size_of::<f32>()) as u64
    }
}
