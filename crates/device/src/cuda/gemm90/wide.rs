//! Products of thousands of rows (`kernels/gemm_wide_sm90.cu`): larger tiles, loaded by two blocks
//! together.

use super::{Form90, Input90, Output90, Weight90};
use crate::Result;
use crate::cuda::driver::{Buffer, Device, Element, Kernel, KernelArg, Launch, Matrix2d, Swizzle, TensorMap, args};
use crate::cuda::tensor::Float;

/// Weight rows of a cluster's tile.
const PAIR_ROWS: u32 = 256;
/// Tokens of a tile.
const TOKENS: u32 = 256;
/// Rows of x that one block loads for both.
pub(super) const LOADED_ROWS: u32 = 128;
/// Token tiles that pass over all weights together.
const TOKEN_GROUP: i32 = 8;
const STAGES: u32 = 4;
/// Tokens that are stored at a time.
const STORED_TOKENS: u32 = 128;
const SHARED_BYTES: u32 = 1024 + STAGES * (49_152 + 16) + 2 * STORED_TOKENS * 128;
// A block has a multiprocessor to itself.
const _: () = assert!(SHARED_BYTES <= 227 << 10);
/// Most clusters; each block stores the sums of one tile.
const MOST_CLUSTERS: u32 = 66;
const PARKED_BYTES: usize = 2 * MOST_CLUSTERS as usize * 131_072;
/// Cost of a tile of the other kernels, in units of the same area's cost with this kernel.
const TILE_COST: f64 = 1.14;

/// Mirrors `Wide90Args`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Wide90Args {
    bias: u64,
    parked: u64,
    rows: i32,
    n: i32,
    k: i32,
    slices: i32,
    token_group: i32,
    padding: i32,
}

const _: () = assert!(size_of::<Wide90Args>() == 40);

// SAFETY: repr(C), numbers and addresses only, as in gemm_wide_sm90.cu.
unsafe impl KernelArg for Wide90Args {}

pub(super) struct Wide90 {
    kernel: Kernel,
    parked: Buffer,
    clusters: u32,
}

impl Wide90 {
    /// Device memory that it takes.
    pub const BYTES: usize = PARKED_BYTES;

    pub fn open(device: &Device) -> Result<Self> {
        let kernel = device.kernel("gemm90_wide");
        kernel.allow_shared(device, SHARED_BYTES);
        let parked = device.alloc("sums of products", PARKED_BYTES)?;
        Ok(Self { kernel, parked, clusters: MOST_CLUSTERS.min(device.info().multiprocessors / 2) })
    }

    /// Whether it can compute this product, and faster than tiles of 128 by 128.
    pub fn serves(&self, weight: &Weight90, rows: usize, form: Form90) -> bool {
        let plain = weight.float8.is_none() && weight.experts == 1;
        plain
            && matches!(form, Form90::Whole(Float::Bf16))
            && weight.n.is_multiple_of(8)
            && is_faster(weight.n, rows as u32, self.clusters)
    }

    /// `x_map`: boxes of [`LOADED_ROWS`].
    pub fn launch(
        &self,
        device: &Device,
        out: Output90,
        (x, x_map): (Input90, TensorMap),
        weight: &Weight90,
        bias: Option<u64>,
        rows: usize,
    ) {
        assert_eq!(x.cols, weight.k as usize, "columns of x and of the weight");
        assert!(rows <= x.rows, "{rows} rows of {}", x.rows);
        let (n, k) = (weight.n, weight.k);
        // Exactly this number of rows: elements outside are not written.
        let out_map = device.tensor_map_2d(&Matrix2d {
            ptr: out.ptr,
            rows: rows as u64,
            cols: u64::from(n),
            stride_bytes: 2 * u64::from(n),
            box_rows: STORED_TOKENS,
            box_cols: 64,
            element: Element::Bf16,
            swizzle: Swizzle::Bytes128,
        });
        let out_map = out_map.expect("rows of a multiple of 16 bytes");
        let values = Wide90Args {
            bias: bias.unwrap_or(0),
            parked: self.parked.ptr(),
            rows: rows as i32,
            n: n as i32,
            k: k as i32,
            slices: weight.slices as i32,
            token_group: TOKEN_GROUP,
            padding: 0,
        };
        let grid = [2 * tiles(n, rows as u32).min(self.clusters), 1, 1];
        let shape = Launch { grid, threads: 384, shared_bytes: SHARED_BYTES, overlap: true };
        device.launch_in_clusters(&self.kernel, shape, 2, args![weight.map, x_map, out_map, values]);
    }
}

fn tiles(n: u32, rows: u32) -> u32 {
    n.div_ceil(PAIR_ROWS) * rows.div_ceil(TOKENS)
}

/// Compares how well tiles fill the multiprocessors: few tiles leave some idle.
fn is_faster(n: u32, rows: u32, clusters: u32) -> bool {
    let small = (n.div_ceil(128) * rows.div_ceil(128)).div_ceil(2 * clusters);
    let wide = 2 * tiles(n, rows).div_ceil(clusters);
    rows > TOKENS && f64::from(wide) <= f64::from(small) * TILE_COST
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wide_tiles_are_for_many_rows() {
        for (n, rows, expected) in
            [(4096, 8192, true), (28672, 1024, true), (4096, 512, false), (6144, 2048, true), (28672, 200, false)]
        {
            assert_eq!(is_faster(n, rows, 66), expected, "{rows} rows of {n}");
        }
    }
}
