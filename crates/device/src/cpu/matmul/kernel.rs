//! Which code multiplies a packing on an instruction set, and what it wants the activations to be.

use folio_formats::{Coding, Levels};

use super::super::Isa;
use super::super::weight::Packing;
use super::activations::{Activations, RowTiles};
#[cfg(target_arch = "aarch64")]
use super::neon;
use super::rounding::Rounding;
use super::tile::Tile;
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512};
use super::{integer, scalar};

/// The highest tile of any instruction set.
pub const MAX_ROWS: usize = 14;

/// How far ahead of a single tile its weights are fetched.
const AHEAD_BYTES: usize = 4 << 10;
/// The same with AVX2, of bytes: on Zen 3 four rows gain a sixth by it.
const AVX2_AHEAD_BYTES: usize = 1 << 10;
/// Tiles up to this height leave that to the hardware elsewhere: they do little but load, and asking costs them 5%.
const LOW_ROWS: usize = 4;

/// The kernel for one instruction set and packing.
#[derive(Clone, Copy)]
pub struct Kernel {
    activations: Activations,
    packing: Packing,
    max_rows: usize,
    row_panels: usize,
    /// See [`Kernel::ahead`]: of low tiles and of others.
    ahead: [usize; 2],
    /// Whether tiles of several rows fetch the next block instead.
    in_turn: bool,
    tile: unsafe fn(&Tile),
    table: [u8; 16],
}

impl Kernel {
    pub fn new(isa: Isa, packing: Packing) -> Self {
        let kernel = match packing {
            Packing::Coded(coding) => Self::coded(isa, coding),
            _ => Self::plain(isa, packing),
        };
        // Tiles of the last panel have room for no more, and the kernels do not look.
        assert!(kernel.max_rows <= MAX_ROWS, "tiles of {} rows", kernel.max_rows);
        kernel
    }

    fn plain(isa: Isa, packing: Packing) -> Self {
        let (max_rows, tiles): (_, [unsafe fn(&Tile); 3]) = match isa {
            Isa::Scalar => (scalar::MAX_ROWS, [scalar::f32_tile, scalar::f16_tile, scalar::bf16_tile]),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => (avx2::MAX_ROWS, [avx2::f32_tile, avx2::f16_tile, avx2::bf16_tile]),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => (avx512::MAX_ROWS, [avx512::f32_tile, avx512::f16_tile, avx512::bf16_tile]),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => (neon::MAX_ROWS, [neon::f32_tile, neon::f16_tile, neon::bf16_tile]),
            _ => unreachable!("{} is not of this architecture", isa.name()),
        };
        let (tile, activations) = match (packing, isa) {
            (Packing::F32, _) => (tiles[0], Activations::F32),
            (Packing::F16, _) => (tiles[1], Activations::F32),
            (_, Isa::Avx512) => (tiles[2], Activations::Bf16Pairs),
            _ => (tiles[2], Activations::RoundedF32),
        };
        let (row_panels, ahead, in_turn) = (row_panels(isa), [0, AHEAD_BYTES], isa == Isa::Avx2);
        Self { activations, packing, max_rows, row_panels, ahead, in_turn, tile, table: [0; 16] }
    }

    fn coded(isa: Isa, coding: Coding) -> Self {
        // Bytes, nibbles through a table, nibbles that count up by one, five bits.
        let (max_rows, tiles): (_, [unsafe fn(&Tile); 4]) = match isa {
            Isa::Scalar => {
                use integer::scalar::*;
                (MAX_ROWS, [bytes_tile, nibbles_tile, nibbles_tile, five_tile])
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                use integer::avx2::*;
                let max_rows = match &coding.levels {
                    Levels::Bytes => MAX_BYTE_ROWS,
                    Levels::Nibbles(table) if !counts_up(table) => MAX_ROWS,
                    _ => MAX_CODE_ROWS,
                };
                (max_rows, [bytes_tile, nibbles_tile, even_nibbles_tile, five_tile])
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                use integer::avx512::*;
                (MAX_ROWS, [bytes_tile, nibbles_tile, even_nibbles_tile, five_tile])
            }
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => {
                use integer::neon::*;
                (MAX_ROWS, [bytes_tile, nibbles_tile, nibbles_tile, five_tile])
            }
            _ => unreachable!("{} is not of this architecture", isa.name()),
        };
        let tile = match &coding.levels {
            Levels::Bytes => tiles[0],
            Levels::Nibbles(table) if counts_up(table) => tiles[2],
            Levels::Nibbles(_) => tiles[1],
            Levels::Five { .. } => tiles[3],
        };
        let (table, offset) = table(isa, &coding.levels);
        let Coding { group, affine, activations: scale, .. } = coding;
        let signs = signs(isa, &coding.levels);
        let activations = Activations::Int8(Rounding { group, scale, offset, signs, affine });
        let ahead = match (&coding.levels, isa) {
            (Levels::Bytes, Isa::Avx2) => AVX2_AHEAD_BYTES,
            (Levels::Bytes, _) => 0,
            _ => AHEAD_BYTES,
        };
        let packing = Packing::Coded(coding);
        let (row_panels, ahead) = (row_panels(isa), [ahead; 2]);
        Self { activations, packing, max_rows, row_panels, ahead, in_turn: false, tile, table }
    }

