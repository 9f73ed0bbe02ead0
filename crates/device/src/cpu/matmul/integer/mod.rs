//! The inner loop of products with quantized weights: integer dot products within a group, floating
//! point between them.
//!
//! Weights and activations of a group are 8-bit integers, so their dot product is exact on every
//! instruction set. At the end of a group it becomes an f32 and is added, times the scales of both
//! sides, to the one sum of this (row, output); a minimum adds its product with the activations'
//! sum. Groups come in ascending order, so a result's bits do not depend on the tile's height, on
//! the blocking or on the neighbours. Scales and minimums that are multiples of a super-block's
//! units are expanded first.
//!
//! As in [`tile`](super::tile), [`Quarters`] has the few vector operations, [`Codes`] reads one
//! packing into them, [`tile`] is the algorithm, and files named after instruction sets enter it
//! with those instructions enabled.

#[cfg(target_arch = "x86_64")]
pub mod avx2;
#[cfg(target_arch = "x86_64")]
pub mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512_row;
#[cfg(target_arch = "x86_64")]
mod avx512_units;
#[cfg(target_arch = "aarch64")]
pub mod neon;
pub mod scalar;
#[cfg(test)]
mod tests;

use super::super::weight::{LANES, LINE_BYTES};
use super::tile::{Lanes, Prefetch, Tile};

/// Inner values read at a time, in quarters of four: the shortest group.
pub const UNIT: usize = 16;

/// Sums of integer products, one a lane.
///
/// # Safety
/// As for [`Lanes`]; code pointers are valid for `WIDTH` lanes, activation pointers for one word.
pub unsafe trait Dots: Copy {
    /// Vectors of the same width in f32.
    type Floats: Lanes;
    /// The tile's table, in registers.
    type Table: Copy;

    /// Words that hold four activations.
    const WORDS: usize = 1;
    /// Units that are added before [`Dots::settle`] is due: a divisor of a group's units, or 0 for
    /// all of them.
    const RUN_UNITS: usize = 0;

    unsafe fn splat(from: *const i32) -> Self;
    /// Widens sums that are narrow while they grow, so that another run of units fits.
    #[inline(always)]
    unsafe fn settle(self) -> Self {
        self
    }
    /// Converts settled integer sums to f32.
    unsafe fn to_floats(self) -> Self::Floats;
    unsafe fn table(table: &[u8; 16]) -> Self::Table;
}

/// Sums to which whole units are added.
///
/// # Safety
/// As for [`Dots`].
pub unsafe trait AddUnits: Dots {
    /// Most units that one call of [`AddUnits::add_units`] adds.
    const AT_ONCE: usize = 1;

    /// Adds the products of [`Units`], from lane `column` on, with their words at `activations`.
    unsafe fn add_units<C: Codes, const R: usize, const N: usize, const P: usize>(
        dots: &mut [[[Self; N]; R]; P],
        units: Units,
        column: usize,
        table: Self::Table,
        activations: *const u32,
    );
}

/// Sums to which products of four inner values are added, and the levels for them.
///
/// # Safety
/// As for [`Dots`].
pub unsafe trait Quarters: Dots {
    /// A register of four levels a lane.
    type Levels: Copy;

    /// Adds each lane's four levels times the four values at `activations`; if they have a second
    /// word, it is `rows` words further.
    unsafe fn add_dot(self, levels: Self::Levels, activations: *const u32, rows: usize) -> Self;
    /// Adds the dot products of a whole panel of byte levels; false if the instruction set has no
    /// special way for them.
    #[inline(always)]
    unsafe fn add_bytes(_: &mut [Self], _levels: *const u8, _activations: *const u32, _rows: usize) -> bool {
        false
    }
    /// Four levels a lane from bytes, which are the levels plus 128.
    unsafe fn bytes(at: *const u8) -> Self::Levels;
    /// The low or (`HIGH`) the high four bits of each byte, looked up in the table.
    unsafe fn nibbles<const HIGH: bool>(at: *const u8, table: Self::Table) -> Self::Levels;
    /// Four bits of each byte and a fifth from `plane`, four bits a lane; less the table's first
    /// entry.
    unsafe fn five<const HIGH: bool>(at: *const u8, plane: *const u8, table: Self::Table) -> Self::Levels;
    /// The low (in odd quarters `Q` the high) four bits of each byte, and above them bits `2 * Q`
    /// and `2 * Q + 1` of each byte of `plane`; less the table's first entry.
    unsafe fn six<const Q: usize>(at: *const u8, plane: *const u8, table: Self::Table) -> Self::Levels;
}

