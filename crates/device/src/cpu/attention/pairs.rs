//! The inner loops for keys and values stored in pairs, on machines that multiply pairs: two
//! products and both sums in one instruction.
//!
//! Queries and weights are rounded to bf16 for it, as they are on GPUs; scores, softmax and sums
//! stay f32. A pair of tokens is the same two slots of a block for every row. If the mask leaves a
//! row only one token of a pair, which its position decides, that token is multiplied alone with a
//! scalar FMA.

use std::ops::Range;

use half::bf16;

use super::super::kv::{Pairs, Storage};
use super::super::simd::{LANES, Simd};
use super::CHUNK;
use super::strip::{Chunk, LINE, State};
use crate::BLOCK_TOKENS;

/// Whether products are computed in pairs.
#[inline(always)]
pub const fn paired<S: Simd, T: Storage>() -> bool {
    S::PAIR_DOTS && T::PAIRS
}

/// Number of 32-bit words, one a lane, that a packed query takes.
#[inline(always)]
pub fn query_words(head_dim: usize) -> usize {
    head_dim.div_ceil(2)
}

/// Rounds a scaled query to pairs, one word in every `stride` of `to`; an odd head ends in a zero.
#[inline(always)]
pub fn pack_query<S: Simd>(s: S, query: &[f32], scale: f32, to: &mut [f32], stride: usize) {
    for (run, values) in query.chunks(LANES).enumerate() {
        let mut words = [[bf16::ZERO; 2]; LANES / 2];
        // SAFETY: eight pairs are sixteen values.
        unsafe { s.store_bf16(words.as_mut_ptr().cast(), s.mul(s.read(values), s.splat(scale))) };
        let to = to[run * LANES / 2 * stride..].iter_mut().step_by(stride);
        for (to, [first, second]) in to.zip(words).take(query_words(values.len())) {
            *to = f32::from_bits(u32::from(first.to_bits()) | u32::from(second.to_bits()) << 16);
        }
    }
}

/// Scores of `M` vectors over `N` blocks, into `scores` `[M][CHUNK]`.
///
/// # Safety
/// The pointers must have the named shapes, with keys in pairs.
#[inline(always)]
pub unsafe fn score<S: Simd, const M: usize, const N: usize>(
    s: S,
    state: &State,
    keys: [*const u8; N],
    next: [*const u8; N],
    head_dim: usize,
    scores: *mut f32,
) {
    let mut dots = [[s.splat(0.0); N]; M];
    for pair in 0..head_dim / 2 {
        let mut key = [s.splat(0.0); N];
        for n in 0..N {
            // SAFETY: the head has both keys.
            key[n] = unsafe { Pairs::keys(s, keys[n], pair) };
            s.prefetch(next[n].wrapping_add(pair * LINE));
        }
        for m in 0..M {
            // SAFETY: queries are [head_dim / 2][M].
            let query = s.splat(unsafe { *state.queries.add(pair * M + m) });
            for n in 0..N {
                dots[m][n] = s.dot_pairs(dots[m][n], query, key[n]);
            }
        }
    }
    if !head_dim.is_multiple_of(2) {
        for n in 0..N {
            // SAFETY: the head has this last key.
            let key = unsafe { Pairs::last_keys(s, keys[n], head_dim / 2) };
            for m in 0..M {
                // SAFETY: as above, and an odd head has one word more.
                let query = s.splat(unsafe { *state.queries.add(head_dim / 2 * M + m) });
                dots[m][n] = s.dot_pairs(dots[m][n], query, key);
            }
        }
    }
    for m in 0..M {
        for n in 0..N {
            // SAFETY: scores are [M][CHUNK] with room for N blocks.
            unsafe { s.store(scores.add(m * CHUNK + n * LANES), dots[m][n]) };
        }
    }
}

/// `sums = sums * correction + weights * values`, over `N` vectors of the head's values; weights
/// are `[M][CHUNK / 2]` pairs.
///
/// # Safety
/// The pointers must have the named shapes, with values in pairs; `all` holds every vector's
/// `seen`, and `common` is inside each of them.
#[inline(always)]
pub unsafe fn accumulate<S: Simd, const M: usize, const N: usize>(
    s: S,
    chunk: &Chunk,
    offset: usize,
    weights: *const f32,
    seen: &[Range<usize>; M],
    all: &Range<usize>,
    common: &Range<usize>,
    correction: &[f32; LANES],
    state: &State,
) {
    let pair_bytes = 2 * Pairs::row_bytes(chunk.head_dim);
    let mut sums = [[s.splat(0.0); N]; M];
    for block in all.start / BLOCK_TOKENS..all.end.div_ceil(BLOCK_TOKENS) {
        let first = block * BLOCK_TOKENS;
        let pairs = all.start.max(first) / 2..all.end.min(first + BLOCK_TOKENS).div_ceil(2);
        let skipped = (pairs.start - first / 2) * pair_bytes;
        let mut rows = chunk.values[block].wrapping_add(skipped);
        let mut next = chunk.next_values[block].wrapping_add(skipped + offset * 2 * size_of::<bf16>());
        for pair in pairs {
            // SAFETY: the tile sees the block, the pair is inside it, and offset is below
            // padded_dim.
            let value: [S::F; N] = unsafe { Pairs::values(s, rows, offset) };
            for n in 0..N {
                s.prefetch(next.wrapping_add(n * LINE));
            }
            (rows, next) = (rows.wrapping_add(pair_bytes), next.wrapping_add(pair_bytes));
            let tokens = 2 * pair..2 * pair + 2;
            if common.start <= tokens.start && tokens.end <= common.end {
                for m in 0..M {
                    // SAFETY: weights are [M][CHUNK / 2] pairs.
                    let weight = s.splat(unsafe { *weights.add(m * (CHUNK / 2) + pair) });
                    for n in 0..N {
                        sums[m][n] = s.dot_pairs(sums[m][n], weight, value[n]);
                    }
                }
            } else {
                for m in 0..M {
                    // SAFETY: as above.
                    let weight = s.splat(unsafe { *weights.add(m * (CHUNK / 2) + pair) });
                    let is_seen = [seen[m].contains(&tokens.start), seen[m].contains(&(tokens.start + 1))];
                    for n in 0..N {
                        if is_seen == [true, true] {
                            sums[m][n] = s.dot_pairs(sums[m][n], weight, value[n]);
                        } else if is_seen != [false, false] {
                            // The other slot may hold anything, and is left out.
                            let half = usize::from(is_seen[1]);
                            sums[m][n] = s.fma(s.halves(weight)[half], s.halves(value[n])[half], sums[m][n]);
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
