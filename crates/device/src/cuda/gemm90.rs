//! Products with bf16 weights on Hopper, by kernels of our own (`kernels/gemm_sm90.cu`): dense and by expert.
//!
//! A row's bits depend on that row and the weight alone. k is cut into slices by the weight's shape, every slice is
//! summed by itself and slices are added in ascending order; how many rows there are decides only which kernel runs and
//! whether one block or several compute the slices of a tile.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use super::driver::{Buffer, Device, Element, Kernel, KernelArg, Launch, Matrix2d, Swizzle, TensorMap, args};
use crate::Result;

/// k in one step of a kernel's ring.
const STEP: u32 = 64;
/// Rows of a box of weights: what one warpgroup multiplies.
const GROUP_ROWS: u32 = 64;
/// Slices are chosen for this many multiprocessors, whatever the device has: its bits are the same everywhere.
const MULTIPROCESSORS: u32 = 132;
const MAX_SLICES: u32 = 16;
/// Experts a kernel can find its tile among.
const MAX_EXPERTS: u32 = 512;
/// For sums of slices that several blocks computed. Where more were needed, whole tiles are computed by one block.
pub(super) const PARTIAL_BYTES: usize = 72 << 20;

/// One kernel of the family, as `gemm_sm90.cu` instantiates it.
struct Variant {
    name: &'static str,
    /// Warpgroups that multiply, 64 weight rows each.
    groups: u32,
    /// Tokens of a tile.
    tokens: u32,
    stages: u32,
    /// Threads that load.
    loaders: u32,
    /// Blocks that share their tokens.
    cluster: u32,
}

const VARIANTS: [Variant; 6] = [
    Variant { name: "gemm90_n8", groups: 2, tokens: 8, stages: 6, loaders: 32, cluster: 1 },
    Variant { name: "gemm90_n16", groups: 2, tokens: 16, stages: 5, loaders: 32, cluster: 1 },
    Variant { name: "gemm90_n32", groups: 2, tokens: 32, stages: 5, loaders: 32, cluster: 1 },
    Variant { name: "gemm90_n64", groups: 2, tokens: 64, stages: 4, loaders: 32, cluster: 1 },
    Variant { name: "gemm90_n128", groups: 2, tokens: 128, stages: 6, loaders: 128, cluster: 1 },
    Variant { name: "gemm90_n192", groups: 2, tokens: 192, stages: 5, loaders: 128, cluster: 1 },
];

impl Variant {
    fn rows(&self) -> u32 {
        self.groups * GROUP_ROWS * self.cluster
    }

    fn threads(&self) -> u32 {
        self.groups * 128 + self.loaders
    }

    fn shared_bytes(&self) -> u32 {
        let stage = self.groups * GROUP_ROWS * 128 + self.tokens * 128;
        1024 + self.stages * stage + self.groups * 4 * 640 + (MAX_EXPERTS + 4) * 4 + 256
    }

    /// Rows of x that one copy moves.
    fn box_tokens(&self) -> u32 {
        self.tokens / self.cluster
    }

    /// Bytes of one slice's sums of a tile.
    fn tile_bytes(&self) -> usize {
        (self.rows() * self.tokens * 4) as usize
    }
}

/// Mirrors `Gemm90Args`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Gemm90Args {
    out: u64,
    bias: u64,
    partial: u64,
    counters: u64,
    offsets: u64,
    rows: i32,
    n: i32,
    k: i32,
    slices: i32,
    experts: i32,
    split: i32,
    out_is_f32: i32,
    token_group: i32,
    prefetch: i32,
    block_scales: i32,
    w_scales: u64,
    x_scales: u64,
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

/// The kernels and what they share. Products of one instance run one after the other, as a stream orders them.
pub struct Gemm90 {
    kernels: Vec<Kernel>,
    partial: Buffer,
    counters: Buffer,
    multiprocessors: u32,
    inputs: Mutex<HashMap<(Input90, u32), TensorMap>>,
}

impl Gemm90 {
    /// None on other architectures.
    pub fn open(device: &Device) -> Result<Option<Gemm90>> {
        if device.info().capability != (9, 0) {
            return Ok(None);
        }
        let mut kernels = Vec::new();
        for variant in &VARIANTS {
            let kernel = device.kernel(variant.name);
            kernel.allow_shared(device, variant.shared_bytes());
            kernels.push(kernel);
        }
        let multiprocessors = device.info().multiprocessors;
        let counters = device.alloc_zeroed("counters of matrix products", multiprocessors as usize * 4 * 4)?;
        let partial = device.alloc("partial sums of matrix products", PARTIAL_BYTES)?;
        Ok(Some(Gemm90 { kernels, partial, counters, multiprocessors, inputs: Mutex::default() }))
    }

    /// Whether these kernels can multiply with a matrix of this shape.
    pub fn fits(k: usize, experts: usize) -> bool {
        k >= 8 && k.is_multiple_of(8) && experts <= MAX_EXPERTS as usize
    }

    /// Device memory taken at start.
    pub fn bytes(&self) -> u64 {
        (self.partial.bytes() + self.counters.bytes()) as u64
    }

    /// A weight of `n` rows whose bf16 values lie at `ptr`, row-major.
    pub fn weight(&self, device: &Device, ptr: u64, n: usize, k: usize) -> Result<Weight90> {
        let slices = slices(n as u32, k as u32, 1);
        Ok(Weight90 { map: map(device, ptr, n, k, GROUP_ROWS)?, n: n as u32, k: k as u32, slices, experts: 1 })
    }