// SAFETY: the caller's promise covers everything that is called.
unsafe impl<V: Quarters> AddUnits for V {
    #[inline(always)]
    unsafe fn add_units<C: Codes, const R: usize, const N: usize, const P: usize>(
        dots: &mut [[[V; N]; R]; P],
        units: Units,
        column: usize,
        table: V::Table,
        activations: *const u32,
    ) {
        assert!(units.number == Self::AT_ONCE);
        // SAFETY: the caller's promise; a prefetch of any address is harmless.
        unsafe {
            for line in 0..units.lines {
                V::Floats::prefetch_far(units.ahead.wrapping_add(64 * line));
            }
            quarter::<V, C, 0, R, N, P>(dots, units, column, table, activations);
            quarter::<V, C, 1, R, N, P>(dots, units, column, table, activations);
            quarter::<V, C, 2, R, N, P>(dots, units, column, table, activations);
            quarter::<V, C, 3, R, N, P>(dots, units, column, table, activations);
        }
    }
}

/// Units of each panel, one after the other, and the distance between panels.
#[derive(Clone, Copy)]
pub struct Units {
    number: usize,
    at: *const u8,
    apart: usize,
    /// Data that later blocks need: with each unit, `lines` more cache lines from there on are
    /// prefetched.
    ahead: *const u8,
    lines: usize,
}

/// The packings of codes, see `weight.rs`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Packed {
    Bytes,
    Nibbles,
    Five,
    Six,
}

/// One packing: a unit is 16 inner values of 32 lanes.
pub trait Codes {
    const PACKED: Packed;
    const UNIT_BYTES: usize;
    /// Quarter `Q` of the unit at `unit`, from lane `lane` on.
    ///
    /// # Safety
    /// As for [`Dots`].
    unsafe fn read<V: Quarters, const Q: usize>(unit: *const u8, lane: usize, table: V::Table) -> V::Levels;
}

pub struct Bytes;
pub struct Nibbles;
pub struct Five;
pub struct Six;

impl Codes for Bytes {
    const PACKED: Packed = Packed::Bytes;
    const UNIT_BYTES: usize = UNIT * LANES;
    #[inline(always)]
    unsafe fn read<V: Quarters, const Q: usize>(unit: *const u8, lane: usize, _: V::Table) -> V::Levels {
        // SAFETY: the caller's promise; four quarters of four bytes a lane.
        unsafe { V::bytes(unit.add((Q * LANES + lane) * 4)) }
    }
}

impl Codes for Nibbles {
    const PACKED: Packed = Packed::Nibbles;
    const UNIT_BYTES: usize = UNIT * LANES / 2;
    #[inline(always)]
    unsafe fn read<V: Quarters, const Q: usize>(unit: *const u8, lane: usize, table: V::Table) -> V::Levels {
        // SAFETY: the caller's promise; two quarters share four bytes a lane.
        unsafe {
            let at = unit.add((Q / 2 * LANES + lane) * 4);
            if Q.is_multiple_of(2) { V::nibbles::<false>(at, table) } else { V::nibbles::<true>(at, table) }
        }
    }
}

impl Codes for Five {
    const PACKED: Packed = Packed::Five;
    const UNIT_BYTES: usize = UNIT * LANES * 5 / 8;
    #[inline(always)]
    unsafe fn read<V: Quarters, const Q: usize>(unit: *const u8, lane: usize, table: V::Table) -> V::Levels {
        // SAFETY: as above; 16 bytes of fifth bits for each quarter follow the nibbles of all.
        unsafe {
            let at = unit.add((Q / 2 * LANES + lane) * 4);
            let plane = unit.add(UNIT * LANES / 2 + Q * LANES / 2 + lane / 2);
            if Q.is_multiple_of(2) { V::five::<false>(at, plane, table) } else { V::five::<true>(at, plane, table) }
        }
    }
}

impl Codes for Six {
    const PACKED: Packed = Packed::Six;
    const UNIT_BYTES: usize = UNIT * LANES * 6 / 8;
    #[inline(always)]
    unsafe fn read<V: Quarters, const Q: usize>(unit: *const u8, lane: usize, table: V::Table) -> V::Levels {
        // SAFETY: as above; the upper bits follow the nibbles of all quarters, four bytes a lane.
        unsafe {
            let at = unit.add((Q / 2 * LANES + lane) * 4);
            V::six::<Q>(at, unit.add(UNIT * LANES / 2 + lane * 4), table)
        }
    }
}

