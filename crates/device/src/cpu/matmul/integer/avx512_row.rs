//! One row of activations by AVX-512: the products of decode, bound by the number of bytes that a
//! core has in flight.
//!
//! A core looks ahead as far as its registers for results go, so the fewer results a cache line of
//! weights takes, the more lines are in flight. The units below are written in assembly, with every
//! load and broadcast folded into the instruction that uses it, which the compiler does not do for
//! values that are used twice. Software prefetches keep the hardware from prefetching, and are
//! slower for bytes, which take the fewest results. The sums are those of [`super::tile`], bit for
//! bit.

use std::arch::asm;
use std::arch::x86_64::*;

use super::super::super::weight::{LANES, LINE_BYTES};
use super::super::tile::Tile;
use super::{Bytes, Codes, Five, Nibbles, Six, UNIT};

/// Distance of the prefetches of codes with fewer bits: the bytes that a core gets from memory in
/// the latency of one line, and some more. On Zen 5, two cores reach these shares of 87 GB/s for
/// four, five and six bits with multiples: 90, 92 and 89%; at 2 KiB, and prefetching codes alone,
/// 83, 75 and 67%.
const AHEAD: usize = 8 << 10;

/// A kernel of one row. `$unit` adds a unit's products to four sums, two for each half of the
/// panel, given the unit, its activations and two constants; `$join` makes one sum of two; `$ahead`
/// is the distance of prefetches in bytes, or 0.
macro_rules! row {
    ($name:ident, $codes:ty, $constants:expr, $unit:ident, $join:expr, $ahead:expr) => {
        /// # Safety
        /// See [`super::tile`], with one row; the machine has AVX-512 with VNNI and VBMI.
        #[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx512vbmi,f16c")]
        pub unsafe fn $name<const MULTIPLES: bool>(tile: &Tile) {
            let (units, groups) = (tile.group / UNIT, if MULTIPLES { tile.groups } else { 1 });
            let number_bytes = if tile.affine { 4 * LANES } else { 2 * LANES };
            let constants: [__m512i; 2] = $constants(tile);
            // SAFETY: `panel`, `activations`, `out`, `factors` and `bias` hold what [`super::tile`]
            // reads there.
            unsafe {
                let mut sums = [_mm512_setzero_ps(); 2];
                if tile.resume {
                    sums = [_mm512_loadu_ps(tile.out), _mm512_loadu_ps(tile.out.add(16))];
                }
                let mut activations = tile.activations;
                let mut panel = tile.panel;
                for _ in 0..tile.steps {
                    // Units of the multiples: of scales and of minimums.
                    let mut base = [[_mm512_setzero_ps(); 2]; 2];
                    if MULTIPLES {
                        fetch(panel, $ahead, number_bytes);
                        base[0] = [half(panel), half(panel.add(32))];
                        if tile.affine {
                            base[1] = [half(panel.add(64)), half(panel.add(96))];
                        }
                        panel = panel.add(number_bytes);
                    }
                    let (mut multiples, mut line_left) = (panel, 0);
                    for _ in 0..groups {
                        if MULTIPLES && line_left == 0 {
                            fetch(panel, $ahead, LINE_BYTES);
                            (line_left, multiples) = (LINE_BYTES, panel);
                            panel = panel.add(LINE_BYTES);
                        }
                        let header = activations;
                        activations = activations.add(if tile.affine { 3 } else { 2 });
                        let start = _mm512_set1_epi32(*header.add(1) as i32);
                        let mut dots = [start, start, _mm512_setzero_si512(), _mm512_setzero_si512()];
                        for _ in 0..units {
                            fetch(panel, $ahead, <$codes>::UNIT_BYTES);
                            $unit!(dots, panel, activations, constants);
                            activations = activations.add(UNIT / 4);
                            panel = panel.add(<$codes>::UNIT_BYTES);
                        }
                        let numbers = if MULTIPLES { multiples } else { panel };
                        let scale = _mm512_set1_ps(f32::from_bits(*header));
                        for n in 0..2 {
                            let dot = _mm512_cvtepi32_ps($join(dots[n], dots[n + 2]));
                            let number = number::<MULTIPLES>(numbers, n, base[0][n]);
                            sums[n] = _mm512_fmadd_ps(dot, _mm512_mul_ps(number, scale), sums[n]);
                        }
                        if tile.affine {
                            let numbers = numbers.add(if MULTIPLES { LANES } else { 2 * LANES });
                            let total = _mm512_set1_ps(f32::from_bits(*header.add(2)));
                            for n in 0..2 {
                                let number = number::<MULTIPLES>(numbers, n, base[1][n]);
                                sums[n] = _mm512_fmadd_ps(number, total, sums[n]);
                            }
                        }
                        match MULTIPLES {
                            true => {
                                multiples = multiples.add(number_bytes / 2);
                                line_left -= number_bytes / 2;
                            }
                            false => {
                                fetch(panel, $ahead, number_bytes);
                                panel = panel.add(number_bytes);
                            }
                        }
                    }
                }
                for n in 0..2 {
                    let mut sum = sums[n];
                    if !tile.factors.is_null() {
                        sum = _mm512_mul_ps(sum, _mm512_loadu_ps(tile.factors.add(16 * n)));
                    }
                    if !tile.bias.is_null() {
                        sum = _mm512_add_ps(sum, _mm512_loadu_ps(tile.bias.add(16 * n)));
                    }
                    _mm512_storeu_ps(tile.out.add(16 * n), sum);
                }
            }
        }
    };
}

