//! Rows as plain values.

use folio_formats::{Format, Part};
use half::bf16;

use super::super::tensor::Float;

/// One row of a part as bf16 or f32, in the device's byte order.
pub fn read_row(part: &Part<'_>, row: usize, values: Float, out: &mut [u8]) {
    match (part.format(), values) {
        (Some(Format::BF16), Float::Bf16) | (Some(Format::F32), Float::F32) => out.copy_from_slice(part.row(row)),
        (_, Float::Bf16) => {
            let mut decoded = vec![0.0; part.cols()];
            part.read_row(row, &mut decoded);
            for (place, value) in out.as_chunks_mut::<2>().0.iter_mut().zip(decoded) {
                *place = bf16::from_f32(value).to_le_bytes();
            }
        }
        (_, Float::F32) => {
            let mut decoded = vec![0.0; part.cols()];
            part.read_row(row, &mut decoded);
            for (place, value) in out.as_chunks_mut::<4>().0.iter_mut().zip(decoded) {
                *place = value.to_le_bytes();
            }
        }
    }
}
