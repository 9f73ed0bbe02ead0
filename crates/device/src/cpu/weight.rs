//! Weights in the one layout that serves one row and 512: outputs in panels of 32 lanes, the inner dimension running
//! through a panel in memory order.
//!
//! | stored as | panel layout | a step |
//! |---|---|---|
//! | F32 | `[k][32]` f32 | 128 bytes, one inner value |
//! | F16 | `[k][32]` f16 | 64 bytes, one inner value |
//! | BF16 | `[k / 2][32][2]` bf16 | 128 bytes, two inner values: one dot-product instruction takes both |
//!
//! Quantized formats are decoded and held as BF16: right for every format from the first day, at the price of memory
//! and decode speed. Kernels that read quantized blocks directly are further rows of this table.

use folio_formats::{Format, Matrix};
use half::bf16;

use super::Ctx;
use super::buffer::Buffer;
use super::pool::Disjoint;
use crate::{Error, Result};

/// Outputs in a panel.
pub const LANES: usize = 32;

/// How the values of a panel lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    F32,
    F16,
    BF16,
}

impl Packing {
    fn for_format(format: Option<Format>) -> Result<Self> {
        match format {
            Some(Format::F32) => Ok(Packing::F32),
            Some(Format::F16) => Ok(Packing::F16),
            Some(format @ (Format::I8 | Format::U8 | Format::I16 | Format::I32 | Format::I64 | Format::F64)) => {
                Err(Error::UnsupportedFormat { backend: "cpu", format })
            }
            _ => Ok(Packing::BF16),
        }
    }

    /// Inner values in a step.
    pub fn step_values(self) -> usize {
        match self {
            Packing::F32 | Packing::F16 => 1,
            Packing::BF16 => 2,
        }
    }

    /// Bytes of a step, all lanes.
    pub fn step_bytes(self) -> usize {
        match self {
            Packing::F32 | Packing::BF16 => 4 * LANES,
            Packing::F16 => 2 * LANES,
        }
    }
}

/// `[outputs, inputs]`, packed. The last panel's missing outputs and a missing last inner value are zeros.
pub struct Weight {
    outputs: usize,
    inputs: usize,
    packing: Packing,
    data: Buffer<u8>,
}

impl Weight {
    pub(crate) fn pack(ctx: Ctx<'_>, matrix: &Matrix<'_>) -> Result<Self> {
        let packing = Packing::for_format(matrix.format())?;
        let (outputs, inputs) = (matrix.num_rows(), matrix.cols());
        let panels = outputs.div_ceil(LANES);
        let panel_bytes = inputs.div_ceil(packing.step_values()) * packing.step_bytes();
        let mut data = Buffer::zeroed("a weight", panels.saturating_mul(panel_bytes))?;
        if panel_bytes > 0 {
            let target = Disjoint::new(&mut data);
            ctx.pool.for_each_chunk(panels, 1, |range| {
                for panel in range {
                    // SAFETY: each panel is packed by one thread, and panels do not overlap.
                    let target = unsafe { target.part(panel * panel_bytes..(panel + 1) * panel_bytes) };
                    pack_panel(matrix, packing, panel * LANES, target);
                }
            });
        }
        Ok(Self { outputs, inputs, packing, data })
    }

    pub fn outputs(&self) -> usize {
        self.outputs
    }

    pub fn inputs(&self) -> usize {
        self.inputs
    }

    pub(crate) fn packing(&self) -> Packing {
        self.packing
    }

    /// Bytes held, padding included.
    pub fn bytes(&self) -> u64 {
        self.data.len() as u64
    }

    pub(crate) fn num_panels(&self) -> usize {
        self.outputs.div_ceil(LANES)
    }

    /// Steps of the inner dimension in each panel.
    pub(crate) fn num_steps(&self) -> usize {
        self.inputs.div_ceil(self.packing.step_values())
    }

    pub(crate) fn panel(&self, panel: usize) -> &[u8] {
        let bytes = self.num_steps() * self.packing.step_bytes();
        &self.data[panel * bytes..(panel + 1) * bytes]
    }
}

/// Packs outputs `first .. first + 32`, as far as they exist.
fn pack_panel(matrix: &Matrix<'_>, packing: Packing, first: usize, target: &mut [u8]) {
    let lanes = LANES.min(matrix.num_rows() - first);
    match (packing, matrix.format()) {
        (Packing::F32, _) => interleave::<4>(lanes, |lane| matrix.parts()[0].row(first + lane), target),
        (Packing::F16, _) => interleave::<2>(lanes, |lane| matrix.parts()[0].row(first + lane), target),
        (Packing::BF16, Some(Format::BF16)) => {
            interleave::<4>(lanes, |lane| matrix.parts()[0].row(first + lane), target)
        }
        (Packing::BF16, _) => {
            let (decoded, row_bytes) = decode_rows(matrix, first, lanes);
            interleave::<4>(lanes, |lane| &decoded[lane * row_bytes..(lane + 1) * row_bytes], target);
        }
    }
}

