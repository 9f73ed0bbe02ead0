//! Integer dot products by AVX2, whose multiply-add of bytes needs one unsigned side and saturates
//! at 16 bits.
//!
//! Codes of four and five bits are unsigned by an offset, which the start of the sums takes back.
//! They are so small that several sums fit in 16 bits before they are widened. Codes of six bits
//! are unsigned too, and widened at once. With other levels the magnitudes of activations are the
//! unsigned side: 2 * 127 * 128 fits, and is widened at once. If an activation is negative, all
//! bits of the level are flipped, which makes it its negative less one; the start of the sums
//! corrects that, too.
//!
//! The sums are in assembly, because the compiler adds products to each other first to shorten the
//! chain of additions, and runs out of registers. Bytes are read in the multiplication, again for
//! each row, which leaves more registers to sums.

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use super::super::avx2::Eight;
use super::super::tile::{Tile, by_rows};
use super::{Bytes, Dots, Five, Nibbles, Quarters, Six, UNIT};

/// Bytes: three rows by all four registers of a panel leave four for magnitudes, signs, a product
/// and ones.
pub const MAX_BYTE_ROWS: usize = 3;
/// Other levels, and codes of six bits: four rows by two registers of sums leave six for codes,
/// magnitudes, signs and a product.
pub const MAX_ROWS: usize = 4;
/// Codes of four and five bits: eight rows by one register, so that many rows share the unpacking.
pub const MAX_CODE_ROWS: usize = 8;

/// Units whose products, two a lane, fit in 16 bits: at most 15 * 127 for each of 16 products. For
/// five bits it is 1.
const NIBBLE_UNITS: usize = 2;

/// Distance of one row's prefetches. These values came closest to the memory's bandwidth on Zen 3:
/// two panels at a time come as fast as a plain read, one alone 5% slower, and without prefetches
/// 15% slower.
const BYTES_AHEAD: usize = 1 << 10;
const CODES_AHEAD: usize = 2 << 10;
const PAIR_AHEAD: usize = 768;

/// Sums of levels, in 32 bits.
#[derive(Clone, Copy)]
struct Sums(__m256i);

/// Sums of codes: 16-bit sums of up to this number of units (0: of a whole group), and the settled
/// sums before them.
#[derive(Clone, Copy)]
struct Narrow<const UNITS: usize> {
    /// Read at the end: it would occupy a register all the time.
    start: *const i32,
    settled: __m256i,
    pairs: __m256i,
}

/// Codes, widened to 32 bits at once.
#[derive(Clone, Copy)]
struct Wide(__m256i);

// SAFETY: unaligned loads of 8 lanes; callers run with AVX2, FMA and F16C enabled.
unsafe impl Dots for Sums {
    type Floats = Eight;
    type Table = __m256i;
    /// A word of magnitudes, and one of signs.
    const WORDS: usize = 2;

    #[inline(always)]
    unsafe fn splat(from: *const i32) -> Self {
        // SAFETY: the trait requires that AVX2 is present; one readable value.
        Sums(unsafe { _mm256_set1_epi32(*from) })
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
}

// SAFETY: as above.
unsafe impl Quarters for Sums {
    type Levels = __m256i;

    #[inline(always)]
    unsafe fn add_dot(self, levels: __m256i, activations: *const u32, rows: usize) -> Self {
        // SAFETY: as above.
        unsafe {
            let (sizes, signs) = (*activations as i32, *activations.add(rows) as i32);
            Sums(add_levels(self.0, levels, _mm256_set1_epi32(sizes), _mm256_set1_epi32(signs)))
        }
    }

    #[inline(always)]
    unsafe fn add_bytes(sums: &mut [Self], levels: *const u8, activations: *const u32, rows: usize) -> bool {
        let Some(sums) = sums.as_mut_array() else { return false };
        // SAFETY: as above.
        unsafe {
            let (sizes, signs) = (*activations as i32, *activations.add(rows) as i32);
            add_panel(sums, levels, _mm256_set1_epi32(sizes), _mm256_set1_epi32(signs));
        }
        true
    }

    #[inline(always)]
    unsafe fn bytes(at: *const u8) -> __m256i {
        // SAFETY: as above; 32 readable bytes.
        unsafe { _mm256_loadu_si256(at.cast()) }
    }

    #[inline(always)]
    unsafe fn nibbles<const HIGH: bool>(at: *const u8, table: __m256i) -> __m256i {
        // SAFETY: as above.
        unsafe { _mm256_shuffle_epi8(table, codes::<HIGH>(at)) }
    }

