//! The inner loops: a strip of `M` query vectors against one chunk of keys and values.
//!
//! For scores, lanes are the sixteen tokens of a block, and each widened key vector is used by all
//! of the strip from registers. For values, lanes are values of the head, and each widened value
//! vector is used by all of the strip.
//!
//! Keys and values are levels of a [`Storage`]. If it has scales, a block's sums are multiplied by
//! its sixteen tokens' scales once a group, and the softmax weights by the values' scales before
//! they meet the levels. Minimums add to a score their product with the sum of the query, and to
//! the values one sum for the whole group.
//!
//! Scores are logarithms to the base 2, for which queries are scaled: a power of two costs half of
//! one of e.
//!
//! Vectors pass through loops and never through closures: only code that is certain to be inlined
//! is compiled for the instruction set.

use std::ops::Range;

use half::bf16;

use super::super::kv::Storage;
use super::super::simd::{LANES, Simd, exp2, tanh};
use super::CHUNK;
use super::pairs::{self, paired};
use crate::BLOCK_TOKENS;

const BLOCKS: usize = CHUNK / BLOCK_TOKENS;

/// Addresses of a chunk's keys and values, and how scores are finished.
pub struct Chunk {
    /// One address per block, in the layout of [`Storage`]; blocks that no row of the tile sees are
    /// not read.
    pub keys: [*const u8; BLOCKS],
    pub values: [*const u8; BLOCKS],
    /// Keys and values of the next chunk, to be prefetched: its blocks are short runs elsewhere in
    /// memory, which the hardware does not predict. They need not be readable.
    pub next_keys: [*const u8; BLOCKS],
    pub next_values: [*const u8; BLOCKS],
    pub head_dim: usize,
    /// Cap of scores in their own units, to the base 2; none for no cap.
    pub soft_cap: Option<f32>,
}

/// The running softmax of a strip. All pointers are to the strip's first vector.
pub struct State {
    /// Queries, scaled, `[head_dim][M]`; for products of pairs, in pairs of bf16,
    /// `[head_dim / 2][M]`.
    pub queries: *const f32,
    /// Sums of the queries' groups, `[groups][M]`; read only if the storage has minimums.
    pub query_sums: *const f32,
    /// The largest score so far, `[M]`.
    pub largest: *mut f32,
    /// The denominator, lane by lane, `[M][16]`.
    pub weights: *mut f32,
    /// The weighted sum of values, `[M][padded_dim]`.
    pub sums: *mut f32,
    pub padded_dim: usize,
}

/// Bytes of a cache line.
pub const LINE: usize = 64;

/// Scores of `M` vectors over `N` blocks, into `scores` `[M][CHUNK]`.
///
/// # Safety
/// The pointers must have the named shapes.
#[inline(always)]
unsafe fn score<S: Simd, T: Storage, const M: usize, const N: usize>(
    s: S,
    state: &State,
    keys: [*const u8; N],
    next: [*const u8; N],
    head_dim: usize,
    scores: *mut f32,
) {
    if paired::<S, T>() {
        // SAFETY: the caller's promise.
        return unsafe { pairs::score::<S, M, N>(s, state, keys, next, head_dim, scores) };
    }
    let (mut first, mut group) = (0, 0);
    while first < head_dim {
        let last = first.saturating_add(T::GROUP).min(head_dim);
        let mut dots = [[s.splat(0.0); N]; M];
        for pair in first / 2..last / 2 {
            let mut key = [[s.splat(0.0); 2]; N];
            for n in 0..N {
                // SAFETY: the head has both keys.
                key[n] = unsafe { T::key_pair(s, keys[n], pair) };
                for line in 0..(2 * T::VECTOR_BYTES).div_ceil(LINE) {
                    s.prefetch(next[n].wrapping_add(pair * 2 * T::VECTOR_BYTES + line * LINE));
                }
            }
            for half in 0..2 {
                for m in 0..M {
                    // SAFETY: queries are [head_dim][M].
                    let query = s.splat(unsafe { *state.queries.add((2 * pair + half) * M + m) });
                    for n in 0..N {
                        dots[m][n] = s.fma(query, key[n][half], dots[m][n]);
                    }
                }
            }
        }
        if !last.is_multiple_of(2) {
            for n in 0..N {
                // SAFETY: groups are even, so this is the head's last key.
                let key = unsafe { T::last_key(s, keys[n], last / 2) };
                for m in 0..M {
                    // SAFETY: as above.
                    let query = s.splat(unsafe { *state.queries.add((last - 1) * M + m) });
                    dots[m][n] = s.fma(query, key, dots[m][n]);
                }
            }
        }
        for n in 0..N {
            // SAFETY: `keys` is a head with this group; scores are [M][CHUNK] with room for N
            // blocks.
            unsafe {
                if T::SCALED {
                    s.prefetch(next[n].wrapping_add(T::scales_at(head_dim)));
                    let scales = T::scales(s, keys[n], head_dim, group);
                    for m in 0..M {
                        let at = scores.add(m * CHUNK + n * LANES);
                        let mut score = s.mul(dots[m][n], scales);
                        if T::AFFINE {
                            let minima = T::minima(s, keys[n], head_dim, group);
                            score = s.fma(s.splat(*state.query_sums.add(group * M + m)), minima, score);
                            if group > 0 {
                                score = s.add(s.load(at), score);
                            }
                        }
                        s.store(at, score);
                    }
                } else {
                    for m in 0..M {
                        s.store(scores.add(m * CHUNK + n * LANES), dots[m][n]);
                    }
                }
            }
        }
        (first, group) = (last, group + 1);
    }
}

