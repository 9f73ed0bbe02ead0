//! Kernels for AMX: a register holds a tile, up to 16 rows of 64 bytes, and one instruction
//! multiplies two of them.
//!
//! In memory, a run of sixteen steps of a panel, 32 inner values, is two tiles of weights, one for
//! each half of the outputs; the same run of up to sixteen rows of activations is a tile in the
//! layout of [`super::activations`]. An instruction sums a run's even and its odd values
//! separately, each in ascending order, adds the two, and adds that to the sum of the earlier runs.
//! All rows and outputs are summed alike, so a result's bits depend neither on the tile's height
//! nor on the blocking. They are not the bits of AVX-512, and one row uses AMX too.

use std::arch::asm;
use std::arch::x86_64::*;

use super::super::tiles::{ROW_BYTES, ROWS, Shapes, load, multiply, store, zero};
use super::activations::PAIR_RUN;
use super::tile::{Prefetch, Tile};

/// Two registers of activations, two of weights, and four of sums.
pub const MAX_ROWS: usize = 2 * ROWS;

/// Weight bytes that all tiles pass over before the next block: with a tile's activations they fit
/// the first-level cache.
pub const BLOCK_BYTES: usize = 16 << 10;
// A block begins with a run of pairs.
const _: () = assert!((BLOCK_BYTES / STEP_BYTES).is_multiple_of(PAIR_RUN));

/// Bytes of a step of a panel.
const STEP_BYTES: usize = 128;
/// Bytes of a run of one row.
const RUN_BYTES: usize = 4 * PAIR_RUN;

/// Loads both registers of up to sixteen rows, or sets them to zero.
macro_rules! load_sums {
    ($low:literal, $high:literal, $sums:expr, $resume:expr) => {{
        let sums = $sums;
        if !$resume {
            zero!($low);
            zero!($high);
        } else if sums.rows == ROWS {
            load!($low, sums.at, 4 * sums.stride);
            load!($high, sums.at.add(ROWS), 4 * sums.stride);
        } else {
            let mut whole = [[0.0; 2 * ROWS]; ROWS];
            sums.copy::<false>(&mut whole);
            load!($low, whole.as_ptr(), 8 * ROWS);
            load!($high, whole[0][ROWS..].as_ptr(), 8 * ROWS);
        }
    }};
}

/// Stores both registers of sums for up to sixteen rows.
macro_rules! store_sums {
    ($low:literal, $high:literal, $sums:expr) => {{
        let sums = $sums;
        if sums.rows == ROWS {
            store!($low, sums.at, 4 * sums.stride);
            store!($high, sums.at.add(ROWS), 4 * sums.stride);
        } else {
            let mut whole = [[0.0; 2 * ROWS]; ROWS];
            store!($low, whole.as_mut_ptr(), 8 * ROWS);
            store!($high, whole.as_mut_ptr().cast::<f32>().add(ROWS), 8 * ROWS);
            sums.copy::<true>(&mut whole);
        }
    }};
}

/// The registers of [`bf16_tile`], for all heights: a lower tile reads beyond its rows, and those
/// sums are not stored.
pub const BF16_SHAPES: Shapes = Shapes::WHOLE;

/// # Safety
/// See [`super::tile::tile`]. Activations are pairs of bf16 and readable for sixteen rows; the
/// machine has AVX-512 and AMX with BF16, and the registers have [`BF16_SHAPES`].
pub unsafe fn bf16_tile(tile: &Tile) {
    // SAFETY: the caller's promise.
    unsafe { if tile.rows <= ROWS { bf16_rows::<false>(tile) } else { bf16_rows::<true>(tile) } }
}

/// Up to sixteen rows, or (`HIGH`) more.
///
/// # Safety
/// As [`bf16_tile`].
#[target_feature(enable = "avx512f")]
unsafe fn bf16_rows<const HIGH: bool>(tile: &Tile) {
    // SAFETY: `panel` holds `steps` steps of 128 bytes, `activations` the rows' pairs in whole
    // runs, `out` the rows with 32 columns; all offsets below stay inside those, and an incomplete
    // last run is read from a copy.
    unsafe {
        let out = Sums { at: tile.out, stride: tile.stride, rows: tile.rows };
        let kept = if tile.kept.is_null() { out } else { Sums { at: tile.kept, stride: 2 * ROWS, ..out } };
        load_sums!(0, 1, kept.top(), tile.resume);
        if HIGH {
            load_sums!(2, 3, kept.bottom(), tile.resume);
        }
        let mut activations = tile.activations.cast::<u8>();
        let mut panel = tile.panel;
        let mut prefetch = tile.prefetch;
        for _ in 0..tile.steps / PAIR_RUN {
            fetch(&mut prefetch);
            run::<HIGH>(activations, panel);
            activations = activations.add(tile.rows * RUN_BYTES);
            panel = panel.add(PAIR_RUN * STEP_BYTES);
        }
        let rest = tile.steps % PAIR_RUN;
        if rest > 0 {
            last_run::<HIGH>(activations, panel, tile.rows, rest);
        }
        let target = if tile.last { out } else { kept };
        store_sums!(0, 1, target.top());
        if HIGH {
            store_sums!(2, 3, target.bottom());
        }
        if !tile.bias.is_null() {
            let bias = [_mm512_loadu_ps(tile.bias), _mm512_loadu_ps(tile.bias.add(16))];
            for row in 0..tile.rows {
                for (half, bias) in bias.into_iter().enumerate() {
                    let out = tile.out.add(row * tile.stride + 16 * half);
                    _mm512_storeu_ps(out, _mm512_add_ps(_mm512_loadu_ps(out), bias));
                }
            }
        }
    }
}

