//! From projections to stored keys and values: norms of q and k, rotation, and the write to the
//! step's slots.

use std::ops::Range;

use super::inputs::{Inputs, Rope};
use super::kv::{Kv, LayerMut, Storage, with_storage};
use super::norm::norm_in_place;
use super::pool::Disjoint;
use super::simd::{Kernel, LANES, Simd, dispatch};
use super::{Cpu, Ctx, Tensor};
use crate::{BLOCK_TOKENS, NormSpan, PrepareQkv};

/// Normalizes all heads of one projection: each alone, or the row as a whole.
#[inline(always)]
fn norm_heads<S: Simd>(s: S, heads: &mut [f32], head_dim: usize, weight: &[f32], span: NormSpan, eps: f32) {
    match span {
        NormSpan::Head => heads.chunks_exact_mut(head_dim).for_each(|head| norm_in_place(s, head, weight, eps)),
        NormSpan::Row => norm_in_place(s, heads, weight, eps),
    }
}

/// Rotates value `i` of a head with value `i + pairs`.
#[inline(always)]
fn rotate<S: Simd>(s: S, head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let pairs = cos.len();
    let (first, rest) = head.split_at_mut(pairs);
    let second = &mut rest[..pairs];
    let angles = cos.chunks(LANES).zip(sin.chunks(LANES));
    for ((first, second), (cos, sin)) in first.chunks_mut(LANES).zip(second.chunks_mut(LANES)).zip(angles) {
        let (a, b, cos, sin) = (s.read(first), s.read(second), s.read(cos), s.read(sin));
        s.write(first, s.sub(s.mul(a, cos), s.mul(b, sin)));
        s.write(second, s.add(s.mul(b, cos), s.mul(a, sin)));
    }
}

struct PrepareRows<'a, T> {
    rows: Range<usize>,
    qkv: &'a Disjoint<'a, f32>,
    layer: &'a LayerMut<'a, T>,
    op: &'a PrepareQkv<'a, Cpu>,
    rope: Option<&'a Rope>,
    slots: &'a [u32],
}

impl<T: Storage> Kernel for PrepareRows<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let op = self.op;
        let (q_width, k_width) = (op.heads * op.head_dim, op.kv_heads * op.head_dim);
        let width = q_width + 2 * k_width;
        for row in self.rows {
            // SAFETY: threads have different rows, and rows do not overlap.
            let values = unsafe { self.qkv.part(row * width..(row + 1) * width) };
            let (q, rest) = values.split_at_mut(q_width);
            let (k, v) = rest.split_at_mut(k_width);
            if let Some(weight) = op.q_norm {
                norm_heads(s, q, op.head_dim, weight, op.norm_span, op.eps);
            }
            if let Some(weight) = op.k_norm {
                norm_heads(s, k, op.head_dim, weight, op.norm_span, op.eps);
            }
            if let Some(rope) = self.rope {
                let (cos, sin) = rope.row(row);
                q.chunks_exact_mut(op.head_dim).for_each(|head| rotate(s, head, cos, sin));
                k.chunks_exact_mut(op.head_dim).for_each(|head| rotate(s, head, cos, sin));
            }
            let heads = k.chunks_exact(op.head_dim).zip(v.chunks_exact(op.head_dim));
            for (kv_head, (key, value)) in heads.enumerate() {
                // SAFETY: threads have different rows, and `upload` checked that rows have
                // different slots.
                unsafe { self.layer.write(self.slots[row], kv_head, key, value) };
            }
        }
    }
}

