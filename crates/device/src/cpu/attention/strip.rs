//! The inner loops: a strip of `M` query vectors against one chunk of keys and values.
//!
//! Scores: lanes are the sixteen tokens of a block, and each widened key vector is used by all of the strip from
//! registers. Values: lanes are values of the head, and each widened value vector is used by all of the strip.

use std::ops::Range;

use super::super::kv::Element;
use super::super::simd::{LANES, Simd, exp, tanh};
use super::CHUNK;
use crate::BLOCK_TOKENS;

const BLOCKS: usize = CHUNK / BLOCK_TOKENS;

/// Where a chunk's keys and values lie, and how scores are finished.
pub struct Chunk<T> {
    /// Per block `[head_dim][16]`; blocks that nobody in the tile sees are not read.
    pub keys: [*const T; BLOCKS],
    /// Per block `[16][head_dim]`, with sixteen more readable values behind.
    pub values: [*const T; BLOCKS],
    /// Keys and values of the chunk that comes next, to be asked for in time: its blocks are short runs somewhere
    /// else, which the hardware does not foresee. They need not be readable.
    pub next_keys: [*const T; BLOCKS],
    pub next_values: [*const T; BLOCKS],
    pub head_dim: usize,
    pub soft_cap: Option<f32>,
}

/// The running softmax of a strip. All pointers are to the strip's first vector.
pub struct State {
    /// Queries, scaled, `[head_dim][M]`.
    pub queries: *const f32,
    /// The largest score so far, `[M]`.
    pub largest: *mut f32,
    /// The denominator, lane by lane, `[M][16]`.
    pub weights: *mut f32,
    /// The weighted sum of values, `[M][padded_dim]`.
    pub sums: *mut f32,
    pub padded_dim: usize,
}

/// Scores of `M` vectors over `N` blocks, into `scores` `[M][CHUNK]`.
///
/// # Safety
/// The pointers must be to the shapes named.
#[inline(always)]
unsafe fn score<S: Simd, T: Element, const M: usize, const N: usize>(
    s: S,
    queries: *const f32,
    keys: [*const T; N],
    next: [*const T; N],
    head_dim: usize,
    scores: *mut f32,
) {
    let mut sums = [[s.splat(0.0); N]; M];
    for i in 0..head_dim {
        // SAFETY: `i` is below head_dim; keys are [head_dim][16] and queries [head_dim][M].
        let key = keys.map(|keys| unsafe { T::load(s, keys.add(i * LANES)) });
        for next in next {
            s.prefetch(next.wrapping_add(i * LANES).cast());
        }
        for m in 0..M {
            // SAFETY: as above.
            let query = s.splat(unsafe { *queries.add(i * M + m) });
            for n in 0..N {
                sums[m][n] = s.fma(query, key[n], sums[m][n]);
            }
        }
    }
    for m in 0..M {
        for n in 0..N {
            // SAFETY: scores are [M][CHUNK], and the caller leaves room for N blocks.
            unsafe { s.store(scores.add(m * CHUNK + n * LANES), sums[m][n]) };
        }
    }
}

