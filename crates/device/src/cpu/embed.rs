//! Embedding rows from the packed layout: one lane of one panel, all steps.

use super::Ctx;
use super::pool::Disjoint;
use super::tensor::Tensor;
use super::weight::Weight;

/// `out[r] = table[ids[r]] * scale`.
pub(crate) fn embed(ctx: Ctx<'_>, out: &mut Tensor, table: &Weight, ids: &[u32], scale: f32) {
    let cols = table.inputs();
    assert_eq!(out.cols(), cols, "width of an embedding");
    let out = Disjoint::new(out.head_mut(ids.len()));
    ctx.pool.for_each_static(ids.len(), 2, |range| {
        for row in range {
            // SAFETY: each row is written by one thread.
            let out = unsafe { out.part(row * cols..(row + 1) * cols) };
            table.read_output(ids[row] as usize, out);
            if scale != 1.0 {
                out.iter_mut().for_each(|value| *value *= scale);
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;

    use folio_formats::{Format, Matrix};
    use half::{bf16, f16};

    use super::*;
    use crate::cpu::packed::Supply;
    use crate::cpu::{Isa, Pool};

    #[test]
    fn rows_come_back_as_they_were_stored() {
        let pool = Pool::new(2).unwrap();
        let ctx = Ctx { pool: &pool, isa: Isa::Scalar };
        let (rows, cols) = (70usize, 33usize);
        for format in [Format::F32, Format::F16, Format::BF16] {
            // Whole numbers up to 100 are exact in every format.
            let bytes = |value: f32| match format {
                Format::F32 => value.to_le_bytes().to_vec(),
                Format::F16 => f16::from_f32(value).to_le_bytes().to_vec(),
                _ => bf16::from_f32(value).to_le_bytes().to_vec(),
            };
            let value = |row: usize, col: usize| ((row * 31 + col * 7) % 100) as f32;
            let row = |row: usize| Cow::Owned((0..cols).flat_map(|col| bytes(value(row, col))).collect());
            let matrix = Matrix::from_rows(format, cols, (0..rows).map(row).collect()).unwrap();
            let table = Weight::pack(ctx, &mut Supply::Fresh, &matrix).unwrap();
            let ids = [0u32, 69, 31, 32, 5, 69];
            let mut out = Tensor::new(8, cols).unwrap();
            embed(ctx, &mut out, &table, &ids, 0.5);
            for (row, &id) in ids.iter().enumerate() {
                let expected: Vec<f32> = (0..cols).map(|col| value(id as usize, col) * 0.5).collect();
                assert_eq!(out.row(row), expected, "{format:?} id {id}");
            }
        }
    }
}
