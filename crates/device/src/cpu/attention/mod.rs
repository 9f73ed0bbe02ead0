//! Causal attention over paged keys and values, with an online softmax: no score matrix in memory.
//!
//! A tile is a few query rows times the heads that share one KV head; it walks the keys in chunks
//! of four blocks, so that each key and value read serves all of the tile. Keys are summed in
//! splits of a fixed number of positions, and splits are merged in ascending order: the sum depends
//! on the row's position alone. If several threads share the splits of a tile, only the place of
//! the partial sums changes, never a bit of the result. Masked keys are left out by selection,
//! never multiplied by zero: the contents of an unused slot cannot matter.
//!
//! A row of a draft tree is its own tile. The keys and values of its path, which are scattered over
//! blocks, are first copied token by token in the order of positions; then the row is like any
//! other.

mod pairs;
mod path;
mod plan;
mod strip;
mod tile;

use std::sync::PoisonError;

pub use plan::{Item, MAX_PARTIALS, MAX_VALUES as MAX_HEAD_DIM, Scratch, Tile};

use super::inputs::Inputs;
use super::kv::{Kv, with_storage};
use super::pool::Disjoint;
use super::simd::dispatch;
use super::{Cpu, Ctx, Tensor};
use crate::{Attention, BLOCK_TOKENS};
use path::{MAX_PATHS, Path};
use plan::Geometry;
use tile::{Merge, Operands, Walk};

/// Number of keys with scores computed before their values are summed: four blocks.
const CHUNK: usize = 4 * BLOCK_TOKENS;
/// Positions that are summed separately before they are merged. Boundaries are fixed and absolute.
const SPLIT: usize = 1024;

/// `out` is `[rows, heads * head_dim]`; q lies in the first columns of `qkv`, keys and values in
/// `kv`.
pub fn attention(
    ctx: Ctx<'_>,
    out: &mut Tensor,
    qkv: &Tensor,
    kv: &Kv,
    layer: usize,
    op: &Attention<'_, Cpu>,
    inputs: &Inputs,
) {
    let rows = inputs.num_rows();
    assert!(op.kv_heads > 0 && op.heads.is_multiple_of(op.kv_heads), "{} heads, {} kv heads", op.heads, op.kv_heads);
    assert_eq!(qkv.cols(), (op.heads + 2 * op.kv_heads) * op.head_dim, "width of [q | k | v]");
    assert_eq!(out.cols(), op.heads * op.head_dim, "width of the attention output");
    assert!(op.sinks.is_none_or(|sinks| sinks.len() == op.heads), "one sink a head");
    assert!(op.window != Some(0), "a window of at least one position");
    let mut scratch = inputs.attention.lock().unwrap_or_else(PoisonError::into_inner);
    let geometry = Geometry::new(op.heads, op.kv_heads, op.head_dim);
    scratch.plan(inputs.spans(), inputs.ancestors(), &geometry, op.window, ctx.pool.num_threads());
    let Scratch { tiles, items, first_tree, partials } = &mut *scratch;
    let (tiles, items) = (&tiles[..], &items[..]);
    let (chains, trees) = items.split_at(*first_tree);
    let (partials, paths) = partials.split_at_mut(plan::MAX_PARTIALS - if trees.is_empty() { 0 } else { MAX_PATHS });
    let (out, partials) = (Disjoint::new(out.head_mut(rows)), Disjoint::new(partials));
    let (out, partials, paths) = (&out, &partials, &Disjoint::new(paths));
    with_storage!(kv.format(), T => {
        let operands = Operands {
            op,
            geometry,
            q: qkv.head(rows),
            q_stride: qkv.cols(),
            layer: kv.layer::<T>(layer, op.kv_heads, op.head_dim),
            spans: inputs.spans(),
            ancestors: inputs.ancestors(),
            tables: inputs.group(op.group),
            out,
            partials,
        };
        let operands = &operands;
        let head_tiles = geometry.head_tiles();
        ctx.pool.for_each_chunk(chains.len() * head_tiles, 1, |jobs| {
            for job in jobs {
                let (item, head_tile) = (&chains[job / head_tiles], job % head_tiles);
                dispatch(ctx.isa, Walk { operands, tile: &tiles[item.tile as usize], item, head_tile, path: None });
            }
        });
        // As many rows of trees at a time as paths fit into the memory.
        let room = path::room(&operands.layer);
        let num_jobs = trees.len() * head_tiles;
        for first in (0..num_jobs).step_by(MAX_PATHS / room) {
            let count = (num_jobs - first).min(MAX_PATHS / room);
            ctx.pool.for_each_chunk(count, 1, |jobs| {
                for place in jobs {
                    let (item, head_tile) = (&trees[(first + place) / head_tiles], (first + place) % head_tiles);
                    let tile = &tiles[item.tile as usize];
                    // SAFETY: jobs have different parts of the memory.
                    let memory = unsafe { paths.part(place * room..(place + 1) * room) };
                    let path = Path::gather(operands, tile, item, head_tile, memory);
                    dispatch(ctx.isa, Walk { operands, tile, item, head_tile, path });
                }
            });
        }
        if items.iter().any(|item| item.partial.is_some()) {
            ctx.pool.for_each_chunk(tiles.len(), 1, |range| {
                for tile in &tiles[range] {
                    dispatch(ctx.isa, Merge { operands, tile });
                }
            });
        }
    });
}

#[cfg(test)]
mod tests;
