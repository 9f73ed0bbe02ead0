//! One tile of query rows and heads over the keys it sees, and the merge of several threads'
//! partial sums.

use std::f32::consts::LOG2_E;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::super::Cpu;
use super::super::kv::{Layer, Storage};
use super::super::pool::Disjoint;
use super::super::simd::{Kernel, LANES, Simd, exp2};
use super::pairs::{self, paired};
use super::path::Path;
use super::plan::{Geometry, Item, MAX_GROUPS, MAX_VALUES, MAX_VECTORS, Tile};
use super::strip::{Chunk, State, attend};
use super::{CHUNK, SPLIT};
use crate::{Attention, BLOCK_TOKENS, GroupTables, Span, tree};

/// Data that all tiles of one operation share.
pub struct Operands<'a, T> {
    pub op: &'a Attention<'a, Cpu>,
    pub geometry: Geometry,
    pub q: &'a [f32],
    pub q_stride: usize,
    pub layer: Layer<'a, T>,
    pub spans: &'a [Span],
    /// Ancestor words of all rows, or none.
    pub ancestors: &'a [u64],
    pub tables: &'a GroupTables,
    pub out: &'a Disjoint<'a, f32>,
    pub partials: &'a Disjoint<'a, f32>,
}

impl<T> Operands<'_, T> {
    /// The tree word of the tile's row; 0 if the tile is no row of a tree.
    #[inline(always)]
    pub fn word(&self, tile: &Tile) -> u64 {
        let row = self.spans[tile.span as usize].first_row as usize + tile.first as usize;
        self.ancestors.get(row).copied().unwrap_or(0)
    }

    /// The position where the rows of a tile's span, or their tree, begin.
    #[inline(always)]
    pub fn base(&self, tile: &Tile) -> usize {
        let span = &self.spans[tile.span as usize];
        tree::base(span, tree::of_span(self.ancestors, span).unwrap_or_default())
    }

    /// Positions that a row of a tile sees; `word` is the tile's.
    #[inline(always)]
    pub fn seen(&self, tile: &Tile, word: u64, row: usize) -> Range<usize> {
        let base = self.base(tile);
        let end = base + if word == 0 { tile.first as usize + row + 1 } else { word.count_ones() as usize };
        self.op.window.map_or(0, |window| end.saturating_sub(window))..end
    }

    /// Keys and values of one head at position `place` of the tile's span.
    #[inline(always)]
    pub fn block(&self, tile: &Tile, place: usize, kv_head: usize) -> (*const u8, *const u8) {
        let entry = self.tables.first_block[tile.span as usize] as usize + place / BLOCK_TOKENS;
        self.layer.block(self.tables.blocks[entry], kv_head)
    }

    /// Position of a partial sum: split, row and head are counted within the tile.
    #[inline(always)]
    fn partial(&self, tile: &Tile, split: usize, row: usize, head: usize) -> Range<usize> {
        let values = self.geometry.partial_values();
        let index = (split * tile.rows as usize + row) * self.geometry.heads + head;
        let start = tile.partials + index * values;
        start..start + values
    }
}

/// Memory of a tile on the stack, aligned to whole vectors and not cleared.
#[repr(align(64))]
struct Area<const N: usize>([MaybeUninit<f32>; N]);

impl<const N: usize> Area<N> {
    #[inline(always)]
    fn new() -> Self {
        Self([const { MaybeUninit::uninit() }; N])
    }

    #[inline(always)]
    fn as_mut_ptr(&mut self) -> *mut f32 {
        self.0.as_mut_ptr().cast()
    }

    /// The first `len` values, all set.
    #[inline(always)]
    fn fill(&mut self, len: usize, value: f32) -> &mut [f32] {
        for slot in &mut self.0[..len] {
            slot.write(value);
        }
        // SAFETY: the first `len` values were just written.
        unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr(), len) }
    }
}

/// A softmax over some positions: the largest score, the denominator relative to it, and the
/// weighted sum of values.
struct Sum<'a> {
    largest: f32,
    weight: f32,
    values: &'a mut [f32],
}