/// Normalizes, rotates and stores rows `[q heads | k heads | v heads]`. q stays in `qkv`.
pub fn prepare_qkv(
    ctx: Ctx<'_>,
    qkv: &mut Tensor,
    kv: &mut Kv,
    layer: usize,
    op: &PrepareQkv<'_, Cpu>,
    inputs: &Inputs,
) {
    let rows = inputs.num_rows();
    assert_eq!(qkv.cols(), (op.heads + 2 * op.kv_heads) * op.head_dim, "width of [q | k | v]");
    let rope = op.rope.map(|rope| inputs.rope(rope));
    if let Some(rope) = rope {
        assert!(2 * rope.pairs() <= op.head_dim, "a rope of {} pairs on a head of {}", rope.pairs(), op.head_dim);
    }
    let slots = &inputs.group(op.group).slots[..];
    let qkv = Disjoint::new(qkv.head_mut(rows));
    with_storage!(kv.format(), T => {
        let layer = kv.layer_mut::<T>(layer, op.kv_heads, op.head_dim);
        // Runs of a block's length keep two threads from writing the same cache lines of a block.
        ctx.pool.for_each_chunk(rows, BLOCK_TOKENS, |rows| {
            dispatch(ctx.isa, PrepareRows { rows, qkv: &qkv, layer: &layer, op, rope, slots });
        });
    });
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::cpu::inputs::{rope_angles, upload};
    use crate::cpu::kv::Pairs;
    use crate::cpu::simd::testing::{close, each_setup, filled, tensor, vector};
    use crate::{Batch, GroupTables, InputLimits, KvFormat, KvShape, Span};

    const ROWS: usize = 37;

    /// Row `r` goes to slot `5 r` of the pool.
    fn batch() -> Batch {
        Batch {
            tokens: vec![0; ROWS],
            positions: (0..ROWS as u32).map(|row| 100 + row).collect(),
            spans: vec![Span { first_row: 0, num_rows: ROWS as u32, context: ROWS as u32 }],
            ancestors: Vec::new(),
            groups: vec![GroupTables {
                slots: (0..ROWS as u32).map(|row| 5 * row).collect(),
                blocks: vec![0; 3],
                first_block: vec![0],
            }],
            outputs: Vec::new(),
        }
    }

    fn plain_norm(x: &mut [f32], weight: &[f32], eps: f32) {
        let sum: f64 = x.iter().map(|&v| f64::from(v).powi(2)).sum();
        let inverse = 1.0 / (sum / x.len() as f64 + f64::from(eps)).sqrt();
        x.iter_mut().zip(weight).for_each(|(x, &w)| *x = (f64::from(*x) * inverse * f64::from(w)) as f32);
    }

    fn check(head_dim: usize, pairs: usize, norm_span: NormSpan, normed: bool) {
        let (heads, kv_heads) = (6, 2);
        let width = (heads + 2 * kv_heads) * head_dim;
        let values = filled(ROWS * width, 11);
        let frequencies: Vec<f32> = (0..pairs).map(|i| 0.7f32.powi(i as i32)).collect();
        let sizes = match norm_span {
            NormSpan::Head => [head_dim; 2],
            NormSpan::Row => [heads * head_dim, kv_heads * head_dim],
        };
        let (q_weight, k_weight) = (filled(sizes[0], 12), filled(sizes[1], 13));
        let mut expected = values.clone();
        for (row, x) in expected.chunks_exact_mut(width).enumerate() {
            let (q, k) = x[..(heads + kv_heads) * head_dim].split_at_mut(heads * head_dim);
            if normed {
                q.chunks_exact_mut(sizes[0]).for_each(|part| plain_norm(part, &q_weight, 1e-5));
                k.chunks_exact_mut(sizes[1]).for_each(|part| plain_norm(part, &k_weight, 1e-5));
            }
            for head in x[..(heads + kv_heads) * head_dim].chunks_exact_mut(head_dim) {
                for i in 0..pairs {
                    let angle = f64::from((100 + row) as f32 * frequencies[i]);
                    let (a, b) = (f64::from(head[i]), f64::from(head[i + pairs]));
                    head[i] = (a * angle.cos() - b * angle.sin()) as f32;
                    head[i + pairs] = (b * angle.cos() + a * angle.sin()) as f32;
                }
            }
        }
        each_setup(|ctx| {
            let limits = InputLimits {
                rows: ROWS,
                spans: 1,
                outputs: 1,
                table_entries: 3,
                groups: 1,
                ropes: 1,
                rope_pairs: pairs,
            };
            let mut inputs = Inputs::new(limits).unwrap();
            upload(ctx, &mut inputs, &batch());
            rope_angles(ctx, &mut inputs, 0, &vector(&frequencies), 1.0);
            let shape = KvShape { layers: 2, blocks: 12, kv_heads, head_dim, format: KvFormat::BF16 };
            let mut kv = Kv::new(shape).unwrap();
            let mut qkv = tensor(ROWS, width, &values);
            let (q_weight, k_weight) = (vector(&q_weight), vector(&k_weight));
            let op = PrepareQkv {
                heads,
                kv_heads,
                head_dim,
                group: 0,
                rope: Some(0),
                q_norm: normed.then_some(&q_weight),
                k_norm: normed.then_some(&k_weight),
                norm_span,
                eps: 1e-5,
            };
            prepare_qkv(ctx, &mut qkv, &mut kv, 1, &op, &inputs);
            close(qkv.head(ROWS), &expected, 1e-5);
            let layer = kv.layer::<Pairs>(1, kv_heads, head_dim);
            for row in 0..ROWS {
                for kv_head in 0..kv_heads {
                    let (keys, values) = layer.block(5 * row as u32 / 16, kv_head);
                    let (keys, values) = (keys.cast::<bf16>(), values.cast::<bf16>());
                    let token = 5 * row % 16;
                    let key = &qkv.row(row)[(heads + kv_head) * head_dim..][..head_dim];
                    let value = &qkv.row(row)[(heads + kv_heads + kv_head) * head_dim..][..head_dim];
                    for i in 0..head_dim {
                        let key_at = (i / 2 * 16 + token) * 2 + i % 2;
                        let value_at = (token / 2 * head_dim + i) * 2 + token % 2;
                        // SAFETY: token and `i` are inside the block; heads are even.
                        let stored = unsafe { (*keys.add(key_at), *values.add(value_at)) };
                        assert_eq!(stored, (bf16::from_f32(key[i]), bf16::from_f32(value[i])));
                    }
                }
            }
            qkv.head(ROWS).iter().map(|v| v.to_bits()).collect()
        });
    }

    #[test]
    fn norm_rotation_and_storage_match_plain_loops() {
        check(64, 32, NormSpan::Head, true);
        check(40, 20, NormSpan::Row, true);
        // Half of the head is rotated, and the width is odd.
        check(24, 6, NormSpan::Head, false);
    }
}
