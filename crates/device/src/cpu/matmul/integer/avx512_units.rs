//! Units of several rows by AVX-512: the products of prompts and batches, bound by multiplications.
//!
//! Two vectors of sums a row, of integers and in floating point, fill the registers, and a compiler
//! moves them to and fro if a group's units are a loop. Here that loop is assembly. In groups of
//! 32, eight products of ten are the limit of Zen 4 and 5, because the conversion of a group's sums
//! to floating point needs the multipliers too; this code reaches seven. The sums are those of
//! [`super::tile`], bit for bit.

use std::arch::asm;
use std::arch::x86_64::*;

use super::{Codes, Packed, Units};

/// Adds the products of one or more units to the sums of `R` rows, two to six: each row has sums
/// for both halves of a panel.
///
/// # Safety
/// As [`super::AddUnits`]; the machine has AVX-512 with VNNI and VBMI.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx512vbmi")]
pub unsafe fn add<C: Codes, const R: usize>(
    dots: &mut [[__m512i; 2]; R],
    units: Units,
    table: __m512i,
    activations: *const u32,
) {
    let low = _mm512_set1_epi8(0x0f);
    // SAFETY: the caller's promise.
    unsafe {
        match C::PACKED {
            Packed::Bytes => bytes(dots, units, activations, [low; 2]),
            Packed::Nibbles => nibbles(dots, units, activations, [table; 2]),
            Packed::Five => five(dots, units, activations, [low, _mm512_set1_epi8(0x10)]),
            Packed::Six => six(dots, units, activations, [low, _mm512_set1_epi8(0x30)]),
        }
    }
}

/// Units of one packing, `$bytes` bytes each. `$levels` is the text that puts a quarter's levels
/// into `a` and `b`, given the unit at `p`, constants `v` and `w`, and registers `c`, `d`, `k` and
/// `l`.
macro_rules! units {
    ($name:ident, $bytes:literal, $levels:ident) => {
        /// # Safety
        /// As [`add`].
        #[inline]
        #[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx512vbmi")]
        unsafe fn $name<const R: usize>(
            dots: &mut [[__m512i; 2]; R],
            units: Units,
            activations: *const u32,
            constants: [__m512i; 2],
        ) {
            // SAFETY: the caller's promise.
            unsafe {
                match R {
                    2 => products!(2, $bytes, $levels, dots, units, activations, constants; 0 1),
                    3 => products!(3, $bytes, $levels, dots, units, activations, constants; 0 1 2),
                    4 => products!(4, $bytes, $levels, dots, units, activations, constants; 0 1 2 3),
                    5 => products!(5, $bytes, $levels, dots, units, activations, constants; 0 1 2 3 4),
                    6 => products!(6, $bytes, $levels, dots, units, activations, constants; 0 1 2 3 4 5),
                    _ => unreachable!("a tile of {R} rows"),
                }
            }
        }
    };
}

/// All rows' products of all quarters, unit by unit.
macro_rules! products {
    ($rows:literal, $bytes:literal, $levels:ident, $dots:ident, $units:ident, $activations:ident, $constants:ident; $($row:tt)*) => {
        asm!(
            concat!(
                "2:\n",
                fetch!(), $levels!(0), $(product!(0, $rows, $row),)*
                fetch!(), $levels!(1), $(product!(1, $rows, $row),)*
                fetch!(), $levels!(2), $(product!(2, $rows, $row),)*
                fetch!(), $levels!(3), $(product!(3, $rows, $row),)*
                "add {p}, ", $bytes, "\n",
                "add {x}, 16 * ", $rows, "\n",
                "dec {n}\n",
                "jnz 2b\n",
                // Some packings do not need all of them.
                "/* {c} {d} {k} {l} {v} {w} */",
            ),
            $(inout(zmm_reg) $dots[$row][0], inout(zmm_reg) $dots[$row][1],)*
            n = inout(reg) $units.number => _,
            p = inout(reg) $units.at => _,
            x = inout(reg) $activations => _,
            f = inout(reg) $units.ahead => _,
            s = in(reg) 16 * $units.lines,
            v = in(zmm_reg) $constants[0],
            w = in(zmm_reg) $constants[1],
            a = out(zmm_reg) _,
            b = out(zmm_reg) _,
            c = out(zmm_reg) _,
            d = out(zmm_reg) _,
            y = out(zmm_reg) _,
            k = out(kreg) _,
            l = out(kreg) _,
            options(nostack, readonly),
        )
    };
}

/// A quarter's share of a unit's prefetches.
macro_rules! fetch {
    () => {
        "prefetcht1 [{f}]\nadd {f}, {s}\n"
    };
}

/// A row's activations of a quarter times both halves' levels.
macro_rules! product {
    ($quarter:literal, $rows:literal, $row:tt) => {
        concat!(
            "vpbroadcastd {y}, dword ptr [{x} + 4 * (",
            $rows,
            " * ",
            $quarter,
            " + ",
            $row,
            ")]\n",
            "vpdpbusd {",
            sum!($row, 0),
            "}, {a}, {y}\n",
            "vpdpbusd {",
            sum!($row, 1),
            "}, {b}, {y}\n",
        )
    };
}

