//! The inner loop of products with quantized weights: integer dot products within a group, floating point between them.
//!
//! Weights and activations of a group are 8-bit integers, so their dot product is exact, whatever instructions compute
//! it. At the end of a group it becomes an f32 and is added, times the scales of both sides, to the one sum of this
//! (row, output); a minimum adds its product with the activations' sum. Groups come in ascending order, so a result's
//! bits do not depend on the tile's height, on the blocking or on the neighbours.
//!
//! As in [`tile`](super::tile), [`Dots`] is the handful of vector operations, [`Codes`] reads one packing into them,
//! [`tile`] is the algorithm, and files named after instruction sets enter it with those instructions enabled.

#[cfg(target_arch = "x86_64")]
pub mod avx2;
#[cfg(target_arch = "x86_64")]
pub mod avx512;
#[cfg(target_arch = "aarch64")]
pub mod neon;
pub mod scalar;
#[cfg(test)]
mod tests;

use super::super::weight::LANES;
use super::tile::{Lanes, Prefetch, Tile};

/// Inner values read at a time: a byte of two codes holds those of both halves.
pub const UNIT: usize = 8;

/// Sums of integer products, one a lane, and the levels they are made of.
///
/// # Safety
/// As for [`Lanes`]; code pointers are valid for `WIDTH` lanes, activation pointers for one word.
pub unsafe trait Dots: Copy {
    /// As wide as this.
    type Floats: Lanes;
    /// Four levels a lane.
    type Levels: Copy;
    /// The tile's table, in registers.
    type Table: Copy;

    unsafe fn splat(from: *const i32) -> Self;
    /// Adds each lane's four levels times the four bytes at `activations`.
    unsafe fn add_dot(self, levels: Self::Levels, activations: *const u32) -> Self;
    unsafe fn to_floats(self) -> Self::Floats;

    unsafe fn table(table: &[u8; 16]) -> Self::Table;
    /// Bytes are the levels, plus 128.
    unsafe fn bytes(at: *const u8) -> Self::Levels;
    /// The low or (`HIGH`) the high four bits of each byte, looked up in the table.
    unsafe fn nibbles<const HIGH: bool>(at: *const u8, table: Self::Table) -> Self::Levels;
    /// The same where the table counts up by one.
    unsafe fn even_nibbles<const HIGH: bool>(at: *const u8, table: Self::Table) -> Self::Levels;
    /// Four bits of each byte and a fifth from `plane`, four bits a lane; less the table's first entry.
    unsafe fn five<const HIGH: bool>(at: *const u8, plane: *const u8, table: Self::Table) -> Self::Levels;
}

/// One packing of codes, see `weight.rs`: a unit is eight inner values of 32 lanes.
pub trait Codes {
    const UNIT_BYTES: usize;
    /// # Safety
    /// As for [`Dots`]; `codes` is the start of a group's codes and of `units` units, of which `unit` is one.
    unsafe fn read<V: Dots, const HIGH: bool>(
        codes: *const u8,
        units: usize,
        unit: usize,
        lane: usize,
        table: V::Table,
    ) -> V::Levels;
}

pub struct Bytes;
pub struct Nibbles;
pub struct EvenNibbles;
pub struct Five;

impl Codes for Bytes {
    const UNIT_BYTES: usize = UNIT * LANES;
    #[inline(always)]
    unsafe fn read<V: Dots, const HIGH: bool>(
        codes: *const u8,
        _: usize,
        unit: usize,
        lane: usize,
        _: V::Table,
    ) -> V::Levels {
        let half = if HIGH { 4 * LANES } else { 0 };
        // SAFETY: the caller's promise; both halves of 128 bytes lie inside the unit.
        unsafe { V::bytes(codes.add(unit * Self::UNIT_BYTES + half + 4 * lane)) }
    }
}

impl Codes for Nibbles {
    const UNIT_BYTES: usize = UNIT * LANES / 2;
    #[inline(always)]
    unsafe fn read<V: Dots, const HIGH: bool>(
        codes: *const u8,
        _: usize,
        unit: usize,
        lane: usize,
        table: V::Table,
    ) -> V::Levels {
        // SAFETY: the caller's promise; four bytes a lane.
        unsafe { V::nibbles::<HIGH>(codes.add(unit * Self::UNIT_BYTES + 4 * lane), table) }
    }
}

impl Codes for EvenNibbles {
    const UNIT_BYTES: usize = UNIT * LANES / 2;
    #[inline(always)]
    unsafe fn read<V: Dots, const HIGH: bool>(
        codes: *const u8,
        _: usize,
        unit: usize,
        lane: usize,
        table: V::Table,
    ) -> V::Levels {
        // SAFETY: the caller's promise; four bytes a lane.
        unsafe { V::even_nibbles::<HIGH>(codes.add(unit * Self::UNIT_BYTES + 4 * lane), table) }
    }
}

impl Codes for Five {
    const UNIT_BYTES: usize = UNIT * LANES * 5 / 8;
    #[inline(always)]
    unsafe fn read<V: Dots, const HIGH: bool>(
        codes: *const u8,
        units: usize,
        unit: usize,
        lane: usize,
        table: V::Table,
    ) -> V::Levels {
        // SAFETY: the caller's promise; 128 bytes of nibbles a unit, then 32 bytes of fifth bits a unit: for each 16
        // lanes eight bytes of the low half and eight of the high.
        unsafe {
            let planes = codes.add(units * (UNIT * LANES / 2));
            let half = if HIGH { 8 } else { 0 };
            let plane = planes.add(unit * LANES + lane / 16 * 16 + half + lane % 16 / 2);
            V::five::<HIGH>(codes.add(unit * (UNIT * LANES / 2) + 4 * lane), plane, table)
        }
    }
}

