// What the kernels over rows share: four values at a time, block-wide sums, and gated activations.
#pragma once
#include "gated.cuh"

// Four neighbours; `at` is a multiple of four values into an aligned row.
DEVICE float4 load4(const float* at) { return *reinterpret_cast<const float4*>(at); }
DEVICE float4 load4(const bf16* at) {
    uint2 raw = *reinterpret_cast<const uint2*>(at);
    return make_float4(low_bf16(raw.x), high_bf16(raw.x), low_bf16(raw.y), high_bf16(raw.y));
}
DEVICE void store4(float* at, float4 x) { *reinterpret_cast<float4*>(at) = x; }
DEVICE void store4(bf16* at, float4 x) {
    *reinterpret_cast<uint2*>(at) = make_uint2(pack_bf16(x.x, x.y), pack_bf16(x.z, x.w));
}

// Eight neighbours.
struct Eight {
    float4 low, high;
};
DEVICE Eight load8(const float* at) { return {load4(at), load4(at + 4)}; }
DEVICE Eight load8(const bf16* at) {
    uint4 raw = *reinterpret_cast<const uint4*>(at);
    return {make_float4(low_bf16(raw.x), high_bf16(raw.x), low_bf16(raw.y), high_bf16(raw.y)),
            make_float4(low_bf16(raw.z), high_bf16(raw.z), low_bf16(raw.w), high_bf16(raw.w))};
}
DEVICE void store8(float* at, Eight x) {
    store4(at, x.low);
    store4(at + 4, x.high);
}
DEVICE void store8(bf16* at, Eight x) {
    *reinterpret_cast<uint4*>(at) = make_uint4(pack_bf16(x.low.x, x.low.y), pack_bf16(x.low.z, x.low.w),
                                               pack_bf16(x.high.x, x.high.y), pack_bf16(x.high.z, x.high.w));
}

// A sum over a block of any whole number of warps, with one barrier, in an order that depends on the number of threads
// alone. `scratch` is for one sum only.
DEVICE float block_total(float x, float4 (&scratch)[8]) {
    float* parts = reinterpret_cast<float*>(scratch);
    int warps = blockDim.x / WARP;
    x = warp_sum(x);
    if (threadIdx.x % WARP == 0) parts[threadIdx.x / WARP] = x;
    if (threadIdx.x < WARP && threadIdx.x >= warps) parts[threadIdx.x] = 0.0f;
    __syncthreads();
    float sums[8];
#pragma unroll
    for (int i = 0; i < 8; i++) sums[i] = (scratch[i].x + scratch[i].y) + (scratch[i].z + scratch[i].w);
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

template <typename T> struct IsExact {
    static const bool value = false;
};
template <> struct IsExact<float> {
    static const bool value = true;
};