/// Prefetches the bytes at a distance of `ahead` from these, unless it is 0.
#[inline(always)]
fn fetch(at: *const u8, ahead: usize, bytes: usize) {
    for line in (0..bytes).step_by(64).filter(|_| ahead > 0) {
        // SAFETY: a prefetch of any address is harmless.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(ahead + line).cast()) };
    }
}

/// Half `n` of a panel's scales or minimums.
///
/// # Safety
/// 64 readable bytes, or 32 of multiples.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn number<const MULTIPLES: bool>(at: *const u8, n: usize, base: __m512) -> __m512 {
    // SAFETY: the caller's promise.
    unsafe {
        if !MULTIPLES {
            return half(at.add(32 * n));
        }
        let bytes = _mm_loadu_si128(at.add(16 * n).cast());
        _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)), base)
    }
}

/// Sixteen f16.
///
/// # Safety
/// 32 readable bytes.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn half(at: *const u8) -> __m512 {
    // SAFETY: the caller's promise.
    unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())) }
}

/// Four quarters: a load and a product for each register of weights.
macro_rules! bytes_unit {
    ($dots:ident, $panel:ident, $activations:ident, $constants:ident) => {{
        let _ = $constants;
        asm!(
            "vmovdqu64 {a}, [{p}]",
            "vmovdqu64 {b}, [{p} + 64]",
            "vpdpbusd {d0}, {a}, dword ptr [{x}]{{1to16}}",
            "vpdpbusd {d1}, {b}, dword ptr [{x}]{{1to16}}",
            "vmovdqu64 {a}, [{p} + 128]",
            "vmovdqu64 {b}, [{p} + 192]",
            "vpdpbusd {d2}, {a}, dword ptr [{x} + 4]{{1to16}}",
            "vpdpbusd {d3}, {b}, dword ptr [{x} + 4]{{1to16}}",
            "vmovdqu64 {a}, [{p} + 256]",
            "vmovdqu64 {b}, [{p} + 320]",
            "vpdpbusd {d0}, {a}, dword ptr [{x} + 8]{{1to16}}",
            "vpdpbusd {d1}, {b}, dword ptr [{x} + 8]{{1to16}}",
            "vmovdqu64 {a}, [{p} + 384]",
            "vmovdqu64 {b}, [{p} + 448]",
            "vpdpbusd {d2}, {a}, dword ptr [{x} + 12]{{1to16}}",
            "vpdpbusd {d3}, {b}, dword ptr [{x} + 12]{{1to16}}",
            p = in(reg) $panel,
            x = in(reg) $activations,
            d0 = inout(zmm_reg) $dots[0],
            d1 = inout(zmm_reg) $dots[1],
            d2 = inout(zmm_reg) $dots[2],
            d3 = inout(zmm_reg) $dots[3],
            a = out(zmm_reg) _,
            b = out(zmm_reg) _,
            options(nostack, readonly, preserves_flags),
        );
    }};
}