impl Sum<'_> {
    /// Merges a later part. A part that saw no token changes nothing, and a merge into an empty sum
    /// is a copy.
    #[inline(always)]
    fn merge<S: Simd>(&mut self, s: S, largest: f32, weight: f32, values: &[f32]) {
        let new = self.largest.max(largest);
        let base = if new == f32::NEG_INFINITY { 0.0 } else { new };
        let mut factors = [0.0f32; LANES];
        s.write(&mut factors, exp2(s, s.read(&[self.largest - base, largest - base])));
        let (old, add) = (s.splat(factors[0]), s.splat(factors[1]));
        for (sum, part) in self.values.chunks_exact_mut(LANES).zip(values.chunks_exact(LANES)) {
            s.write(sum, s.fma(s.read(part), add, s.mul(s.read(sum), old)));
        }
        self.weight = self.weight * factors[0] + weight * factors[1];
        self.largest = new;
    }

    /// The sink's logit is added last; then the sum is divided.
    #[inline(always)]
    fn finish<S: Simd>(self, s: S, sink: Option<f32>, out: &mut [f32]) {
        let (mut factor, mut weight) = (1.0, self.weight);
        if let Some(sink) = sink {
            let new = self.largest.max(sink);
            let mut factors = [0.0f32; LANES];
            s.write(&mut factors, exp2(s, s.read(&[self.largest - new, sink - new])));
            factor = factors[0];
            weight = weight * factors[0] + factors[1];
        }
        let quotient = s.splat(factor / weight);
        for (out, sum) in out.chunks_mut(LANES).zip(self.values.chunks(LANES)) {
            // A zero may have either sign, depending on the order of the sums; adding zero makes it
            // positive.
            s.write(out, s.add(s.mul(s.read(sum), quotient), s.splat(0.0)));
        }
    }
}

/// Computes an item for the heads of one head tile.
pub struct Walk<'a, T> {
    pub operands: &'a Operands<'a, T>,
    pub tile: &'a Tile,
    pub item: &'a Item,
    pub head_tile: usize,
    /// The gathered path of a tree's row, which holds the last positions that it sees.
    pub path: Option<Path>,
}

impl<T: Storage> Kernel for Walk<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (operands, tile, item) = (self.operands, self.tile, self.item);
        let geometry = &operands.geometry;
        let (kv_head, heads) = geometry.heads_of(self.head_tile);
        let (rows, dim) = (tile.rows as usize, geometry.padded_dim);
        let vectors = rows * heads.len();
        assert!(vectors <= MAX_VECTORS && vectors * dim <= MAX_VALUES, "{vectors} vectors of {dim}");
        let (mut queries, mut query_sums) = (Area::<MAX_VALUES>::new(), Area::<MAX_GROUPS>::new());
        let groups = if T::AFFINE { operands.op.head_dim.div_ceil(T::GROUP) } else { 0 };
        let query_sums = query_sums.fill(vectors * groups, 0.0);
        let query_len = query_len::<S, T>(operands.op.head_dim);
        self.pack_queries(s, queries.fill(vectors * query_len, 0.0), query_sums, heads.clone());
        let (mut largest, mut weights) = (Area::<MAX_VECTORS>::new(), Area::<{ MAX_VECTORS * LANES }>::new());
        let mut sums = Area::<MAX_VALUES>::new();
        let mut totals = Area::<MAX_VALUES>::new();
        let (mut total_largest, mut total_weight) = ([f32::NEG_INFINITY; MAX_VECTORS], [0.0f32; MAX_VECTORS]);
        let totals = if item.num_splits > 1 { totals.fill(vectors * dim, 0.0) } else { &mut [] };
        let (queries, query_sums) = (queries.as_mut_ptr().cast_const(), query_sums.as_ptr());
        for split in 0..item.num_splits as usize {
            let largest = largest.fill(vectors, f32::NEG_INFINITY);
            let weights = weights.fill(vectors * LANES, 0.0);
            let sums = sums.fill(vectors * dim, 0.0);
            let start = (item.first_split as usize + split) * SPLIT;
            self.walk_split(s, start, kv_head, heads.len(), (queries, query_sums), largest, weights, sums);
            for vector in 0..vectors {
                let (row, head) = (vector / heads.len(), heads.start + vector % heads.len());
                let largest = largest[vector];
                let weight = s.sum(s.read(&weights[vector * LANES..]));
                let values = &mut sums[vector * dim..(vector + 1) * dim];
                if let Some(partial) = item.partial {
                    let range = operands.partial(tile, partial as usize, row, head);
                    // SAFETY: every split, row and head of a tile has its own range, written by one
                    // item.
                    let to = unsafe { operands.partials.part(range) };
                    to[..dim].copy_from_slice(values);
                    to[dim..dim + 2].copy_from_slice(&[largest, weight]);
                } else if item.num_splits == 1 {
                    finish(s, operands, tile, row, head, Sum { largest, weight, values });
                } else {
                    let mut total = Sum {
                        largest: total_largest[vector],
                        weight: total_weight[vector],
                        values: &mut totals[vector * dim..(vector + 1) * dim],
                    };
                    total.merge(s, largest, weight, values);
                    if split + 1 == item.num_splits as usize {
                        finish(s, operands, tile, row, head, total);
                    } else {
                        (total_largest[vector], total_weight[vector]) = (total.largest, total.weight);
                    }
                }
            }
        }
    }
}