/// Scales of a group, from a panel's first lane on, followed by minimums if the format has them.
#[derive(Clone, Copy)]
enum Numbers {
    Halves(*const u8),
    /// Multiples, and the units that they are multiples of.
    Multiples(*const i8, *const u8),
    /// Multiples that were multiplied with their units before.
    Floats(*const f32),
}

impl Numbers {
    /// # Safety
    /// As for [`Lanes`], from `lane` on.
    #[inline(always)]
    unsafe fn read<V: Lanes>(self, lane: usize) -> V {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Numbers::Halves(at) => V::load_f16(at.add(2 * lane)),
                Numbers::Multiples(at, base) => V::load_i8(at.add(lane)).mul(V::load_f16(base.add(2 * lane))),
                Numbers::Floats(at) => V::load(at.add(lane)),
            }
        }
    }

    /// The numbers of a panel at a distance of `bytes`.
    #[inline(always)]
    fn further(self, bytes: usize) -> Self {
        match self {
            Numbers::Halves(at) => Numbers::Halves(at.wrapping_add(bytes)),
            Numbers::Multiples(at, base) => Numbers::Multiples(at.wrapping_add(bytes), base.wrapping_add(bytes)),
            Numbers::Floats(_) => self,
        }
    }
}

/// Expands the multiples of all steps into the layout of [`Tile::numbers`]; a group's codes take
/// `code_bytes`. Several tiles that pass over a block share the result.
///
/// # Safety
/// As for [`tile`]; `out` has room for the values.
#[inline(always)]
pub unsafe fn expand<V: Lanes>(tile: &Tile, code_bytes: usize, mut out: *mut f32) {
    let lanes = if tile.affine { 2 * LANES } else { LANES };
    // SAFETY: the panel holds what [`tile`] reads there.
    unsafe {
        let mut panel = tile.panel;
        for _ in 0..tile.steps {
            let base = panel;
            panel = panel.add(2 * lanes);
            let (mut multiples, mut line_left) = (panel, 0);
            for _ in 0..tile.groups {
                if line_left == 0 {
                    (line_left, multiples) = (LINE_BYTES, panel);
                    panel = panel.add(LINE_BYTES);
                }
                let numbers = Numbers::Multiples(multiples.cast(), base);
                for lane in (0..lanes).step_by(V::WIDTH) {
                    numbers.read::<V>(lane).store(out.add(lane));
                }
                (multiples, out, panel) = (multiples.add(lanes), out.add(lanes), panel.add(code_bytes));
                line_left -= lanes;
            }
        }
    }
}

/// Multiplies `R` rows by 32 outputs, `N` vectors at a time. A step is a group or a super-block;
/// activations are in the layout of [`super::activations`].
///
/// # Safety
/// As for [`super::tile::tile`], with `V`'s instruction set.
#[inline(always)]
pub unsafe fn tile<V: AddUnits, C: Codes, const R: usize, const N: usize>(tile: &Tile) {
    let (mut tile, mut column) = (*tile, 0);
    while column < LANES {
        // SAFETY: column + N * WIDTH <= 32 by divisibility; the caller promises the rest.
        unsafe { part::<V, C, R, N, 1, true>(&tile, column) };
        column += N * V::Floats::WIDTH;
        tile.prefetch = tile.prefetch.of_another_pass();
    }
}

/// Multiplies one row by the outputs of `P` panels, as [`super::tile::row`].
///
/// # Safety
/// As for [`tile`], with `P` panels.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub unsafe fn row<V: AddUnits, C: Codes, const N: usize, const P: usize>(tile: &Tile, ahead: usize) {
    const { assert!(N * V::Floats::WIDTH == LANES) };
    let tile = Tile { prefetch: Prefetch::following(ahead), ..*tile };
    // SAFETY: the caller's promise.
    unsafe {
        match tile.multiples {
            true => part::<V, C, 1, N, P, true>(&tile, 0),
            false => part::<V, C, 1, N, P, false>(&tile, 0),
        }
    }
}

