//! The left side of a product, made ready once a call: rounded to what the kernel multiplies and laid out so that a
//! tile reads it straight through.
//!
//! Rows are cut into tiles of nearly equal height; a tile is `[steps][rows of the tile]`, so that the values that one
//! step broadcasts lie side by side. Row-major rows would collide in the cache: widths are powers of two.

use half::bf16;

use super::super::pool::{Disjoint, even_split};
use super::super::{Ctx, Isa};
use super::Kernel;

/// What a kernel multiplies with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activations {
    /// As they are.
    F32,
    /// Rounded to bf16, held as f32: for bf16 weights where only f32 can be multiplied.
    RoundedF32,
    /// Rounded to bf16, two inner values in a word.
    Bf16Pairs,
}

/// Rows of one product, all multiplied with one weight: `rows` rows from `first_row` on, in tiles.
#[derive(Clone, Copy, Debug)]
pub struct RowTiles {
    pub first_row: usize,
    pub rows: usize,
    pub num_tiles: usize,
}

impl RowTiles {
    pub fn new(first_row: usize, rows: usize, max_rows: usize) -> Self {
        Self { first_row, rows, num_tiles: rows.div_ceil(max_rows) }
    }

    /// The rows of one tile.
    pub fn tile(&self, tile: usize) -> std::ops::Range<usize> {
        let range = even_split(self.rows, self.num_tiles, tile);
        self.first_row + range.start..self.first_row + range.end
    }
}

/// Packs the rows of every set; row `r` of the sets is row `picked[r]` (or `r`) of `source`, which is `[.., cols]`. The
/// tile that starts at row `r` starts at word `r * words` of `target`.
pub fn pack(
    ctx: Ctx<'_>,
    kernel: &Kernel,
    source: &[f32],
    cols: usize,
    picked: Option<&[u32]>,
    sets: &[RowTiles],
    target: &mut [u32],
) {
    let words = kernel.row_words(cols);
    let total: usize = sets.iter().map(|set| set.num_tiles).sum();
    let (activations, isa) = (kernel.activations, ctx.isa);
    let target = Disjoint::new(target);
    let body = |range: std::ops::Range<usize>| {
        let tiles = sets.iter().flat_map(|set| (0..set.num_tiles).map(|tile| set.tile(tile)));
        for tile in tiles.skip(range.start).take(range.len()) {
            // SAFETY: tiles hold different rows, so their words do not overlap.
            let target = unsafe { target.part(tile.start * words..tile.end * words) };
            let height = tile.len();
            for (place, row) in tile.enumerate() {
                let at = picked.map_or(row, |picked| picked[row] as usize) * cols;
                pack_row(isa, activations, &source[at..at + cols], &mut target[place..], height);
            }
        }
    };
    // A fork costs less than packing a few thousand values.
    let min_tiles = 8192usize.div_ceil(words * kernel.max_rows + 1);
    ctx.pool.for_each_static(total, min_tiles, body);
}

/// Writes one row's words to every `stride`-th place.
fn pack_row(isa: Isa, activations: Activations, row: &[f32], target: &mut [u32], stride: usize) {
    match activations {
        Activations::F32 => {
            for (value, place) in row.iter().zip(target.iter_mut().step_by(stride)) {
                *place = value.to_bits();
            }
        }
        Activations::RoundedF32 => {
            let mut places = target.iter_mut().step_by(stride);
            for (value, place) in row.iter().zip(&mut places) {
                *place = bf16::from_f32(*value).to_f32().to_bits();
            }
            // An odd width ends in half a step.
            places.for_each(|place| *place = 0);
        }
        Activations::Bf16Pairs => pack_pairs(isa, row, target, stride),
    }
}

#[cfg(target_arch = "x86_64")]
fn pack_pairs(isa: Isa, row: &[f32], target: &mut [u32], stride: usize) {
    assert_eq!(isa, Isa::Avx512);
    let (blocks, rest) = row.as_chunks::<32>();
    for (index, block) in blocks.iter().enumerate() {
        // SAFETY: a block holds 32 values, and the instruction set is Avx512.
        let pairs = unsafe { super::avx512::round_to_pairs(block.as_ptr()) };
        let places = &mut target[index * 16 * stride..];
        if stride == 1 {
            places[..16].copy_from_slice(&pairs);
        } else {
            for (pair, place) in pairs.iter().zip(places.iter_mut().step_by(stride)) {
                *place = *pair;
            }
        }
    }
    let done = (blocks.len() * 16 * stride).min(target.len());
    let places = target[done..].iter_mut().step_by(stride);
    for (pair, place) in rest.chunks(2).zip(places) {
        let bits = |index: usize| pair.get(index).map_or(0, |&value| bf16::from_f32(value).to_bits() as u32);
        *place = bits(0) | bits(1) << 16;
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn pack_pairs(_: Isa, _: &[f32], _: &mut [u32], _: usize) {
    unreachable!("no kernel here takes pairs");
}
