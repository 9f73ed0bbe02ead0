//! Positions, keys and values, and causal attention over paged storage, row by row and head by
//! head; rows of trees along their own path.

use super::{Inputs, Kv, Reference, Rope, Tensor, Vector, codes, math};
use crate::{Attention, BLOCK_TOKENS, NormSpan, PrepareQkv, tree};

impl Kv {
    /// Range of one head of one token in `keys` and `values`.
    fn place(&self, layer: usize, slot: usize, head: usize) -> std::ops::Range<usize> {
        let shape = &self.shape;
        assert!(layer < shape.layers, "layer {layer} of a group of {}", shape.layers);
        assert!(slot < shape.blocks * BLOCK_TOKENS, "slot {slot} beyond {} blocks", shape.blocks);
        assert!(head < shape.kv_heads, "kv head {head} of {}", shape.kv_heads);
        let slots = shape.blocks * BLOCK_TOKENS;
        let bytes = shape.format.head_bytes(shape.head_dim);
        let start = ((layer * slots + slot) * shape.kv_heads + head) * bytes;
        start..start + bytes
    }

    fn check_heads(&self, kv_heads: usize, head_dim: usize) {
        assert_eq!(self.shape.kv_heads, kv_heads, "kv heads of the storage and of the operation");
        assert_eq!(self.shape.head_dim, head_dim, "head_dim of the storage and of the operation");
    }
}

/// Normalizes all heads of one projection: each alone, or the row as a whole.
fn norm_heads(heads: &mut [f32], head_dim: usize, weight: &Vector, span: NormSpan, eps: f32) {
    match span {
        NormSpan::Head => heads.chunks_exact_mut(head_dim).for_each(|head| math::rms_norm(head, &weight.0, eps)),
        NormSpan::Row => math::rms_norm(heads, &weight.0, eps),
    }
}

/// Rotates the first `2 * pairs` values of a head; value `i` is paired with value `i + pairs`.
fn rotate(head: &mut [f32], rope: &Rope, row: usize) {
    let pairs = rope.pairs;
    assert!(2 * pairs <= head.len(), "a rope of {pairs} pairs on a head of {}", head.len());
    for i in 0..pairs {
        let (cos, sin) = (rope.cos[row * pairs + i], rope.sin[row * pairs + i]);
        let (a, b) = (head[i], head[i + pairs]);
        head[i] = a * cos - b * sin;
        head[i + pairs] = b * cos + a * sin;
    }
}

pub fn prepare_qkv(qkv: &mut Tensor, kv: &mut Kv, layer: usize, op: &PrepareQkv<'_, Reference>, inputs: &Inputs) {
    let (q_width, k_width) = (op.heads * op.head_dim, op.kv_heads * op.head_dim);
    qkv.check("qkv", inputs.batch.num_rows(), q_width + 2 * k_width);
    kv.check_heads(op.kv_heads, op.head_dim);
    for row in 0..inputs.batch.num_rows() {
        let (q, rest) = qkv.row_mut(row).split_at_mut(q_width);
        let (k, v) = rest.split_at_mut(k_width);
        if let Some(weight) = op.q_norm {
            norm_heads(q, op.head_dim, weight, op.norm_span, op.eps);
        }
        if let Some(weight) = op.k_norm {
            norm_heads(k, op.head_dim, weight, op.norm_span, op.eps);
        }
        if let Some(rope) = op.rope {
            let rope = inputs.rope(rope);
            q.chunks_exact_mut(op.head_dim).for_each(|head| rotate(head, rope, row));
            k.chunks_exact_mut(op.head_dim).for_each(|head| rotate(head, rope, row));
        }
        let slot = inputs.batch.groups[op.group].slots[row] as usize;
        for head in 0..op.kv_heads {
            let from = head * op.head_dim..(head + 1) * op.head_dim;
            let (to, format) = (kv.place(layer, slot, head), kv.shape.format);
            codes::encode(format, &k[from.clone()], &mut kv.keys[to.clone()]);
            codes::encode(format, &v[from], &mut kv.values[to]);
        }
    }
}

