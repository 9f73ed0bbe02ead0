//! Memory that operations need between their kernels. Each kind is allocated for the largest
//! possible step when it is first requested, at the latest by the first step; addresses in a
//! recorded step stay valid.

use super::driver::{Buffer, Device};
use crate::Result;

#[derive(Default)]
pub(super) struct Scratch {
    /// All buffers of each kind; the last is in use.
    buffers: [Vec<Buffer>; Scratch::KINDS],
}

impl Scratch {
    /// Partial results of attention.
    pub const PARTIAL: usize = 0;
    /// Weights widened for a product of many rows.
    pub const WEIGHTS: usize = 1;
    /// Rows of f32 narrowed to bf16.
    pub const ROWS: usize = 2;
    /// Scales of rows rounded to eight bits.
    pub const SCALES: usize = 3;
    /// For experts: lists of pairs, rows in their order, and the results of both products.
    pub const LISTS: usize = 4;
    pub const SORTED: usize = 5;
    pub const GATE_UP: usize = 6;
    pub const GATED: usize = 7;
    pub const DOWN: usize = 8;
    /// Rows of activations rounded to eight bits.
    pub const ROUNDED: usize = 9;
    /// Rows of activations in the order that products with codes read.
    pub const TURNED: usize = 10;
    const KINDS: usize = 11;

    /// The address of a buffer of at least this many bytes.
    pub fn at_least(&mut self, device: &Device, kind: usize, bytes: usize) -> Result<u64> {
        let buffers = &mut self.buffers[kind];
        if let Some(last) = buffers.last()
            && last.bytes() >= bytes
        {
            return Ok(last.ptr());
        }
        let buffer = device.alloc_zeroed("scratch of a step", bytes)?;
        let address = buffer.ptr();
        buffers.push(buffer);
        Ok(address)
    }
}
