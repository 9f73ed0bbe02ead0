// out[m, n of out_stride] = x[m, k] . w[n, k]^T (+ bias) in f32, where results are compared with the CPU's.
//
// A warp has four outputs and eight rows of x, its lanes run along k, four values each; the lanes' sums are added in one
// order. So no bit depends on m. Grid: (n / 32, m / 8). k is a multiple of 4.
#include "common.cuh"

#define THREADS 256
#define OUTPUTS 4
#define ROWS 8

extern "C" __global__ void __launch_bounds__(THREADS) linear_f32(
    float* out, const float* x, const float* w, const float* bias, int m, int n, int k, int out_stride) {
    int lane = threadIdx.x % WARP, first_output = (blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP) * OUTPUTS;
    int first_row = blockIdx.y * ROWS;
    release_next();
    wait_for_previous();
    float sum[OUTPUTS][ROWS] = {};
#pragma unroll 1
    for (int at = lane * 4; at < k; at += WARP * 4) {
        float4 weights[OUTPUTS];
#pragma unroll
        for (int o = 0; o < OUTPUTS; o++) weights[o] = *(const float4*)(w + (i64)min(first_output + o, n - 1) * k + at);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float4 value = *(const float4*)(x + (i64)min(first_row + r, m - 1) * k + at);
#pragma unroll
            for (int o = 0; o < OUTPUTS; o++) {
                float part = fmaf(value.x, weights[o].x, sum[o][r]);
                part = fmaf(value.y, weights[o].y, part);
                part = fmaf(value.z, weights[o].z, part);
                sum[o][r] = fmaf(value.w, weights[o].w, part);
            }
        }
    }
#pragma unroll
    for (int o = 0; o < OUTPUTS; o++)
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float total = warp_sum(sum[o][r]);
            int row = first_row + r, output = first_output + o;
            if (lane == 0 && row < m && output < n) out[(i64)row * out_stride + output] = total + (bias ? bias[output] : 0.0f);
        }
}