    #[inline(always)]
    unsafe fn five<const HIGH: bool>(_: *const u8, _: *const u8, _: __m256i) -> __m256i {
        unreachable!("five bits are multiplied as codes")
    }

    #[inline(always)]
    unsafe fn six<const Q: usize>(_: *const u8, _: *const u8, _: __m256i) -> __m256i {
        unreachable!("six bits are multiplied as codes")
    }
}

// SAFETY: as above.
unsafe impl<const UNITS: usize> Dots for Narrow<UNITS> {
    type Floats = Eight;
    type Table = ();
    const RUN_UNITS: usize = UNITS;

    #[inline(always)]
    unsafe fn splat(start: *const i32) -> Self {
        // SAFETY: as above.
        let zero = unsafe { _mm256_setzero_si256() };
        Narrow { start, settled: zero, pairs: zero }
    }

    #[inline(always)]
    unsafe fn settle(self) -> Self {
        // SAFETY: as above.
        unsafe {
            let sums = _mm256_madd_epi16(self.pairs, _mm256_set1_epi16(1));
            Narrow { settled: _mm256_add_epi32(self.settled, sums), pairs: _mm256_setzero_si256(), ..self }
        }
    }

    #[inline(always)]
    unsafe fn to_floats(self) -> Eight {
        // SAFETY: as above; the start is still there.
        Eight(unsafe { _mm256_cvtepi32_ps(_mm256_add_epi32(self.settled, _mm256_set1_epi32(*self.start))) })
    }

    #[inline(always)]
    unsafe fn table(_: &[u8; 16]) {}
}

// SAFETY: as above.
unsafe impl<const UNITS: usize> Quarters for Narrow<UNITS> {
    /// Unsigned codes stand in for levels here.
    type Levels = __m256i;

    #[inline(always)]
    unsafe fn add_dot(self, codes: __m256i, activations: *const u32, _: usize) -> Self {
        // SAFETY: as above.
        unsafe { Narrow { pairs: add_codes(self.pairs, codes, _mm256_set1_epi32(*activations as i32)), ..self } }
    }

    #[inline(always)]
    unsafe fn bytes(_: *const u8) -> __m256i {
        unreachable!("sums of bytes do not fit in 16 bits")
    }

    #[inline(always)]
    unsafe fn nibbles<const HIGH: bool>(at: *const u8, (): ()) -> __m256i {
        const { assert!(UNITS <= NIBBLE_UNITS) };
        // SAFETY: as above.
        unsafe { codes::<HIGH>(at) }
    }

    #[inline(always)]
    unsafe fn five<const HIGH: bool>(at: *const u8, plane: *const u8, (): ()) -> __m256i {
        const { assert!(UNITS == 1) };
        // SAFETY: as above; 32 readable bytes and four of the plane.
        unsafe {
            // Byte i of the plane goes to each of eight codes; code j looks at bit j.
            let spread = _mm256_setr_epi64x(0, 0x0101_0101_0101_0101, 0x0202_0202_0202_0202, 0x0303_0303_0303_0303);
            let bits = _mm256_set1_epi64x(0x8040_2010_0804_0201u64 as i64);
            let plane = _mm256_shuffle_epi8(_mm256_set1_epi32(plane.cast::<i32>().read_unaligned()), spread);
            let fifth = _mm256_cmpeq_epi8(_mm256_and_si256(plane, bits), bits);
            _mm256_or_si256(codes::<HIGH>(at), _mm256_and_si256(fifth, _mm256_set1_epi8(16)))
        }
    }

    #[inline(always)]
    unsafe fn six<const Q: usize>(_: *const u8, _: *const u8, (): ()) -> __m256i {
        unreachable!("sums of six bits do not fit in 16")
    }
}

// SAFETY: as above.
unsafe impl Dots for Wide {
    type Floats = Eight;
    type Table = ();

    #[inline(always)]
    unsafe fn splat(from: *const i32) -> Self {
        // SAFETY: as above; one readable value.
        Wide(unsafe { _mm256_set1_epi32(*from) })
    }

    #[inline(always)]
    unsafe fn to_floats(self) -> Eight {
        // SAFETY: as above.
        Eight(unsafe { _mm256_cvtepi32_ps(self.0) })
    }

