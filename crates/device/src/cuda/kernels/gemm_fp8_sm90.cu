// As gemm_sm90.cu with e4m3 on both sides: out = (x * w^T) * x_scales[row] * w_scales[...] (+ bias).
//
// Maps are of bytes, boxes 128 columns wide; k is a multiple of 16, and slices are counted in steps of 128. w_scales: one
// a weight row, [n] (by expert [experts * n]); or, with block_scales, one a 128 x 128 block, [n / 128 rounded up][k / 128
// rounded up] (by expert: one's blocks after the other's, n a multiple of 128). x_scales: one a row of x.
#include "gemm_sm90_slices.cuh"
#include "gemm_sm90_tiles.cuh"

SLICES_KERNEL(gemm90_fp8_slices1_n8, 1, 8, 11, 1, 2, true)
SLICES_KERNEL(gemm90_fp8_slices1_n16, 1, 16, 10, 1, 2, true)
SLICES_KERNEL(gemm90_fp8_slices1_n32, 1, 32, 8, 1, 2, true)
SLICES_KERNEL(gemm90_fp8_slices1_n64, 1, 64, 12, 1, 1, true)
SLICES_KERNEL(gemm90_fp8_slices1_n80, 1, 80, 10, 1, 1, true)
SLICES_KERNEL(gemm90_fp8_slices1_n96, 1, 96, 10, 1, 1, true)
SLICES_KERNEL(gemm90_fp8_slices1_n128, 1, 128, 8, 1, 1, true)
SLICES_KERNEL(gemm90_fp8_slices_n8, 2, 8, 6, 4, 2, true)
SLICES_KERNEL(gemm90_fp8_slices_n16, 2, 16, 6, 4, 2, true)
SLICES_KERNEL(gemm90_fp8_slices_n32, 2, 32, 5, 4, 2, true)
SLICES_KERNEL(gemm90_fp8_slices_n64, 2, 64, 4, 1, 2, true)
SLICES_KERNEL(gemm90_fp8_slices_n96, 2, 96, 7, 1, 1, true)
SLICES_KERNEL(gemm90_fp8_slices_n128, 2, 128, 6, 1, 1, true)
SLICES_KERNEL(gemm90_fp8_slices4_n80, 4, 80, 4, 1, 1, true)
TILES_KERNEL(gemm90_fp8_tiles_n8, 2, 8, 6, false, true)
TILES_KERNEL(gemm90_fp8_tiles_n16, 2, 16, 5, false, true)
TILES_KERNEL(gemm90_fp8_tiles_n32, 2, 32, 5, false, true)
TILES_KERNEL(gemm90_fp8_tiles_n64, 2, 64, 4, false, true)
TILES_KERNEL(gemm90_fp8_tiles_n128, 2, 128, 6, true, true)
