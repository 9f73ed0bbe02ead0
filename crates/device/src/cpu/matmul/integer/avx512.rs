//! Integer dot products by AVX-512 VNNI: one instruction multiplies 64 unsigned bytes with 64 signed ones and adds four
//! neighbours. Levels are made unsigned by an offset, which the sums' start takes back.

use std::arch::x86_64::*;

use super::super::avx512::Sixteen;
use super::super::tile::{Tile, by_rows};
use super::{Bytes, Dots, EvenNibbles, Five, Nibbles};

/// Six rows by two registers of outputs, integer and floating-point sums, leave eight registers for the rest.
pub const MAX_ROWS: usize = 6;

#[derive(Clone, Copy)]
struct Sums(__m512i);

// SAFETY: unaligned loads of 16 lanes; callers run with AVX-512 F, BW and VNNI enabled.
unsafe impl Dots for Sums {
    type Floats = Sixteen;
    type Levels = __m512i;
    type Table = __m512i;

    #[inline(always)]
    unsafe fn splat(from: *const i32) -> Self {
        // SAFETY: AVX-512 is there, as the trait asks; one readable value.
        Sums(unsafe { _mm512_set1_epi32(*from) })
    }

    #[inline(always)]
    unsafe fn add_dot(self, levels: __m512i, activations: *const u32) -> Self {
        // SAFETY: as above.
        Sums(unsafe { _mm512_dpbusd_epi32(self.0, levels, _mm512_set1_epi32(*activations as i32)) })
    }

    #[inline(always)]
    unsafe fn to_floats(self) -> Sixteen {
        // SAFETY: as above.
        Sixteen(unsafe { _mm512_cvtepi32_ps(self.0) })
    }

    #[inline(always)]
    unsafe fn table(table: &[u8; 16]) -> __m512i {
        // SAFETY: as above; 16 readable bytes.
        unsafe { _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast())) }
    }

    #[inline(always)]
    unsafe fn bytes(at: *const u8) -> __m512i {
        // SAFETY: as above; 64 readable bytes.
        unsafe { _mm512_loadu_si512(at.cast()) }
    }

    #[inline(always)]
    unsafe fn nibbles<const HIGH: bool>(at: *const u8, table: __m512i) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_shuffle_epi8(table, Self::even_nibbles::<HIGH>(at, table)) }
    }

    #[inline(always)]
    unsafe fn even_nibbles<const HIGH: bool>(at: *const u8, _: __m512i) -> __m512i {
        // SAFETY: as above; 64 readable bytes.
        unsafe {
            let pairs = _mm512_loadu_si512(at.cast());
            let pairs = if HIGH { _mm512_srli_epi16::<4>(pairs) } else { pairs };
            _mm512_and_si512(pairs, _mm512_set1_epi8(15))
        }
    }

    #[inline(always)]
    unsafe fn five<const HIGH: bool>(at: *const u8, plane: *const u8, table: __m512i) -> __m512i {
        // SAFETY: as above; 64 readable bytes and eight of the plane.
        unsafe {
            let low = Self::even_nibbles::<HIGH>(at, table);
            let fifth = plane.cast::<u64>().read_unaligned();
            _mm512_mask_add_epi8(low, fifth, low, _mm512_set1_epi8(16))
        }
    }
}

macro_rules! kernel {
    ($rows_name:ident, $name:ident, $codes:ty) => {
        #[target_feature(enable = "avx512f,avx512bw,avx512vnni,f16c")]
        unsafe fn $rows_name<const R: usize>(tile: &Tile) {
            // SAFETY: the caller's promise; the instruction set is enabled here.
            unsafe { super::tile::<Sums, $codes, R, 2>(tile) }
        }

        /// # Safety
        /// See [`super::tile`]; the machine has AVX-512 with VNNI.
        pub unsafe fn $name(tile: &Tile) {
            by_rows!(tile, $rows_name, [1 2 3 4 5 6])
        }
    };
}

kernel!(bytes_rows, bytes_tile, Bytes);
kernel!(nibbles_rows, nibbles_tile, Nibbles);
kernel!(even_nibbles_rows, even_nibbles_tile, EvenNibbles);
kernel!(five_rows, five_tile, Five);

/// See [`super::super::rounding`].
///
/// # Safety
/// The machine has AVX-512.
#[target_feature(enable = "avx512f")]
pub unsafe fn largest_bits(values: &[f32]) -> u32 {
    let sign = _mm512_set1_epi32(i32::MAX);
    let (blocks, rest) = values.as_chunks::<16>();
    // SAFETY: the masked load reads the rest alone.
    let mut largest = unsafe { _mm512_maskz_loadu_epi32(tail(rest.len()), rest.as_ptr().cast()) };
    largest = _mm512_and_si512(largest, sign);
    for block in blocks {
        // SAFETY: a block holds 16 values.
        let bits = unsafe { _mm512_loadu_si512(block.as_ptr().cast()) };
        largest = _mm512_max_epu32(largest, _mm512_and_si512(bits, sign));
    }
    _mm512_reduce_max_epu32(largest)
}

/// See [`super::super::rounding`].
///
/// # Safety
/// The machine has AVX-512, and `codes` has room for the values, rounded up to a multiple of 16.
#[target_feature(enable = "avx512f")]
pub unsafe fn round(values: &[f32], inverse: f32, codes: &mut [i8]) -> i32 {
    assert!(codes.len() >= values.len().next_multiple_of(16));
    let inverse = _mm512_set1_ps(inverse);
    let (blocks, rest) = values.as_chunks::<16>();
    let mut sum = _mm512_setzero_si512();
    for (block, codes) in blocks.iter().zip(codes.chunks_exact_mut(16)) {
        // SAFETY: a block holds 16 values, and so does its part of the codes.
        unsafe {
            let rounded = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(block.as_ptr()), inverse));
            sum = _mm512_add_epi32(sum, rounded);
            _mm_storeu_si128(codes.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(rounded));
        }
    }
    if !rest.is_empty() {
        // SAFETY: the masked load reads the rest alone; 16 codes have room, as checked above.
        unsafe {
            let values = _mm512_maskz_loadu_ps(tail(rest.len()), rest.as_ptr());
            let rounded = _mm512_cvtps_epi32(_mm512_mul_ps(values, inverse));
            sum = _mm512_add_epi32(sum, rounded);
            _mm_storeu_si128(codes[16 * blocks.len()..].as_mut_ptr().cast(), _mm512_cvtepi32_epi8(rounded));
        }
    }
    _mm512_reduce_add_epi32(sum)
}

/// The first `len` lanes.
fn tail(len: usize) -> u16 {
    ((1u32 << len) - 1) as u16
}
