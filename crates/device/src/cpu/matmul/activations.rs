//! The left side of a product, prepared once a call: rounded to the kernel's type and laid out so
//! that a tile reads it in memory order.
//!
//! Rows are cut into tiles of nearly equal height; a tile is
//! `[steps][words of a step][rows of the tile]`, so that the values that one step broadcasts are
//! side by side. Row-major rows would collide in the cache: widths are powers of two. Pairs of bf16
//! are `[steps / 16][rows of the tile][16]`: a cache line is stored as the rounding instruction
//! produces it, because taking it apart would cost as much as some products of few rows.

use std::ops::Range;

use half::bf16;

use super::super::pool::{Disjoint, even_split};
use super::super::simd::nearest_bf16;
use super::super::{Ctx, Isa};
use super::rounding::Rounding;

/// Values that are gathered at a time, and columns of a thread's share: the longest group, and
/// whole steps of every other form.
pub const BUFFER: usize = 256;

/// A second thread pays from this number of values per thread on.
const WORTH_SHARING: usize = 4096;

/// Steps with their pairs of bf16 side by side in one row.
pub const PAIR_RUN: usize = 16;

/// Words behind packed rows that kernels may read: a tile register has sixteen rows of a run,
/// whether or not the tile does.
pub const SLACK_WORDS: usize = 16 * PAIR_RUN;

/// The form of activations that a kernel multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activations {
    /// f32 activations, not rounded.
    F32,
    /// Rounded to bf16, held as f32: for bf16 weights on machines that multiply only f32.
    RoundedF32,
    /// Rounded to bf16, two inner values in a word.
    Bf16Pairs,
    /// Rounded to 8-bit integers, group by group.
    Int8(Rounding),
}

impl Activations {
    /// Inner values in a step.
    pub fn step_values(&self) -> usize {
        match self {
            Activations::F32 => 1,
            Activations::RoundedF32 | Activations::Bf16Pairs => 2,
            Activations::Int8(rounding) => rounding.group,
        }
    }

    /// Words in a step of one row.
    pub fn step_words(&self) -> usize {
        match self {
            Activations::F32 | Activations::Bf16Pairs => 1,
            Activations::RoundedF32 => 2,
            Activations::Int8(rounding) => rounding.step_words(),
        }
    }

    /// Words of a whole row.
    pub fn row_words(&self, cols: usize) -> usize {
        let words = cols.div_ceil(self.step_values()) * self.step_words();
        if *self == Activations::Bf16Pairs { words.next_multiple_of(PAIR_RUN) } else { words }
    }
}

/// The row's values that a weight multiplies, and their order.
#[derive(Clone, Copy, Default)]
pub struct Columns<'a> {
    /// Value `j` is the row's `order[j]`; without an order, values keep theirs.
    pub order: Option<&'a [u32]>,
    /// Positions in that order with values that count as zero, ascending.
    pub zeroed: &'a [u32],
}

/// One row in the order that a weight multiplies.
pub struct Row<'a> {
    values: &'a [f32],
    columns: Columns<'a>,
}

impl<'a> Row<'a> {
    #[cfg(test)]
    pub fn new(values: &'a [f32]) -> Self {
        Self { values, columns: Columns::default() }
    }

    /// All values, if memory has them in the weight's order.
    pub fn plain_values(&self) -> Option<&'a [f32]> {
        (self.columns.order.is_none() && self.columns.zeroed.is_empty()).then_some(self.values)
    }

    pub fn cols(&self) -> usize {
        self.columns.order.map_or(self.values.len(), <[u32]>::len)
    }

    /// Up to `len` values from `start` on; gathered in `buffer` unless memory has them in this
    /// order.
    pub fn read<'b>(&'b self, start: usize, len: usize, buffer: &'b mut [f32; BUFFER]) -> &'b [f32] {
        let range = start..(start + len).min(self.cols());
        let zeroed = self.columns.zeroed;
        let zeroed = &zeroed[zeroed.partition_point(|&at| (at as usize) < range.start)..];
        let zeroed = &zeroed[..zeroed.partition_point(|&at| (at as usize) < range.end)];
        if self.columns.order.is_none() && zeroed.is_empty() {
            return &self.values[range];
        }
        let buffer = &mut buffer[..range.len()];
        match self.columns.order {
            None => buffer.copy_from_slice(&self.values[range.clone()]),
            Some(order) => {
                for (value, &from) in buffer.iter_mut().zip(&order[range.clone()]) {
                    *value = self.values[from as usize];
                }
            }
        }
        for &at in zeroed {
            buffer[at as usize - range.start] = 0.0;
        }
        buffer
    }
}

/// Rows of one product, all multiplied with one weight: `rows` rows from `first_row` on, in tiles.
#[derive(Clone, Copy, Debug)]
pub struct RowTiles {
    pub first_row: usize,
    pub rows: usize,
    pub num_tiles: usize,
    heights: Heights,
}

/// Division of rows into tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heights {
    /// The smallest number of tiles of at most this height, nearly equal.
    Even(usize),
    /// Tiles of this height, except for the last: lower tiles would cost the same.
    Whole(usize),
}

impl Heights {
    pub fn most(self) -> usize {
        let (Heights::Even(rows) | Heights::Whole(rows)) = self;
        rows
    }
}

impl RowTiles {
    pub fn new(first_row: usize, rows: usize, heights: Heights) -> Self {
        Self { first_row, rows, num_tiles: rows.div_ceil(heights.most()), heights }
    }

