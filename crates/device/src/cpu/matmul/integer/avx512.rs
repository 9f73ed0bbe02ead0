//! Integer dot products by AVX-512 VNNI: one instruction multiplies 64 unsigned bytes with 64
//! signed ones and adds four neighbours. Levels are made unsigned by an offset, which the sums'
//! start takes back.

use std::arch::x86_64::*;

use super::super::avx512::Sixteen;
use super::super::tile::{Tile, by_rows};
use super::avx512_row as row;
use super::avx512_units;
use super::{AddUnits, Bytes, Codes, Dots, Five, Nibbles, Six, Units};

/// Six rows by two registers of outputs, integer and floating-point sums, leave eight registers for
/// the rest.
pub const MAX_ROWS: usize = 6;

#[derive(Clone, Copy)]
#[repr(transparent)]
struct Sums(__m512i);

// SAFETY: unaligned loads of 16 lanes; callers run with AVX-512 F, BW, VNNI and VBMI enabled.
unsafe impl Dots for Sums {
    type Floats = Sixteen;
    type Table = __m512i;

    #[inline(always)]
    unsafe fn splat(from: *const i32) -> Self {
        // SAFETY: the trait requires that AVX-512 is present; one readable value.
        Sums(unsafe { _mm512_set1_epi32(*from) })
    }

    #[inline(always)]
    unsafe fn to_floats(self) -> Sixteen {
        // SAFETY: as above.
        Sixteen(unsafe { _mm512_cvtepi32_ps(self.0) })
    }

    /// Four copies: a permutation of bytes reads six bits of its index, so only the lower four
    /// matter.
    #[inline(always)]
    unsafe fn table(table: &[u8; 16]) -> __m512i {
        // SAFETY: as above; 16 readable bytes.
        unsafe { _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast())) }
    }
}

// SAFETY: as above.
unsafe impl AddUnits for Sums {
    /// Few, so that prefetches for later blocks come in small portions.
    const AT_ONCE: usize = 4;

    #[inline(always)]
    unsafe fn add_units<C: Codes, const R: usize, const N: usize, const P: usize>(
        dots: &mut [[[Self; N]; R]; P],
        units: Units,
        _: usize,
        table: __m512i,
        activations: *const u32,
    ) {
        const { assert!(N == 2 && P == 1, "a whole panel at a time") };
        // SAFETY: as above; `Sums` has the layout of its register.
        unsafe { avx512_units::add::<C, R>(&mut *std::ptr::from_mut(dots).cast(), units, table, activations) };
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
