// Coded weights as plain values: whole matrices to bf16 [n, k] for products with many rows, and single rows of an
// embedding table.
//
// A warp takes 512 bytes of codes as the streaming kernel lays them out (see linear_stream.cuh): a lane reads 16 bytes
// and writes eight neighbours of a row at a time.
#include "linear_stream.cuh"

#define THREADS 256

// Eight values in the order of a row.
struct Eight {
    float v[8];
};

// Two words of e4m3 codes.
DEVICE Eight eight_of(u32 low, u32 high, float by) {
    Eight out;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 pair = e4m3_to_bf16(pick_bytes(i < 2 ? low : high, 0, i % 2 ? 0x3424 : 0x1404));
        out.v[2 * i] = low_bf16(pair) * by, out.v[2 * i + 1] = high_bf16(pair) * by;
    }
    return out;
}

template <int FORM, bool AFFINE, int GROUP> struct Decode : Stream<FORM, AFFINE, GROUP, 1> {
    typedef Stream<FORM, AFFINE, GROUP, 1> Base;
    static constexpr bool BY_16 = GROUP == 16;
    using Base::a, Base::g, Base::t, Base::lane, Base::chunks;
    // Runs of eight that 16 bytes hold of each of two rows.
    static constexpr int RUNS = FORM == BYTES ? 1 : 2;

    MEMBER Decode(const StreamArgs& args) : Base(args, (u8*)0) {}

    // Scale and minimum of row `8 * eighth + g` of a tile, factor included.
    MEMBER float2 scale_of(int tile, int chunk, int quarter, int s, int eighth, float factor) const {
        constexpr int EACH = AFFINE ? 2 : 1;
        i64 group = ((i64)tile * chunks + chunk) * (4 / a.group_quarters) + quarter / a.group_quarters;
        const u8* from = a.scales + (group * 8 + g) * Base::SCALE_BYTES + (BY_16 ? s * Base::SCALE_BYTES / 2 : 0);
        const u16* values = (const u16*)from + eighth * EACH;
        return make_float2(half_to_float(__ldg(values)) * factor, AFFINE ? half_to_float(__ldg(values + 1)) * factor : 0.0f);
    }

    // Run `run` of 16 bytes of codes, part `part` of a chunk, for row g or g + 8: quarter, and the values.
    MEMBER Eight eight_of_codes(const uint4& own, int tile, int chunk, int part, int run, int upper, float factor) const {
        int quarter = FORM == BYTES ? part : part % 2 * 2 + run, eighth = (FORM == BYTES ? 0 : part / 2 * 2) + upper;
        Eight out;
#pragma unroll
        for (int s = 0; s < 2; s++) {
            u32 pairs[4];
            this->codes(pairs, own, run, s);
            float2 by = scale_of(tile, chunk, quarter, s, eighth, factor);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                out.v[4 * s + 2 * i] = fmaf(low_bf16(pairs[2 * i + upper]), by.x, by.y);
                out.v[4 * s + 2 * i + 1] = fmaf(high_bf16(pairs[2 * i + upper]), by.x, by.y);
            }
        }
        return out;
    }

    // Where the first four of a run lie, and how much further the other four.
    MEMBER int place(int chunk, int part, int run) const {
        int quarter = FORM == BYTES ? part : part % 2 * 2 + run;
        return chunk * 128 + quarter * 32 + t * (BY_16 ? 4 : 8);
    }
    static constexpr int APART = BY_16 ? 16 : 4;

    MEMBER void all() const {
        int warps = gridDim.x * (THREADS / WARP);
        i64 units = (i64)Base::tiles * chunks * 4;
#pragma unroll 1
        for (i64 unit = blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP; unit < units; unit += warps) {
            int part = unit % 4, chunk = unit / 4 % chunks, tile = unit / 4 / chunks;
            uint4 own = __ldg((const uint4*)(a.weights + unit * 512 + lane * 16));
#pragma unroll
            for (int upper = 0; upper < 2; upper++) {
                int row = tile * Base::ROWS + (FORM == BYTES ? 0 : part / 2 * 16) + 8 * upper + g;
                if (row >= a.n) continue;
                float factor = a.factors ? __ldg(a.factors + row) : 1.0f;
#pragma unroll
                for (int run = 0; run < RUNS; run++) {
                    Eight e = eight_of_codes(own, tile, chunk, part, run, upper, factor);
                    uint2 first = make_uint2(pack_bf16(e.v[0], e.v[1]), pack_bf16(e.v[2], e.v[3]));
                    uint2 second = make_uint2(pack_bf16(e.v[4], e.v[5]), pack_bf16(e.v[6], e.v[7]));
                    int at = place(chunk, part, run);
                    bf16* to = (bf16*)a.out + (i64)row * a.k + at;
                    if (BY_16) {
                        if (at < a.k) *(uint2*)to = first;
                        if (at + APART < a.k) *(uint2*)(to + APART) = second;
                    } else if (at < a.k) {
                        *(uint4*)to = make_uint4(first.x, first.y, second.x, second.y);
                    }
                }
            }
        }
    }

    // out f32 [m, k]: row ids[r] - first, times `by`, where there is one. Block r has row r; a warp's lanes of other rows
    // are idle.
    MEMBER void rows(const u32* ids, u32 first, float by) const {
        u32 id = ids[blockIdx.x] - first;
        if (id >= (u32)a.n) return;
        int tile = id / Base::ROWS, within = id % Base::ROWS, half = within / 16, upper = within / 8 % 2;
        if (g != within % 8) return;
        float factor = a.factors ? __ldg(a.factors + id) : 1.0f;
        constexpr int PARTS = FORM == BYTES ? 4 : 2;
#pragma unroll 1
        for (int i = threadIdx.x / WARP; i < chunks * PARTS; i += THREADS / WARP) {
            int chunk = i / PARTS, part = i % PARTS + (FORM == BYTES ? 0 : half * 2);
            uint4 own = __ldg((const uint4*)(a.weights + (((i64)tile * chunks + chunk) * 4 + part) * 512 + lane * 16));
#pragma unroll
            for (int run = 0; run < RUNS; run++) {
                Eight e = upper ? eight_of_codes(own, tile, chunk, part, run, 1, factor) : eight_of_codes(own, tile, chunk, part, run, 0, factor);
                int at = place(chunk, part, run);
                float* to = (float*)a.out + (i64)blockIdx.x * a.k + at;
                if (at < a.k) *(float4*)to = make_float4(e.v[0] * by, e.v[1] * by, e.v[2] * by, e.v[3] * by);
                if (at + APART < a.k) *(float4*)(to + APART) = make_float4(e.v[4] * by, e.v[5] * by, e.v[6] * by, e.v[7] * by);
            }
        }
    }
};

