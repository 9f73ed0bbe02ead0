//! The code that multiplies a packing on an instruction set, and the form of activations that it
//! needs.

use folio_formats::{Coding, Levels, Numbers};

use super::super::Isa;
#[cfg(target_arch = "x86_64")]
use super::super::tiles;
use super::super::weight::{LANES, Packing, code_bytes};
use super::activations::{Activations, Heights, RowTiles};
#[cfg(target_arch = "aarch64")]
use super::neon;
use super::rounding::Rounding;
use super::tile::Tile;
#[cfg(target_arch = "x86_64")]
use super::{amx, avx2, avx512};
use super::{integer, scalar};

/// The highest tile of any instruction set.
pub const MAX_ROWS: usize = 32;

/// Weight bytes that all tiles pass over before the next block: a small part of a second-level
/// cache, and long enough that loading and storing the sums costs nothing. Measured on Zen 4 at 512
/// rows, as shares of the bf16 peak: 16 KiB 84%, 32 KiB 88%, 128 KiB 93%.
pub const BLOCK_BYTES: usize = 128 << 10;

/// Weight bytes of several panels that a tile passes over before the next tile does, so that its
/// activations stay in the first-level cache meanwhile. On Zen 4 a prompt's products take 4% less
/// time with it.
const BESIDE_BYTES: usize = 256 << 10;

/// Distance of a single tile's prefetches.
const AHEAD_BYTES: usize = 4 << 10;
/// Distance of a single tile's prefetches of byte codes with AVX2: on Zen 3 four rows gain a sixth.
const AVX2_AHEAD_BYTES: usize = 1 << 10;
/// On other sets tiles up to this height leave prefetching to the hardware: they do little but
/// load, and prefetches cost them 5%.
const LOW_ROWS: usize = 4;

/// A function like [`integer::expand`].
type Expand = unsafe fn(&Tile, usize, *mut f32);

/// The kernel for one instruction set and packing.
#[derive(Clone, Copy)]
pub struct Kernel {
    activations: Activations,
    packing: Packing,
    heights: Heights,
    row_panels: usize,
    /// See [`Kernel::ahead`]: for low tiles and for others.
    ahead: [usize; 2],
    /// Whether tiles of several rows prefetch the next block instead.
    in_turn: bool,
    block_bytes: usize,
    /// See [`Kernel::beside_bytes`].
    beside_bytes: usize,
    tile: unsafe fn(&Tile),
    /// See [`Kernel::expand`].
    expand: Expand,
    table: [u8; 16],
    /// Shapes of the tile registers, if the kernel uses them.
    #[cfg(target_arch = "x86_64")]
    shapes: Option<tiles::Shapes>,
}

impl Kernel {
    pub fn new(isa: Isa, packing: Packing) -> Self {
        let kernel = match packing {
            Packing::Coded(coding) => Self::coded(isa, coding),
            _ => Self::plain(isa, packing),
        };
        // Tiles of the last panel have room for no more rows, and the kernels do not check.
        assert!(kernel.heights.most() <= MAX_ROWS, "tiles of {:?}", kernel.heights);
        kernel
    }

    fn plain(isa: Isa, packing: Packing) -> Self {
        let (max_rows, tiles): (_, [unsafe fn(&Tile); 3]) = match isa {
            Isa::Scalar => (scalar::MAX_ROWS, [scalar::f32_tile, scalar::f16_tile, scalar::bf16_tile]),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => (avx2::MAX_ROWS, [avx2::f32_tile, avx2::f16_tile, avx2::bf16_tile]),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Amx => (avx512::MAX_ROWS, [avx512::f32_tile, avx512::f16_tile, avx512::bf16_tile]),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => (neon::MAX_ROWS, [neon::f32_tile, neon::f16_tile, neon::bf16_tile]),
            _ => unreachable!("{} is not of this architecture", isa.name()),
        };
        let (tile, activations) = match (packing, isa) {
            (Packing::F32, _) => (tiles[0], Activations::F32),
            (Packing::F16, _) => (tiles[1], Activations::F32),
            (_, Isa::Avx512 | Isa::Amx) => (tiles[2], Activations::Bf16Pairs),
            _ => (tiles[2], Activations::RoundedF32),
        };
        let kernel = Self {
            activations,
            packing,
            heights: Heights::Even(max_rows),
            row_panels: row_panels(isa),
            ahead: [0, AHEAD_BYTES],
            in_turn: isa == Isa::Avx2,
            tile,
            expand: integer::scalar::expand,
            table: [0; 16],
            block_bytes: BLOCK_BYTES,
            beside_bytes: beside_bytes(isa),
            #[cfg(target_arch = "x86_64")]
            shapes: None,
        };
        match (packing, isa) {
            #[cfg(target_arch = "x86_64")]
            (Packing::BF16, Isa::Amx) => Self {
                heights: Heights::Whole(amx::MAX_ROWS),
                tile: amx::bf16_tile,
                block_bytes: amx::BLOCK_BYTES,
                beside_bytes: 0,
                shapes: Some(amx::BF16_SHAPES),
                ..kernel
            },
            _ => kernel,
        }
    }

