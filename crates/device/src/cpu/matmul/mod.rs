//! Matrix products: rows of activations times packed weights.
//!
//! Work is divided among threads by panels of 32 outputs, and each panel is computed in [`blocks`].
//! The same kernel serves one row and 512, see [`tile`].

mod activations;
#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod blocks;
mod integer;
mod kernel;
#[cfg(target_arch = "aarch64")]
mod neon;
mod rounding;
mod scalar;
#[cfg(test)]
mod tests;
mod tile;

use super::Ctx;
use super::buffer::Grown;
use super::pool::Disjoint;
use super::tensor::{Tensor, Vector};
use super::weight::{Part, Weight};
pub use activations::{Activations, Columns, Heights, RowTiles, Source};
pub use kernel::Kernel;

use activations::SLACK_WORDS;
use blocks::Output;

/// Fewest panels that a thread takes at a time if sums are stored between blocks, as far as there
/// are that many.
const CHUNK_PANELS: usize = 8;
/// Most weight bytes that a thread takes at a time otherwise.
const CHUNK_BYTES: usize = 1 << 20;

/// Memory of one call: it grows to the largest call's size and is reused.
#[derive(Default)]
pub struct Scratch {
    /// Packed activations, see [`activations`].
    pub packed: Grown<u32>,
    /// Scratch memory of all threads, see [`blocks`].
    pub per_thread: Grown<f32>,
}

#[cfg(test)]
impl Scratch {
    /// Bytes of all its memory.
    pub fn bytes(&self) -> u64 {
        self.packed.bytes() + self.per_thread.bytes()
    }
}

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
    let packed = scratch.packed.take(words(weight.feeds().len()) + SLACK_WORDS);
    for (index, feed) in weight.feeds().iter().enumerate() {
        let source = Source { values: x.head(rows), cols: x.cols(), picked: None, columns: feed.columns() };
        let tiles = RowTiles::new(0, rows, feed.heights);
        activations::pack(ctx, feed.activations, source, &[tiles], &mut packed[words(index)..words(index + 1)]);
    }
    let packed = &*packed;
    let operand = |part| operand(part, &packed[words(part.feed())..], 0, rows);
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
    multiply(ctx, &mut scratch.per_thread, weight.parts().len(), product, out.head_mut(rows), weight.outputs());
}

/// A packed part and the packed rows it is multiplied with.
#[derive(Clone, Copy)]
pub struct Operand<'a> {
    part: &'a Part,
    packed: &'a [u32],
    tiles: RowTiles,
}

/// `rows` rows from `first_row` on; row numbers are the same in the packed activations and in
/// `out`.
pub fn operand<'a>(part: &'a Part, packed: &'a [u32], first_row: usize, rows: usize) -> Operand<'a> {
    Operand { part, packed, tiles: part.kernel().tiles(first_row, rows) }
}

/// One part, its bias and outliers, and its columns of the output.
#[derive(Clone, Copy)]
pub struct Product<'a> {
    pub main: Operand<'a>,
    /// Added to the main product, panel by panel.
    pub outliers: Option<Operand<'a>>,
    /// Bias, one value per output of the part.
    pub bias: Option<&'a [f32]>,
    /// Column in `out` of the part's first output.
    pub first_column: usize,
}

/// Packs `num_rows` rows, cut into the tiles of `sets`; the sets follow one another.
pub(crate) fn pack<'s>(
    ctx: Ctx<'_>,
    activations: Activations,
    scratch: &'s mut Grown<u32>,
    source: Source<'_>,
    num_rows: usize,
    sets: &[RowTiles],
) -> &'s [u32] {
    let words = num_rows * activations.row_words(source.packed_cols());
    let target = scratch.take(words + SLACK_WORDS);
    activations::pack(ctx, activations, source, sets, &mut target[..words]);
    target
}

/// Computes several products in one fork: `out` is `[rows of all products, stride]`, and no two
/// products write to one element.
pub(crate) fn multiply<'a>(
    ctx: Ctx<'_>,
    scratch: &mut Grown<f32>,
    num_products: usize,
    product: impl Fn(usize) -> Product<'a> + Sync,
    out: &mut [f32],
    stride: usize,
) {
    let panels = |index: usize| product(index).main.part.num_panels();
    let total: usize = (0..num_products).map(panels).sum();
    let main = |index: usize| product(index).main;
    let keeps_sums = (0..num_products).any(|index| main(index).keeps_sums());
    let scratch_len = (0..num_products).map(|index| main(index).scratch_len()).max().unwrap_or(0);
    let out = Output {
        values: Disjoint::new(out),
        stride,
        scratch: Disjoint::new(scratch.take(ctx.pool.num_threads() * scratch_len)),
        scratch_len,
    };
    let bytes = (0..num_products).map(|index| product(index).main.part.panel_bytes()).max().unwrap_or(0);
    // Enough panels that most of them read the rows' activations for a block from cache.
    let least = if keeps_sums { CHUNK_PANELS } else { 1 };
    let chunk = (CHUNK_BYTES / bytes.max(1)).max(least).min(total / (2 * ctx.pool.num_threads())).max(1);
    let grain = (0..num_products).map(|index| main(index).part.kernel().panels(main(index).tiles.rows)).max();
    ctx.pool.for_each_run(total, chunk, grain.unwrap_or(1), |thread, range| {
        let mut first = 0;
        for index in 0..num_products {
            let product = product(index);
            let num_panels = product.main.part.num_panels();
            let own = range.start.max(first)..range.end.min(first + num_panels);
            if !own.is_empty() {
                // SAFETY: rows and panels of the products do not overlap, and each is computed by
                // one thread.
                unsafe { blocks::multiply_panels(thread, &product, own.start - first..own.end - first, &out) };
            }
            first += num_panels;
            if first >= range.end {
                break;
            }
        }
    });
}