/// `x` for the tokens of a block that are seen, `otherwise` for the rest. Selection leaves them
/// out, because an unseen slot may hold anything.
#[inline(always)]
fn only_seen<S: Simd>(s: S, seen: &Range<usize>, block: usize, x: S::F, otherwise: S::F) -> S::F {
    const TOKENS: [f32; LANES] = [0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.];
    let first = block * BLOCK_TOKENS;
    if seen.start <= first && seen.end >= first + BLOCK_TOKENS {
        return x;
    }
    let tokens = s.read(&TOKENS);
    let (start, end) = (seen.start as f32 - first as f32, seen.end as f32 - first as f32);
    let x = s.select_lt(tokens, s.splat(start), otherwise, x);
    s.select_lt(tokens, s.splat(end), x, otherwise)
}

/// Weights times the values' scales of one group, into `scaled` `[M][CHUNK]`, and for each vector
/// the sum of weights times minimums. Slots that a vector does not see get any weight, and no part
/// in the sum.
///
/// # Safety
/// The pointers must have the named shapes, and the chunk must have the blocks.
#[inline(always)]
unsafe fn scale_weights<S: Simd, T: Storage, const M: usize>(
    s: S,
    chunk: &Chunk,
    group: usize,
    blocks: Range<usize>,
    weights: *const f32,
    seen: &[Range<usize>; M],
    scaled: *mut f32,
) -> [f32; M] {
    let mut sums = [s.splat(0.0); M];
    for block in blocks {
        s.prefetch(chunk.next_values[block].wrapping_add(T::scales_at(chunk.head_dim) + group * LINE));
        // SAFETY: the block is one that the tile sees, and has the group; weights are [M][CHUNK].
        unsafe {
            let scales = T::scales(s, chunk.values[block], chunk.head_dim, group);
            for m in 0..M {
                let weight = s.load(weights.add(m * CHUNK + block * LANES));
                s.store(scaled.add(m * CHUNK + block * LANES), s.mul(weight, scales));
                if T::AFFINE {
                    let part = s.mul(weight, T::minima(s, chunk.values[block], chunk.head_dim, group));
                    sums[m] = s.add(sums[m], only_seen(s, &seen[m], block, part, s.splat(0.0)));
                }
            }
        }
    }
    let mut totals = [0.0; M];
    if T::AFFINE {
        for m in 0..M {
            totals[m] = s.sum(sums[m]);
        }
    }
    totals
}