/// Copies keys and values of one token to another slot, in every layer.
pub fn move_token(kv: &mut Kv, from: usize, to: usize) {
    for layer in 0..kv.shape.layers {
        for head in 0..kv.shape.kv_heads {
            let (from, to) = (kv.place(layer, from, head), kv.place(layer, to, head));
            kv.keys.copy_within(from.clone(), to.start);
            kv.values.copy_within(from, to.start);
        }
    }
}

pub fn attention(
    out: &mut Tensor,
    qkv: &Tensor,
    kv: &Kv,
    layer: usize,
    op: &Attention<'_, Reference>,
    inputs: &Inputs,
) {
    let batch = &inputs.batch;
    qkv.check("qkv", batch.num_rows(), (op.heads + 2 * op.kv_heads) * op.head_dim);
    out.check("attention output", batch.num_rows(), op.heads * op.head_dim);
    kv.check_heads(op.kv_heads, op.head_dim);
    assert_eq!(op.heads % op.kv_heads, 0, "heads are a multiple of kv heads");
    let tables = &batch.groups[op.group];
    for (span, &first_block) in batch.spans.iter().zip(&tables.first_block) {
        let slots: Vec<usize> = (0..span.context as usize)
            .map(|seen| {
                let block = tables.blocks[first_block as usize + seen / BLOCK_TOKENS] as usize;
                block * BLOCK_TOKENS + seen % BLOCK_TOKENS
            })
            .collect();
        for kv_head in 0..op.kv_heads {
            let stored = |bytes: &[u8]| -> Vec<Vec<f64>> {
                let place = |&slot: &usize| kv.place(layer, slot, kv_head);
                let (format, dim) = (kv.shape.format, kv.shape.head_dim);
                slots.iter().map(|slot| codes::decode(format, dim, &bytes[place(slot)])).collect()
            };
            let (keys, values) = (stored(&kv.keys), stored(&kv.values));
            for index in 0..span.num_rows as usize {
                let row = span.first_row as usize + index;
                let words = tree::of_span(&batch.ancestors, span);
                let base = tree::base(span, words.unwrap_or_default());
                // Storage indices of the positions from 0 to the row's own.
                let places: Vec<usize> = match words {
                    None => (0..base + index + 1).collect(),
                    Some(words) => (0..base).chain(tree::path(words[index]).map(|row| base + row)).collect(),
                };
                let first = op.window.map_or(0, |window| places.len().saturating_sub(window));
                let seen = &places[first..];
                let group = op.heads / op.kv_heads;
                for head in kv_head * group..(kv_head + 1) * group {
                    let place = head * op.head_dim..(head + 1) * op.head_dim;
                    let query = &qkv.row(row)[place.clone()];
                    let seen = seen.iter().map(|&place| (&keys[place][..], &values[place][..]));
                    attend(&mut out.row_mut(row)[place], query, seen, head, op);
                }
            }
        }
    }
}

/// Attention of one query head over the keys and values that it may see.
fn attend<'a>(
    out: &mut [f32],
    query: &[f32],
    seen: impl Iterator<Item = (&'a [f64], &'a [f64])> + Clone,
    head: usize,
    op: &Attention<'_, Reference>,
) {
    let score = |(key, _): (&[f64], &[f64])| {
        let dot: f64 = query.iter().zip(key).map(|(&q, &k)| f64::from(q) * k).sum();
        let score = dot * f64::from(op.scale);
        op.soft_cap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
    };
    let mut weights: Vec<f64> = seen.clone().map(score).collect();
    // A sink is one more score without a value: `zip` below leaves its weight out.
    weights.extend(op.sinks.map(|sinks| f64::from(sinks.0[head])));
    math::softmax(&mut weights);
    let mut sums = vec![0.0f64; op.head_dim];
    for ((_, value), weight) in seen.zip(&weights) {
        for (sum, value) in sums.iter_mut().zip(value) {
            *sum += weight * value;
        }
    }
    for (out, sum) in out.iter_mut().zip(sums) {
        *out = sum as f32;
    }
}
