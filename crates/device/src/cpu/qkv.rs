//! From projections to stored keys and values: norm of q and k, rotation, and the write to the step's slots.

use std::ops::Range;

use super::inputs::{Inputs, Rope};
use super::kv::{Element, Kv, LayerMut, with_element};
use super::norm::norm_in_place;
use super::pool::Disjoint;
use super::simd::{Kernel, LANES, Simd, dispatch};
use super::{Cpu, Ctx, Tensor};
use crate::{BLOCK_TOKENS, NormSpan, PrepareQkv};

/// Norms all heads of one projection: each alone, or the row as a whole.
#[inline(always)]
fn norm_heads<S: Simd>(s: S, heads: &mut [f32], head_dim: usize, weight: &[f32], span: NormSpan, eps: f32) {
    match span {
        NormSpan::Head => heads.chunks_exact_mut(head_dim).for_each(|head| norm_in_place(s, head, weight, eps)),
        NormSpan::Row => norm_in_place(s, heads, weight, eps),
    }
}

/// Turns value `i` of a head with value `i + pairs`.
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
    layer: &'a LayerMut<T>,
    op: &'a PrepareQkv<'a, Cpu>,
    rope: Option<&'a Rope>,
    slots: &'a [u32],
}

impl<T: Element> Kernel for PrepareRows<'_, T> {
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
                // SAFETY: the storage is borrowed for writing, and a step gives every row its own slot.
                unsafe { self.layer.write(self.slots[row], kv_head, key, value) };
            }
        }
    }
}

/// On rows `[q heads | k heads | v heads]`: norms, rotates, stores. q stays in `qkv`.
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
    with_element!(kv.format(), T => {
        let layer = kv.layer_mut::<T>(layer, op.kv_heads, op.head_dim);
        // Runs of a block's length keep two threads from writing the same cache lines of a block.
        ctx.pool.for_each_chunk(rows, BLOCK_TOKENS, |rows| {
            dispatch(ctx.isa, PrepareRows { rows, qkv: &qkv, layer: &layer, op, rope, slots });
        });
    });
}