/// `sums = sums * correction + base + weights * values`, over `N` vectors of the head's values.
///
/// # Safety
/// The pointers must have the named shapes; `all` holds every vector's `seen`, and `common` is
/// inside each of them.
#[inline(always)]
unsafe fn accumulate<S: Simd, T: Storage, const M: usize, const N: usize>(
    s: S,
    chunk: &Chunk,
    offset: usize,
    weights: *const f32,
    base: &[f32; M],
    seen: &[Range<usize>; M],
    all: &Range<usize>,
    common: &Range<usize>,
    correction: &[f32; LANES],
    state: &State,
) {
    if paired::<S, T>() {
        // SAFETY: the caller's promise.
        return unsafe {
            pairs::accumulate::<S, M, N>(s, chunk, offset, weights, seen, all, common, correction, state)
        };
    }
    let row_bytes = T::row_bytes(chunk.head_dim);
    let mut sums = [[s.splat(0.0); N]; M];
    if T::AFFINE {
        for m in 0..M {
            sums[m] = [s.splat(base[m]); N];
        }
    }
    for block in all.start / BLOCK_TOKENS..all.end.div_ceil(BLOCK_TOKENS) {
        let first = block * BLOCK_TOKENS;
        let pairs = all.start.max(first) / 2..all.end.min(first + BLOCK_TOKENS).div_ceil(2);
        let skipped = (2 * pairs.start - first) * row_bytes;
        let mut rows = chunk.values[block].wrapping_add(skipped);
        let mut next = chunk.next_values[block].wrapping_add(skipped + offset / LANES * T::VECTOR_BYTES);
        for pair in pairs {
            // SAFETY: the tile sees the block, the pair is inside it, and offset is below
            // padded_dim.
            let values: [[S::F; N]; 2] = unsafe { T::value_pair(s, rows, chunk.head_dim, offset) };
            rows = rows.wrapping_add(2 * row_bytes);
            for half in 0..2 {
                for line in 0..(N * T::VECTOR_BYTES).div_ceil(LINE) {
                    s.prefetch(next.wrapping_add(half * row_bytes + line * LINE));
                }
            }
            next = next.wrapping_add(2 * row_bytes);
            if common.start <= 2 * pair && 2 * pair + 2 <= common.end {
                for half in 0..2 {
                    for m in 0..M {
                        // SAFETY: weights are [M][CHUNK].
                        let weight = s.splat(unsafe { *weights.add(m * CHUNK + 2 * pair + half) });
                        for n in 0..N {
                            sums[m][n] = s.fma(weight, values[half][n], sums[m][n]);
                        }
                    }
                }
            } else {
                for half in 0..2 {
                    for m in 0..M {
                        if seen[m].contains(&(2 * pair + half)) {
                            // SAFETY: weights are [M][CHUNK].
                            let weight = s.splat(unsafe { *weights.add(m * CHUNK + 2 * pair + half) });
                            for n in 0..N {
                                sums[m][n] = s.fma(weight, values[half][n], sums[m][n]);
                            }
                        }
                    }
                }
            }
        }
    }
    for m in 0..M {
        let correction = s.splat(correction[m]);
        for n in 0..N {
            // SAFETY: sums are [M][padded_dim], and the caller keeps offset + 16 N within it.
            unsafe {
                let at = state.sums.add(m * state.padded_dim + offset + n * LANES);
                s.store(at, s.fma(s.load(at), correction, sums[m][n]));
            }
        }
    }
}

/// Turns the scores of `blocks` into weights, in place or, for products of pairs, rounded into
/// `pairs`. Returns the factors by which the older sums shrink.
///
/// # Safety
/// `scores` and `pairs` must be `[M][CHUNK]`, and `state` must have its documented shapes.
#[inline(always)]
unsafe fn soften<S: Simd, T: Storage, const M: usize>(
    s: S,
    blocks: Range<usize>,
    scores: *mut f32,
    pairs: *mut bf16,
    seen: &[Range<usize>; M],
    soft_cap: Option<f32>,
    state: &State,
) -> [f32; LANES] {
    let lowest = s.splat(f32::NEG_INFINITY);
    let mut shrink = [f32::NEG_INFINITY; LANES];
    let mut bases = [0.0f32; M];
    for m in 0..M {
        let mut largest = lowest;
        for block in blocks.clone() {
            // SAFETY: blocks of a chunk, so inside [M][CHUNK].
            let at = unsafe { scores.add(m * CHUNK + block * LANES) };
            // SAFETY: as above.
            let mut score = unsafe { s.load(at) };
            if let Some(cap) = soft_cap {
                score = s.mul(s.splat(cap), tanh(s, s.div(score, s.splat(cap))));
            }
            score = only_seen(s, &seen[m], block, score, lowest);
            largest = s.max(largest, score);
            // SAFETY: as above.
            unsafe { s.store(at, score) };
        }
        // SAFETY: `largest` holds M values.
        let old = unsafe { *state.largest.add(m) };
        let new = old.max(s.largest(largest));
        // No token was seen yet: any finite base turns minus infinity into a weight of zero.
        bases[m] = if new == f32::NEG_INFINITY { 0.0 } else { new };
        shrink[m] = old - bases[m];
        // SAFETY: as above.
        unsafe { *state.largest.add(m) = new };
    }
    let shrink_vector = exp2(s, s.read(&shrink));
    s.write(&mut shrink, shrink_vector);
    for m in 0..M {
        let base = s.splat(bases[m]);
        let mut sum = s.splat(0.0);
        for block in blocks.clone() {
            // SAFETY: blocks of a chunk, so inside [M][CHUNK].
            unsafe {
                let at = scores.add(m * CHUNK + block * LANES);
                let weight = exp2(s, s.sub(s.load(at), base));
                if paired::<S, T>() {
                    s.store_bf16(pairs.add(m * CHUNK + block * LANES), weight);
                } else {
                    s.store(at, weight);
                }
                sum = s.add(sum, weight);
            }
        }
        // SAFETY: weights are [M][16].
        unsafe {
            let at = state.weights.add(m * LANES);
            s.store(at, s.fma(s.load(at), s.splat(shrink[m]), sum));
        }
    }
    shrink
}

