// Products with bf16 weights on Hopper, dense or by expert: out[rows, n] = x[rows, k] * w[n, k]^T (+ bias[n]), f32 sums.
//
// The weights are the 64 rows of the warpgroup product and the tokens its columns: eight tokens waste nothing, and one
// kernel family serves 1 to 8192 rows. A loading warp keeps a ring of stages filled (a stage: 64 of k, in 128-byte
// swizzle); two warpgroups (r192: three) multiply, 64 weight rows each.
//
// A row's bits depend on that row and the weight alone. k is cut into `slices` by the weight's shape alone; every slice is
// summed from zero and slices are added in ascending order. `split = 0`: a block computes all slices of its tiles.
// `split = 1`: all slices of all tiles are dealt out evenly; a block that has a part of a tile writes its sums to
// `partial` (a run that begins with slice 0 is added up first), and the last to arrive adds in order and stores.
//
// Kernels gemm90_{n8, n16, n32, n64, n128, n192}: N tokens a tile, 128 weight rows. c2: pairs of blocks, 256 weight
// of one tile between them, each loads half of the tokens for both; the grid is even.
//   arguments  weights' map, x's map, Gemm90Args, by value
//   threads    groups * 128 + 32 (N <= 64) or + 128; dynamic shared bytes Ring::SHARED
//   maps       bf16, 128-byte swizzle, box 64 columns; weights [n or experts * n, k] box of 64 rows; x [any rows >= rows,
//              k] box of N (c2: N / 2) rows. k is a multiple of 8; n is any, best a multiple of 4.
//   grid       split or grouped: as many blocks as fit at once; otherwise no more than there are tiles
//   partial    min(tiles, blocks) * slices * 128 * N floats with split, else unused
//   counters   blocks * groups u32, zero before the first launch; every launch leaves them zero
//   offsets    grouped: expert e has rows offsets[e] to offsets[e + 1] of x and out and the weight rows e * n on; read on
//              the device, so that a recorded launch serves any routing
//   slices     1 to the steps of k (64 each); the fewest that make tiles * slices fill whole rounds of 132 blocks
//   token_group  token tiles that go through all weights together (dense)
//   prefetch   steps beyond the ring that are fetched into L2 before the kernel waits for the one before
#include "gemm_sm90_loop.cuh"

GEMM90_KERNEL(gemm90_n8, 2, 8, 6, false, 1, false, SINGLE)
GEMM90_KERNEL(gemm90_n16, 2, 16, 5, false, 1, false, SINGLE)
GEMM90_KERNEL(gemm90_n32, 2, 32, 5, false, 1, false, SINGLE)
GEMM90_KERNEL(gemm90_n64, 2, 64, 4, false, 1, false, SINGLE)
GEMM90_KERNEL(gemm90_n128, 2, 128, 6, true, 1, false, SINGLE)
GEMM90_KERNEL(gemm90_n192, 2, 192, 5, true, 1, false, SINGLE)
GEMM90_KERNEL(gemm90_r192_n128, 3, 128, 5, true, 1, false, SINGLE)
GEMM90_KERNEL(gemm90_c2_n128, 2, 128, 6, true, 2, false, PAIR)
GEMM90_KERNEL(gemm90_c2_n192, 2, 192, 5, true, 2, false, PAIR)
