//! The inputs of one step, in memory allocated once: ids, positions, spans, block tables, angles of
//! the rotary embedding, and attention's scratch memory.

use std::sync::Mutex;

use super::buffer::Buffer;
use super::pool::Disjoint;
use super::{Ctx, Vector, attention};
use crate::{Batch, Error, GroupTables, InputLimits, Result, Span};

pub struct Inputs {
    limits: InputLimits,
    tokens: Vec<u32>,
    positions: Vec<u32>,
    spans: Vec<Span>,
    ancestors: Vec<u64>,
    groups: Vec<GroupTables>,
    outputs: Vec<u32>,
    ropes: Vec<Rope>,
    /// Sorted slots, in which `upload` looks for duplicates.
    sorted_slots: Vec<u32>,
    /// Behind a lock because operations share their inputs; it is never contended.
    pub(crate) attention: Mutex<attention::Scratch>,
}

/// Cosines and sines of one rotary embedding, `[row][pairs]`.
pub(crate) struct Rope {
    /// Number of rows with valid angles: none after `upload`, all of the step's after
    /// `rope_angles`.
    rows: usize,
    pairs: usize,
    cos: Buffer<f32>,
    sin: Buffer<f32>,
}

impl Rope {
    pub fn pairs(&self) -> usize {
        self.pairs
    }

    /// Cosines and sines of one row.
    #[inline(always)]
    pub fn row(&self, row: usize) -> (&[f32], &[f32]) {
        let range = row * self.pairs..(row + 1) * self.pairs;
        (&self.cos[range.clone()], &self.sin[range])
    }
}

impl Inputs {
    pub fn new(limits: InputLimits) -> Result<Self> {
        // A product beyond a usize is a buffer beyond any memory.
        let angles = limits.rows.saturating_mul(limits.rope_pairs);
        let tables = |_| {
            Ok(GroupTables {
                slots: reserved(limits.rows)?,
                blocks: reserved(limits.table_entries)?,
                first_block: reserved(limits.spans)?,
            })
        };
        let rope = |_| {
            let (cos, sin) = (Buffer::zeroed("cosines", angles)?, Buffer::zeroed("sines", angles)?);
            Ok(Rope { rows: 0, pairs: 0, cos, sin })
        };
        Ok(Self {
            limits,
            tokens: reserved(limits.rows)?,
            positions: reserved(limits.rows)?,
            spans: reserved(limits.spans)?,
            ancestors: reserved(limits.rows)?,
            groups: (0..limits.groups).map(tables).collect::<Result<_>>()?,
            outputs: reserved(limits.rows)?,
            ropes: (0..limits.ropes).map(rope).collect::<Result<_>>()?,
            sorted_slots: reserved(limits.rows)?,
            attention: Mutex::new(attention::Scratch::new(limits)?),
        })
    }

    /// Bytes of all its buffers.
    #[cfg(test)]
    pub fn bytes(&self) -> u64 {
        let words = [&self.tokens, &self.positions, &self.outputs, &self.sorted_slots];
        let tables = self.groups.iter().flat_map(|group| [&group.slots, &group.blocks, &group.first_block]);
        let words: usize = words.into_iter().chain(tables).map(|list| 4 * list.capacity()).sum();
        let wide = 8 * self.ancestors.capacity() + size_of::<Span>() * self.spans.capacity();
        let angles: usize = self.ropes.iter().map(|rope| size_of_val(&rope.cos[..]) + size_of_val(&rope.sin[..])).sum();
        let attention = self.attention.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        (words + wide + angles) as u64 + attention.bytes()
    }

    pub fn num_rows(&self) -> usize {
        self.tokens.len()
    }

    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    pub fn outputs(&self) -> &[u32] {
        &self.outputs
    }

    pub fn spans(&self) -> &[Span] {
        &self.spans
    }

    /// Ancestor words of all rows, or none if the step has no tree.
    pub fn ancestors(&self) -> &[u64] {
        &self.ancestors
    }

    pub fn group(&self, group: usize) -> &GroupTables {
        &self.groups[group]
    }

    pub(crate) fn rope(&self, rope: usize) -> &Rope {
        let angles = &self.ropes[rope];
        assert_eq!(angles.rows, self.num_rows(), "rows with angles of rope {rope} and rows of the step");
        angles
    }
}

/// An empty vector with room for `len` values.
pub(super) fn reserved<T>(len: usize) -> Result<Vec<T>> {
    let mut values = Vec::new();
    let bytes = (len as u64).saturating_mul(size_of::<T>() as u64);
    values.try_reserve_exact(len).map_err(|_| Error::OutOfMemory { what: "a step's inputs", bytes })?;
    Ok(values)
}

fn copy<T: Copy>(to: &mut Vec<T>, from: &[T]) {
    to.clear();
    to.extend_from_slice(from);
}

/// Stores a step's inputs. A batch that exceeds the limits or contradicts itself is a bug.
pub fn upload(_ctx: Ctx<'_>, inputs: &mut Inputs, batch: &Batch) {
    batch.check(&inputs.limits);
    batch.groups.iter().for_each(|group| check_slots(&group.slots, &mut inputs.sorted_slots));
    copy(&mut inputs.tokens, &batch.tokens);
    copy(&mut inputs.positions, &batch.positions);
    copy(&mut inputs.spans, &batch.spans);
    copy(&mut inputs.ancestors, &batch.ancestors);
    copy(&mut inputs.outputs, &batch.outputs);
    inputs.ropes.iter_mut().for_each(|rope| rope.rows = 0);
    for (to, from) in inputs.groups.iter_mut().zip(&batch.groups) {
        copy(&mut to.slots, &from.slots);
        copy(&mut to.blocks, &from.blocks);
        copy(&mut to.first_block, &from.first_block);
    }
}