/// Sizes of the strips that `vectors` are cut into.
#[inline(always)]
fn next_strip<S: Simd>(left: usize) -> usize {
    let most = if S::ACCUMULATORS >= 16 { 8 } else { S::ACCUMULATORS };
    if left >= most { most } else { 1 << left.ilog2() }
}

/// Number of lanes of a packed query.
#[inline(always)]
fn query_len<S: Simd, T: Storage>(head_dim: usize) -> usize {
    if paired::<S, T>() { pairs::query_words(head_dim) } else { head_dim }
}

impl<T: Storage> Walk<'_, T> {
    /// Queries, scaled so that scores are to the base 2, strip by strip `[query_len][strip]`, and
    /// the sums of their groups `[groups][strip]` if the storage needs them; vectors run over
    /// heads, then rows.
    #[inline(always)]
    fn pack_queries<S: Simd>(&self, s: S, packed: &mut [f32], sums: &mut [f32], heads: Range<usize>) {
        let operands = self.operands;
        let (dim, len) = (operands.op.head_dim, query_len::<S, T>(operands.op.head_dim));
        let scale = operands.op.scale * LOG2_E;
        let (vectors, groups) = (packed.len() / len, dim.div_ceil(T::GROUP));
        let first_row = operands.spans[self.tile.span as usize].first_row as usize + self.tile.first as usize;
        let mut start = 0;
        while start < vectors {
            let strip = next_strip::<S>(vectors - start);
            for m in 0..strip {
                let (row, head) = ((start + m) / heads.len(), heads.start + (start + m) % heads.len());
                let from = (first_row + row) * operands.q_stride + head * dim;
                let query = &operands.q[from..from + dim];
                if paired::<S, T>() {
                    pairs::pack_query(s, query, scale, &mut packed[start * len + m..], strip);
                    continue;
                }
                for (i, value) in query.iter().enumerate() {
                    let scaled = value * scale;
                    packed[start * dim + i * strip + m] = scaled;
                    if T::AFFINE {
                        sums[start * groups + i / T::GROUP * strip + m] += scaled;
                    }
                }
            }
            start += strip;
        }
    }

    /// Sums the positions of one split.
    #[inline(always)]
    fn walk_split<S: Simd>(
        &self,
        s: S,
        split_start: usize,
        kv_head: usize,
        heads: usize,
        (queries, query_sums): (*const f32, *const f32),
        largest: &mut [f32],
        weights: &mut [f32],
        sums: &mut [f32],
    ) {
        let (operands, tile) = (self.operands, self.tile);
        let (dim, padded_dim) = (operands.op.head_dim, operands.geometry.padded_dim);
        let word = operands.word(tile);
        let row_seen = |row: usize| operands.seen(tile, word, row);
        let first = row_seen(0).start.max(split_start);
        let last = row_seen(tile.rows as usize - 1).end.min(split_start + SPLIT);
        let vectors = largest.len();
        let mut chunk_start = first / CHUNK * CHUNK;
        while chunk_start < last {
            let needed = first.max(chunk_start)..last.min(chunk_start + CHUNK);
            let chunk = self.chunk(kv_head, chunk_start, needed, last);
            let mut start = 0;
            while start < vectors {
                let strip = next_strip::<S>(vectors - start);
                // SAFETY: `start` is below `vectors`, and the areas hold `vectors` vectors.
                let state = unsafe {
                    State {
                        queries: queries.add(start * query_len::<S, T>(dim)),
                        query_sums: query_sums.wrapping_add(start * dim.div_ceil(T::GROUP)),
                        largest: largest.as_mut_ptr().add(start),
                        weights: weights.as_mut_ptr().add(start * LANES),
                        sums: sums.as_mut_ptr().add(start * padded_dim),
                        padded_dim,
                    }
                };
                let seen = |vector: usize| {
                    let seen = row_seen(vector / heads);
                    seen.start.clamp(chunk_start, chunk_start + CHUNK) - chunk_start
                        ..seen.end.clamp(chunk_start, chunk_start + CHUNK) - chunk_start
                };
                // SAFETY: the strip's vectors are inside the areas, queries are packed by the same
                // strips, and the chunk has every block that a row of the tile sees.
                unsafe {
                    if S::ACCUMULATORS >= 16 {
                        match strip {
                            8 => attend::<S, T, 8, 2>(s, &chunk, &state, &std::array::from_fn(|m| seen(start + m))),
                            4 => attend::<S, T, 4, 4>(s, &chunk, &state, &std::array::from_fn(|m| seen(start + m))),
                            2 => attend::<S, T, 2, 4>(s, &chunk, &state, &std::array::from_fn(|m| seen(start + m))),
                            _ => attend::<S, T, 1, 4>(s, &chunk, &state, &[seen(start)]),
                        }
                    } else if S::ACCUMULATORS >= 4 {
                        match strip {
                            4 => attend::<S, T, 4, 1>(s, &chunk, &state, &std::array::from_fn(|m| seen(start + m))),
                            2 => attend::<S, T, 2, 1>(s, &chunk, &state, &std::array::from_fn(|m| seen(start + m))),
                            _ => attend::<S, T, 1, 1>(s, &chunk, &state, &[seen(start)]),
                        }
                    } else {
                        match strip {
                            2 => attend::<S, T, 2, 1>(s, &chunk, &state, &std::array::from_fn(|m| seen(start + m))),
                            _ => attend::<S, T, 1, 1>(s, &chunk, &state, &[seen(start)]),
                        }
                    }
                }
                start += strip;
            }
            chunk_start += CHUNK;
        }
    }

    /// The block of a position that the tile sees.
    #[inline(always)]
    fn block(&self, position: usize, kv_head: usize) -> (*const u8, *const u8) {
        match &self.path {
            Some(path) if position >= path.first => path.block(position),
            _ => self.operands.block(self.tile, position, kv_head),
        }
    }

    #[inline(always)]
    fn chunk(&self, kv_head: usize, chunk_start: usize, needed: Range<usize>, last: usize) -> Chunk {
        let mut chunk = Chunk {
            keys: [std::ptr::null(); CHUNK / BLOCK_TOKENS],
            values: [std::ptr::null(); CHUNK / BLOCK_TOKENS],
            next_keys: [std::ptr::null(); CHUNK / BLOCK_TOKENS],
            next_values: [std::ptr::null(); CHUNK / BLOCK_TOKENS],
            head_dim: self.operands.op.head_dim,
            soft_cap: self.operands.op.soft_cap.map(|cap| cap * LOG2_E),
        };
        for block in 0..CHUNK / BLOCK_TOKENS {
            let position = chunk_start + block * BLOCK_TOKENS;
            if position < needed.end && position + BLOCK_TOKENS > needed.start {
                (chunk.keys[block], chunk.values[block]) = self.block(position, kv_head);
            }
            // At the end there is no next chunk: a prefetch of the current one costs nothing.
            let next = position + CHUNK;
            (chunk.next_keys[block], chunk.next_values[block]) =
                if next < last { self.block(next, kv_head) } else { (chunk.keys[block], chunk.values[block]) };
        }
        chunk
    }
}