/// Some vectors of `P` panels at a time. Without `MULTIPLES` the code for them is left out and more
/// registers are free, which products of one row need: they do little but load.
///
/// # Safety
/// As [`tile`]; `column + N * WIDTH <= 32`.
#[inline(always)]
unsafe fn part<V: AddUnits, C: Codes, const R: usize, const N: usize, const P: usize, const MULTIPLES: bool>(
    tile: &Tile,
    column: usize,
) {
    const { assert!(LANES.is_multiple_of(N * V::Floats::WIDTH)) };
    let has_multiples = MULTIPLES && tile.multiples;
    let width = V::Floats::WIDTH;
    let units = tile.group / UNIT;
    let run_units = if V::RUN_UNITS == 0 { units } else { V::RUN_UNITS };
    let runs = units / run_units;
    // Bytes of f16 scales, and minimums if there are any: a group's own, or a super-block's units.
    // Multiples take half of that.
    let number_bytes = if tile.affine { 4 * LANES } else { 2 * LANES };
    // SAFETY: each `panel` holds `steps` steps: codes, scales, and minimums if there are any; or
    // units, multiples and codes. `activations` holds R words each of scales, starts, and sums if
    // affine, then R words a quarter, or twice that. `out` has R rows of `stride` with 32 columns a
    // panel; `factors` and `bias` have 32 values unless they are null. Prefetches of any address
    // are harmless.
    unsafe {
        let out = tile.out.add(column);
        let mut sums = [[[V::Floats::zero(); N]; R]; P];
        if tile.resume {
            for p in 0..P {
                for r in 0..R {
                    for n in 0..N {
                        sums[p][r][n] = V::Floats::load(out.add(r * tile.stride + p * LANES + n * width));
                    }
                }
            }
        }
        let table = V::table(&tile.table);
        let mut place = Place { panel: tile.panel, activations: tile.activations, ahead: tile.prefetch.at };
        // Multiples of the next group, and this step's units.
        let (mut multiples, mut base): (*const u8, _) = (std::ptr::null(), std::ptr::null());
        let (mut groups_left, mut line_left) = (0, 0);
        let mut expanded = if MULTIPLES { tile.numbers } else { std::ptr::null() };
        for _ in 0..tile.steps * tile.groups {
            if has_multiples {
                let mut numbers_end = place.panel;
                if groups_left == 0 {
                    (groups_left, line_left, base) = (tile.groups, 0, place.panel);
                    numbers_end = numbers_end.add(number_bytes);
                }
                if line_left == 0 {
                    (line_left, multiples) = (LINE_BYTES, numbers_end);
                    numbers_end = numbers_end.add(LINE_BYTES);
                }
                groups_left -= 1;
                line_left -= number_bytes / 2;
                while place.panel < numbers_end {
                    if tile.prefetch.distance > 0 {
                        for p in 0..P {
                            let ahead = place.panel.wrapping_add(p * tile.panel_bytes + tile.prefetch.distance);
                            fetch::<V::Floats>(&tile.prefetch, ahead);
                        }
                    }
                    place.panel = place.panel.add(64);
                }
            }
            let scales = place.activations.cast::<f32>();
            let starts = place.activations.add(R).cast::<i32>();
            let totals = place.activations.add(2 * R).cast::<f32>();
            place.activations = place.activations.add(if tile.affine { 3 * R } else { 2 * R });

            let mut dots = [[[V::splat(starts); N]; R]; P];
            for p in 0..P {
                for r in 0..R {
                    dots[p][r] = [V::splat(starts.add(r)); N];
                }
            }
            for _ in 0..runs {
                add_run::<V, C, R, N, P>(tile, &mut dots, &mut place, run_units, column, table);
                for p in 0..P {
                    for r in 0..R {
                        for n in 0..N {
                            dots[p][r][n] = dots[p][r][n].settle();
                        }
                    }
                }
            }
            let numbers = match (has_multiples, expanded.is_null()) {
                (false, _) => Numbers::Halves(place.panel),
                (true, true) => Numbers::Multiples(multiples.cast(), base),
                (true, false) => Numbers::Floats(expanded),
            };
            for p in 0..P {
                let numbers = numbers.further(p * tile.panel_bytes);
                if tile.prefetch.distance > 0 && !has_multiples {
                    let end = place.panel.wrapping_add(p * tile.panel_bytes + tile.prefetch.distance);
                    fetch::<V::Floats>(&tile.prefetch, end);
                }
                for n in 0..N {
                    let scale: V::Floats = numbers.read(column + n * width);
                    for r in 0..R {
                        let scale = scale.mul(V::Floats::splat(*scales.add(r)));
                        sums[p][r][n] = sums[p][r][n].add_product(dots[p][r][n].to_floats(), scale);
                    }
                }
                if tile.affine {
                    for n in 0..N {
                        let minimum: V::Floats = numbers.read(LANES + column + n * width);
                        for r in 0..R {
                            sums[p][r][n] = sums[p][r][n].add_product(minimum, V::Floats::splat(*totals.add(r)));
                        }
                    }
                }
            }
            match has_multiples {
                true if expanded.is_null() => multiples = multiples.add(number_bytes / 2),
                true => expanded = expanded.add(number_bytes / 2),
                false => place.panel = place.panel.add(number_bytes),
            }
        }
        for p in 0..P {
            for r in 0..R {
                for n in 0..N {
                    let (mut sum, at) = (sums[p][r][n], p * LANES + n * width);
                    if !tile.factors.is_null() {
                        sum = sum.mul(V::Floats::load(tile.factors.add(column + at)));
                    }
                    if !tile.bias.is_null() {
                        sum = sum.add(V::Floats::load(tile.bias.add(column + at)));
                    }
                    sum.store(out.add(r * tile.stride + at));
                }
            }
        }
    }
}