/// `sums = sums * correction + weights * values`, over `N` vectors of the head's values.
///
/// # Safety
/// The pointers must be to the shapes named; `all` holds every vector's `seen`, `common` lies in every one.
#[inline(always)]
unsafe fn accumulate<S: Simd, T: Element, const M: usize, const N: usize>(
    s: S,
    chunk: &Chunk<T>,
    offset: usize,
    weights: *const f32,
    seen: &[Range<usize>; M],
    all: &Range<usize>,
    common: &Range<usize>,
    correction: &[f32; LANES],
    state: &State,
) {
    let mut sums = [[s.splat(0.0); N]; M];
    for block in all.start / BLOCK_TOKENS..all.end.div_ceil(BLOCK_TOKENS) {
        let first = block * BLOCK_TOKENS;
        // SAFETY: the block is one that the tile sees, and offset is below padded_dim.
        let mut values = unsafe { chunk.values[block].add(offset) };
        let tokens = all.start.max(first)..all.end.min(first + BLOCK_TOKENS);
        // SAFETY: the token lies inside the block.
        values = unsafe { values.add((tokens.start - first) * chunk.head_dim) };
        let mut next = chunk.next_values[block].wrapping_add(offset + (tokens.start - first) * chunk.head_dim);
        for token in tokens {
            // SAFETY: sixteen values are readable behind the end of a row.
            let value: [S::F; N] = std::array::from_fn(|n| unsafe { T::load(s, values.add(n * LANES)) });
            for n in 0..N {
                if (n * LANES * size_of::<T>()).is_multiple_of(64) {
                    s.prefetch(next.wrapping_add(n * LANES).cast());
                }
            }
            next = next.wrapping_add(chunk.head_dim);
            if common.contains(&token) {
                for m in 0..M {
                    // SAFETY: weights are [M][CHUNK].
                    let weight = s.splat(unsafe { *weights.add(m * CHUNK + token) });
                    for n in 0..N {
                        sums[m][n] = s.fma(weight, value[n], sums[m][n]);
                    }
                }
            } else {
                for m in 0..M {
                    if seen[m].contains(&token) {
                        // SAFETY: weights are [M][CHUNK].
                        let weight = s.splat(unsafe { *weights.add(m * CHUNK + token) });
                        for n in 0..N {
                            sums[m][n] = s.fma(weight, value[n], sums[m][n]);
                        }
                    }
                }
            }
            values = values.wrapping_add(chunk.head_dim);
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

/// Scores to weights, in place, for blocks `blocks`; gives back by how much the older sums shrink.
///
/// # Safety
/// `scores` must be `[M][CHUNK]`, and `state` as it says.
#[inline(always)]
unsafe fn soften<S: Simd, const M: usize>(
    s: S,
    blocks: Range<usize>,
    scores: *mut f32,
    seen: &[Range<usize>; M],
    soft_cap: Option<f32>,
    state: &State,
) -> [f32; LANES] {
    const TOKENS: [f32; LANES] = [0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.];
    let lowest = s.splat(f32::NEG_INFINITY);
    let tokens = s.read(&TOKENS);
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
            let first = block * BLOCK_TOKENS;
            if seen[m].start > first || seen[m].end < first + BLOCK_TOKENS {
                let (start, end) = (seen[m].start as f32 - first as f32, seen[m].end as f32 - first as f32);
                score = s.select_lt(tokens, s.splat(start), lowest, score);
                score = s.select_lt(tokens, s.splat(end), score, lowest);
            }
            largest = s.max(largest, score);
            // SAFETY: as above.
            unsafe { s.store(at, score) };
        }
        // SAFETY: `largest` holds M values.
        let old = unsafe { *state.largest.add(m) };
        let new = old.max(s.largest(largest));
        // Nothing seen yet: any finite base turns minus infinity into a weight of zero.
        bases[m] = if new == f32::NEG_INFINITY { 0.0 } else { new };
        shrink[m] = old - bases[m];
        // SAFETY: as above.
        unsafe { *state.largest.add(m) = new };
    }
    let shrink_vector = exp(s, s.read(&shrink));
    s.write(&mut shrink, shrink_vector);
    for m in 0..M {
        let base = s.splat(bases[m]);
        let mut sum = s.splat(0.0);
        for block in blocks.clone() {
            // SAFETY: blocks of a chunk, so inside [M][CHUNK].
            unsafe {
                let at = scores.add(m * CHUNK + block * LANES);
                let weight = exp(s, s.sub(s.load(at), base));
                s.store(at, weight);
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

/// Takes one chunk into the running softmax of `M` vectors; `seen` are the tokens of the chunk each of them sees.
///
/// # Safety
/// `chunk` and `state` must be as they say, for every block that `seen` touches.
#[inline(always)]
pub unsafe fn attend<S: Simd, T: Element, const M: usize, const N: usize>(
    s: S,
    chunk: &Chunk<T>,
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
    let mut scores = Scores([[0.0; CHUNK]; M]);
    let scores = scores.0.as_mut_ptr().cast::<f32>();
    let mut block = blocks.start;
    // SAFETY: the caller vouches for the shapes; all offsets below stay inside one chunk and one head.
    unsafe {
        while block + N <= blocks.end {
            let keys: [*const T; N] = std::array::from_fn(|n| chunk.keys[block + n]);
            let next: [*const T; N] = std::array::from_fn(|n| chunk.next_keys[block + n]);
            score::<S, T, M, N>(s, state.queries, keys, next, chunk.head_dim, scores.add(block * LANES));
            block += N;
        }
        while block < blocks.end {
            let (keys, next) = ([chunk.keys[block]], [chunk.next_keys[block]]);
            score::<S, T, M, 1>(s, state.queries, keys, next, chunk.head_dim, scores.add(block * LANES));
            block += 1;
        }
        let correction = soften(s, blocks, scores, seen, chunk.soft_cap, state);
        let mut offset = 0;
        while offset + N * LANES <= state.padded_dim {
            accumulate::<S, T, M, N>(s, chunk, offset, scores, seen, &all, &common, &correction, state);
            offset += N * LANES;
        }
        while offset < state.padded_dim {
            accumulate::<S, T, M, 1>(s, chunk, offset, scores, seen, &all, &common, &correction, state);
            offset += LANES;
        }
    }
}
