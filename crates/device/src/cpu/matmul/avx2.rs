//! Kernels for AVX2 with FMA and F16C: 16 registers of 8 lanes.

use std::arch::x86_64::*;

use super::tile::{self, Bf16, F16, F32, Lanes, Tile, by_rows};

/// Five rows by two registers of outputs leave six registers for weights, which in bf16 come in
/// pairs, and an activation.
pub const MAX_ROWS: usize = 5;

/// Distance of one row's prefetches. This value came closest to the memory's bandwidth on Zen 3.
const AHEAD: usize = 1 << 10;

#[derive(Clone, Copy)]
pub struct Eight(pub __m256);

// SAFETY: unaligned loads and stores of 8 elements; callers run with AVX2, FMA and F16C enabled.
unsafe impl Lanes for Eight {
    const WIDTH: usize = 8;
    const IN_TURN: bool = true;

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: the trait requires that AVX is present.
        Eight(unsafe { _mm256_setzero_ps() })
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: as above.
        Eight(unsafe { _mm256_set1_ps(value) })
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: as above; 8 readable values.
        Eight(unsafe { _mm256_loadu_ps(from) })
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u8) -> Self {
        // SAFETY: as above; 16 readable bytes.
        Eight(unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) })
    }

    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self {
        // SAFETY: as above; 8 readable bytes.
        Eight(unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast()))) })
    }

    #[inline(always)]
    unsafe fn load_bf16_first(from: *const u8) -> Self {
        // SAFETY: as above; 32 readable bytes.
        unsafe {
            let pairs = _mm256_loadu_si256(from.cast());
            Eight(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs)))
        }
    }

    #[inline(always)]
    unsafe fn load_bf16_second(from: *const u8) -> Self {
        // SAFETY: as above; 32 readable bytes.
        unsafe {
            let pairs = _mm256_loadu_si256(from.cast());
            Eight(_mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(0xffff_0000u32 as i32))))
        }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: as above; room for 8 values.
        unsafe { _mm256_storeu_ps(to, self.0) }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: as above.
        Eight(unsafe { _mm256_add_ps(self.0, other.0) })
    }

    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        // SAFETY: as above.
        Eight(unsafe { _mm256_mul_ps(self.0, other.0) })
    }

    #[inline(always)]
    unsafe fn add_product(self, a: Self, b: Self) -> Self {
        // SAFETY: as above.
        Eight(unsafe { _mm256_fmadd_ps(a.0, b.0, self.0) })
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

/// Low tiles take all four registers of a panel in one pass, so that each cache line is read once;
/// high tiles take two and pass twice over a block that the first pass left in cache.
macro_rules! kernel {
    ($rows_name:ident, $name:ident, $source:ty) => {
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn $rows_name<const R: usize>(tile: &Tile) {
            // SAFETY: the caller's promise; the instruction set is enabled here.
            unsafe {
                match R {
                    1 if tile.panels == 2 => tile::row::<Eight, $source, 4, 2>(tile, AHEAD),
                    1 => tile::row::<Eight, $source, 4, 1>(tile, AHEAD),
                    2 => tile::tile::<Eight, $source, R, 4>(tile),
                    _ => tile::tile::<Eight, $source, R, 2>(tile),
                }
            }
        }

        /// # Safety
        /// See [`super::tile::tile`]; the machine has AVX2, FMA and F16C.
        pub unsafe fn $name(tile: &Tile) {
            by_rows!(tile, $rows_name, [1 2 3 4 5])
        }
    };
}

kernel!(f32_rows, f32_tile, F32);
kernel!(f16_rows, f16_tile, F16);
kernel!(bf16_rows, bf16_tile, Bf16);
