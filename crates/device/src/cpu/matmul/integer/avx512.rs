//! Integer dot products by AVX-512 VNNI: one instruction multiplies 64 unsigned bytes with 64 signed ones and adds four
//! neighbours. Levels are made unsigned by an offset, which the sums' start takes back.

use std::arch::x86_64::*;

use super::super::avx512::Sixteen;
use super::super::tile::{Tile, by_rows};
use super::avx512_row as row;
use super::{Bytes, Dots, Five, Nibbles, Six};

/// Six rows by two registers of outputs, integer and floating-point sums, leave eight registers for the rest.
pub const MAX_ROWS: usize = 6;

#[derive(Clone, Copy)]
struct Sums(__m512i);

// SAFETY: unaligned loads of 16 lanes; callers run with AVX-512 F, BW, VNNI and VBMI enabled.
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
    unsafe fn add_dot(self, levels: __m512i, activations: *const u32, _: usize) -> Self {
        // SAFETY: as above.
        Sums(unsafe { _mm512_dpbusd_epi32(self.0, levels, _mm512_set1_epi32(*activations as i32)) })
    }

    #[inline(always)]
    unsafe fn to_floats(self) -> Sixteen {
        // SAFETY: as above.
        Sixteen(unsafe { _mm512_cvtepi32_ps(self.0) })
    }

    /// Four times over: a permutation of bytes looks at six bits of its index, of which the lower four count this way.
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
        // SAFETY: as above; 64 readable bytes.
        unsafe {
            let pairs = _mm512_loadu_si512(at.cast());
            let pairs = if HIGH { _mm512_srli_epi16::<4>(pairs) } else { pairs };
            _mm512_permutexvar_epi8(pairs, table)
        }
    }

    #[inline(always)]
    unsafe fn five<const HIGH: bool>(at: *const u8, plane: *const u8, _: __m512i) -> __m512i {
        // SAFETY: as above; 64 readable bytes and eight of the plane.
        unsafe {
            let pairs = _mm512_loadu_si512(at.cast());
            let pairs = if HIGH { _mm512_srli_epi16::<4>(pairs) } else { pairs };
            let low = _mm512_and_si512(pairs, _mm512_set1_epi8(15));
            let fifth = plane.cast::<u64>().read_unaligned();
            _mm512_mask_add_epi8(low, fifth, low, _mm512_set1_epi8(16))
        }
    }

    #[inline(always)]
    unsafe fn six<const Q: usize>(at: *const u8, plane: *const u8, _: __m512i) -> __m512i {
        /// `a | b & c`.
        const OR_AND: i32 = 0xf8;
        // SAFETY: as above; 64 readable bytes of both.
        unsafe {
            let (pairs, plane) = (_mm512_loadu_si512(at.cast()), _mm512_loadu_si512(plane.cast()));
            let pairs = if Q.is_multiple_of(2) { pairs } else { _mm512_srli_epi16::<4>(pairs) };
            let upper = match Q {
                0 => _mm512_slli_epi16::<4>(plane),
                1 => _mm512_slli_epi16::<2>(plane),
                2 => plane,
                _ => _mm512_srli_epi16::<2>(plane),
            };
            let upper = _mm512_and_si512(upper, _mm512_set1_epi8(0x30));
            _mm512_ternarylogic_epi32::<OR_AND>(upper, pairs, _mm512_set1_epi8(15))
        }
    }
}

macro_rules! kernel {
    ($rows_name:ident, $name:ident, $codes:ty, $one:ident) => {
        #[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx512vbmi,f16c")]
        unsafe fn $rows_name<const R: usize>(tile: &Tile) {
            // SAFETY: the caller's promise; the instruction set is enabled here.
            unsafe { super::tile::<Sums, $codes, R, 2>(tile) }
        }

        /// # Safety
        /// See [`super::tile`]; the machine has AVX-512 with VNNI and VBMI.
        pub unsafe fn $name(tile: &Tile) {
            if tile.rows == 1 {
                // SAFETY: the caller's promise.
                return unsafe { if tile.multiples { row::$one::<true>(tile) } else { row::$one::<false>(tile) } };
            }
            by_rows!(tile, $rows_name, [2 3 4 5 6])
        }
    };
}

kernel!(bytes_rows, bytes_tile, Bytes, bytes);
kernel!(nibbles_rows, nibbles_tile, Nibbles, nibbles);
kernel!(five_rows, five_tile, Five, five);
kernel!(six_rows, six_tile, Six, six);

/// # Safety
/// As [`nibbles_tile`], with a table that counts up by one.
pub unsafe fn even_nibbles_tile(tile: &Tile) {
    // SAFETY: the caller's promise.
    unsafe {
        match (tile.rows, tile.multiples) {
            (1, true) => row::even_nibbles::<true>(tile),
            (1, false) => row::even_nibbles::<false>(tile),
            _ => nibbles_tile(tile),
        }
    }
}

/// # Safety
/// See [`super::expand`]; the machine has AVX-512.
#[target_feature(enable = "avx512f,avx512bw,f16c")]
pub unsafe fn expand(tile: &Tile, code_bytes: usize, out: *mut f32) {
    // SAFETY: the caller's promise.
    unsafe { super::expand::<Sixteen>(tile, code_bytes, out) }
}
