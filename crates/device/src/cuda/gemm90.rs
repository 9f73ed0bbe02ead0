//! Products with bf16 weights on Hopper, by kernels of our own (`kernels/gemm_sm90.cu`): dense and by expert.
//!
//! A row's bits depend on that row and the weight alone. k is cut into slices by the weight's shape, every slice is
//! summed by itself and slices are added in ascending order; how many rows there are decides only which kernel runs.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use super::driver::{Device, Element, Kernel, KernelArg, Launch, Matrix2d, Swizzle, TensorMap, args};
use crate::Result;

/// k in one step of a kernel's ring.
const STEP: u32 = 64;
/// Rows of a box of weights: what one warpgroup multiplies.
const GROUP_ROWS: u32 = 64;
/// Weight rows of a tile.
const TILE_ROWS: u32 = 128;
/// Slices are chosen to keep about this many multiprocessors busy, whatever the device has: the bits are the same
/// everywhere.
const BUSY: u32 = 120;
/// Blocks of a cluster, at most.
const MAX_SLICES: u32 = 8;
/// Experts a kernel can find its tile among.
const MAX_EXPERTS: u32 = 512;
/// Token tiles whose weights are used together before the next weights are read.
const TOKEN_GROUP: i32 = 8;

/// Who computes the slices of a tile: the blocks of a cluster, one each, or one block after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Slices,
    Tiles,
}

/// One kernel of the family, as `gemm_sm90.cu` instantiates it.
struct Variant {
    name: &'static str,
    kind: Kind,
    /// Tokens of a tile.
    tokens: u32,
    stages: u32,
    /// Threads that load.
    loaders: u32,
}

const VARIANTS: [Variant; 10] = [
    Variant { name: "gemm90_slices_n8", kind: Kind::Slices, tokens: 8, stages: 6, loaders: 32 },
    Variant { name: "gemm90_slices_n16", kind: Kind::Slices, tokens: 16, stages: 6, loaders: 32 },
    Variant { name: "gemm90_slices_n32", kind: Kind::Slices, tokens: 32, stages: 5, loaders: 32 },
    Variant { name: "gemm90_slices_n64", kind: Kind::Slices, tokens: 64, stages: 4, loaders: 32 },
    Variant { name: "gemm90_slices_n128", kind: Kind::Slices, tokens: 128, stages: 3, loaders: 32 },
    Variant { name: "gemm90_tiles_n8", kind: Kind::Tiles, tokens: 8, stages: 6, loaders: 32 },
    Variant { name: "gemm90_tiles_n16", kind: Kind::Tiles, tokens: 16, stages: 5, loaders: 32 },
    Variant { name: "gemm90_tiles_n32", kind: Kind::Tiles, tokens: 32, stages: 5, loaders: 32 },
    Variant { name: "gemm90_tiles_n64", kind: Kind::Tiles, tokens: 64, stages: 4, loaders: 32 },
    Variant { name: "gemm90_tiles_n128", kind: Kind::Tiles, tokens: 128, stages: 6, loaders: 128 },
];

impl Variant {
    fn threads(&self) -> u32 {
        256 + self.loaders
    }

    fn shared_bytes(&self) -> u32 {
        let ring = self.stages * (TILE_ROWS * 128 + self.tokens * 128);
        let staging = if self.kind == Kind::Tiles { 8 * 640 } else { 0 };
        1024 + ring + staging + (MAX_EXPERTS + 4) * 4 + 128
    }
}

/// Mirrors `Gemm90Args`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Gemm90Args {
    out: u64,
    bias: u64,
    offsets: u64,
    w_scales: u64,
    x_scales: u64,
    rows: i32,
    n: i32,
    k: i32,
    slices: i32,
    experts: i32,
    out_is_f32: i32,
    token_group: i32,
    block_scales: i32,
}

// SAFETY: repr(C), numbers and addresses only, as in gemm_sm90.cuh.
unsafe impl KernelArg for Gemm90Args {}

/// A bf16 matrix `[n, k]` on the device, or `experts` of them one after the other.
#[derive(Clone, Debug)]
pub struct Weight90 {
    map: TensorMap,
    n: u32,
    k: u32,
    slices: u32,
    experts: u32,
}

/// bf16 rows on the device: `rows` as many as the tensor has, of which a product may use fewer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Input90 {
    pub ptr: u64,
    pub rows: usize,
    pub cols: usize,
}

/// Where a product goes: `[rows, n]`.
#[derive(Clone, Copy, Debug)]
pub struct Output90 {
    pub ptr: u64,
    pub is_f32: bool,
}

