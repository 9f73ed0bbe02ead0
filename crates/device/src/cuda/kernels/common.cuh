// What all kernels share: short names, the types of activations, and waiting for the kernel before.
// No toolkit header is needed: NVRTC knows everything used here by itself.
#pragma once

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef int i32;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE static __device__ __forceinline__
#define WARP 32
#define FULL_MASK 0xffffffffu
// Tokens in a KV block.
#define BLOCK_TOKENS 16

// Sixteen-bit activations; arithmetic is in f32.
struct bf16 {
    u16 bits;
};

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(bf16 x) { return __uint_as_float((u32)x.bits << 16); }

template <typename T> DEVICE T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
// To nearest, ties to even; NaN stays NaN.
template <> __device__ __forceinline__ bf16 from_float<bf16>(float x) {
    bf16 out;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out.bits) : "f"(x));
    return out;
}

// Two at once: `low` lies first in memory.
DEVICE u32 pack_bf16(float low, float high) {
    u32 out;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}
DEVICE float low_bf16(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float high_bf16(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

DEVICE float half_to_float(u16 bits) {
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(bits));
    return out;
}
DEVICE u16 float_to_half(float x) {
    u16 out;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out) : "f"(x));
    return out;
}

// e4m3 without infinities, as integers and exact on every architecture: what fp8 weights and keys are stored as.
DEVICE float e4m3_to_float(u8 code) {
    u32 sign = (u32)(code & 0x80) << 24, exponent = (code >> 3) & 15, mantissa = code & 7;
    if ((code & 0x7f) == 0x7f) return __uint_as_float(0x7fc00000u);
    float magnitude = exponent == 0 ? (float)mantissa * 0.001953125f
                                    : __uint_as_float(((exponent + 120) << 23) | (mantissa << 20));
    return __uint_as_float(__float_as_uint(magnitude) | sign);
}

// Launches may overlap: a kernel starts while the one before it drains. Until `wait_for_previous` returns, only what no
// kernel of a step writes (weights, tables that were uploaded before the step) may be read, and nothing written. Every
// kernel calls it, in every thread. `release_next` lets the next kernel begin to start; call it early.
DEVICE void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE void release_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

DEVICE float4 plus(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

// Sums and maxima in one fixed order; all lanes get the result.
DEVICE float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(FULL_MASK, x, step);
    return x;
}
DEVICE float warp_max(float x) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) x = fmaxf(x, __shfl_xor_sync(FULL_MASK, x, step));
    return x;
}
// Over a block of any whole number of warps; `scratch` has 32 floats and may be used again after the next barrier.
DEVICE float block_sum(float x, float* scratch) {
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    x = warp_sum(x);
    __syncthreads();
    if (lane == 0) scratch[warp] = x;
    __syncthreads();
    x = 0.0f;
    for (int other = 0; other < warps; other++) x += scratch[other];
    return x;
}