DEVICE float float8_scale(const StreamArgs& a, int row, int at) {
    float by = a.factors ? __ldg(a.factors + row) : 1.0f;
    return a.scales ? by * __ldg((const float*)a.scales + (i64)(row / 128) * ((a.k + 127) / 128) + at / 128) : by;
}

extern "C" __global__ void __launch_bounds__(THREADS) dequantize_fp8(const __grid_constant__ StreamArgs a) {
    release_next();
    wait_for_previous();
    i64 pieces = (i64)a.n * a.k / 16;
#pragma unroll 1
    for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < pieces; i += (i64)gridDim.x * THREADS) {
        int row = i * 16 / a.k, at = i * 16 % a.k;
        float by = float8_scale(a, row, at);
        uint4 own = __ldg((const uint4*)(a.weights + i * 16));
#pragma unroll
        for (int half = 0; half < 2; half++) {
            Eight e = half ? eight_of(own.z, own.w, by) : eight_of(own.x, own.y, by);
            *(uint4*)((bf16*)a.out + i * 16 + half * 8) = make_uint4(pack_bf16(e.v[0], e.v[1]), pack_bf16(e.v[2], e.v[3]), pack_bf16(e.v[4], e.v[5]), pack_bf16(e.v[6], e.v[7]));
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) embed_run_fp8(const __grid_constant__ StreamArgs a, const u32* ids, u32 first, float by) {
    release_next();
    wait_for_previous();
    u32 id = ids[blockIdx.x] - first;
    if (id >= (u32)a.n) return;
    for (int at = threadIdx.x; at < a.k; at += THREADS)
        ((float*)a.out)[(i64)blockIdx.x * a.k + at] = e4m3_to_float(a.weights[(i64)id * a.k + at]) * float8_scale(a, id, at) * by;
}

// Plain outputs among coded ones.
extern "C" __global__ void __launch_bounds__(THREADS) dequantize_bf16(const __grid_constant__ StreamArgs a) {
    release_next();
    wait_for_previous();
    i64 pieces = (i64)a.n * a.k / 8;
#pragma unroll 1
    for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < pieces; i += (i64)gridDim.x * THREADS)
        ((uint4*)a.out)[i] = __ldg((const uint4*)a.weights + i);
}

extern "C" __global__ void __launch_bounds__(THREADS) embed_run_bf16(const __grid_constant__ StreamArgs a, const u32* ids, u32 first, float by) {
    release_next();
    wait_for_previous();
    u32 id = ids[blockIdx.x] - first;
    if (id >= (u32)a.n) return;
    for (int at = threadIdx.x; at < a.k; at += THREADS)
        ((float*)a.out)[(i64)blockIdx.x * a.k + at] = to_float(((const bf16*)a.weights)[(i64)id * a.k + at]) * by;
}

#define DECODE_KERNELS(NAME, FORM, AFFINE, GROUP)                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS) dequantize_##NAME(const __grid_constant__ StreamArgs args) { \
        release_next();                                                                                                \
        wait_for_previous();                                                                                           \
        Decode<FORM, AFFINE, GROUP>(args).all();                                                                       \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        embed_run_##NAME(const __grid_constant__ StreamArgs args, const u32* ids, u32 first, float by) {               \
        release_next();                                                                                                \
        wait_for_previous();                                                                                           \
        Decode<FORM, AFFINE, GROUP>(args).rows(ids, first, by);                                                        \
    }

DECODE_KERNELS(int8, BYTES, false, 32)
DECODE_KERNELS(int8_affine, BYTES, true, 32)
DECODE_KERNELS(int8_by16, BYTES, false, 16)
DECODE_KERNELS(int4, NIBBLES, false, 32)
DECODE_KERNELS(int4_affine, NIBBLES, true, 32)
DECODE_KERNELS(int4_affine_by16, NIBBLES, true, 16)
DECODE_KERNELS(table, TABLE, false, 32)
DECODE_KERNELS(table_by16, TABLE, false, 16)