    /// The rows of one tile.
    pub fn tile(&self, tile: usize) -> Range<usize> {
        let range = match self.heights {
            Heights::Even(_) => even_split(self.rows, self.num_tiles, tile),
            Heights::Whole(height) => tile * height..self.rows.min((tile + 1) * height),
        };
        self.first_row + range.start..self.first_row + range.end
    }
}

/// Rows to be packed: row `r` is row `picked[r]` (or `r`) of the `[.., cols]` array `values`.
#[derive(Clone, Copy)]
pub struct Source<'a> {
    pub values: &'a [f32],
    pub cols: usize,
    pub picked: Option<&'a [u32]>,
    pub columns: Columns<'a>,
}

impl<'a> Source<'a> {
    fn row(&self, row: usize) -> Row<'a> {
        let at = self.picked.map_or(row, |picked| picked[row] as usize) * self.cols;
        Row { values: &self.values[at..at + self.cols], columns: self.columns }
    }

    /// Number of values in a packed row.
    pub fn packed_cols(&self) -> usize {
        self.columns.order.map_or(self.cols, <[u32]>::len)
    }
}

/// Packs the rows of every set. The tile that starts at row `r` starts at word `r * words` of
/// `target`; `words` is [`Activations::row_words`].
pub fn pack(ctx: Ctx<'_>, activations: Activations, source: Source<'_>, sets: &[RowTiles], target: &mut [u32]) {
    let cols = source.packed_cols();
    let words = activations.row_words(cols);
    if words == 0 {
        return;
    }
    let (isa, target) = (ctx.isa, Disjoint::new(target));
    // Rows are packed in pieces of whole steps.
    let piece = if BUFFER.is_multiple_of(activations.step_values()) { BUFFER } else { cols };
    let (pieces, piece_words) = (cols.div_ceil(piece), activations.row_words(piece));
    let body = |range: Range<usize>| {
        let tiles = sets.iter().flat_map(|set| (0..set.num_tiles).map(|tile| set.tile(tile)));
        let touched = range.start / pieces..range.end.div_ceil(pieces);
        for (index, tile) in tiles.enumerate().skip(touched.start).take(touched.len()) {
            let own = |piece: usize| piece.saturating_sub(index * pieces).min(pieces);
            let (first, end) = (own(range.start), own(range.end));
            let word = |piece: usize| tile.start * words + (piece * piece_words).min(words) * tile.len();
            // SAFETY: tiles hold different rows and pieces different columns, so their words do not
            // overlap.
            let target = unsafe { target.part(word(first)..word(end)) };
            let (height, columns) = (tile.len(), first * piece..cols.min(end * piece));
            for (place, row) in tile.enumerate() {
                let first = if activations == Activations::Bf16Pairs { place * PAIR_RUN } else { place };
                pack_row(isa, activations, &source.row(row), columns.clone(), &mut target[first..], height);
            }
        }
    };
    let num_tiles: usize = sets.iter().map(|set| set.num_tiles).sum();
    let rows: usize = sets.iter().map(|set| set.rows).sum();
    let piece_values = (rows * cols).div_ceil(pieces * num_tiles.max(1));
    ctx.pool.for_each_static(num_tiles * pieces, WORTH_SHARING.div_ceil(piece_values.max(1)), body);
}

/// Writes some columns of a row to every `stride`-th word, or in runs at that distance.
fn pack_row(
    isa: Isa,
    activations: Activations,
    row: &Row<'_>,
    columns: Range<usize>,
    target: &mut [u32],
    stride: usize,
) {
    if let Activations::Int8(rounding) = activations {
        return rounding.pack_row(isa, row, columns, target, stride);
    }
    let mut buffer = [0.0; BUFFER];
    let run = if row.plain_values().is_some() { columns.len() } else { BUFFER };
    let run_words = activations.row_words(run) * stride;
    for (start, target) in columns.clone().step_by(run).zip(target.chunks_mut(run_words)) {
        let values = row.read(start, run.min(columns.end - start), &mut buffer);
        pack_values(isa, activations, values, target, stride);
    }
}

fn pack_values(isa: Isa, activations: Activations, values: &[f32], target: &mut [u32], stride: usize) {
    match activations {
        Activations::F32 => {
            for (value, place) in values.iter().zip(target.iter_mut().step_by(stride)) {
                *place = value.to_bits();
            }
        }
        Activations::RoundedF32 => {
            let mut places = target.iter_mut().step_by(stride);
            for (value, place) in values.iter().zip(&mut places) {
                *place = nearest_bf16(*value);
            }
            // An odd width ends in half a step.
            places.for_each(|place| *place = 0);
        }
        Activations::Bf16Pairs => pack_pairs(isa, values, target, stride),
        Activations::Int8(_) => unreachable!("integers are packed by groups"),
    }
}

#[cfg(target_arch = "x86_64")]
fn pack_pairs(isa: Isa, values: &[f32], target: &mut [u32], stride: usize) {
    assert!(matches!(isa, Isa::Avx512 | Isa::Amx));
    let (blocks, rest) = values.as_chunks::<{ 2 * PAIR_RUN }>();
    // SAFETY: the instruction set is Avx512 or includes it.
    unsafe { super::avx512::round_to_pairs(blocks, target, PAIR_RUN * stride) };
    let done = (blocks.len() * PAIR_RUN * stride).min(target.len());
    for (pair, place) in rest.chunks(2).zip(&mut target[done..]) {
        let bits = |index: usize| pair.get(index).map_or(0, |&value| bf16::from_f32(value).to_bits() as u32);
        *place = bits(0) | bits(1) << 16;
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn pack_pairs(_: Isa, _: &[f32], _: &mut [u32], _: usize) {
    unreachable!("no kernel here takes pairs");
}
