// Pseudo-random weights made in place from a seed, for measurements with real shapes. A value depends on the seed and its
// index alone.
//
//   random_bf16(out, count, seed, scale)       normal-like values of standard deviation `scale`
//   random_f16(out, count, seed, scale)        the same
//   random_f32(out, count, seed, scale, mean)  the same plus `mean`; with scale 0 a constant
//   random_bytes(out, count, seed)             any codes: int4 pairs, int8
//   random_e4m3(out, count, seed)              fp8 codes below 448 that are numbers, normal-like
//       count as i64; seed u64; grid any (blocks stride), threads 256.
#include "common.cuh"

// A good mix of 64 bits (the finalizer known as splitmix64).
DEVICE u64 mixed(u64 seed, u64 index) {
    u64 x = seed + (index + 1) * 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}
// The sum of four uniform numbers has a bell's shape; its variance is 1/3 before the factor.
DEVICE float bell(u64 bits) {
    float sum = (float)(bits & 0xffff) + (float)(bits >> 16 & 0xffff) + (float)(bits >> 32 & 0xffff) + (float)(bits >> 48);
    return (sum * (1.0f / 65536.0f) - 2.0f) * 1.7320508f;
}
template <typename Body> DEVICE void for_all(i64 count, Body body) {
    wait_for_previous();
    i64 step = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) body(i);
}

extern "C" __global__ void __launch_bounds__(256) random_bf16(bf16* out, i64 count, u64 seed, float scale) {
    for_all(count, [&](i64 i) { out[i] = from_float<bf16>(bell(mixed(seed, i)) * scale); });
}
extern "C" __global__ void __launch_bounds__(256) random_f16(u16* out, i64 count, u64 seed, float scale) {
    for_all(count, [&](i64 i) { out[i] = float_to_half(bell(mixed(seed, i)) * scale); });
}
extern "C" __global__ void __launch_bounds__(256) random_f32(float* out, i64 count, u64 seed, float scale, float mean) {
    for_all(count, [&](i64 i) { out[i] = bell(mixed(seed, i)) * scale + mean; });
}
extern "C" __global__ void __launch_bounds__(256) random_bytes(u8* out, i64 count, u64 seed) {
    u32* words = reinterpret_cast<u32*>(out);
    for_all((count + 3) / 4, [&](i64 i) {
        u32 bits = (u32)(mixed(seed, i) >> 32);
        if (4 * i + 4 <= count)
            words[i] = bits;
        else
            for (i64 at = 4 * i; at < count; at++, bits >>= 8) out[at] = (u8)bits;
    });
}
// Exponents 2^-2 to 2^5 or so, as weights have around their scale.
extern "C" __global__ void __launch_bounds__(256) random_e4m3(u8* out, i64 count, u64 seed) {
    for_all(count, [&](i64 i) {
        u64 bits = mixed(seed, i);
        float value = bell(bits) * 32.0f;
        u32 raw = __float_as_uint(value), sign = raw >> 24 & 0x80, size = raw & 0x7fffffff;
        u32 code = size < ((127 - 6) << 23) ? 0 : (size >> 20) - ((127 - 7) << 3);
        out[i] = (u8)(sign | min(code, 0x7eu));
    });
}