/// `R` rows by 32 outputs, `N` vectors at a time; a step is a group, with activations as
/// [`super::activations`] lays them out.
///
/// # Safety
/// As for [`super::tile::tile`], with `V`'s instruction set.
#[inline(always)]
pub unsafe fn tile<V: Dots, C: Codes, const R: usize, const N: usize>(tile: &Tile) {
    let mut column = 0;
    while column < LANES {
        // SAFETY: column + N * WIDTH <= 32 by divisibility, the rest is the caller's.
        unsafe { part::<V, C, R, N>(tile, column) };
        column += N * V::Floats::WIDTH;
    }
}

/// # Safety
/// As [`tile`]; `column + N * WIDTH <= 32`.
#[inline(always)]
unsafe fn part<V: Dots, C: Codes, const R: usize, const N: usize>(tile: &Tile, column: usize) {
    const { assert!(LANES.is_multiple_of(N * V::Floats::WIDTH)) };
    let width = V::Floats::WIDTH;
    let units = tile.group / UNIT;
    let header = if tile.affine { 4 * LANES } else { 2 * LANES };
    let step_bytes = header + units * C::UNIT_BYTES;
    // SAFETY: `panel` holds `steps` steps of `step_bytes`: scales, minimums if there are any, codes. `activations` holds
    // R words each of scales, starts, sums if affine, then 2 * R words a unit. `out` has R rows of `stride` with 32
    // columns, `factors` and `bias` 32 values where they are not null. Prefetching may go anywhere.
    unsafe {
        let out = tile.out.add(column);
        let mut sums = [[V::Floats::zero(); N]; R];
        if tile.resume {
            for r in 0..R {
                for n in 0..N {
                    sums[r][n] = V::Floats::load(out.add(r * tile.stride + n * width));
                }
            }
        }
        let table = V::table(&tile.table);
        let mut activations = tile.activations;
        let mut panel = tile.panel;
        let mut ahead = tile.prefetch.at;
        for _ in 0..tile.steps {
            if tile.prefetch.follows {
                // A little ahead of what is read here, headers included.
                V::Floats::prefetch(ahead);
                ahead = ahead.wrapping_add(header);
            }
            let scales = activations.cast::<f32>();
            let starts = activations.add(R).cast::<i32>();
            let totals = activations.add(2 * R).cast::<f32>();
            let mut words = activations.add(if tile.affine { 3 * R } else { 2 * R });
            let codes = panel.add(header);

            let mut dots = [[V::splat(starts); N]; R];
            for r in 0..R {
                dots[r] = [V::splat(starts.add(r)); N];
            }
            for unit in 0..units {
                fetch::<V::Floats>(&tile.prefetch, &mut ahead);
                let mut levels = [C::read::<V, false>(codes, units, unit, column, table); N];
                for n in 1..N {
                    levels[n] = C::read::<V, false>(codes, units, unit, column + n * width, table);
                }
                for r in 0..R {
                    for n in 0..N {
                        dots[r][n] = dots[r][n].add_dot(levels[n], words.add(r));
                    }
                }
                for n in 0..N {
                    levels[n] = C::read::<V, true>(codes, units, unit, column + n * width, table);
                }
                for r in 0..R {
                    for n in 0..N {
                        dots[r][n] = dots[r][n].add_dot(levels[n], words.add(R + r));
                    }
                }
                words = words.add(2 * R);
            }
            for n in 0..N {
                let scale = V::Floats::load_f16(panel.add(2 * (column + n * width)));
                for r in 0..R {
                    let scale = scale.mul(V::Floats::splat(*scales.add(r)));
                    sums[r][n] = sums[r][n].add_product(dots[r][n].to_floats(), scale);
                }
            }
            if tile.affine {
                for n in 0..N {
                    let minimum = V::Floats::load_f16(panel.add(2 * (LANES + column + n * width)));
                    for r in 0..R {
                        sums[r][n] = sums[r][n].add_product(minimum, V::Floats::splat(*totals.add(r)));
                    }
                }
            }
            activations = words;
            panel = panel.add(step_bytes);
        }
        for r in 0..R {
            for n in 0..N {
                let mut sum = sums[r][n];
                if !tile.factors.is_null() {
                    sum = sum.mul(V::Floats::load(tile.factors.add(column + n * width)));
                }
                if !tile.bias.is_null() {
                    sum = sum.add(V::Floats::load(tile.bias.add(column + n * width)));
                }
                sum.store(out.add(r * tile.stride + n * width));
            }
        }
    }
}

/// One unit's share of what is to be fetched.
///
/// # Safety
/// `V`'s instruction set is there.
#[inline(always)]
unsafe fn fetch<V: Lanes>(prefetch: &Prefetch, at: &mut *const u8) {
    // SAFETY: the caller's promise; a prefetch of any address is harmless.
    unsafe {
        for line in 0..prefetch.lines {
            let at = at.wrapping_add(64 * line);
            if prefetch.far { V::prefetch_far(at) } else { V::prefetch(at) }
        }
    }
    *at = at.wrapping_add(64 * prefetch.lines);
}