/// Adds one chunk to the running softmax of `M` vectors, `N` blocks of keys and vectors of values
/// at a time, so that a loaded weight or query serves `N` products. `seen` are the tokens of the
/// chunk that each vector sees.
///
/// # Safety
/// `chunk` and `state` must be as documented, for every block that `seen` touches.
#[inline(always)]
pub unsafe fn attend<S: Simd, T: Storage, const M: usize, const N: usize>(
    s: S,
    chunk: &Chunk,
    state: &State,
    seen: &[Range<usize>; M],
) {
    let mut all = seen[0].clone();
    let mut common = seen[0].clone();
    for range in seen {
        all = all.start.min(range.start)..all.end.max(range.end);
        common = common.start.max(range.start)..common.end.min(range.end);
    }
    if all.is_empty() {
        return;
    }
    let blocks = all.start / BLOCK_TOKENS..all.end.div_ceil(BLOCK_TOKENS);
    #[repr(align(64))]
    struct Scores<const M: usize>([[f32; CHUNK]; M]);
    // Scores become weights in place. Some storages need weights scaled or rounded for their
    // values; these go to `ready`.
    let (mut scores, mut ready) = (Scores([[0.0; CHUNK]; M]), Scores([[0.0; CHUNK]; M]));
    let (scores, ready) = (scores.0.as_mut_ptr().cast::<f32>(), ready.0.as_mut_ptr().cast::<f32>());
    let mut block = blocks.start;
    // SAFETY: the caller promises the shapes; all offsets below stay inside one chunk and one head.
    unsafe {
        while block + N <= blocks.end {
            let keys: [*const u8; N] = std::array::from_fn(|n| chunk.keys[block + n]);
            let next: [*const u8; N] = std::array::from_fn(|n| chunk.next_keys[block + n]);
            score::<S, T, M, N>(s, state, keys, next, chunk.head_dim, scores.add(block * LANES));
            block += N;
        }
        while block < blocks.end {
            let (keys, next) = ([chunk.keys[block]], [chunk.next_keys[block]]);
            score::<S, T, M, 1>(s, state, keys, next, chunk.head_dim, scores.add(block * LANES));
            block += 1;
        }
        let correction = soften::<S, T, M>(s, blocks.clone(), scores, ready.cast(), seen, chunk.soft_cap, state);
        let (mut offset, mut group) = (0, 0);
        while offset < state.padded_dim {
            let end = offset.saturating_add(T::GROUP).min(state.padded_dim);
            let weights = if T::SCALED || paired::<S, T>() { ready } else { scores };
            let mut base = [0.0; M];
            if T::SCALED {
                base = scale_weights::<S, T, M>(s, chunk, group, blocks.clone(), scores, seen, ready);
            }
            while N * LANES <= T::GROUP && offset + N * LANES <= end {
                accumulate::<S, T, M, N>(s, chunk, offset, weights, &base, seen, &all, &common, &correction, state);
                offset += N * LANES;
            }
            while N > 2 && offset + 2 * LANES <= end {
                accumulate::<S, T, M, 2>(s, chunk, offset, weights, &base, seen, &all, &common, &correction, state);
                offset += 2 * LANES;
            }
            while offset < end {
                accumulate::<S, T, M, 1>(s, chunk, offset, weights, &base, seen, &all, &common, &correction, state);
                offset += LANES;
            }
            group += 1;
        }
    }
}
