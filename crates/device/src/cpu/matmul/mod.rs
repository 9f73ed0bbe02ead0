//! Matrix products: rows of activations times packed weights.
//!
//! Work is split over threads by panels of 32 outputs. Within a panel the inner dimension runs in blocks that stay in
//! cache while all row tiles pass over them, so that a weight byte comes from memory once a call; partial sums wait in
//! `out`, which is exact. The same kernel serves one row and 512, see [`tile`].

mod activations;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod integer;
mod kernel;
#[cfg(target_arch = "aarch64")]
mod neon;
mod rounding;
mod scalar;
#[cfg(test)]
mod tests;
mod tile;

use std::ops::Range;

use super::Ctx;
use super::buffer::Grown;
use super::pool::Disjoint;
use super::tensor::{Tensor, Vector};
use super::weight::{LANES, Packing, Part, Weight};
use activations::PAIR_RUN;
pub use activations::{Activations, Columns, RowTiles, Source};
pub use kernel::Kernel;

use kernel::MAX_ROWS;
use tile::{Prefetch, Tile};

/// Weight bytes that all tiles pass over before the next block: a small part of a second-level cache, and long enough
/// that loading and storing the sums costs nothing. Measured on Zen 4: 16 KiB 84% of the bf16 peak at 512 rows,
/// 32 KiB 88%, 128 KiB 93%.
const BLOCK_BYTES: usize = 128 << 10;
// A block begins with a run of pairs.
const _: () = assert!((BLOCK_BYTES / (2 * LANES * size_of::<u16>())).is_multiple_of(PAIR_RUN));
/// Tiles that fetch the next block between them, at most, where each of them takes a small part with every step.
const MAX_SHARES: usize = 4;
/// Weight bytes that a thread takes at a time, at most.
const CHUNK_BYTES: usize = 1 << 20;

/// Packed activations of one call, see [`activations`].
pub type Scratch = Grown<u32>;

/// `out = x * weight^T (+ bias)`.
pub(crate) fn linear(
    ctx: Ctx<'_>,
    scratch: &mut Scratch,
    out: &mut Tensor,
    x: &Tensor,
    weight: &Weight,
    bias: Option<&Vector>,
    rows: usize,
) {
    assert_eq!(x.cols(), weight.inputs(), "inputs of a linear layer");
    assert_eq!(out.cols(), weight.outputs(), "outputs of a linear layer");
    if let Some(bias) = bias {
        assert_eq!(bias.len(), weight.outputs(), "bias of a linear layer");
    }
    if rows == 0 {
        return;
    }
    let words = |feed: usize| weight.feeds()[..feed].iter().map(|feed| rows * feed.row_words(x.cols())).sum::<usize>();
    let packed = scratch.take(words(weight.feeds().len()));
    for (index, feed) in weight.feeds().iter().enumerate() {
        let source = Source { values: x.head(rows), cols: x.cols(), picked: None, columns: feed.columns() };
        let tiles = RowTiles::new(0, rows, feed.max_rows);
        activations::pack(ctx, feed.activations, source, &[tiles], &mut packed[words(index)..words(index + 1)]);
    }
    let packed = &*packed;
    let operand = |part| operand(part, &packed[words(part.feed())..words(part.feed() + 1)], 0, rows);
    let product = |index: usize| {
        let part = &weight.parts()[index];
        let outputs = part.first_output()..part.first_output() + part.outputs();
        Product {
            main: operand(part),
            outliers: part.outliers().map(operand),
            bias: bias.map(|bias| &bias[outputs.clone()]),
            first_column: outputs.start,
        }
    };
    multiply(ctx, weight.parts().len(), product, out.head_mut(rows), weight.outputs());
}

/// A packed part and the packed rows it is multiplied with.
#[derive(Clone, Copy)]
pub struct Operand<'a> {
    part: &'a Part,
    packed: &'a [u32],
    tiles: RowTiles,
}