    fn coded(isa: Isa, coding: Coding) -> Self {
        // Bytes, nibbles through a table, nibbles that count up by one, five bits, six bits.
        let (max_rows, tiles, expand): (_, [unsafe fn(&Tile); 5], Expand) = match isa {
            Isa::Scalar => {
                use integer::scalar::*;
                (MAX_ROWS, [bytes_tile, nibbles_tile, nibbles_tile, five_tile, six_tile], expand)
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                use integer::avx2::*;
                let max_rows = match &coding.levels {
                    Levels::Bytes => MAX_BYTE_ROWS,
                    Levels::Nibbles(table) if !counts_up(table) => MAX_ROWS,
                    Levels::Six { .. } => MAX_ROWS,
                    _ => MAX_CODE_ROWS,
                };
                (max_rows, [bytes_tile, nibbles_tile, even_nibbles_tile, five_tile, six_tile], expand)
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Amx => {
                use integer::avx512::*;
                (MAX_ROWS, [bytes_tile, nibbles_tile, even_nibbles_tile, five_tile, six_tile], expand)
            }
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => {
                use integer::neon::*;
                (MAX_ROWS, [bytes_tile, nibbles_tile, nibbles_tile, five_tile, six_tile], expand)
            }
            _ => unreachable!("{} is not of this architecture", isa.name()),
        };
        let tile = match &coding.levels {
            Levels::Bytes => tiles[0],
            Levels::Nibbles(table) if counts_up(table) => tiles[2],
            Levels::Nibbles(_) => tiles[1],
            Levels::Five { .. } => tiles[3],
            Levels::Six { .. } => tiles[4],
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
        Self {
            activations,
            packing,
            heights: Heights::Even(max_rows),
            row_panels,
            ahead,
            in_turn: false,
            tile,
            expand,
            table,
            block_bytes: BLOCK_BYTES,
            beside_bytes: beside_bytes(isa),
            #[cfg(target_arch = "x86_64")]
            shapes: None,
        }
    }

    pub fn activations(&self) -> Activations {
        self.activations
    }

    pub fn packing(&self) -> &Packing {
        &self.packing
    }

    pub fn heights(&self) -> Heights {
        self.heights
    }

    /// Weight bytes of a panel that all tiles pass over before the next ones.
    pub fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Weight bytes of several panels that a tile passes over before the next tile does; 0 for one
    /// panel.
    pub fn beside_bytes(&self) -> usize {
        self.beside_bytes
    }

    /// Whether sums of several tiles are stored side by side between blocks.
    pub fn keeps_sums(&self) -> bool {
        self.heights == Heights::Whole(MAX_ROWS)
    }

    /// Runs `body`, which may run tiles of this kernel only.
    pub fn within(&self, body: impl FnOnce()) {
        #[cfg(target_arch = "x86_64")]
        if let Some(shapes) = &self.shapes {
            // SAFETY: this kernel was made for an instruction set that is there.
            unsafe { shapes.enter() };
            body();
            // SAFETY: as above.
            return unsafe { tiles::leave() };
        }
        body();
    }

    /// Most panels that a tile of `rows` rows may cover.
    pub fn panels(&self, rows: usize) -> usize {
        if rows == 1 { self.row_panels } else { 1 }
    }

    /// Distance of the prefetches of a single tile with this number of rows; 0 leaves them to the
    /// hardware.
    pub fn ahead(&self, rows: usize) -> usize {
        self.ahead[usize::from(rows > LOW_ROWS)]
    }

    /// Whether tiles of this height prefetch the next block [in
    /// turn](super::tile::Prefetch::in_turn), with each pass over this one.
    pub fn fetches_in_turn(&self, rows: usize) -> bool {
        self.in_turn && rows > 1
    }

    /// The levels of 16 codes, for [`Tile::table`].
    pub fn table(&self) -> [u8; 16] {
        self.table
    }

    pub fn is_affine(&self) -> bool {
        matches!(self.packing, Packing::Coded(coding) if coding.affine)
    }

    /// Whether scales and minimums are multiples of a super-block's units.
    pub fn has_multiples(&self) -> bool {
        matches!(self.packing, Packing::Coded(coding) if coding.numbers == Numbers::Multiples)
    }

    /// Number of values that each step's multiples are expanded to, or none.
    pub fn step_numbers(&self) -> usize {
        match self.packing {
            Packing::Coded(coding) if coding.numbers == Numbers::Multiples => {
                self.packing.step_values() / coding.group * if coding.affine { 2 * LANES } else { LANES }
            }
            _ => 0,
        }
    }

    /// Expands the multiples of a tile's steps, for all tiles that pass over them.
    ///
    /// # Safety
    /// As [`Kernel::run`], with a kernel that has [`Kernel::step_numbers`] and room for them.
    pub unsafe fn expand(&self, tile: &Tile, out: &mut [f32]) {
        let Packing::Coded(coding) = self.packing else { panic!("{:?} has no multiples", self.packing) };
        assert!(out.len() >= tile.steps * self.step_numbers());
        // SAFETY: the caller's promise.
        unsafe { (self.expand)(tile, code_bytes(&coding), out.as_mut_ptr()) }
    }

    pub fn tiles(&self, first_row: usize, rows: usize) -> RowTiles {
        RowTiles::new(first_row, rows, self.heights)
    }

    /// # Safety
    /// The tile's pointers are valid as documented on [`Tile`], no other thread writes its columns
    /// of `out`, and this is called inside [`Kernel::within`].
    pub unsafe fn run(&self, tile: &Tile) {
        // SAFETY: the caller's promise.
        unsafe { (self.tile)(tile) }
    }
}

/// Panels that one row is multiplied with at a time. AVX2 takes two: its registers cannot keep
/// enough loads of a single panel in flight to saturate memory.
fn row_panels(isa: Isa) -> usize {
    if isa == Isa::Avx2 { 2 } else { 1 }
}

/// See [`BESIDE_BYTES`]; other sets were not measured.
fn beside_bytes(isa: Isa) -> usize {
    if matches!(isa, Isa::Avx512 | Isa::Amx) { BESIDE_BYTES } else { 0 }
}

/// Whether the level of each code is the code plus the first code's level.
fn counts_up(table: &[i8; 16]) -> bool {
    table.is_sorted_by(|a, b| i32::from(*a) + 1 == i32::from(*b))
}

/// The levels in the kernel's form, and the offset that was added to them. AVX-512's multiplication
/// needs unsigned levels; AVX2's is faster with them if they are few and need no table.
fn table(isa: Isa, levels: &Levels) -> ([u8; 16], i32) {
    match (levels, isa) {
        (Levels::Bytes, Isa::Avx512 | Isa::Amx) => ([0; 16], 128),
        (Levels::Bytes, _) => ([0; 16], 0),
        (Levels::Nibbles(table), Isa::Avx512 | Isa::Amx) => {
            let least = table.iter().copied().min().map_or(0, i32::from);
            (table.map(|level| (i32::from(level) - least) as u8), -least)
        }
        (Levels::Nibbles(table), Isa::Avx2) if counts_up(table) => ([0; 16], -i32::from(table[0])),
        (Levels::Nibbles(table), _) => (table.map(|level| level as u8), 0),
        (Levels::Five { zero } | Levels::Six { zero }, Isa::Avx512 | Isa::Amx | Isa::Avx2) => {
            ([0; 16], i32::from(*zero))
        }
        (Levels::Five { zero } | Levels::Six { zero }, _) => ([*zero; 16], 0),
    }
}

/// [`Rounding::signs`]: AVX2's multiplication needs one unsigned side. Bytes are stored with their
/// top bit flipped.
fn signs(isa: Isa, levels: &Levels) -> Option<u8> {
    match (isa, levels) {
        (Isa::Avx2, Levels::Bytes) => Some(128),
        (Isa::Avx2, Levels::Nibbles(table)) if !counts_up(table) => Some(0),
        _ => None,
    }
}
