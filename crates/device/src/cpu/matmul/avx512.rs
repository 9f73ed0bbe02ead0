//! Kernels for AVX-512 with BF16: 32 registers of 16 lanes, and a dot-product instruction for pairs
//! of bf16.

use std::arch::x86_64::*;

use super::activations::PAIR_RUN;
use super::kernel::BLOCK_BYTES;
use super::tile::{self, F16, F32, Lanes, Tile, by_rows};

// A block begins with a run of pairs.
const _: () = assert!((BLOCK_BYTES / 128).is_multiple_of(PAIR_RUN));

/// Fourteen rows by two registers of outputs leave four registers for weights and an activation.
pub const MAX_ROWS: usize = 14;

#[derive(Clone, Copy)]
pub struct Sixteen(pub __m512);

// SAFETY: unaligned loads and stores of 16 elements; callers run with AVX-512 F enabled.
unsafe impl Lanes for Sixteen {
    const WIDTH: usize = 16;

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: the trait requires that AVX-512 is present.
        Sixteen(unsafe { _mm512_setzero_ps() })
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: as above.
        Sixteen(unsafe { _mm512_set1_ps(value) })
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: as above; 16 readable values.
        Sixteen(unsafe { _mm512_loadu_ps(from) })
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u8) -> Self {
        // SAFETY: as above; 32 readable bytes.
        Sixteen(unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) })
    }

    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self {
        // SAFETY: as above; 16 readable bytes.
        Sixteen(unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast()))) })
    }

    #[inline(always)]
    unsafe fn load_bf16_first(from: *const u8) -> Self {
        // SAFETY: as above; 64 readable bytes.
        unsafe {
            let pairs = _mm512_loadu_si512(from.cast());
            Sixteen(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)))
        }
    }

    #[inline(always)]
    unsafe fn load_bf16_second(from: *const u8) -> Self {
        // SAFETY: as above; 64 readable bytes.
        unsafe {
            let pairs = _mm512_loadu_si512(from.cast());
            Sixteen(_mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(0xffff_0000u32 as i32))))
        }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: as above; room for 16 values.
        unsafe { _mm512_storeu_ps(to, self.0) }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: as above.
        Sixteen(unsafe { _mm512_add_ps(self.0, other.0) })
    }

    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        // SAFETY: as above.
        Sixteen(unsafe { _mm512_mul_ps(self.0, other.0) })
    }

    #[inline(always)]
    unsafe fn add_product(self, a: Self, b: Self) -> Self {
        // SAFETY: as above.
        Sixteen(unsafe { _mm512_fmadd_ps(a.0, b.0, self.0) })
    }

    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        // SAFETY: a prefetch of any address is harmless.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }

    #[inline(always)]
    unsafe fn prefetch_far(at: *const u8) {
        // SAFETY: a prefetch of any address is harmless.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
    }
}

#[target_feature(enable = "avx512f")]
unsafe fn f32_rows<const R: usize>(tile: &Tile) {
    // SAFETY: the caller's promise; the instruction set is enabled here.
    unsafe { tile::tile::<Sixteen, F32, R, 2>(tile) }
}

#[target_feature(enable = "avx512f")]
unsafe fn f16_rows<const R: usize>(tile: &Tile) {
    // SAFETY: the caller's promise; the instruction set is enabled here.
    unsafe { tile::tile::<Sixteen, F16, R, 2>(tile) }
}

/// The bf16 kernel: both values of a pair go into one instruction, so activations come as pairs
/// too.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn bf16_rows<const R: usize>(tile: &Tile) {
    // SAFETY: `panel` holds `steps` steps of 128 bytes, `activations` R pairs a step in whole runs,
    // `out` R rows of `stride` with 32 columns; all offsets below stay inside those. Prefetches of
    // any address are harmless.
    unsafe {
        let mut sums = [[_mm512_setzero_ps(); 2]; R];
        if tile.resume {
            for r in 0..R {
                let out = tile.out.add(r * tile.stride);
                sums[r] = [_mm512_loadu_ps(out), _mm512_loadu_ps(out.add(16))];
            }
        }
        let mut activations = tile.activations.cast::<i32>();
        let mut panel = tile.panel;
        let mut ahead = tile.prefetch.at;
        let mut left = tile.steps;
        while left > 0 {
            let run = left.min(PAIR_RUN);
            for step in 0..run {
                if tile.prefetch.far {
                    _mm_prefetch::<_MM_HINT_T1>(ahead.cast());
                } else {
                    _mm_prefetch::<_MM_HINT_T0>(ahead.cast());
                    _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(tile.prefetch.second).cast());
                }
                ahead = ahead.wrapping_add(tile.prefetch.advance);
                let low = as_pairs(_mm512_loadu_si512(panel.cast()));
                let high = as_pairs(_mm512_loadu_si512(panel.add(64).cast()));
                for r in 0..R {
                    let pair = as_pairs(_mm512_set1_epi32(*activations.add(r * PAIR_RUN + step)));
                    sums[r][0] = _mm512_dpbf16_ps(sums[r][0], low, pair);
                    sums[r][1] = _mm512_dpbf16_ps(sums[r][1], high, pair);
                }
                panel = panel.add(128);
            }
            activations = activations.wrapping_add(R * PAIR_RUN);
            left -= run;
        }
        for r in 0..R {
            let out = tile.out.add(r * tile.stride);
            let [mut low, mut high] = sums[r];
            if !tile.bias.is_null() {
                low = _mm512_add_ps(low, _mm512_loadu_ps(tile.bias));
                high = _mm512_add_ps(high, _mm512_loadu_ps(tile.bias.add(16)));
            }
            _mm512_storeu_ps(out, low);
            _mm512_storeu_ps(out.add(16), high);
        }
    }
}

#[inline(always)]
fn as_pairs(bits: __m512i) -> __m512bh {
    // SAFETY: both are 64 plain bytes.
    unsafe { std::mem::transmute(bits) }
}

/// # Safety
/// See [`super::tile::tile`]; the machine has AVX-512.
pub unsafe fn f32_tile(tile: &Tile) {
    by_rows!(tile, f32_rows, [1 2 3 4 5 6 7 8 9 10 11 12 13 14])
}

/// # Safety
/// See [`super::tile::tile`]; the machine has AVX-512.
pub unsafe fn f16_tile(tile: &Tile) {
    by_rows!(tile, f16_rows, [1 2 3 4 5 6 7 8 9 10 11 12 13 14])
}

/// # Safety
/// See [`super::tile::tile`], with activations as pairs of bf16; the machine has AVX-512 with BF16.
pub unsafe fn bf16_tile(tile: &Tile) {
    by_rows!(tile, bf16_rows, [1 2 3 4 5 6 7 8 9 10 11 12 13 14])
}

/// Rounds each run of values to pairs of bf16, and stores them at every `stride`-th word of
/// `target`.
///
/// # Safety
/// The machine has AVX-512 with BF16.
#[target_feature(enable = "avx512f,avx512bf16")]
pub unsafe fn round_to_pairs(runs: &[[f32; 2 * PAIR_RUN]], target: &mut [u32], stride: usize) {
    for (run, places) in runs.iter().zip(target.chunks_mut(stride)) {
        let places = &mut places[..PAIR_RUN];
        // SAFETY: 32 readable values, and room for 16 words.
        unsafe {
            let (low, high) = (_mm512_loadu_ps(run.as_ptr()), _mm512_loadu_ps(run.as_ptr().add(16)));
            let pairs: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(high, low));
            _mm512_storeu_si512(places.as_mut_ptr().cast(), pairs);
        }
    }
}