/// Number of the operand that holds a row's sums of a half.
#[rustfmt::skip]
macro_rules! sum {
    (0, 0) => { 0 }; (0, 1) => { 1 };
    (1, 0) => { 2 }; (1, 1) => { 3 };
    (2, 0) => { 4 }; (2, 1) => { 5 };
    (3, 0) => { 6 }; (3, 1) => { 7 };
    (4, 0) => { 8 }; (4, 1) => { 9 };
    (5, 0) => { 10 }; (5, 1) => { 11 };
}

macro_rules! byte_levels {
    ($quarter:literal) => {
        concat!("vmovdqu64 {a}, [{p} + 128 * ", $quarter, "]\n", "vmovdqu64 {b}, [{p} + 128 * ", $quarter, " + 64]\n",)
    };
}

/// The low or, in odd quarters, the high half of each byte indexes a table, which reads only its
/// lower four bits.
#[rustfmt::skip]
macro_rules! nibble_levels {
    (0) => { nibble_levels!("vmovdqu64 {a}, [{p}]\n vmovdqu64 {b}, [{p} + 64]\n") };
    (1) => { nibble_levels!("vpsrlw {a}, [{p}], 4\n vpsrlw {b}, [{p} + 64], 4\n") };
    (2) => { nibble_levels!("vmovdqu64 {a}, [{p} + 128]\n vmovdqu64 {b}, [{p} + 192]\n") };
    (3) => { nibble_levels!("vpsrlw {a}, [{p} + 128], 4\n vpsrlw {b}, [{p} + 192], 4\n") };
    ($pairs:literal) => { concat!($pairs, "vpermb {a}, {a}, {v}\n vpermb {b}, {b}, {v}\n") };
}

/// Nibbles, to which a mask of fifth bits adds sixteen.
#[rustfmt::skip]
macro_rules! five_levels {
    (0) => { five_levels!("vmovdqu64 {a}, [{p}]\n vmovdqu64 {b}, [{p} + 64]\n", 256) };
    (1) => { five_levels!("vpsrlw {a}, [{p}], 4\n vpsrlw {b}, [{p} + 64], 4\n", 272) };
    (2) => { five_levels!("vmovdqu64 {a}, [{p} + 128]\n vmovdqu64 {b}, [{p} + 192]\n", 288) };
    (3) => { five_levels!("vpsrlw {a}, [{p} + 128], 4\n vpsrlw {b}, [{p} + 192], 4\n", 304) };
    ($pairs:literal, $fifths:literal) => {
        concat!(
            $pairs,
            "vpandd {a}, {a}, {v}\n vpandd {b}, {b}, {v}\n",
            "kmovq {k}, [{p} + ", $fifths, "]\n kmovq {l}, [{p} + ", $fifths, " + 8]\n",
            "vpaddb {a} {{{k}}}, {a}, {w}\n vpaddb {b} {{{l}}}, {b}, {w}\n",
        )
    };
}

/// Two upper bits are shifted to their position; 0xf8 puts the nibbles of the third operand below
/// them.
#[rustfmt::skip]
macro_rules! six_levels {
    (0) => { six_levels!(low, 0, "vpsllw {a}, [{p} + 256], 4\n vpsllw {b}, [{p} + 320], 4\n") };
    (1) => { six_levels!(high, 0, "vpsllw {a}, [{p} + 256], 2\n vpsllw {b}, [{p} + 320], 2\n") };
    (2) => { six_levels!(low, 128, "vmovdqu64 {a}, [{p} + 256]\n vmovdqu64 {b}, [{p} + 320]\n") };
    (3) => { six_levels!(high, 128, "vpsrlw {a}, [{p} + 256], 2\n vpsrlw {b}, [{p} + 320], 2\n") };
    (low, $at:literal, $upper:literal) => {
        concat!(
            $upper,
            "vpandd {a}, {a}, {w}\n vpandd {b}, {b}, {w}\n",
            "vpternlogd {a}, {v}, [{p} + ", $at, "], 0xf8\n vpternlogd {b}, {v}, [{p} + ", $at, " + 64], 0xf8\n",
        )
    };
    (high, $at:literal, $upper:literal) => {
        concat!(
            $upper,
            "vpandd {a}, {a}, {w}\n vpandd {b}, {b}, {w}\n",
            "vpsrlw {c}, [{p} + ", $at, "], 4\n vpsrlw {d}, [{p} + ", $at, " + 64], 4\n",
            "vpternlogd {a}, {v}, {c}, 0xf8\n vpternlogd {b}, {v}, {d}, 0xf8\n",
        )
    };
}

units!(bytes, 512, byte_levels);
units!(nibbles, 256, nibble_levels);
units!(five, 320, five_levels);
units!(six, 384, six_levels);
