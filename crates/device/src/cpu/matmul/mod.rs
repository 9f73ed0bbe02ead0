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
#[cfg(target_arch = "aarch64")]
mod neon;
mod scalar;
#[cfg(test)]
mod tests;
mod tile;

use std::ops::Range;

use super::buffer::Grown;
use super::pool::Disjoint;
use super::tensor::{Tensor, Vector};
use super::weight::{LANES, Packing, Weight};
use super::{Ctx, Isa};
pub use activations::RowTiles;

use activations::Activations;
use tile::{Prefetch, Tile};

/// Weight bytes that all tiles pass over before the next block: a small part of a second-level cache, and long enough
/// that loading and storing the sums costs nothing. Measured on Zen 4: 16 KiB 84% of the bf16 peak at 512 rows,
/// 32 KiB 88%, 128 KiB 93%.
const BLOCK_BYTES: usize = 128 << 10;
/// How far ahead of a single tile its weights are fetched.
const AHEAD_BYTES: usize = 4 << 10;
/// Tiles up to this height leave that to the hardware: they do little but load, and asking costs them 5%.
const ROWS_WITHOUT_PREFETCH: usize = 4;
/// Panels that a thread takes at a time, at most.
const MAX_CHUNK: usize = 8;

/// Packed activations of one call, see [`activations`].
pub type Scratch = Grown<u32>;

/// The kernel for one instruction set and packing.
pub struct Kernel {
    activations: Activations,
    packing: Packing,
    max_rows: usize,
    tile: unsafe fn(&Tile),
}

impl Kernel {
    pub fn new(isa: Isa, packing: Packing) -> Self {
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
        // `Edge` has room for no more, and the kernels do not look.
        assert!(max_rows <= MAX_ROWS, "tiles of {max_rows} rows");
        let (tile, activations) = match (packing, isa) {
            (Packing::F32, _) => (tiles[0], Activations::F32),
            (Packing::F16, _) => (tiles[1], Activations::F32),
            (Packing::BF16, Isa::Avx512) => (tiles[2], Activations::Bf16Pairs),
            (Packing::BF16, _) => (tiles[2], Activations::RoundedF32),
        };
        Self { activations, packing, max_rows, tile }
    }

    /// Words of packed activations in a step of one row.
    fn step_words(&self) -> usize {
        match self.activations {
            Activations::F32 | Activations::Bf16Pairs => 1,
            Activations::RoundedF32 => 2,
        }
    }

    /// Words of packed activations in one row.
    fn row_words(&self, cols: usize) -> usize {
        cols.div_ceil(self.packing.step_values()) * self.step_words()
    }

    pub fn tiles(&self, first_row: usize, rows: usize) -> RowTiles {
        RowTiles::new(first_row, rows, self.max_rows)
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
    let kernel = Kernel::new(ctx.isa, weight.packing());
    let product = Product { weight, bias: bias.map(|bias| &**bias), tiles: kernel.tiles(0, rows) };
    let packed = pack(ctx, &kernel, scratch, x.head(rows), x.cols(), None, rows, &[product.tiles]);
    multiply(ctx, &kernel, packed, 1, |_| product, out.head_mut(rows));
}

/// One weight and the rows it is multiplied with; row numbers count in the packed activations and in `out` alike.
#[derive(Clone, Copy)]
pub struct Product<'a> {
    pub weight: &'a Weight,
    pub bias: Option<&'a [f32]>,
    pub tiles: RowTiles,
}

/// Packs `num_rows` rows of `source`, or those picked from it, cut into the tiles of `sets`, which follow one another.
pub(crate) fn pack<'s>(
    ctx: Ctx<'_>,
    kernel: &Kernel,
    scratch: &'s mut Scratch,
    source: &[f32],
    cols: usize,
    picked: Option<&[u32]>,
    num_rows: usize,
    sets: &[RowTiles],
) -> &'s [u32] {
    let target = scratch.take(num_rows * kernel.row_words(cols));
    activations::pack(ctx, kernel, source, cols, picked, sets, target);
    target
}

/// Several products of equal weight shape in one fork: `out` is `[rows of all products, outputs]`.
pub(crate) fn multiply<'a>(
    ctx: Ctx<'_>,
    kernel: &Kernel,
    packed: &[u32],
    num_products: usize,
    product: impl Fn(usize) -> Product<'a> + Sync,
    out: &mut [f32],
) {
    if num_products == 0 {
        return;
    }
    let num_panels = product(0).weight.num_panels();
    let out = Disjoint::new(out);
    // Some chunks for each thread, so that one that is late holds up little.
    let total = num_products * num_panels;
    let chunk = (total / (8 * ctx.pool.num_threads())).clamp(1, MAX_CHUNK);
    ctx.pool.for_each_chunk(total, chunk, |range| {
        let mut at = range.start;
        while at < range.end {
            let (index, panel) = (at / num_panels, at % num_panels);
            let end = num_panels.min(panel + range.end - at);
            let product = product(index);
            assert_eq!(product.weight.packing(), kernel.packing, "packing of a weight");
            // SAFETY: rows and panels of the products do not overlap, and each is computed by one thread.
            unsafe { multiply_panels(kernel, packed, &product, panel..end, &out) };
            at += end - panel;
        }
    });
}