/// Address of sums, 32 columns of some rows.
#[derive(Clone, Copy)]
struct Sums {
    at: *mut f32,
    stride: usize,
    rows: usize,
}

impl Sums {
    /// The rows of the first two registers.
    #[inline(always)]
    fn top(self) -> Self {
        Self { rows: self.rows.min(ROWS), ..self }
    }

    /// The rows of the other two registers.
    #[inline(always)]
    fn bottom(self) -> Self {
        Self { at: self.at.wrapping_add(ROWS * self.stride), rows: self.rows - ROWS, ..self }
    }

    /// Copies the sums to or (`BACK`) from sixteen rows of 32.
    ///
    /// # Safety
    /// `rows` rows of 32 columns exist.
    #[inline(always)]
    unsafe fn copy<const BACK: bool>(&self, whole: &mut [[f32; 2 * ROWS]; ROWS]) {
        for (row, values) in whole.iter_mut().enumerate().take(self.rows) {
            // SAFETY: the caller's promise.
            unsafe {
                let own = self.at.add(row * self.stride);
                let (from, to) = if BACK { (values.as_ptr(), own) } else { (own.cast_const(), values.as_mut_ptr()) };
                from.copy_to_nonoverlapping(to, values.len());
            }
        }
    }
}

/// Multiplies one run of all rows.
///
/// # Safety
/// Called inside [`bf16_rows`], with a whole run readable at both addresses.
#[inline(always)]
unsafe fn run<const HIGH: bool>(activations: *const u8, panel: *const u8) {
    // SAFETY: the caller's promise.
    unsafe {
        load!(4, activations, RUN_BYTES);
        load!(6, panel, STEP_BYTES);
        multiply!("tdpbf16ps", 0, 4, 6);
        load!(7, panel.add(ROW_BYTES), STEP_BYTES);
        multiply!("tdpbf16ps", 1, 4, 7);
        if HIGH {
            load!(5, activations.add(ROWS * RUN_BYTES), RUN_BYTES);
            multiply!("tdpbf16ps", 2, 5, 6);
            multiply!("tdpbf16ps", 3, 5, 7);
        }
    }
}

/// Multiplies a run with only `steps` steps: the others count as zeros.
///
/// # Safety
/// Called inside [`bf16_rows`], with these steps readable at `panel` and a run of the rows at
/// `activations`.
#[inline(never)]
unsafe fn last_run<const HIGH: bool>(activations: *const u8, panel: *const u8, rows: usize, steps: usize) {
    let mut weights = [0u8; PAIR_RUN * STEP_BYTES];
    let mut pairs = [0u8; MAX_ROWS * RUN_BYTES];
    // SAFETY: the caller's promise.
    unsafe {
        panel.copy_to_nonoverlapping(weights.as_mut_ptr(), steps * STEP_BYTES);
        for row in 0..rows {
            let from = activations.add(row * RUN_BYTES);
            from.copy_to_nonoverlapping(pairs.as_mut_ptr().add(row * RUN_BYTES), 4 * steps);
        }
        run::<HIGH>(pairs.as_ptr(), weights.as_ptr());
    }
}

/// Prefetches the cache lines that are due with one run of steps.
#[inline(always)]
fn fetch(prefetch: &mut Prefetch) {
    for _ in 0..prefetch.lines {
        // SAFETY: a prefetch of any address is harmless.
        unsafe {
            if prefetch.far {
                _mm_prefetch::<_MM_HINT_T1>(prefetch.at.cast());
            } else {
                _mm_prefetch::<_MM_HINT_T0>(prefetch.at.cast());
            }
        }
        prefetch.at = prefetch.at.wrapping_add(64);
    }
}