/// Low halves of bytes are levels; high halves are sixteen times a level, which the join takes
/// back.
macro_rules! even_nibbles_unit {
    ($dots:ident, $panel:ident, $activations:ident, $constants:ident) => {
        asm!(
            "vpandd {a}, {low}, [{p}]",
            "vpandd {b}, {low}, [{p} + 64]",
            "vpdpbusd {d0}, {a}, dword ptr [{x}]{{1to16}}",
            "vpdpbusd {d1}, {b}, dword ptr [{x}]{{1to16}}",
            "vpandd {a}, {high}, [{p}]",
            "vpandd {b}, {high}, [{p} + 64]",
            "vpdpbusd {d2}, {a}, dword ptr [{x} + 4]{{1to16}}",
            "vpdpbusd {d3}, {b}, dword ptr [{x} + 4]{{1to16}}",
            "vpandd {a}, {low}, [{p} + 128]",
            "vpandd {b}, {low}, [{p} + 192]",
            "vpdpbusd {d0}, {a}, dword ptr [{x} + 8]{{1to16}}",
            "vpdpbusd {d1}, {b}, dword ptr [{x} + 8]{{1to16}}",
            "vpandd {a}, {high}, [{p} + 128]",
            "vpandd {b}, {high}, [{p} + 192]",
            "vpdpbusd {d2}, {a}, dword ptr [{x} + 12]{{1to16}}",
            "vpdpbusd {d3}, {b}, dword ptr [{x} + 12]{{1to16}}",
            p = in(reg) $panel,
            x = in(reg) $activations,
            low = in(zmm_reg) $constants[0],
            high = in(zmm_reg) $constants[1],
            d0 = inout(zmm_reg) $dots[0],
            d1 = inout(zmm_reg) $dots[1],
            d2 = inout(zmm_reg) $dots[2],
            d3 = inout(zmm_reg) $dots[3],
            a = out(zmm_reg) _,
            b = out(zmm_reg) _,
            options(nostack, readonly, preserves_flags),
        )
    };
}

/// Both halves of bytes index a table, which reads only their lower four bits.
macro_rules! nibbles_unit {
    ($dots:ident, $panel:ident, $activations:ident, $constants:ident) => {
        asm!(
            "vmovdqu64 {a}, [{p}]",
            "vmovdqu64 {b}, [{p} + 64]",
            "vpsrlw {c}, {a}, 4",
            "vpsrlw {d}, {b}, 4",
            "vpermb {a}, {a}, {table}",
            "vpermb {b}, {b}, {table}",
            "vpermb {c}, {c}, {table}",
            "vpermb {d}, {d}, {table}",
            "vpdpbusd {d0}, {a}, dword ptr [{x}]{{1to16}}",
            "vpdpbusd {d1}, {b}, dword ptr [{x}]{{1to16}}",
            "vpdpbusd {d2}, {c}, dword ptr [{x} + 4]{{1to16}}",
            "vpdpbusd {d3}, {d}, dword ptr [{x} + 4]{{1to16}}",
            "vmovdqu64 {a}, [{p} + 128]",
            "vmovdqu64 {b}, [{p} + 192]",
            "vpsrlw {c}, {a}, 4",
            "vpsrlw {d}, {b}, 4",
            "vpermb {a}, {a}, {table}",
            "vpermb {b}, {b}, {table}",
            "vpermb {c}, {c}, {table}",
            "vpermb {d}, {d}, {table}",
            "vpdpbusd {d0}, {a}, dword ptr [{x} + 8]{{1to16}}",
            "vpdpbusd {d1}, {b}, dword ptr [{x} + 8]{{1to16}}",
            "vpdpbusd {d2}, {c}, dword ptr [{x} + 12]{{1to16}}",
            "vpdpbusd {d3}, {d}, dword ptr [{x} + 12]{{1to16}}",
            p = in(reg) $panel,
            x = in(reg) $activations,
            table = in(zmm_reg) $constants[0],
            d0 = inout(zmm_reg) $dots[0],
            d1 = inout(zmm_reg) $dots[1],
            d2 = inout(zmm_reg) $dots[2],
            d3 = inout(zmm_reg) $dots[3],
            a = out(zmm_reg) _,
            b = out(zmm_reg) _,
            c = out(zmm_reg) _,
            d = out(zmm_reg) _,
            options(nostack, readonly, preserves_flags),
        )
    };
}