impl Operand<'_> {
    /// Steps of a panel that all tiles pass over before the next ones.
    fn block_steps(&self) -> usize {
        let kernel = self.part.kernel();
        match self.tiles.num_tiles == 1 && !kernel.fetches_in_turn(self.tiles.rows) {
            true => self.part.num_steps().max(1),
            false => (BLOCK_BYTES / kernel.packing().step_bytes()).max(1),
        }
    }

    /// Whether a single tile goes from panel to panel, as they lie in memory.
    fn runs_through(&self) -> bool {
        self.tiles.num_tiles == 1 && self.block_steps() >= self.part.num_steps()
    }
}

/// `rows` rows from `first_row` on; row numbers count in the packed activations and in `out` alike.
pub fn operand<'a>(part: &'a Part, packed: &'a [u32], first_row: usize, rows: usize) -> Operand<'a> {
    Operand { part, packed, tiles: part.kernel().tiles(first_row, rows) }
}

/// One part, what is added to it, and where its outputs go.
#[derive(Clone, Copy)]
pub struct Product<'a> {
    pub main: Operand<'a>,
    /// Added to the main product, panel by panel.
    pub outliers: Option<Operand<'a>>,
    /// As long as the part has outputs.
    pub bias: Option<&'a [f32]>,
    /// Column of `out` of the part's first output.
    pub first_column: usize,
}

/// Packs `num_rows` rows, cut into the tiles of `sets`, which follow one another.
pub(crate) fn pack<'s>(
    ctx: Ctx<'_>,
    activations: Activations,
    scratch: &'s mut Scratch,
    source: Source<'_>,
    num_rows: usize,
    sets: &[RowTiles],
) -> &'s [u32] {
    let target = scratch.take(num_rows * activations.row_words(source.packed_cols()));
    activations::pack(ctx, activations, source, sets, target);
    target
}

/// Several products in one fork: `out` is `[rows of all products, stride]`, and no two products write to one place.
pub(crate) fn multiply<'a>(
    ctx: Ctx<'_>,
    num_products: usize,
    product: impl Fn(usize) -> Product<'a> + Sync,
    out: &mut [f32],
    stride: usize,
) {
    let panels = |index: usize| product(index).main.part.num_panels();
    let total: usize = (0..num_products).map(panels).sum();
    let out = Output { values: Disjoint::new(out), stride };
    let bytes = (0..num_products).map(|index| product(index).main.part.panel_bytes()).max().unwrap_or(0);
    let chunk = (CHUNK_BYTES / bytes.max(1)).min(total / (2 * ctx.pool.num_threads())).max(1);
    let main = |index: usize| product(index).main;
    let grain = (0..num_products).map(|index| main(index).part.kernel().panels(main(index).tiles.rows)).max();
    ctx.pool.for_each_run(total, chunk, grain.unwrap_or(1), |range| {
        let mut first = 0;
        for index in 0..num_products {
            let product = product(index);
            let num_panels = product.main.part.num_panels();
            let own = range.start.max(first)..range.end.min(first + num_panels);
            if !own.is_empty() {
                // SAFETY: rows and panels of the products do not overlap, and each is computed by one thread.
                unsafe { multiply_panels(&product, own.start - first..own.end - first, &out) };
            }
            first += num_panels;
            if first >= range.end {
                break;
            }
        }
    });
}

/// Where products go.
struct Output<'a> {
    values: Disjoint<'a, f32>,
    stride: usize,
}

