// Root-mean-square norms and the residual stream: one block a row, squares summed in an order that depends on the width
// and the number of threads alone.
//
//   rms_norm_{x}_{out}[_wide](out, x, weight, eps, width)
//   add_rms_norm_{x}_{out}[_wide](out, residual, x, scale, weight, eps, width)      residual += x * scale, out = norm
//       grid (rows), threads clamp(round_up(ceil(width / 8), 32), 32, 1024), no dynamic shared memory.
//       Plain name: width % 4 == 0 and width <= 8192. `_wide`: any width, rows read twice.
//       x_out: f32_f32, f32_bf16, bf16_bf16; weight and residual are f32.
//   add_{target}_{x}(target, x, scale, count)      target += x * scale
//       grid ceil(count / 1024), threads 256; target_x: f32_f32, f32_bf16, bf16_bf16.
#include "rows.cuh"

// Vectors of four that a thread keeps in registers.
#define VECTORS 2

template <typename X, typename O, bool ADD>
DEVICE void norm_row(O* out, float* residual, const X* x, float scale, const float* weight, float eps, int width) {
    __shared__ float4 scratch[8];
    i64 start = (i64)blockIdx.x * width;
    float4 weights[VECTORS], values[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        int at = (v * blockDim.x + threadIdx.x) * 4;
        if (at < width) weights[v] = load4(weight + at);
    }
    release_next();
    wait_for_previous();
    float4 added[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        int at = (v * blockDim.x + threadIdx.x) * 4;
        if (at < width) {
            values[v] = ADD ? load4(residual + start + at) : load4(x + start + at);
            if (ADD) added[v] = load4(x + start + at);
        }
    }
    float sum = 0.0f;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        int at = (v * blockDim.x + threadIdx.x) * 4;
        if (at < width) {
            float4& value = values[v];
            if (ADD) {
                value.x = fmaf(added[v].x, scale, value.x);
                value.y = fmaf(added[v].y, scale, value.y);
                value.z = fmaf(added[v].z, scale, value.z);
                value.w = fmaf(added[v].w, scale, value.w);
                store4(residual + start + at, value);
            }
            sum += (value.x * value.x + value.y * value.y) + (value.z * value.z + value.w * value.w);
        }
    }
    float inverse = 1.0f / sqrtf(block_total(sum, scratch) / width + eps);
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        int at = (v * blockDim.x + threadIdx.x) * 4;
        if (at < width) {
            float4 value = values[v], by = weights[v];
            store4(out + start + at, make_float4(value.x * inverse * by.x, value.y * inverse * by.y,
                                                 value.z * inverse * by.z, value.w * inverse * by.w));
        }
    }
}

// Any width, value by value, read twice.
template <typename X, typename O, bool ADD>
DEVICE void norm_any(O* out, float* residual, const X* x, float scale, const float* weight, float eps, int width) {
    __shared__ float4 scratch[8];
    release_next();
    wait_for_previous();
    i64 start = (i64)blockIdx.x * width;
    float sum = 0.0f;
#pragma unroll 1
    for (int at = threadIdx.x; at < width; at += blockDim.x) {
        float value = to_float(x[start + at]);
        if (ADD) {
            value = fmaf(value, scale, residual[start + at]);
            residual[start + at] = value;
        }
        sum += value * value;
    }
    float inverse = 1.0f / sqrtf(block_total(sum, scratch) / width + eps);
#pragma unroll 1
    for (int at = threadIdx.x; at < width; at += blockDim.x) {
        float value = ADD ? residual[start + at] : to_float(x[start + at]);
        out[start + at] = from_float<O>(value * inverse * weight[at]);
    }
}

#define NORMS(NAME, X, O)                                                                                              \
    extern "C" __global__ void __launch_bounds__(1024)                                                                 \
        rms_norm_##NAME(O* out, const X* x, const float* weight, float eps, int width) {                               \
        norm_row<X, O, false>(out, nullptr, x, 0.0f, weight, eps, width);                                         \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(1024)                                                                 \
        rms_norm_##NAME##_wide(O* out, const X* x, const float* weight, float eps, int width) {                        \
        norm_any<X, O, false>(out, nullptr, x, 0.0f, weight, eps, width);                                             \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(1024)                                                                 \
        add_rms_norm_##NAME(O* out, float* residual, const X* x, float scale, const float* weight, float eps,          \
                            int width) {                                                                               \
        norm_row<X, O, true>(out, residual, x, scale, weight, eps, width);                                        \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(1024)                                                                 \
        add_rms_norm_##NAME##_wide(O* out, float* residual, const X* x, float scale, const float* weight, float eps,   \
                                   int width) {                                                                        \
        norm_any<X, O, true>(out, residual, x, scale, weight, eps, width);                                            \
    }

NORMS(f32_f32, float, float)
NORMS(f32_bf16, float, bf16)
NORMS(bf16_bf16, bf16, bf16)

template <typename T, typename X> DEVICE void add_values(T* target, const X* x, float scale, u32 count) {
    release_next();
    wait_for_previous();
    u32 at = (blockIdx.x * 256 + threadIdx.x) * 4;
    if (at + 4 <= count) {
        float4 value = load4(target + at), by = load4(x + at);
        store4(target + at, make_float4(fmaf(by.x, scale, value.x), fmaf(by.y, scale, value.y),
                                        fmaf(by.z, scale, value.z), fmaf(by.w, scale, value.w)));
    } else {
#pragma unroll 1
        for (; at < count; at++)
            target[at] = from_float<T>(fmaf(to_float(x[at]), scale, to_float(target[at])));
    }
}

#define ADD(NAME, T, X)                                                                                                \
    extern "C" __global__ void __launch_bounds__(256) add_##NAME(T* target, const X* x, float scale, u32 count) {      \
        add_values(target, x, scale, count);                                                                           \
    }
ADD(f32_f32, float, float)
ADD(f32_bf16, float, bf16)
ADD(bf16_bf16, bf16, bf16)
