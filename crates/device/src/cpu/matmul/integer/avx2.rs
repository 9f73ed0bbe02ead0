//! Integer dot products by AVX2: the multiply-add of bytes wants one side unsigned and saturates at 16 bits, so it is
//! given the levels' sizes and the activations with the levels' signs; 2 * 128 * 127 fits.

use std::arch::x86_64::*;

use super::super::avx2::Eight;
use super::super::tile::{Tile, by_rows};
use super::{Bytes, Dots, Five, Nibbles};

pub const MAX_ROWS: usize = 4;

#[derive(Clone, Copy)]
struct Sums(__m256i);

// SAFETY: unaligned loads of 8 lanes; callers run with AVX2, FMA and F16C enabled.
unsafe impl Dots for Sums {
    type Floats = Eight;
    /// Sizes and signed levels.
    type Levels = (__m256i, __m256i);
    type Table = __m256i;

    #[inline(always)]
    unsafe fn splat(from: *const i32) -> Self {
        // SAFETY: AVX2 is there, as the trait asks; one readable value.
        Sums(unsafe { _mm256_set1_epi32(*from) })
    }

    #[inline(always)]
    unsafe fn add_dot(self, (sizes, levels): (__m256i, __m256i), activations: *const u32) -> Self {
        // SAFETY: as above.
        unsafe {
            let signed = _mm256_sign_epi8(_mm256_set1_epi32(*activations as i32), levels);
            let pairs = _mm256_maddubs_epi16(sizes, signed);
            Sums(_mm256_add_epi32(self.0, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))))
        }
    }

    #[inline(always)]
    unsafe fn to_floats(self) -> Eight {
        // SAFETY: as above.
        Eight(unsafe { _mm256_cvtepi32_ps(self.0) })
    }

    #[inline(always)]
    unsafe fn table(table: &[u8; 16]) -> __m256i {
        // SAFETY: as above; 16 readable bytes.
        unsafe { _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast())) }
    }

    #[inline(always)]
    unsafe fn bytes(at: *const u8) -> (__m256i, __m256i) {
        // SAFETY: as above; 32 readable bytes. Flipping the top bit takes 128 away.
        unsafe {
            let levels = _mm256_xor_si256(_mm256_loadu_si256(at.cast()), _mm256_set1_epi8(i8::MIN));
            (_mm256_abs_epi8(levels), levels)
        }
    }

    #[inline(always)]
    unsafe fn nibbles<const HIGH: bool>(at: *const u8, table: __m256i) -> (__m256i, __m256i) {
        // SAFETY: as above.
        unsafe {
            let levels = _mm256_shuffle_epi8(table, codes::<HIGH>(at));
            (_mm256_abs_epi8(levels), levels)
        }
    }

    #[inline(always)]
    unsafe fn five<const HIGH: bool>(at: *const u8, plane: *const u8, table: __m256i) -> (__m256i, __m256i) {
        // SAFETY: as above; 32 readable bytes and four of the plane.
        unsafe {
            let zero = _mm256_broadcastb_epi8(_mm256_castsi256_si128(table));
            // Byte i of the plane to each of eight codes, of which code j looks at bit j.
            let spread = _mm256_setr_epi64x(0, 0x0101_0101_0101_0101, 0x0202_0202_0202_0202, 0x0303_0303_0303_0303);
            let bits = _mm256_set1_epi64x(0x8040_2010_0804_0201u64 as i64);
            let plane = _mm256_shuffle_epi8(_mm256_set1_epi32(plane.cast::<i32>().read_unaligned()), spread);
            let fifth = _mm256_cmpeq_epi8(_mm256_and_si256(plane, bits), bits);
            let code = _mm256_or_si256(codes::<HIGH>(at), _mm256_and_si256(fifth, _mm256_set1_epi8(16)));
            let levels = _mm256_sub_epi8(code, zero);
            (_mm256_abs_epi8(levels), levels)
        }
    }
}

/// # Safety
/// AVX2 is there; 32 readable bytes.
#[inline(always)]
unsafe fn codes<const HIGH: bool>(at: *const u8) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe {
        let pairs = _mm256_loadu_si256(at.cast());
        let pairs = if HIGH { _mm256_srli_epi16::<4>(pairs) } else { pairs };
        _mm256_and_si256(pairs, _mm256_set1_epi8(15))
    }
}

/// One row takes all four registers of a panel in one pass, so that each cache line is read once; more rows take fewer
/// and pass again over a block that the first pass left in cache.
macro_rules! kernel {
    ($rows_name:ident, $name:ident, $codes:ty) => {
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn $rows_name<const R: usize>(tile: &Tile) {
            // SAFETY: the caller's promise; the instruction set is enabled here.
            unsafe {
                match R {
                    1 => super::tile::<Sums, $codes, R, 4>(tile),
                    2 => super::tile::<Sums, $codes, R, 2>(tile),
                    _ => super::tile::<Sums, $codes, R, 1>(tile),
                }
            }
        }

        /// # Safety
        /// See [`super::tile`]; the machine has AVX2, FMA and F16C.
        pub unsafe fn $name(tile: &Tile) {
            by_rows!(tile, $rows_name, [1 2 3 4])
        }
    };
}

kernel!(bytes_rows, bytes_tile, Bytes);
kernel!(nibbles_rows, nibbles_tile, Nibbles);
kernel!(five_rows, five_tile, Five);