    #[inline(always)]
    unsafe fn table(_: &[u8; 16]) {}
}

// SAFETY: as above.
unsafe impl Quarters for Wide {
    /// Unsigned codes stand in for levels here.
    type Levels = __m256i;

    #[inline(always)]
    unsafe fn add_dot(self, codes: __m256i, activations: *const u32, _: usize) -> Self {
        // SAFETY: as above.
        unsafe { Wide(add_wide_codes(self.0, codes, _mm256_set1_epi32(*activations as i32))) }
    }

    #[inline(always)]
    unsafe fn bytes(_: *const u8) -> __m256i {
        unreachable!("bytes are multiplied as levels")
    }

    #[inline(always)]
    unsafe fn nibbles<const HIGH: bool>(_: *const u8, (): ()) -> __m256i {
        unreachable!("sums of nibbles stay narrow")
    }

    #[inline(always)]
    unsafe fn five<const HIGH: bool>(_: *const u8, _: *const u8, (): ()) -> __m256i {
        unreachable!("sums of five bits stay narrow")
    }

    #[inline(always)]
    unsafe fn six<const Q: usize>(at: *const u8, plane: *const u8, (): ()) -> __m256i {
        // SAFETY: as above; 32 readable bytes of both.
        unsafe {
            let low = if Q.is_multiple_of(2) { codes::<false>(at) } else { codes::<true>(at) };
            let plane = _mm256_loadu_si256(plane.cast());
            let upper = match Q {
                0 => _mm256_slli_epi16::<4>(plane),
                1 => _mm256_slli_epi16::<2>(plane),
                2 => plane,
                _ => _mm256_srli_epi16::<2>(plane),
            };
            _mm256_or_si256(low, _mm256_and_si256(upper, _mm256_set1_epi8(0x30)))
        }
    }
}

/// `sums` plus, four to a lane, the products of levels and activations.
#[inline]
#[target_feature(enable = "avx2")]
fn add_levels(mut sums: __m256i, levels: __m256i, sizes: __m256i, signs: __m256i) -> __m256i {
    // SAFETY: nothing but registers.
    unsafe {
        asm!(
            "vpxor {product}, {levels}, {signs}",
            "vpmaddubsw {product}, {sizes}, {product}",
            "vpmaddwd {product}, {product}, {ones}",
            "vpaddd {sums}, {sums}, {product}",
            sums = inout(ymm_reg) sums,
            levels = in(ymm_reg) levels,
            sizes = in(ymm_reg) sizes,
            signs = in(ymm_reg) signs,
            ones = in(ymm_reg) _mm256_set1_epi16(1),
            product = out(ymm_reg) _,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sums
}

/// [`add_levels`] with levels in memory.
macro_rules! add_levels_at {
    ($at:literal, $sums:literal) => {
        concat!(
            concat!("vpxor {product}, {signs}, [{levels} + ", $at, "]\n"),
            "vpmaddubsw {product}, {sizes}, {product}\nvpmaddwd {product}, {product}, {ones}\n",
            concat!("vpaddd {", $sums, "}, {", $sums, "}, {product}")
        )
    };
}

/// [`add_levels`] for a panel.
///
/// # Safety
/// 128 readable bytes.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn add_panel([a, b, c, d]: &mut [Sums; 4], levels: *const u8, sizes: __m256i, signs: __m256i) {
    // SAFETY: the caller's promise, and registers.
    unsafe {
        asm!(
            add_levels_at!(0, "a"),
            add_levels_at!(32, "b"),
            add_levels_at!(64, "c"),
            add_levels_at!(96, "d"),
            a = inout(ymm_reg) a.0,
            b = inout(ymm_reg) b.0,
            c = inout(ymm_reg) c.0,
            d = inout(ymm_reg) d.0,
            levels = in(reg) levels,
            sizes = in(ymm_reg) sizes,
            signs = in(ymm_reg) signs,
            ones = in(ymm_reg) _mm256_set1_epi16(1),
            product = out(ymm_reg) _,
            options(pure, readonly, nostack, preserves_flags),
        );
    }
}

/// `pairs` plus, two to each, products of codes.
#[inline]
#[target_feature(enable = "avx2")]
fn add_codes(mut pairs: __m256i, codes: __m256i, activations: __m256i) -> __m256i {
    // SAFETY: nothing but registers.
    unsafe {
        asm!(
            "vpmaddubsw {product}, {codes}, {activations}",
            "vpaddw {pairs}, {pairs}, {product}",
            pairs = inout(ymm_reg) pairs,
            codes = in(ymm_reg) codes,
            activations = in(ymm_reg) activations,
            product = out(ymm_reg) _,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    pairs
}

/// `sums` plus, four to a lane, the products of codes and activations.
#[inline]
#[target_feature(enable = "avx2")]
fn add_wide_codes(mut sums: __m256i, codes: __m256i, activations: __m256i) -> __m256i {
    // SAFETY: nothing but registers.
    unsafe {
        asm!(
            "vpmaddubsw {product}, {codes}, {activations}",
            "vpmaddwd {product}, {product}, {ones}",
            "vpaddd {sums}, {sums}, {product}",
            sums = inout(ymm_reg) sums,
            codes = in(ymm_reg) codes,
            activations = in(ymm_reg) activations,
            ones = in(ymm_reg) _mm256_set1_epi16(1),
            product = out(ymm_reg) _,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sums
}

/// # Safety
/// AVX2 is present; 32 readable bytes.
#[inline(always)]
unsafe fn codes<const HIGH: bool>(at: *const u8) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe {
        let pairs = _mm256_loadu_si256(at.cast());
        let pairs = if HIGH { _mm256_srli_epi16::<4>(pairs) } else { pairs };
        _mm256_and_si256(pairs, _mm256_set1_epi8(15))
    }
}

/// Aligns the caller's stack, so that spilled registers do not lie across two cache lines.
#[inline(always)]
fn align_stack() {
    // SAFETY: an empty instruction sequence that names an address changes nothing.
    unsafe { asm!("/* {} */", in(reg) &MaybeUninit::<__m256i>::uninit(), options(nostack, preserves_flags)) };
}

/// One row and two, and bytes, take all four registers of a panel in one pass, so that each cache
/// line is read once; more rows take fewer and pass again over a block that the first pass left in
/// cache.
macro_rules! kernel {
    ($rows_name:ident, $name:ident, $sums:ty, $codes:ty, $ahead:expr, $heights:tt by $width:literal) => {
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn $rows_name<const R: usize>(tile: &Tile) {
            align_stack();
            // SAFETY: the caller's promise; the instruction set is enabled here.
            unsafe {
                match R {
                    1 if tile.panels == 2 => super::row::<$sums, $codes, 4, 2>(tile, PAIR_AHEAD),
                    1 => super::row::<$sums, $codes, 4, 1>(tile, $ahead),
                    2 => super::tile::<$sums, $codes, R, 4>(tile),
                    3..=4 => super::tile::<$sums, $codes, R, $width>(tile),
                    _ => super::tile::<$sums, $codes, R, 1>(tile),
                }
            }
        }

        /// # Safety
        /// See [`super::tile`]; the machine has AVX2, FMA and F16C.
        pub unsafe fn $name(tile: &Tile) {
            by_rows!(tile, $rows_name, $heights)
        }
    };
}

kernel!(bytes_rows, bytes_tile, Sums, Bytes, BYTES_AHEAD, [1 2 3] by 4);
kernel!(nibbles_rows, nibbles_tile, Sums, Nibbles, CODES_AHEAD, [1 2 3 4] by 2);
kernel!(short_nibbles_rows, short_nibbles_tile, Narrow<0>, Nibbles, CODES_AHEAD, [1 2 3 4 5 6 7 8] by 2);
kernel!(long_nibbles_rows, long_nibbles_tile, Narrow<NIBBLE_UNITS>, Nibbles, CODES_AHEAD, [1 2 3 4 5 6 7 8] by 2);
kernel!(five_rows, five_tile, Narrow<1>, Five, CODES_AHEAD, [1 2 3 4 5 6 7 8] by 2);
kernel!(six_rows, six_tile, Wide, Six, CODES_AHEAD, [1 2 3 4] by 2);

/// # Safety
/// As [`nibbles_tile`], with a table that counts up by one.
pub unsafe fn even_nibbles_tile(tile: &Tile) {
    // SAFETY: the caller's promise.
    unsafe { if tile.group <= NIBBLE_UNITS * UNIT { short_nibbles_tile(tile) } else { long_nibbles_tile(tile) } }
}

/// # Safety
/// See [`super::expand`]; the machine has AVX2 and F16C.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn expand(tile: &Tile, code_bytes: usize, out: *mut f32) {
    // SAFETY: the caller's promise.
    unsafe { super::expand::<Eight>(tile, code_bytes, out) }
}