    pub fn activations(&self) -> Activations {
        self.activations
    }

    pub fn packing(&self) -> &Packing {
        &self.packing
    }

    pub fn max_rows(&self) -> usize {
        self.max_rows
    }

    /// How many panels a tile of `rows` rows may be of.
    pub fn panels(&self, rows: usize) -> usize {
        if rows == 1 { self.row_panels } else { 1 }
    }

    /// How far ahead a single tile of so many rows fetches its weights; 0 where that is left to the hardware.
    pub fn ahead(&self, rows: usize) -> usize {
        self.ahead[usize::from(rows > LOW_ROWS)]
    }

    /// Whether tiles of so many rows fetch the next block [in turn](super::tile::Prefetch::in_turn), with each pass over this one.
    pub fn fetches_in_turn(&self, rows: usize) -> bool {
        self.in_turn && rows > 1
    }

    /// Levels for [`Tile::table`].
    pub fn table(&self) -> [u8; 16] {
        self.table
    }

    pub fn is_affine(&self) -> bool {
        matches!(self.packing, Packing::Coded(coding) if coding.affine)
    }

    pub fn tiles(&self, first_row: usize, rows: usize) -> RowTiles {
        RowTiles::new(first_row, rows, self.max_rows)
    }

    /// # Safety
    /// The tile's pointers are valid for what [`Tile`] says, nobody else writes its columns of `out`, and this kernel
    /// was made for an instruction set that is there.
    pub unsafe fn run(&self, tile: &Tile) {
        // SAFETY: the caller's promise.
        unsafe { (self.tile)(tile) }
    }
}

/// Panels of which one row is multiplied at once: AVX2's registers are enough for two, and too few to have as much of one
/// under way as memory gives.
fn row_panels(isa: Isa) -> usize {
    if isa == Isa::Avx2 { 2 } else { 1 }
}

/// Whether a code's level is the code, plus what the first one's is.
fn counts_up(table: &[i8; 16]) -> bool {
    table.is_sorted_by(|a, b| i32::from(*a) + 1 == i32::from(*b))
}

/// The levels as the kernel wants them, and what they have been raised by: AVX-512's multiplication asks for unsigned
/// ones, and AVX2's wins by it where they are few and need no table.
fn table(isa: Isa, levels: &Levels) -> ([u8; 16], i32) {
    match (levels, isa) {
        (Levels::Bytes, Isa::Avx512) => ([0; 16], 128),
        (Levels::Bytes, _) => ([0; 16], 0),
        (Levels::Nibbles(table), Isa::Avx512) => {
            let least = table.iter().copied().min().map_or(0, i32::from);
            (table.map(|level| (i32::from(level) - least) as u8), -least)
        }
        (Levels::Nibbles(table), Isa::Avx2) if counts_up(table) => ([0; 16], -i32::from(table[0])),
        (Levels::Nibbles(table), _) => (table.map(|level| level as u8), 0),
        (Levels::Five { zero }, Isa::Avx512 | Isa::Avx2) => ([0; 16], i32::from(*zero)),
        (Levels::Five { zero }, _) => ([*zero; 16], 0),
    }
}

/// [`Rounding::signs`]: AVX2's multiplication asks for one unsigned side. Bytes are stored with their top bit flipped.
fn signs(isa: Isa, levels: &Levels) -> Option<u8> {
    match (isa, levels) {
        (Isa::Avx2, Levels::Bytes) => Some(128),
        (Isa::Avx2, Levels::Nibbles(table)) if !counts_up(table) => Some(0),
        _ => None,
    }
}