/// Nibbles, to which a mask of fifth bits adds sixteen.
macro_rules! five_unit {
    ($dots:ident, $panel:ident, $activations:ident, $constants:ident) => {
        asm!(
            "kmovq {k}, [{p} + 256]",
            "kmovq {l}, [{p} + 264]",
            "vpandd {a}, {low}, [{p}]",
            "vpandd {b}, {low}, [{p} + 64]",
            "vpaddb {a} {{{k}}}, {a}, {sixteen}",
            "vpaddb {b} {{{l}}}, {b}, {sixteen}",
            "vpdpbusd {d0}, {a}, dword ptr [{x}]{{1to16}}",
            "vpdpbusd {d1}, {b}, dword ptr [{x}]{{1to16}}",
            "kmovq {k}, [{p} + 272]",
            "kmovq {l}, [{p} + 280]",
            "vpsrlw {a}, [{p}], 4",
            "vpsrlw {b}, [{p} + 64], 4",
            "vpandd {a}, {a}, {low}",
            "vpandd {b}, {b}, {low}",
            "vpaddb {a} {{{k}}}, {a}, {sixteen}",
            "vpaddb {b} {{{l}}}, {b}, {sixteen}",
            "vpdpbusd {d2}, {a}, dword ptr [{x} + 4]{{1to16}}",
            "vpdpbusd {d3}, {b}, dword ptr [{x} + 4]{{1to16}}",
            "kmovq {k}, [{p} + 288]",
            "kmovq {l}, [{p} + 296]",
            "vpandd {a}, {low}, [{p} + 128]",
            "vpandd {b}, {low}, [{p} + 192]",
            "vpaddb {a} {{{k}}}, {a}, {sixteen}",
            "vpaddb {b} {{{l}}}, {b}, {sixteen}",
            "vpdpbusd {d0}, {a}, dword ptr [{x} + 8]{{1to16}}",
            "vpdpbusd {d1}, {b}, dword ptr [{x} + 8]{{1to16}}",
            "kmovq {k}, [{p} + 304]",
            "kmovq {l}, [{p} + 312]",
            "vpsrlw {a}, [{p} + 128], 4",
            "vpsrlw {b}, [{p} + 192], 4",
            "vpandd {a}, {a}, {low}",
            "vpandd {b}, {b}, {low}",
            "vpaddb {a} {{{k}}}, {a}, {sixteen}",
            "vpaddb {b} {{{l}}}, {b}, {sixteen}",
            "vpdpbusd {d2}, {a}, dword ptr [{x} + 12]{{1to16}}",
            "vpdpbusd {d3}, {b}, dword ptr [{x} + 12]{{1to16}}",
            p = in(reg) $panel,
            x = in(reg) $activations,
            low = in(zmm_reg) $constants[0],
            sixteen = in(zmm_reg) $constants[1],
            d0 = inout(zmm_reg) $dots[0],
            d1 = inout(zmm_reg) $dots[1],
            d2 = inout(zmm_reg) $dots[2],
            d3 = inout(zmm_reg) $dots[3],
            a = out(zmm_reg) _,
            b = out(zmm_reg) _,
            k = out(kreg) _,
            l = out(kreg) _,
            options(nostack, readonly, preserves_flags),
        )
    };
}