/// # Safety
/// No other thread works on these panels of this product.
unsafe fn multiply_panels(product: &Product<'_>, panels: Range<usize>, out: &Output<'_>) {
    let part = product.main.part;
    let is_stream = product.main.runs_through() && product.outliers.is_none();
    let mut panel = panels.start;
    while panel < panels.end {
        // A single tile runs through whole panels without a stop, as they lie in memory.
        let whole = panels.end.min(part.outputs() / LANES).saturating_sub(panel);
        let count = if is_stream { whole.max(1) } else { 1 };
        let outputs = panel * LANES..part.outputs().min((panel + count) * LANES);
        let bias = product.bias.map(|bias| &bias[outputs.clone()]);
        let columns = product.first_column + outputs.start..product.first_column + outputs.end;
        // SAFETY: the caller's promise.
        unsafe {
            multiply_operand(&product.main, panel..panel + count, columns.clone(), bias, false, out);
            if let Some(outliers) = &product.outliers {
                multiply_operand(outliers, panel..panel + count, columns, None, true, out);
            }
        }
        panel += count;
    }
}

/// # Safety
/// No other thread works on these columns of these rows. Several panels are whole ones, and of a single tile.
unsafe fn multiply_operand(
    operand: &Operand<'_>,
    panels: Range<usize>,
    columns: Range<usize>,
    bias: Option<&[f32]>,
    adds: bool,
    out: &Output<'_>,
) {
    let steps = operand.part.num_steps();
    let block = operand.block_steps();
    // Once even for an inner dimension of zero, which gives zeros or the bias.
    for start in (0..steps.max(1)).step_by(block) {
        let end = steps.min(start + block);
        let last = end == steps;
        let block = Block {
            panels: panels.clone(),
            steps: start..end,
            columns: columns.clone(),
            resume: adds || start > 0,
            factors: operand.part.factors(panels.clone()).filter(|_| last),
            bias: bias.filter(|_| last),
        };
        // SAFETY: the caller's promise; the block lies inside the panel.
        unsafe { multiply_block(operand, &block, out) };
    }
}

/// Some steps of a panel, or all steps of several, and what they are to become.
struct Block<'a> {
    panels: Range<usize>,
    steps: Range<usize>,
    /// Of the output.
    columns: Range<usize>,
    /// Whether the output holds something to be added to.
    resume: bool,
    /// Of the last block: 32 of these a panel, and as many of those as there are columns.
    factors: Option<&'a [f32]>,
    bias: Option<&'a [f32]>,
}

/// All tiles over one block of one panel, or one tile over several panels.
///
/// # Safety
/// As [`multiply_operand`]; the block lies inside the panels' steps.
unsafe fn multiply_block(operand: &Operand<'_>, block: &Block<'_>, out: &Output<'_>) {
    let Operand { part, packed, tiles } = operand;
    let kernel = part.kernel();
    let (step_bytes, step_words) = (kernel.packing().step_bytes(), kernel.activations().step_words());
    let row_words = kernel.activations().row_words(part.inputs());
    let Range { start, end } = block.steps;
    let source = &part.panel(block.panels.start)[start * step_bytes..end * step_bytes];
    let (column, columns) = (block.columns.start, block.columns.len());
    let prefetch = prefetch(source, kernel, tiles);
    for index in 0..tiles.num_tiles {
        let rows = tiles.tile(index);
        let activations = &packed[rows.start * row_words..rows.end * row_words];
        // Up to their end: what a block needs of it may be a whole run more than its steps.
        let activations = &activations[start * step_words * rows.len()..];
        let mut tile = Tile {
            rows: rows.len(),
            activations: activations.as_ptr(),
            panel: source.as_ptr(),
            panel_bytes: source.len(),
            panels: 1,
            steps: end - start,
            out: std::ptr::null_mut(),
            stride: out.stride,
            resume: block.resume,
            bias: block.bias.map_or(std::ptr::null(), <[f32]>::as_ptr),
            prefetch: prefetch(index),
            factors: block.factors.map_or(std::ptr::null(), <[f32]>::as_ptr),
            group: kernel.packing().step_values(),
            affine: kernel.is_affine(),
            table: kernel.table(),
        };
        if columns == block.panels.len() * LANES {
            let last = (rows.end - 1) * out.stride + column;
            // SAFETY: the slices above hold what the tile reads. It writes whole panels of rows that lie in `out`
            // (checked by `part`), and no other thread touches these columns.
            unsafe {
                let _ = out.values.part(last..last + columns);
                tile.out = out.values.as_ptr().add(rows.start * out.stride + column);
                // More than one only of a stream, whose blocks are whole panels.
                let mut left = block.panels.len();
                while left > 0 {
                    tile.panels = kernel.panels(tile.rows).min(left);
                    kernel.run(&tile);
                    left -= tile.panels;
                    tile = tile.next();
                }
            }
        } else {
            // SAFETY: as above.
            unsafe { multiply_edge(kernel, tile, rows, block, out) };
        }
    }
}