/// Writes the finished row and head to the output.
#[inline(always)]
fn finish<S: Simd, T>(s: S, operands: &Operands<'_, T>, tile: &Tile, row: usize, head: usize, sum: Sum<'_>) {
    let dim = operands.op.head_dim;
    let first_row = operands.spans[tile.span as usize].first_row as usize + tile.first as usize;
    let start = ((first_row + row) * operands.geometry.heads + head) * dim;
    // SAFETY: a row is in one span (`Batch::check`), and a row and head of a span are finished by
    // one tile.
    let out = unsafe { operands.out.part(start..start + dim) };
    sum.finish(s, operands.op.sinks.map(|sinks| sinks[head] * LOG2_E), out);
}

/// Merges the partial sums of a tile that several threads computed.
pub struct Merge<'a, T> {
    pub operands: &'a Operands<'a, T>,
    pub tile: &'a Tile,
}

impl<T: Storage> Kernel for Merge<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (operands, tile) = (self.operands, self.tile);
        if tile.num_splits == 1 {
            return;
        }
        let dim = operands.geometry.padded_dim;
        let mut values = Area::<MAX_VALUES>::new();
        for row in 0..tile.rows as usize {
            for head in 0..operands.geometry.heads {
                let mut total = Sum { largest: f32::NEG_INFINITY, weight: 0.0, values: values.fill(dim, 0.0) };
                for split in 0..tile.num_splits as usize {
                    let range = operands.partial(tile, split, row, head);
                    // SAFETY: all items are done, and a tile is merged by one thread.
                    let part = unsafe { operands.partials.part(range) };
                    total.merge(s, part[dim], part[dim + 1], &part[..dim]);
                }
                finish(s, operands, tile, row, head, total);
            }
        }
    }
}