/// Nibbles below two upper bits. The plane is taken by even and by odd quarters, so that the
/// shifted value has zeros in the top two bits; 0xb8 then puts the nibbles into the lower four.
macro_rules! six_unit {
    ($dots:ident, $panel:ident, $activations:ident, $constants:ident) => {
        asm!(
            "vpandd {c}, {even}, [{p} + 256]",
            "vpandd {d}, {even}, [{p} + 320]",
            "vpsllw {a}, {c}, 4",
            "vpsllw {b}, {d}, 4",
            "vpternlogd {a}, {low}, [{p}], 0xb8",
            "vpternlogd {b}, {low}, [{p} + 64], 0xb8",
            "vpdpbusd {d0}, {a}, dword ptr [{x}]{{1to16}}",
            "vpdpbusd {d1}, {b}, dword ptr [{x}]{{1to16}}",
            "vpternlogd {c}, {low}, [{p} + 128], 0xb8",
            "vpternlogd {d}, {low}, [{p} + 192], 0xb8",
            "vpdpbusd {d0}, {c}, dword ptr [{x} + 8]{{1to16}}",
            "vpdpbusd {d1}, {d}, dword ptr [{x} + 8]{{1to16}}",
            "vpandnd {c}, {even}, [{p} + 256]",
            "vpandnd {d}, {even}, [{p} + 320]",
            "vpsllw {a}, {c}, 2",
            "vpsllw {b}, {d}, 2",
            "vpsrlw {e}, [{p}], 4",
            "vpsrlw {f}, [{p} + 64], 4",
            "vpternlogd {a}, {low}, {e}, 0xb8",
            "vpternlogd {b}, {low}, {f}, 0xb8",
            "vpdpbusd {d2}, {a}, dword ptr [{x} + 4]{{1to16}}",
            "vpdpbusd {d3}, {b}, dword ptr [{x} + 4]{{1to16}}",
            "vpsrlw {c}, {c}, 2",
            "vpsrlw {d}, {d}, 2",
            "vpsrlw {e}, [{p} + 128], 4",
            "vpsrlw {f}, [{p} + 192], 4",
            "vpternlogd {c}, {low}, {e}, 0xb8",
            "vpternlogd {d}, {low}, {f}, 0xb8",
            "vpdpbusd {d2}, {c}, dword ptr [{x} + 12]{{1to16}}",
            "vpdpbusd {d3}, {d}, dword ptr [{x} + 12]{{1to16}}",
            p = in(reg) $panel,
            x = in(reg) $activations,
            low = in(zmm_reg) $constants[0],
            even = in(zmm_reg) $constants[1],
            d0 = inout(zmm_reg) $dots[0],
            d1 = inout(zmm_reg) $dots[1],
            d2 = inout(zmm_reg) $dots[2],
            d3 = inout(zmm_reg) $dots[3],
            a = out(zmm_reg) _,
            b = out(zmm_reg) _,
            c = out(zmm_reg) _,
            d = out(zmm_reg) _,
            e = out(zmm_reg) _,
            f = out(zmm_reg) _,
            options(nostack, readonly, preserves_flags),
        )
    };
}

row!(bytes, Bytes, no_constants, bytes_unit, add, 0);
row!(nibbles, Nibbles, table, nibbles_unit, add, AHEAD);
row!(even_nibbles, Nibbles, masks, even_nibbles_unit, add_sixteenth, AHEAD);
row!(five, Five, low_and_sixteen, five_unit, add, AHEAD);
row!(six, Six, low_and_even, six_unit, add, AHEAD);

#[inline]
#[target_feature(enable = "avx512f")]
fn no_constants(_: &Tile) -> [__m512i; 2] {
    [_mm512_setzero_si512(); 2]
}

#[inline]
#[target_feature(enable = "avx512f")]
fn table(tile: &Tile) -> [__m512i; 2] {
    // SAFETY: 16 readable bytes.
    [_mm512_broadcast_i32x4(unsafe { _mm_loadu_si128(tile.table.as_ptr().cast()) }); 2]
}

#[inline]
#[target_feature(enable = "avx512f")]
fn masks(_: &Tile) -> [__m512i; 2] {
    [_mm512_set1_epi8(0x0f), _mm512_set1_epi8(0xf0u8 as i8)]
}

#[inline]
#[target_feature(enable = "avx512f")]
fn low_and_sixteen(_: &Tile) -> [__m512i; 2] {
    [_mm512_set1_epi8(0x0f), _mm512_set1_epi8(16)]
}

#[inline]
#[target_feature(enable = "avx512f")]
fn low_and_even(_: &Tile) -> [__m512i; 2] {
    [_mm512_set1_epi8(0x0f), _mm512_set1_epi8(0x33)]
}

#[inline]
#[target_feature(enable = "avx512f")]
fn add(a: __m512i, b: __m512i) -> __m512i {
    _mm512_add_epi32(a, b)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn add_sixteenth(a: __m512i, b: __m512i) -> __m512i {
    _mm512_add_epi32(a, _mm512_srai_epi32::<4>(b))
}