/// A tile over a last panel of fewer than 32 outputs, apart from its neighbours.
///
/// # Safety
/// As [`multiply_block`]; `tile` lacks but the place of its output.
unsafe fn multiply_edge(kernel: &Kernel, mut tile: Tile, rows: Range<usize>, block: &Block<'_>, out: &Output<'_>) {
    let columns = block.columns.len();
    let mut sums = [[0.0; LANES]; MAX_ROWS];
    let mut bias = [0.0; LANES];
    if let Some(values) = block.bias {
        bias[..columns].copy_from_slice(values);
        tile.bias = bias.as_ptr();
    }
    // SAFETY: the caller's promise; no other thread touches these columns.
    let row = |row: usize| unsafe {
        let start = row * out.stride + block.columns.start;
        out.values.part(start..start + columns)
    };
    for (values, r) in sums.iter_mut().zip(rows.clone()) {
        values[..columns].copy_from_slice(row(r));
    }
    (tile.out, tile.stride) = (sums.as_mut_ptr().cast(), LANES);
    // SAFETY: the caller's promise, and room for 32 columns of the highest tile.
    unsafe { kernel.run(&tile) };
    for (values, r) in sums.iter().zip(rows) {
        row(r).copy_from_slice(&values[..columns]);
    }
}

/// What the tiles fetch while they work on `source`, by their number: a single one what lies a little ahead of it; of several,
/// or of one that does so in turn, the first few the next block between them, which follows in memory whether or not the panel
/// ends here. AVX2 decides by itself what one row fetches.
fn prefetch(source: &[u8], kernel: &Kernel, tiles: &RowTiles) -> impl Fn(usize) -> Prefetch {
    let (packing, ahead) = (kernel.packing(), kernel.ahead(tiles.rows));
    let lines = packing.step_bytes() / 64;
    let (at, next) = (source.as_ptr(), source.as_ptr().wrapping_add(source.len()));
    // Of the first one, from one to the next, and of how many.
    let (first, share, count) = match (packing, tiles.num_tiles) {
        // Half of a share with each of two passes. Two rows pass once, and leave the other half to the hardware.
        (_, num_tiles) if kernel.fetches_in_turn(tiles.rows) => {
            let count = num_tiles.min(MAX_SHARES);
            let share = source.len() / count;
            (Prefetch::in_turn(next, share / 2, source.len() / packing.step_bytes()), share, count)
        }
        (Packing::Coded(_), 1) => (Prefetch::following(ahead), 0, 1),
        (_, 1) => (Prefetch::near(at.wrapping_add(ahead), if ahead > 0 { lines } else { 0 }), 0, 1),
        // Steps are of several units.
        (Packing::Coded(coding), num_tiles) => {
            let units = source.len() / packing.step_bytes() * (coding.group / integer::UNIT);
            let unit_lines = (source.len() / 64).div_ceil((units * num_tiles).max(1));
            let share = units * unit_lines * 64;
            (Prefetch::far_units(next, unit_lines), share, source.len().div_ceil(share.max(1)))
        }
        _ => (Prefetch::far(next), source.len() / lines, lines),
    };
    move |tile| match tile < count {
        true => Prefetch { at: first.at.wrapping_add(tile * share), ..first },
        false => Prefetch::near(at, 0),
    }
}