/// The kernels, and the maps of what they read.
pub struct Gemm90 {
    kernels: Vec<Kernel>,
    multiprocessors: u32,
    inputs: Mutex<HashMap<(Input90, u32), TensorMap>>,
}

impl Gemm90 {
    /// None on other architectures.
    pub fn open(device: &Device) -> Result<Option<Gemm90>> {
        if device.info().capability != (9, 0) {
            return Ok(None);
        }
        let load = |variant: &Variant| {
            let kernel = device.kernel(variant.name);
            kernel.allow_shared(device, variant.shared_bytes());
            kernel
        };
        let kernels = VARIANTS.iter().map(load).collect();
        Ok(Some(Gemm90 { kernels, multiprocessors: device.info().multiprocessors, inputs: Mutex::default() }))
    }

    /// Whether these kernels can multiply with a matrix of this shape.
    pub fn fits(k: usize, experts: usize) -> bool {
        k >= 8 && k.is_multiple_of(8) && experts <= MAX_EXPERTS as usize
    }

    /// A weight of `n` rows whose bf16 values lie at `ptr`, row-major.
    pub fn weight(&self, device: &Device, ptr: u64, n: usize, k: usize) -> Result<Weight90> {
        let slices = slices(n as u32, k as u32);
        Ok(Weight90 { map: map(device, ptr, n, k, GROUP_ROWS)?, n: n as u32, k: k as u32, slices, experts: 1 })
    }

    /// `experts` matrices `[n, k]`, one after the other at `ptr`, of which a row uses `chosen`.
    pub fn experts(
        &self,
        device: &Device,
        ptr: u64,
        experts: usize,
        n: usize,
        k: usize,
        chosen: usize,
    ) -> Result<Weight90> {
        assert!(experts <= MAX_EXPERTS as usize, "{experts} experts; the kernels take {MAX_EXPERTS}");
        // Even one row's experts have tiles for most multiprocessors; few experts of few rows do not.
        let slices = if chosen > 1 { 1 } else { slices(n as u32, k as u32) };
        let map = map(device, ptr, experts * n, k, GROUP_ROWS)?;
        Ok(Weight90 { map, n: n as u32, k: k as u32, slices, experts: experts as u32 })
    }

    /// `out[rows, n] = x[rows, k] * weight^T (+ bias)`.
    pub fn linear(
        &self,
        device: &Device,
        out: Output90,
        x: Input90,
        weight: &Weight90,
        bias: Option<u64>,
        rows: usize,
    ) {
        let which = dense_variant(rows as u32, weight.slices);
        let tiles = weight.n.div_ceil(TILE_ROWS) * (rows as u32).div_ceil(VARIANTS[which].tokens);
        self.launch(device, which, tiles, out, x, weight, bias, 0, rows);
    }

    /// `out[r] = x[r] * weight[e]^T (+ bias[e])` for the rows `offsets[e]..offsets[e + 1]` of every expert e; `offsets`
    /// are u32 on the device. `rows`: all of them.
    #[expect(clippy::too_many_arguments)]
    pub fn grouped(
        &self,
        device: &Device,
        out: Output90,
        x: Input90,
        weight: &Weight90,
        bias: Option<u64>,
        offsets: u64,
        rows: usize,
    ) {
        let which = grouped_variant(rows as u32, weight.experts);
        self.launch(device, which, self.multiprocessors, out, x, weight, bias, offsets, rows);
    }

    #[expect(clippy::too_many_arguments)]
    fn launch(
        &self,
        device: &Device,
        which: usize,
        tiles: u32,
        out: Output90,
        x: Input90,
        weight: &Weight90,
        bias: Option<u64>,
        offsets: u64,
        rows: usize,
    ) {
        assert_eq!(x.cols, weight.k as usize, "columns of x and of the weight");
        assert!(rows <= x.rows, "{rows} rows of {}", x.rows);
        if rows == 0 {
            return;
        }
        let variant = &VARIANTS[which];
        let (grid, cluster) = match variant.kind {
            Kind::Slices => (tiles * weight.slices, weight.slices),
            Kind::Tiles => (tiles.min(self.multiprocessors), 1),
        };
        let values = Gemm90Args {
            out: out.ptr,
            bias: bias.unwrap_or(0),
            offsets,
            w_scales: 0,
            x_scales: 0,
            rows: rows as i32,
            n: weight.n as i32,
            k: weight.k as i32,
            slices: weight.slices as i32,
            experts: weight.experts as i32,
            out_is_f32: i32::from(out.is_f32),
            token_group: TOKEN_GROUP,
            block_scales: 0,
        };
        let shape = Launch {
            grid: [grid, 1, 1],
            threads: variant.threads(),
            shared_bytes: variant.shared_bytes(),
            overlap: true,
        };
        let x = self.input(device, x, variant.tokens);
        device.launch_in_clusters(&self.kernels[which], shape, cluster, args![weight.map, x, values]);
    }