/// # Safety
/// No other thread works on these panels of this product.
unsafe fn multiply_panels(
    kernel: &Kernel,
    packed: &[u32],
    product: &Product<'_>,
    panels: Range<usize>,
    out: &Disjoint<'_, f32>,
) {
    let steps = product.weight.num_steps();
    let block = match product.tiles.num_tiles {
        1 => steps.max(1),
        _ => BLOCK_BYTES / kernel.packing.step_bytes(),
    };
    for panel in panels {
        // Once even for an inner dimension of zero, which gives zeros or the bias.
        for start in (0..steps.max(1)).step_by(block) {
            // SAFETY: the caller's promise; the block lies inside the panel.
            unsafe { multiply_block(kernel, packed, product, panel, start..steps.min(start + block), out) };
        }
    }
}

/// All tiles over one block of one panel.
///
/// # Safety
/// As [`multiply_panels`]; `block` lies inside the panel's steps.
unsafe fn multiply_block(
    kernel: &Kernel,
    packed: &[u32],
    product: &Product<'_>,
    panel: usize,
    block: Range<usize>,
    out: &Disjoint<'_, f32>,
) {
    let Product { weight, bias, tiles } = product;
    let (steps, step_bytes) = (weight.num_steps(), kernel.packing.step_bytes());
    let (row_words, stride) = (kernel.row_words(weight.inputs()), weight.outputs());
    let column = panel * LANES;
    let columns = LANES.min(stride - column);
    let source = &weight.panel(panel)[block.start * step_bytes..block.end * step_bytes];
    let bias = bias.filter(|_| block.end == steps).map(|bias| &bias[column..column + columns]);

    let mut edge = Edge::new();
    let bias_at = match bias {
        None => std::ptr::null(),
        Some(bias) if columns == LANES => bias.as_ptr(),
        Some(bias) => {
            edge.bias[..columns].copy_from_slice(bias);
            edge.bias.as_ptr()
        }
    };
    for index in 0..tiles.num_tiles {
        let rows = tiles.tile(index);
        let activations = &packed[rows.start * row_words..rows.end * row_words];
        let activations = &activations[block.start * kernel.step_words() * rows.len()..];
        assert!(activations.len() >= block.len() * kernel.step_words() * rows.len());
        let mut tile = Tile {
            rows: rows.len(),
            activations: activations.as_ptr(),
            panel: source.as_ptr(),
            steps: block.len(),
            out: std::ptr::null_mut(),
            stride,
            resume: block.start > 0,
            bias: bias_at,
            prefetch: prefetch(source, kernel.packing, tiles, index),
        };
        // SAFETY: the slices above hold what the tile reads. Whole panels write 32 columns of rows that lie in `out`
        // (checked by `part`); the last, narrower one goes through `edge`. No other thread touches these columns.
        unsafe {
            if columns == LANES {
                let last = (rows.end - 1) * stride + column;
                let _ = out.part(last..last + LANES);
                tile.out = out.as_ptr().add(rows.start * stride + column);
                (kernel.tile)(&tile);
            } else {
                let row = |row: usize| out.part(row * stride + column..row * stride + column + columns);
                for (values, r) in edge.sums.iter_mut().zip(rows.clone()) {
                    values[..columns].copy_from_slice(row(r));
                }
                (tile.out, tile.stride) = (edge.sums.as_mut_ptr().cast(), LANES);
                (kernel.tile)(&tile);
                for (values, r) in edge.sums.iter().zip(rows) {
                    row(r).copy_from_slice(&values[..columns]);
                }
            }
        }
    }
}

/// What tile `index` fetches while it works on `source`: a single tile what lies a little ahead of it; of several, the
/// first two the next block between them, which follows in memory whether or not the panel ends here.
fn prefetch(source: &[u8], packing: Packing, tiles: &RowTiles, index: usize) -> Prefetch {
    let lines = packing.step_bytes() / 64;
    let at = source.as_ptr();
    match tiles.num_tiles {
        1 if tiles.rows <= ROWS_WITHOUT_PREFETCH => Prefetch::near(at, 0),
        1 => Prefetch::near(at.wrapping_add(AHEAD_BYTES), lines),
        _ if index < lines => Prefetch::far(at.wrapping_add(source.len() + index * source.len() / lines)),
        _ => Prefetch::near(at, 0),
    }
}

/// Where the last panel's tile is computed when it has fewer than 32 outputs.
struct Edge {
    sums: [[f32; LANES]; MAX_ROWS],
    bias: [f32; LANES],
}

/// The highest tile of any instruction set.
const MAX_ROWS: usize = 14;

impl Edge {
    fn new() -> Self {
        Self { sums: [[0.0; LANES]; MAX_ROWS], bias: [0.0; LANES] }
    }
}
