// out[m, n of out_stride] = x[m, k] . w[n, k]^T (+ bias) by plain multiplications: f32 weights and activations, where results are
// compared with the CPU's, and bf16 ones of an odd width, which 16-byte copies do not fit.
//
// Few rows: a warp has two outputs and eight rows of x; its lanes run along k. Many rows: a block has 64 x 64 sums, k in
// steps of 16 through shared memory. Sums of one kernel do not depend on m; those of the two differ in their order.
#include "linear.cuh"

#define THREADS 256
#define FEW_OUTPUTS 2
#define FEW_ROWS 8
#define SIDE 64
#define STEP 16

DEVICE void store(void* out, i64 at, float value, int out_f32) {
    if (out_f32) ((float*)out)[at] = value;
    else ((bf16*)out)[at] = from_float<bf16>(value);
}

// Grid: (n / 16, m / 8).
template <typename T> DEVICE void few_rows(void* out, const T* x, const T* w, const float* bias, int m, int n, int k, int out_stride, int out_f32) {
    int lane = threadIdx.x % WARP, first_output = (blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP) * FEW_OUTPUTS;
    int first_row = blockIdx.y * FEW_ROWS;
    release_next();
    wait_for_previous();
    float sum[FEW_OUTPUTS][FEW_ROWS] = {};
#pragma unroll 2
    for (int at = lane; at < k; at += WARP) {
        float weights[FEW_OUTPUTS];
#pragma unroll
        for (int o = 0; o < FEW_OUTPUTS; o++) weights[o] = to_float(w[(i64)min(first_output + o, n - 1) * k + at]);
#pragma unroll
        for (int r = 0; r < FEW_ROWS; r++) {
            float value = first_row + r < m ? to_float(x[(i64)(first_row + r) * k + at]) : 0.0f;
#pragma unroll
            for (int o = 0; o < FEW_OUTPUTS; o++) sum[o][r] = fmaf(value, weights[o], sum[o][r]);
        }
    }
#pragma unroll
    for (int o = 0; o < FEW_OUTPUTS; o++)
#pragma unroll
        for (int r = 0; r < FEW_ROWS; r++) {
            float total = warp_sum(sum[o][r]);
            int row = first_row + r, output = first_output + o;
            if (lane == 0 && row < m && output < n) store(out, (i64)row * out_stride + output, total + (bias ? bias[output] : 0.0f), out_f32);
        }
}

// Grid: (m / 64, n / 64). A thread has 4 x 4 sums, 16 apart in both directions.
template <typename T> DEVICE void many_rows(void* out, const T* x, const T* w, const float* bias, int m, int n, int k, int out_stride, int out_f32) {
    __shared__ float xs[STEP][SIDE + 1], ws[STEP][SIDE + 1];
    int first_row = blockIdx.x * SIDE, first_output = blockIdx.y * SIDE;
    int across = threadIdx.x % 16, down = threadIdx.x / 16;
    release_next();
    wait_for_previous();
    float sum[4][4] = {};
#pragma unroll 1
    for (int at = 0; at < k; at += STEP) {
#pragma unroll
        for (int turn = 0; turn < SIDE * STEP / THREADS; turn++) {
            int row = threadIdx.x / STEP + turn * (THREADS / STEP), column = threadIdx.x % STEP;
            bool inside = at + column < k;
            xs[column][row] = inside && first_row + row < m ? to_float(x[(i64)(first_row + row) * k + at + column]) : 0.0f;
            ws[column][row] = inside && first_output + row < n ? to_float(w[(i64)(first_output + row) * k + at + column]) : 0.0f;
        }
        __syncthreads();
#pragma unroll 4
        for (int j = 0; j < STEP; j++) {
            float values[4], weights[4];
#pragma unroll
            for (int i = 0; i < 4; i++) values[i] = xs[j][down + 16 * i], weights[i] = ws[j][across + 16 * i];
#pragma unroll
            for (int r = 0; r < 4; r++)
#pragma unroll
                for (int o = 0; o < 4; o++) sum[r][o] = fmaf(values[r], weights[o], sum[r][o]);
        }
        __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
        for (int o = 0; o < 4; o++) {
            int row = first_row + down + 16 * r, output = first_output + across + 16 * o;
            if (row < m && output < n) store(out, (i64)row * out_stride + output, sum[r][o] + (bias ? bias[output] : 0.0f), out_f32);
        }
}

#define FEW_KERNEL(NAME, T)                                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS) linear_few_##NAME(                                           \
        void* out, const T* x, const T* w, const float* bias, int m, int n, int k, int out_stride, int out_f32) {                      \
        few_rows<T>(out, x, w, bias, m, n, k, out_stride, out_f32);                                                                \
    }
FEW_KERNEL(f32, float)
FEW_KERNEL(bf16, bf16)

extern "C" __global__ void __launch_bounds__(THREADS) linear_many_f32(
    void* out, const float* x, const float* w, const float* bias, int m, int n, int k, int out_stride, int out_f32) {
    many_rows<float>(out, x, w, bias, m, n, k, out_stride, out_f32);
}