    /// Tensors keep their addresses, so that a map is made once.
    fn input(&self, device: &Device, x: Input90, box_rows: u32) -> TensorMap {
        let mut inputs = self.inputs.lock().unwrap_or_else(PoisonError::into_inner);
        *inputs.entry((x, box_rows)).or_insert_with(|| {
            map(device, x.ptr, x.rows, x.cols, box_rows).expect("a tensor of bf16 rows of a multiple of 16 bytes")
        })
    }
}

fn map(device: &Device, ptr: u64, rows: usize, cols: usize, box_rows: u32) -> Result<TensorMap> {
    device.tensor_map_2d(&Matrix2d {
        ptr,
        rows: rows as u64,
        cols: cols as u64,
        stride_bytes: cols as u64 * 2,
        box_rows,
        box_cols: STEP,
        element: Element::Bf16,
        swizzle: Swizzle::Bytes128,
    })
}

/// In how many slices k is cut: enough that one tile of tokens keeps the multiprocessors busy, of 256 k or more each. By
/// the shape alone.
fn slices(n: u32, k: u32) -> u32 {
    let (tiles, steps) = (n.div_ceil(TILE_ROWS), k.div_ceil(STEP));
    let mut slices = 1;
    while tiles * slices < BUSY && slices < MAX_SLICES && steps >= 8 * slices {
        slices *= 2;
    }
    slices
}

/// The smallest of a kind that holds so many tokens, or the largest.
fn variant(kind: Kind, tokens: u32) -> usize {
    let of_kind = |variant: &Variant| variant.kind == kind;
    let holds = |variant: &Variant| of_kind(variant) && variant.tokens >= tokens;
    let largest = || VARIANTS.iter().rposition(of_kind);
    VARIANTS.iter().position(holds).or_else(largest).expect("kernels of both kinds")
}

/// Few rows of a sliced weight: slices side by side. Otherwise tiles fill the device, or come close; where the memory is
/// the limit, blocks that go from tile to tile read best, and where it is the tensor cores two small blocks.
fn dense_variant(rows: u32, slices: u32) -> usize {
    let side_by_side = if slices > 1 { rows <= 128 } else { (33..=64).contains(&rows) };
    variant(if side_by_side { Kind::Slices } else { Kind::Tiles }, rows)
}

/// By the rows an expert has on average, with room for those that have more.
fn grouped_variant(rows: u32, experts: u32) -> usize {
    variant(Kind::Tiles, rows / experts * 3 / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_follow_from_the_shape() {
        let cases = [
            ((4096, 4096), 4),
            ((6144, 4096), 4),
            ((28672, 4096), 1),
            ((4096, 14336), 4),
            ((128_256, 4096), 1),
            ((128, 2048), 8),
            ((8, 8), 1),
        ];
        for ((n, k), expected) in cases {
            assert_eq!(slices(n, k), expected, "[{n}, {k}]");
        }
    }

    #[test]
    fn two_blocks_of_the_small_variants_fit_on_a_multiprocessor() {
        for variant in &VARIANTS {
            let most = if variant.loaders == 32 { 113 << 10 } else { 227 << 10 };
            assert!(variant.shared_bytes() <= most, "{}: {}", variant.name, variant.shared_bytes());
        }
    }

    #[test]
    fn tiles_hold_their_tokens() {
        let cases = [
            ((1, 4), "gemm90_slices_n8"),
            ((9, 4), "gemm90_slices_n16"),
            ((128, 2), "gemm90_slices_n128"),
            ((129, 2), "gemm90_tiles_n128"),
            ((1, 1), "gemm90_tiles_n8"),
            ((64, 1), "gemm90_slices_n64"),
            ((65, 1), "gemm90_tiles_n128"),
            ((8192, 4), "gemm90_tiles_n128"),
        ];
        for ((rows, slices), name) in cases {
            assert_eq!(VARIANTS[dense_variant(rows, slices)].name, name, "{rows} rows, {slices} slices");
        }
        for (rows, tokens) in [(8, 8), (512, 8), (2048, 32), (65536, 128)] {
            assert_eq!(VARIANTS[grouped_variant(rows, 128)].tokens, tokens, "{rows} rows over 128 experts");
        }
    }
}