/// The rows as bf16 bytes, one after the other, and the bytes of each.
fn decode_rows(matrix: &Matrix<'_>, first: usize, lanes: usize) -> (Vec<u8>, usize) {
    let row_bytes = 2 * matrix.cols();
    let mut values = vec![0.0f32; matrix.cols()];
    let mut decoded = Vec::with_capacity(lanes * row_bytes);
    for lane in 0..lanes {
        matrix.read_row(first + lane, &mut values);
        decoded.extend(values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()));
    }
    (decoded, row_bytes)
}

/// Writes unit `i` of lane `l` (units of `N` bytes) to place `i * 32 + l`. A row that ends inside a unit is padded by
/// the zeros already there.
fn interleave<'a, const N: usize>(lanes: usize, row: impl Fn(usize) -> &'a [u8], target: &mut [u8]) {
    /// Units taken from a lane before the next lane's turn: a cache line of source, a few KiB of target.
    const RUN: usize = 16;
    let (places, _) = target.as_chunks_mut::<N>();
    for (block, places) in places.chunks_mut(RUN * LANES).enumerate() {
        for lane in 0..lanes {
            let row = row(lane);
            let row = &row[(block * RUN * N).min(row.len())..];
            let row = &row[..row.len().min(RUN * N)];
            let (units, rest) = row.as_chunks::<N>();
            for (unit, place) in units.iter().zip(places[lane..].iter_mut().step_by(LANES)) {
                *place = *unit;
            }
            if !rest.is_empty() {
                places[units.len() * LANES + lane][..rest.len()].copy_from_slice(rest);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;

    use super::*;
    use crate::cpu::{Isa, Pool};

    fn matrix(format: Format, rows: usize, cols: usize) -> Matrix<'static> {
        let value = |row: usize, col: usize| (row * 7 + col) as f32 % 61.0 - 30.0;
        let rows = (0..rows).map(|row| {
            let values = (0..cols).map(|col| value(row, col));
            Cow::Owned(match format {
                Format::F32 => values.flat_map(f32::to_le_bytes).collect::<Vec<u8>>(),
                Format::F16 => values.flat_map(|v| half::f16::from_f32(v).to_le_bytes()).collect(),
                _ => values.flat_map(|v| bf16::from_f32(v).to_le_bytes()).collect(),
            })
        });
        Matrix::from_rows(format, cols, rows.collect()).unwrap()
    }

    /// One value, read back from the layout that the module's table describes.
    fn value(weight: &Weight, output: usize, k: usize) -> f32 {
        let (panel, lane) = (weight.panel(output / LANES), output % LANES);
        let short = |at: usize| u16::from_le_bytes([panel[2 * at], panel[2 * at + 1]]);
        match weight.packing() {
            Packing::F32 => {
                let at = 4 * (k * LANES + lane);
                f32::from_le_bytes([panel[at], panel[at + 1], panel[at + 2], panel[at + 3]])
            }
            Packing::F16 => half::f16::from_bits(short(k * LANES + lane)).to_f32(),
            Packing::BF16 => bf16::from_bits(short((k / 2 * LANES + lane) * 2 + k % 2)).to_f32(),
        }
    }

    #[test]
    fn every_value_lies_where_the_table_says() {
        let pool = Pool::new(2).unwrap();
        let ctx = Ctx { pool: &pool, isa: Isa::Scalar };
        for format in [Format::F32, Format::F16, Format::BF16] {
            for (outputs, inputs) in [(1, 1), (32, 32), (33, 31), (70, 131)] {
                let matrix = matrix(format, outputs, inputs);
                let weight = Weight::pack(ctx, &matrix).unwrap();
                let mut row = vec![0.0; inputs];
                for output in 0..outputs {
                    matrix.read_row(output, &mut row);
                    for (k, &expected) in row.iter().enumerate() {
                        assert_eq!(value(&weight, output, k), expected, "{format:?} [{output}, {k}]");
                    }
                }
                let stored = weight.num_panels() * weight.num_steps() * weight.packing().step_bytes();
                assert_eq!(weight.bytes(), stored as u64);
            }
        }
    }

    #[test]
    fn index_tensors_are_refused() {
        let pool = Pool::new(1).unwrap();
        let ctx = Ctx { pool: &pool, isa: Isa::Scalar };
        let matrix = Matrix::from_rows(Format::U8, 2, vec![Cow::Owned(vec![1, 2])]).unwrap();
        assert!(matches!(Weight::pack(ctx, &matrix), Err(Error::UnsupportedFormat { .. })));
    }
}