/// Position of a tile in its panels and activations, and in its prefetches for later blocks.
struct Place {
    panel: *const u8,
    activations: *const u32,
    ahead: *const u8,
}

/// Adds the products of `units` units of each panel, and issues the prefetches that are due.
///
/// # Safety
/// As [`tile`], with the panels' units and their words at `place`, which advances behind them.
#[inline(always)]
unsafe fn add_run<V: AddUnits, C: Codes, const R: usize, const N: usize, const P: usize>(
    tile: &Tile,
    dots: &mut [[[V; N]; R]; P],
    place: &mut Place,
    units: usize,
    column: usize,
    table: V::Table,
) {
    let mut units_left = units;
    while units_left > 0 {
        let number = units_left.min(V::AT_ONCE);
        let (bytes, lines) = (number * C::UNIT_BYTES, tile.prefetch.lines);
        let units = Units { number, at: place.panel, apart: tile.panel_bytes, ahead: place.ahead, lines };
        // SAFETY: the caller's promise; a prefetch of any address is harmless.
        unsafe {
            if tile.prefetch.distance > 0 {
                for p in 0..P {
                    let ahead = place.panel.wrapping_add(p * tile.panel_bytes + tile.prefetch.distance);
                    for line in 0..bytes / 64 {
                        fetch::<V::Floats>(&tile.prefetch, ahead.wrapping_add(64 * line));
                    }
                }
            }
            V::add_units::<C, R, N, P>(dots, units, column, table, place.activations);
            place.panel = place.panel.add(bytes);
            place.ahead = place.ahead.wrapping_add(64 * lines * number);
            place.activations = place.activations.add(number * UNIT / 4 * V::WORDS * R);
        }
        units_left -= number;
    }
}

/// Adds the products of four inner values.
///
/// # Safety
/// As [`tile`], with the panels' `units` and their words at `activations`.
#[inline(always)]
unsafe fn quarter<V: Quarters, C: Codes, const Q: usize, const R: usize, const N: usize, const P: usize>(
    dots: &mut [[[V; N]; R]; P],
    units: Units,
    column: usize,
    table: V::Table,
    activations: *const u32,
) {
    // SAFETY: the caller's promise.
    unsafe {
        for p in 0..P {
            let unit = units.at.add(p * units.apart);
            let mut levels = [C::read::<V, Q>(unit, column, table); N];
            for n in 1..N {
                levels[n] = C::read::<V, Q>(unit, column + n * V::Floats::WIDTH, table);
            }
            for r in 0..R {
                let words = activations.add(Q * V::WORDS * R + r);
                if C::PACKED == Packed::Bytes && V::add_bytes(&mut dots[p][r], unit.add(Q * LANES * 4), words, R) {
                    continue;
                }
                for n in 0..N {
                    dots[p][r][n] = dots[p][r][n].add_dot(levels[n], words, R);
                }
            }
        }
    }
}

/// # Safety
/// `V`'s instruction set is present.
#[inline(always)]
unsafe fn fetch<V: Lanes>(prefetch: &Prefetch, at: *const u8) {
    // SAFETY: the caller's promise; a prefetch of any address is harmless.
    unsafe { if prefetch.far { V::prefetch_far(at) } else { V::prefetch(at) } }
}