/// Threads write the slots of their own rows, so two threads would write a slot that two rows
/// share.
fn check_slots(slots: &[u32], sorted: &mut Vec<u32>) {
    copy(sorted, slots);
    sorted.sort_unstable();
    if let Some(pair) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        panic!("two rows write slot {}", pair[0]);
    }
}

/// Cosines and sines of this step's positions. The angle is the f32 product, as in every
/// implementation; its cosine and sine are rounded from f64.
pub fn rope_angles(ctx: Ctx<'_>, inputs: &mut Inputs, rope: usize, inv_freq: &Vector, magnitude: f32) {
    let pairs = inv_freq.len();
    assert!(pairs <= inputs.limits.rope_pairs, "a rope of {pairs} pairs, limit {}", inputs.limits.rope_pairs);
    let positions = &inputs.positions;
    let table = &mut inputs.ropes[rope];
    (table.rows, table.pairs) = (positions.len(), pairs);
    let (all_cos, all_sin) = (Disjoint::new(&mut table.cos), Disjoint::new(&mut table.sin));
    let frequencies: &[f32] = inv_freq;
    ctx.pool.for_each_static(positions.len(), 16, |rows| {
        let range = rows.start * pairs..rows.end * pairs;
        // SAFETY: threads have different rows, and rows do not overlap.
        let (cos, sin) = unsafe { (all_cos.part(range.clone()), all_sin.part(range)) };
        for (i, row) in rows.enumerate() {
            let position = positions[row] as f32;
            for (pair, &frequency) in frequencies.iter().enumerate() {
                let (sine, cosine) = f64::from(position * frequency).sin_cos();
                cos[i * pairs + pair] = cosine as f32 * magnitude;
                sin[i * pairs + pair] = sine as f32 * magnitude;
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{Isa, Pool};

    #[test]
    fn angles_match_plain_loops_on_any_number_of_threads() {
        let limits =
            InputLimits { rows: 70, spans: 1, outputs: 1, table_entries: 8, groups: 1, ropes: 2, rope_pairs: 5 };
        let positions: Vec<u32> = (0..70).map(|row| row * 997).collect();
        let span = Span { first_row: 0, num_rows: 70, context: 70 };
        let tables = GroupTables { slots: (0..70).collect(), blocks: vec![0; 5], first_block: vec![0] };
        let batch = Batch {
            tokens: vec![1; 70],
            positions: positions.clone(),
            spans: vec![span],
            ancestors: Vec::new(),
            groups: vec![tables],
            outputs: vec![69],
        };
        let frequencies = [1.0f32, 0.31, 0.01, 7e-4, 1e-6];
        for threads in [1, 2, 3] {
            let pool = Pool::new(threads).unwrap();
            let ctx = Ctx { pool: &pool, isa: Isa::Scalar };
            let mut inputs = Inputs::new(limits).unwrap();
            upload(ctx, &mut inputs, &batch);
            rope_angles(ctx, &mut inputs, 1, &Vector::new(&frequencies).unwrap(), 1.5);
            for (row, &position) in positions.iter().enumerate() {
                let (cos, sin) = inputs.rope(1).row(row);
                for (pair, &frequency) in frequencies.iter().enumerate() {
                    let angle = f64::from(position as f32 * frequency);
                    assert_eq!(cos[pair], angle.cos() as f32 * 1.5, "row {row} pair {pair}");
                    assert_eq!(sin[pair], angle.sin() as f32 * 1.5, "row {row} pair {pair}");
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "angles of rope 0")]
    fn angles_of_an_earlier_step_are_refused() {
        let limits =
            InputLimits { rows: 4, spans: 1, outputs: 1, table_entries: 1, groups: 1, ropes: 1, rope_pairs: 1 };
        let batch = Batch {
            tokens: vec![1],
            positions: vec![3],
            spans: vec![Span { first_row: 0, num_rows: 1, context: 4 }],
            ancestors: Vec::new(),
            groups: vec![GroupTables { slots: vec![3], blocks: vec![0], first_block: vec![0] }],
            outputs: vec![],
        };
        let pool = Pool::new(1).unwrap();
        let ctx = Ctx { pool: &pool, isa: Isa::Scalar };
        let mut inputs = Inputs::new(limits).unwrap();
        upload(ctx, &mut inputs, &batch);
        rope_angles(ctx, &mut inputs, 0, &Vector::new(&[1.0]).unwrap(), 1.0);
        assert_eq!(inputs.rope(0).pairs(), 1);
        upload(ctx, &mut inputs, &batch);
        inputs.rope(0);
    }

    #[test]
    fn impossible_limits_are_an_error() {
        let small = InputLimits { rows: 4, spans: 1, outputs: 1, table_entries: 1, groups: 1, ropes: 1, rope_pairs: 1 };
        for limits in [
            InputLimits { rows: usize::MAX / 2, ..small },
            InputLimits { spans: usize::MAX / 2, ..small },
            InputLimits { table_entries: usize::MAX, ..small },
            InputLimits { rope_pairs: usize::MAX, ..small },
        ] {
            assert!(matches!(Inputs::new(limits), Err(Error::OutOfMemory { .. })), "{limits:?}");
        }
    }

    #[test]
    #[should_panic(expected = "two rows write slot 7")]
    fn a_slot_with_two_rows_is_refused() {
        check_slots(&[9, 7, 3, 7], &mut Vec::new());
    }
}
