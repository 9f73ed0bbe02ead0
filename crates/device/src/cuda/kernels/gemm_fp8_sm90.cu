// As gemm_sm90.cu with e4m3 on both sides: out = (x * w^T) * x_scales[row] * w_scales[...] (+ bias). Maps are of bytes, box
// 128 columns; k is a multiple of 16, and slices are counted in steps of 128. w_scales: one per weight row, [n] (grouped
// [experts * n]); or, with block_scales, one per 128 x 128 block, [n / 128 rounded up][k / 128 rounded up] (grouped: n a
// multiple of 128, an expert's blocks after the other's). x_scales: one per row of x.
#include "gemm_sm90_loop.cuh"

GEMM90_KERNEL(gemm90_fp8_n8, 2, 8, 6, false, 1, true, SINGLE)
GEMM90_KERNEL(gemm90_fp8_n16, 2, 16, 5, false, 1, true, SINGLE)
GEMM90_KERNEL(gemm90_fp8_n32, 2, 32, 5, false, 1, true, SINGLE)
GEMM90_KERNEL(gemm90_fp8_n64, 2, 64, 4, true, 1, true, SINGLE)
GEMM90_KERNEL(gemm90_fp8_n128, 2, 128, 6, true, 1, true, SINGLE)
GEMM90_KERNEL(gemm90_fp8_c2_n128, 2, 128, 6, true, 2, true, PAIR)
