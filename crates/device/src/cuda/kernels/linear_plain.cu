// Matrix products on plain cores, for f32 activations and for what no faster kernel takes: dense, and by expert.
//
//   linear_plain_{f32,bf16}(PlainArgs)      out[m, n] = x[m, k] . w[n, k]^T (+ bias)
//       x and w are of the named type, out of it or f32; threads 256, no dynamic shared memory.
//       Dense: grid (ceil(n / 64), ceil(m / 64)). By expert: grid (ceil(n / 64), ceil(m / 64) + experts); rows
//       offsets[e] .. offsets[e + 1] of x and out belong to expert e, whose weights and bias lie e * n rows further.
//   narrow_rows(out, x, count)              f32 to bf16; grid ceil(count / 1024), threads 256.
//   round_rows_e4m3(codes, scales, x, width)
//       Rows of bf16 to e4m3 with one f32 scale a row, the largest magnitude over 448; width is a multiple of 8.
//       grid (rows), threads 256. For compute capability 8.9 and later.
//
// A value is one chain of multiplications and additions over k, in ascending order: no bit depends on the other rows.
#include "common.cuh"

#define TILE 64
#define DEPTH 16

// By value, mirrored in Rust with repr(C): 64 bytes.
struct PlainArgs {
    void* out;
    const void* x;
    const void* w;
    const float* bias;   // [n] (by expert: [experts, n]) or null
    const u32* offsets;  // [experts + 1], or null: dense
    i32 m, n, k, experts, out_is_f32, padding;
};
static_assert(sizeof(PlainArgs) == 64, "as the host has it");

template <typename T> DEVICE void linear_plain(const PlainArgs& args) {
    // Columns of both sides; the gap keeps four neighbours on one line apart from the next.
    __shared__ float left[DEPTH][TILE + 4], right[DEPTH][TILE + 4];
    release_next();
    wait_for_previous();
    int first_row = blockIdx.y * TILE, end_row = args.m, expert = 0;
    if (args.offsets) {
        int tile = blockIdx.y, begin = 0;
        for (expert = 0; expert < args.experts; expert++) {
            begin = args.offsets[expert];
            end_row = args.offsets[expert + 1];
            int tiles = (end_row - begin + TILE - 1) / TILE;
            if (tile < tiles) break;
            tile -= tiles;
        }
        if (expert == args.experts) return;
        first_row = begin + tile * TILE;
    }
    const int first_column = blockIdx.x * TILE, n = args.n, k = args.k;
    const T* x = (const T*)args.x;
    const T* w = (const T*)args.w + (i64)expert * n * k;
    const int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16 * 4;
    float sums[4][4] = {};
    for (int start = 0; start < k; start += DEPTH) {
#pragma unroll
        for (int part = 0; part < TILE * DEPTH / 256; part++) {
            int at = part * 256 + threadIdx.x, line = at / DEPTH, depth = at % DEPTH;
            bool inside = start + depth < k;
            left[depth][line] = inside && first_row + line < end_row
                                    ? to_float(x[(i64)(first_row + line) * k + start + depth])
                                    : 0.0f;
            right[depth][line] = inside && first_column + line < n
                                     ? to_float(w[(i64)(first_column + line) * k + start + depth])
                                     : 0.0f;
        }
        __syncthreads();
#pragma unroll
        for (int depth = 0; depth < DEPTH; depth++) {
            float4 a = *(const float4*)&left[depth][row], b = *(const float4*)&right[depth][column];
            const float lefts[4] = {a.x, a.y, a.z, a.w}, rights[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) sums[i][j] = fmaf(lefts[i], rights[j], sums[i][j]);
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (first_row + row + i >= end_row || first_column + column + j >= n) continue;
            float sum = sums[i][j];
            if (args.bias) sum += args.bias[(i64)expert * n + first_column + column + j];
            i64 at = (i64)(first_row + row + i) * n + first_column + column + j;
            if (args.out_is_f32)
                ((float*)args.out)[at] = sum;
            else
                ((T*)args.out)[at] = from_float<T>(sum);
        }
}
extern "C" __global__ void __launch_bounds__(256) linear_plain_f32(const __grid_constant__ PlainArgs args) {
    linear_plain<float>(args);
}
extern "C" __global__ void __launch_bounds__(256) linear_plain_bf16(const __grid_constant__ PlainArgs args) {
    linear_plain<bf16>(args);
}

extern "C" __global__ void __launch_bounds__(256) narrow_rows(bf16* out, const float* x, i64 count) {
    release_next();
    wait_for_previous();
    i64 at = ((i64)blockIdx.x * 256 + threadIdx.x) * 4;
    if (at + 4 <= count) {
        float4 v = *(const float4*)(x + at);
        *(uint2*)(out + at) = make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
    } else {
        for (; at < count; at++) out[at] = from_float<bf16>(x[at]);
    }
}

extern "C" __global__ void __launch_bounds__(256) round_rows_e4m3(u8* codes, float* scales, const bf16* x, int width) {
    __shared__ float largest[8];
    release_next();
    wait_for_previous();
    const bf16* row = x + (i64)blockIdx.x * width;
    float most = 0.0f;
    for (int at = threadIdx.x * 8; at < width; at += 256 * 8) {
        uint4 raw = *(const uint4*)(row + at);
        const u32 pairs[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int i = 0; i < 4; i++) most = fmaxf(most, fmaxf(fabsf(low_bf16(pairs[i])), fabsf(high_bf16(pairs[i]))));
    }
    most = warp_max(most);
    if (threadIdx.x % WARP == 0) largest[threadIdx.x / WARP] = most;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < 8; warp++) most = fmaxf(most, largest[warp]);
    // A row of zeros has zeros whatever its scale.
    float scale = most > 0.0f ? most / 448.0f : 1.0f;
    if (threadIdx.x == 0) scales[blockIdx.x] = scale;
#if __CUDA_ARCH__ >= 890
    float inverse = 1.0f / scale;
    for (int at = threadIdx.x * 8; at < width; at += 256 * 8) {
        uint4 raw = *(const uint4*)(row + at);
        const u32 pairs[4] = {raw.x, raw.y, raw.z, raw.w};
        u16 out[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
                : "=h"(out[i])
                : "f"(high_bf16(pairs[i]) * inverse), "f"(low_bf16(pairs[i]) * inverse));
        *(uint2*)(codes + (i64)blockIdx.x * width + at) =
            make_uint2(out[0] | (u32)out[1] << 16, out[2] | (u32)out[3] << 16);
    }
#endif
}
