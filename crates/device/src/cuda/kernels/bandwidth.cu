// What the memory gives: plain reads and copies of 16 bytes a thread, for the ceilings that measurements are put beside.
//
//   read_bytes(from, out, count)      count in units of 16 bytes; out: one u32 a block, so that nothing is optimized away
//   copy_bytes(to, from, count)
//       grid: a multiple of the SM count, 8 blocks an SM or so; threads 512.
#include "common.cuh"

// Reads that will not be used again.
DEVICE uint4 stream_in(const uint4* at) {
    uint4 x;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(at));
    return x;
}

extern "C" __global__ void __launch_bounds__(512) read_bytes(const uint4* from, u32* out, i64 count) {
    wait_for_previous();
    u32 mix = 0;
    i64 step = (i64)gridDim.x * 512, at = (i64)blockIdx.x * 512 + threadIdx.x;
    for (; at + 3 * step < count; at += 4 * step) {
        uint4 a = stream_in(from + at), b = stream_in(from + at + step);
        uint4 c = stream_in(from + at + 2 * step), d = stream_in(from + at + 3 * step);
        mix ^= a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w;
        mix ^= c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
    }
    for (; at < count; at += step) {
        uint4 a = stream_in(from + at);
        mix ^= a.x ^ a.y ^ a.z ^ a.w;
    }
    mix = __reduce_xor_sync(FULL_MASK, mix);
    if (threadIdx.x % WARP == 0) atomicXor(&out[blockIdx.x], mix);
}

extern "C" __global__ void __launch_bounds__(512) copy_bytes(uint4* to, const uint4* from, i64 count) {
    wait_for_previous();
    i64 step = (i64)gridDim.x * 512, at = (i64)blockIdx.x * 512 + threadIdx.x;
    for (; at + 3 * step < count; at += 4 * step) {
        uint4 a = stream_in(from + at), b = stream_in(from + at + step);
        uint4 c = stream_in(from + at + 2 * step), d = stream_in(from + at + 3 * step);
        to[at] = a;
        to[at + step] = b;
        to[at + 2 * step] = c;
        to[at + 3 * step] = d;
    }
    for (; at < count; at += step) to[at] = stream_in(from + at);
}