    /// `experts` matrices `[n, k]`, one after the other at `ptr`. `chosen`: experts of a row.
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
        let slices = slices(n as u32, k as u32, chosen as u32);
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
        let which = dense_variant(rows as u32);
        let variant = &VARIANTS[which];
        let tiles = weight.n.div_ceil(variant.rows()) * (rows as u32).div_ceil(variant.tokens);
        let blocks = self.multiprocessors / variant.cluster;
        let even = f64::from(tiles) / f64::from(tiles.next_multiple_of(blocks));
        let split = weight.slices > 1 && even < 0.9 && self.holds(variant, weight.slices, tiles.min(blocks));
        let grid = if split { blocks } else { blocks.min(tiles) } * variant.cluster;
        self.launch(device, which, grid, split, out, x, weight, bias, 0, rows);
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
        let variant = &VARIANTS[which];
        let blocks = self.multiprocessors / variant.cluster;
        let split = weight.slices > 1 && variant.tokens <= 64 && self.holds(variant, weight.slices, blocks);
        self.launch(device, which, blocks * variant.cluster, split, out, x, weight, bias, offsets, rows);
    }

    /// Whether the partial sums of so many shared tiles have room.
    fn holds(&self, variant: &Variant, slices: u32, tiles: u32) -> bool {
        variant.tile_bytes() * slices as usize * tiles as usize <= self.partial.bytes()
    }

    #[expect(clippy::too_many_arguments)]
    fn launch(
        &self,
        device: &Device,
        which: usize,
        grid: u32,
        split: bool,
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
        let values = Gemm90Args {
            out: out.ptr,
            bias: bias.unwrap_or(0),
            partial: self.partial.ptr(),
            counters: self.counters.ptr(),
            offsets,
            rows: rows as i32,
            n: weight.n as i32,
            k: weight.k as i32,
            slices: weight.slices as i32,
            experts: weight.experts as i32,
            split: i32::from(split),
            out_is_f32: i32::from(out.is_f32),
            token_group: TOKEN_GROUP,
            prefetch: PREFETCH,
            block_scales: 0,
            w_scales: 0,
            x_scales: 0,
        };
        let shape = Launch {
            grid: [grid, 1, 1],
            threads: variant.threads(),
            shared_bytes: variant.shared_bytes(),
            overlap: true,
        };
        let x = self.input(device, x, variant.box_tokens());
        device.launch(&self.kernels[which], shape, args![weight.map, x, values]);
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

/// Token tiles whose weights are used together before the next weights are read.
const TOKEN_GROUP: i32 = 8;
/// Steps beyond the ring that are brought into L2 while the kernel before still runs.
const PREFETCH: i32 = 0;

/// In how many slices k is cut: the fewest that keep all multiprocessors evenly busy with one tile of tokens, of 256 k or
/// more each. By the shape alone; `together` such matrices are used at once.
fn slices(n: u32, k: u32, together: u32) -> u32 {
    let (tiles, steps) = (n.div_ceil(2 * GROUP_ROWS) * together, k.div_ceil(STEP));
    let (mut best, mut best_even) = (1, 0.0);
    for slices in 1..=(steps / 4).clamp(1, MAX_SLICES) {
        let pieces = tiles * slices;
        let even = f64::from(pieces) / f64::from(pieces.next_multiple_of(MULTIPROCESSORS));
        if even >= 0.93 {
            return slices;
        }
        if even > best_even + 0.02 {
            (best, best_even) = (slices, even);
        }
    }
    best
}

fn smallest_holding(tokens: u32) -> usize {
    VARIANTS.iter().position(|variant| variant.tokens >= tokens).unwrap_or(VARIANTS.len() - 1)
}

fn dense_variant(rows: u32) -> usize {
    if rows <= 512 { smallest_holding(rows.min(128)) } else { VARIANTS.len() - 1 }
}

/// By the rows an expert has on average, with room for those that have more.
fn grouped_variant(rows: u32, experts: u32) -> usize {
    smallest_holding((rows / experts * 3 / 2).clamp(8, 128))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_follow_from_the_shape() {
        let cases = [
            ((4096, 4096, 1), 4),
            ((6144, 4096, 1), 8),
            ((28672, 4096, 1), 4),
            ((4096, 14336, 1), 4),
            ((128_256, 4096, 1), 1),
            ((1536, 2048, 8), 4),
            ((2048, 768, 8), 1),
            ((8, 8, 1), 1),
        ];
        for ((n, k, together), expected) in cases {
            assert_eq!(slices(n, k, together), expected, "[{n}, {k}] x {together}");
        }
    }

    #[test]
    fn two_blocks_of_the_small_variants_fit_on_a_multiprocessor() {
        for variant in VARIANTS.iter().filter(|variant| variant.loaders == 32) {
            assert!(variant.shared_bytes() <= 113 << 10, "{}: {}", variant.name, variant.shared_bytes());
        }
        for variant in &VARIANTS {
            assert!(variant.shared_bytes() <= 227 << 10, "{}: {}", variant.name, variant.shared_bytes());
        }
    }

    #[test]
    fn tiles_hold_their_tokens() {
        for (rows, tokens) in [(1, 8), (8, 8), (9, 16), (33, 64), (64, 64), (65, 128), (256, 128), (8192, 192)] {
            assert_eq!(VARIANTS[dense_variant(rows)].tokens, tokens, "{rows} rows");
        }
        for (rows, tokens) in [(8, 8), (512, 8), (2048, 32), (65536, 128)] {
            assert_eq!(VARIANTS[grouped_variant(rows, 128)].tokens, tokens, "{rows} rows over 128 experts");
        }
    }
}
