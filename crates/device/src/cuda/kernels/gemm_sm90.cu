// Products with bf16 weights on Hopper, dense or by expert: out[rows, n] = x[rows, k] * w[n, k]^T (+ bias[n]).
//
// The weights are the 64 rows of the warpgroup product and the tokens its columns: eight tokens waste nothing, and one
// kernel family serves 1 to 8192 rows. A loading warp keeps a ring of stages filled (a stage: 64 of k, in 128-byte
// swizzle); warpgroups multiply, 64 weight rows each. Sums are f32.
//
// A row's bits depend on that row and the weight alone: k is cut into `slices` by the weight's shape alone, every slice
// is summed from zero and slices are added in ascending order. There are two kinds of kernels, and both do just that:
//   gemm90_slices_nN, gemm90_slices1_nN  few rows: a strip of `height` weight rows by N tokens is a cluster's, a slice of
//                it a block's. `height` is a multiple of 64, at most TILES * GROUPS * 64
//     grid       (n / height rounded up) * slices, rows / N rounded up; clusters of `slices` (1, 2, 4 or 8) along x
//     threads    128 * GROUPS + 32
//     shared     1024 + stages * (GROUPS * 8192 + N * 128 + 16) bytes
//   gemm90_tiles_nN  many rows, or rows by expert: blocks go through tiles of 128 weight rows by N tokens, one in every
//                `grid`
//     grid       at most as many blocks as fit at once
//     threads    288 (n128: 384)
//     shared     1024 + stages * (16384 + N * 128 + 16) + 5120 + 2064 bytes
// All take the weights' map, x's map and Gemm90Args, by value.
//   maps         bf16, 128-byte swizzle, boxes 64 columns wide; weights [n or experts * n, k], 64 rows a box; x [at least
//                rows, k], N rows a box. k is a multiple of 8; n is any, best a multiple of 4
//   offsets      by expert: e has rows offsets[e] to offsets[e + 1] of x and out, and the weight rows from e * n on.
//                Read on the device, so that a recorded launch serves any routing
//   slices       at most the steps of k; see `slices` in gemm90/plan.rs
//   token_group  token tiles that go through all weights together (dense tiles)
//   activation   gemm90_slices_n16 to n96 alone, of one slice: `height` and n are multiples of 128, and a strip has boxes
//                of gates and of ups in turn
// Weights are loaded before the kernel waits for the one before it. Few tokens leave room for a second block on every
// multiprocessor: the next kernel's, whose ring is full when this one ends. Rings of more tokens leave room beside them for
// the kernels between products alone: with all of the memory a ring would not begin to fill before those end.
#include "gemm_sm90_slices.cuh"
#include "gemm_sm90_tiles.cuh"

SLICES_KERNEL(gemm90_slices1_n8, 1, 8, 11, 1, 2, false)
SLICES_KERNEL(gemm90_slices1_n16, 1, 16, 10, 1, 2, false)
SLICES_KERNEL(gemm90_slices1_n32, 1, 32, 8, 1, 2, false)
SLICES_KERNEL(gemm90_slices1_n64, 1, 64, 12, 1, 1, false)
SLICES_KERNEL(gemm90_slices1_n80, 1, 80, 10, 1, 1, false)
SLICES_KERNEL(gemm90_slices1_n96, 1, 96, 10, 1, 1, false)
SLICES_KERNEL(gemm90_slices1_n128, 1, 128, 8, 1, 1, false)
SLICES_KERNEL(gemm90_slices_n8, 2, 8, 6, 4, 2, false)
SLICES_KERNEL(gemm90_slices_n16, 2, 16, 6, 4, 2, false)
SLICES_KERNEL(gemm90_slices_n32, 2, 32, 5, 4, 2, false)
SLICES_KERNEL(gemm90_slices_n64, 2, 64, 4, 1, 2, false)
SLICES_KERNEL(gemm90_slices_n96, 2, 96, 7, 1, 1, false)
SLICES_KERNEL(gemm90_slices_n128, 2, 128, 6, 1, 1, false)
SLICES_KERNEL(gemm90_slices4_n80, 4, 80, 4, 1, 1, false)
TILES_KERNEL(gemm90_tiles_n8, 2, 8, 6, false, false)
TILES_KERNEL(gemm90_tiles_n16, 2, 16, 5, false, false)
TILES_KERNEL(gemm90_tiles_n32, 2, 32, 5, false, false)
TILES_KERNEL(gemm90_tiles_n64, 2, 64, 4, false, false)
TILES_KERNEL(gemm90_tiles_n128, 2, 128, 6, true, false)
