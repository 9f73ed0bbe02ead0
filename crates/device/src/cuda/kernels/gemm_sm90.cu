// Products with bf16 weights on Hopper, dense or by expert: out[rows, n] = x[rows, k] * w[n, k]^T (+ bias[n]).
//
// The weights are the 64 rows of the warpgroup product and the tokens its columns: eight tokens waste nothing, and one
// kernel family serves 1 to 8192 rows. A loading warp keeps a ring of stages filled (a stage: 64 of k, in 128-byte
// swizzle); two warpgroups multiply, 64 weight rows each. Sums are f32.
//
// A row's bits depend on that row and the weight alone: k is cut into `slices` by the weight's shape alone, every slice
// is summed from zero and slices are added in ascending order. There are two kinds of kernels, and both do just that:
//   gemm90_slices_nN  few rows: one block for one slice of a tile of N tokens by 128 weight rows
//     grid       slices * tiles in clusters of `slices` (1, 2, 4 or 8). Grouped: tiles of the worst case; clusters beyond
//                the last tile leave
//     threads    288 (n256: 384)
//     shared     1024 + stages * (16384 + N * 128) + 2064 + 128 bytes
//   gemm90_tiles_nN  many rows: blocks go through tiles, one in every `grid`. c2: two blocks share a tile of 256 weight
//                rows, each loads half of the tokens for both
//     grid       at most as many blocks as fit at once (c2: even)
//     threads    288 (N >= 128: 384)
//     shared     1024 + stages * (16384 + N * 128) + 5120 + 2064 + 128 bytes
// All take the weights' map, x's map and Gemm90Args, by value.
//   maps         bf16, 128-byte swizzle, boxes 64 columns wide; weights [n or experts * n, k], 64 rows a box; x [at least
//                rows, k], N rows a box (c2: N / 2). k is a multiple of 8; n is any, best a multiple of 4
//   offsets      grouped: expert e has rows offsets[e] to offsets[e + 1] of x and out, and the weight rows from e * n on.
//                Read on the device, so that a recorded launch serves any routing
//   slices       at most the steps of k; see `slices` in gemm90.rs
//   token_group  token tiles that go through all weights together (dense)
#include "gemm_sm90_slices.cuh"
#include "gemm_sm90_tiles.cuh"

SLICES_KERNEL(gemm90_slices1_n8, 1, 8, 11, 1, 2, false)
SLICES_KERNEL(gemm90_slices1_n16, 1, 16, 10, 1, 2, false)
SLICES_KERNEL(gemm90_slices1_n32, 1, 32, 8, 1, 2, false)
SLICES_KERNEL(gemm90_slices1_n64, 1, 64, 6, 1, 2, false)
SLICES_KERNEL(gemm90_slices1_n128, 1, 128, 8, 1, 1, false)
SLICES_KERNEL(gemm90_slices_n8, 2, 8, 6, 4, 2, false)
SLICES_KERNEL(gemm90_slices_n16, 2, 16, 6, 4, 2, false)
SLICES_KERNEL(gemm90_slices_n32, 2, 32, 5, 4, 2, false)
SLICES_KERNEL(gemm90_slices_n64, 2, 64, 4, 1, 2, false)
SLICES_KERNEL(gemm90_slices_n128, 2, 128, 6, 2, 1, false)
TILES_KERNEL(gemm90_tiles_n8, 2, 8, 6, false, 1, false, SINGLE)
TILES_KERNEL(gemm90_tiles_n16, 2, 16, 5, false, 1, false, SINGLE)
TILES_KERNEL(gemm90_tiles_n32, 2, 32, 5, false, 1, false, SINGLE)
TILES_KERNEL(gemm90_tiles_n64, 2, 64, 4, false, 1, false, SINGLE)
TILES_KERNEL(gemm90_tiles_n128, 2, 128, 6, true, 1, false, SINGLE)
