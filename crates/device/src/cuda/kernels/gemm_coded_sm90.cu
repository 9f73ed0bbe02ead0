// out[rows, n] = x[rows, k] * w[n, k]^T (+ bias) with coded weights on Hopper, for rows that are too many to be streamed and
// too few for the weights to be written out first.
//
// As gemm90_slices of gemm_sm90.cu: a cluster has 128 weight rows by N tokens, each of its blocks a slice of k, and the sums
// of slices meet in shared memory. The weights are the left side of the warpgroup product and come from registers: a warp
// reads its 16 bytes a lane as they were packed for the streaming kernels (weight/codes.rs) and makes bf16 fragments of
// them, half a chunk of 128 ahead of the tensor cores. An input's place inside 32 differs there, so x comes with its
// 4-byte words of every 64 bytes turned around (`turn_rows`).
//
// A weight is code times scale (plus minimum), rounded to bf16 once; the factor of an output multiplies its sum.
//   grid       (n / 128 rounded up) * slices, rows / N rounded up; clusters of `slices` (1, 2, 4 or 8) along x
//   threads    288
//   shared     1024 + stages * (N * 256 + weights + 2048 + 16) bytes, weights: 8192 of nibbles, 16384 of bytes
//   x_map      x, bf16, turned, N rows by 64, 128-byte swizzle; k is a multiple of 32
#include "hopper.cuh"
#include "linear_stream.cuh"

#define METHOD __device__ __forceinline__
#define GROUPS 2
#define ROWS 128

// StreamArgs as of the streaming kernels; x is the map's alone.
template <int FORM, bool AFFINE, int N, int STAGES> struct Coded {
    static constexpr int TILE_ROWS = FORM == BYTES ? 16 : 32, TILES = ROWS / TILE_ROWS;
    static constexpr int X_BYTES = N * 256, W_BYTES = TILES * 2048, S_BYTES = 2048, BYTES_ALL = X_BYTES + W_BYTES + S_BYTES;
    // Bytes of scales (and minimums) that belong to eight rows of every eighth of a tile, and to one group.
    static constexpr int LANE_BYTES = TILE_ROWS / 8 * 2 * (AFFINE ? 2 : 1);
    static constexpr int STRIDE = ROWS + 4;
    static_assert(N * STRIDE * 4 <= STAGES * BYTES_ALL, "the sums lie where the ring was");

    const StreamArgs& a;
    u32 memory, full, empty;
    i32 warp, lane, group, slice, first_row, token0, chunks, first, steps, scale_bytes;

    METHOD Coded(const StreamArgs& args, u32 memory) : a(args), memory(memory) {
        full = memory + STAGES * BYTES_ALL, empty = full + STAGES * 8;
        warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = warp / 4;
        slice = blockIdx.x % a.slices, first_row = blockIdx.x / a.slices * ROWS, token0 = blockIdx.y * N;
        chunks = (a.k + 127) / 128, first = slice * chunks / a.slices, steps = (slice + 1) * chunks / a.slices - first;
        scale_bytes = 4 / a.group_quarters * 8 * LANE_BYTES;
    }

    METHOD void init() const {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full + i * 8, 1);
            barrier_init(empty + i * 8, GROUPS * 128);
        }
        barrier_init_done();
    }

    METHOD void load_weights(i32 stage, i32 step) const {
        u32 at = memory + stage * BYTES_ALL + X_BYTES, barrier = full + stage * 8;
        i32 tile = first_row / TILE_ROWS, tiles = min(TILES, (a.n + TILE_ROWS - 1) / TILE_ROWS - tile);
        barrier_expect(barrier, X_BYTES + tiles * (2048 + scale_bytes));
        for (i32 i = 0; i < tiles; i++) {
            i64 chunk = (i64)(tile + i) * chunks + first + step;
            copy_bytes(at + i * 2048, a.weights + chunk * 2048, 2048, barrier);
            copy_bytes(at + W_BYTES + i * scale_bytes, a.scales + chunk * scale_bytes, scale_bytes, barrier);
        }
    }
    METHOD void load_x(const TensorMap* x_map, i32 stage, i32 step) const {
        u32 at = memory + stage * BYTES_ALL, barrier = full + stage * 8;
        copy_box(at, x_map, (first + step) * 128, token0, barrier);
        copy_box(at + N * 128, x_map, (first + step) * 128 + 64, token0, barrier);
    }
    METHOD void load(const TensorMap* x_map) const {
        i32 ahead = min(STAGES, steps);
        for (i32 step = 0; step < ahead; step++) load_weights(step, step);
        wait_for_previous();
        i32 stage = 0;
        u32 phase = 1;
        for (i32 step = 0; step < steps; step++) {
            if (step >= ahead) {
                barrier_wait(empty + stage * 8, phase);
                load_weights(stage, step);
            }
            load_x(x_map, stage, step);
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }
    }

    METHOD static u32 word(const uint4& v, int index) { return index == 0 ? v.x : index == 1 ? v.y : index == 2 ? v.z : v.w; }

    // Scales and minimums of the warp's rows g and g + 8 in one group.
    struct Scales {
        float by[2], least[2];
    };
    METHOD Scales scales_of(u32 stage_scales, int place) const {
        i32 tile = group * (64 / TILE_ROWS) + (FORM == BYTES ? warp % 4 : warp % 4 / 2), sixteenth = FORM == BYTES ? 0 : warp % 2;
        u32 from = stage_scales + tile * scale_bytes + (place * 8 + lane / 4) * LANE_BYTES + sixteenth * (AFFINE ? 8 : 4);
        Scales s;
        u32 words[2];
        if (AFFINE) {
            asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(from) : "memory");
        } else {
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(words[0]) : "r"(from) : "memory");
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            s.by[i] = half_to_float(AFFINE ? words[i] : words[0] >> (16 * i));
            s.least[i] = AFFINE ? half_to_float(words[i] >> 16) : 0.0f;
        }
        return s;
    }

    // Fragments of instruction `s` of quarter `quarter` of a chunk.
    METHOD void fragments(u32 (&out)[4], const uint4& own, int quarter, int s, const Scales& scales, u32 above) const {
        if (FORM == BYTES) {
            u32 low = word(own, 2 * s), high = word(own, 2 * s + 1);
            out[0] = bytes_to_bf16(low, above), out[2] = bytes_to_bf16(low >> 8, above);
            out[1] = bytes_to_bf16(high, above), out[3] = bytes_to_bf16(high >> 8, above);
        } else if (FORM == TABLE) {
            look_up(a.levels, word(own, quarter % 2 * 2 + s), out);
        } else {
            u32 nibbles = word(own, quarter % 2 * 2 + s);
#pragma unroll
            for (int j = 0; j < 4; j++) out[j] = nibbles_to_bf16(nibbles >> (4 * j), above, a.offset);
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int row = j % 2;
            if (AFFINE) {
                float low = fmaf(low_bf16(out[j]), scales.by[row], scales.least[row]);
                out[j] = pack_bf16(low, fmaf(high_bf16(out[j]), scales.by[row], scales.least[row]));
            } else {
                // The scale as two bf16, so that it need not be rounded to one. Made here and not once a group: the
                // compiler would wait for the products after each of them.
                u32 high = pack_bf16(scales.by[row], scales.by[row]);
                float rest = scales.by[row] - low_bf16(high);
                out[j] = fma_bf16x2(out[j], high, fma_bf16x2(out[j], pack_bf16(rest, rest), 0x80008000u));
            }
        }
    }

    // Half a chunk, two quarters: four products.
    METHOD void half(u32 (&a_regs)[4][4], u32 stage, int which, u32 above) const {
        u32 codes = stage + X_BYTES, scales = codes + W_BYTES;
        u32 own_at = FORM == BYTES ? codes + (group * 4 + warp % 4) * 2048 + which * 1024
                                   : codes + (group * 2 + warp % 4 / 2) * 2048 + warp % 2 * 1024 + which * 512;
        uint4 own;
        Scales by;
        if (FORM != BYTES) own = load_shared_16(own_at + lane * 16);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int quarter = which * 2 + i;
            if (FORM == BYTES) own = load_shared_16(own_at + i * 512 + lane * 16);
            if (i == 0 || a.group_quarters == 1) by = scales_of(scales, quarter / a.group_quarters);
#pragma unroll
            for (int s = 0; s < 2; s++) fragments(a_regs[i * 2 + s], own, quarter, s, by, above);
        }
    }
    METHOD static void products(float (&sums)[N / 2], u32 (&a_regs)[4][4], u32 stage, int which, bool keep) {
        u64 b = k_major_128(stage + which * N * 128);
#pragma unroll
        for (int i = 0; i < 4; i++) pin(a_regs[i]);
        group_fence();
#pragma unroll
        for (int i = 0; i < 4; i++) Product<N>::template bf16_registers<0>(sums, a_regs[i], advance(b, i * 32), keep || i > 0);
        group_commit();
    }

    METHOD void multiply(float (&sums)[N / 2]) const {
        u32 a0[4][4], a1[4][4], previous = 0, phase = 0;
        // BF16_128S, by a way that does not show: n is positive.
        u32 above = BF16_128S + (u32)(a.n >> 31);
        i32 stage = 0;
        for (i32 step = 0; step < steps; step++) {
            u32 at = memory + stage * BYTES_ALL;
            barrier_wait(full + stage * 8, phase);
            // The products that read a0 last are done.
            group_wait<1>();
            half(a0, at, 0, above);
            products(sums, a0, at, 0, step > 0);
            group_wait<1>();
            // Every lane for itself: it has read codes and scales of the stage before.
            if (step > 0) barrier_arrive(previous);
            half(a1, at, 1, above);
            products(sums, a1, at, 1, true);
            previous = empty + stage * 8;
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }
        group_wait<0>();
        pin(sums);
    }

    // Slices are added in their order; this block stores its part of the weight rows.
    METHOD void add_slices() const {
        i32 rows = min(ROWS, a.n - first_row), tokens = min(N, a.m - token0);
        i32 share = ROWS / 4 / a.slices, row = (slice * share + (i32)threadIdx.x % share) * 4, valid = rows - row;
        if (valid <= 0) return;
        float factor[4], bias[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            factor[i] = i < valid ? a.factors[first_row + row + i] : 0.0f;
            bias[i] = a.bias && i < valid ? a.bias[first_row + row + i] : 0.0f;
        }
        for (i32 token = threadIdx.x / share; token < tokens; token += GROUPS * 128 / share) {
            u32 from = memory + (token * STRIDE + row) * 4;
            float4 total = load_cluster(cluster_address(from, 0));
            for (i32 s = 1; s < a.slices; s++) {
                float4 more = load_cluster(cluster_address(from, s));
                total.x += more.x, total.y += more.y, total.z += more.z, total.w += more.w;
            }
            float v[4] = {total.x, total.y, total.z, total.w};
#pragma unroll
            for (int i = 0; i < 4; i++) v[i] = fmaf(v[i], factor[i], bias[i]);
            i64 at = (i64)(token0 + token) * a.out_stride + first_row + row;
            if (valid >= 4 && a.out_stride % 4 == 0 && ((u64)a.out & 15) == 0) {
                if (a.finish == FINISH_F32) *(float4*)((float*)a.out + at) = make_float4(v[0], v[1], v[2], v[3]);
                else *(uint2*)((bf16*)a.out + at) = make_uint2(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]));
                continue;
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (i >= valid) continue;
                if (a.finish == FINISH_F32) ((float*)a.out)[at + i] = v[i];
                else ((bf16*)a.out)[at + i] = from_float<bf16>(v[i]);
            }
        }
    }

    METHOD void run(const TensorMap* x_map, float* shared) const {
        release_next();
        if (threadIdx.x == 0) {
            prefetch_map(x_map);
            init();
        }
        __syncthreads();
        if (group == GROUPS) {
            if (elect_one()) load(x_map);
            __syncwarp();
            if (a.slices > 1) {
                cluster_sync();
                cluster_leave();
            }
            return;
        }
        wait_for_previous();
        float sums[N / 2];
#pragma unroll
        for (int i = 0; i < N / 2; i++) sums[i] = 0.0f;
        pin(sums);
        multiply(sums);
        // All of the ring has been read: the sums go there.
        named_barrier(1, GROUPS * 128);
        float* to = shared + lane % 4 * 2 * STRIDE + warp * 16 + lane / 4;
#pragma unroll
        for (int j = 0; j < N / 8; j++) {
            float* at = to + j * 8 * STRIDE;
            at[0] = sums[j * 4], at[STRIDE] = sums[j * 4 + 1];
            at[8] = sums[j * 4 + 2], at[STRIDE + 8] = sums[j * 4 + 3];
        }
        if (a.slices > 1) cluster_sync();
        else named_barrier(1, GROUPS * 128);
        add_slices();
        // Others may still read this block's sums.
        if (a.slices > 1) cluster_leave();
    }
};

#define CODED_KERNEL(NAME, FORM, AFFINE, N, STAGES, BLOCKS)                                                            \
    extern "C" __global__ void __launch_bounds__(GROUPS * 128 + 32, BLOCKS)                                            \
        NAME(const __grid_constant__ TensorMap x_map, const __grid_constant__ StreamArgs args) {                      \
        extern __shared__ u8 raw[];                                                                                    \
        float* shared = (float*)(((u64)raw + 1023) / 1024 * 1024);                                                     \
        Coded<FORM, AFFINE, N, STAGES>(args, shared_address(shared)).run(&x_map, shared);                              \
    }

CODED_KERNEL(gemm90_int4_n64, NIBBLES, false, 64, 4, 2)
CODED_KERNEL(gemm90_int4_n128, NIBBLES, false, 128, 5, 1)
CODED_KERNEL(gemm90_int4_affine_n64, NIBBLES, true, 64, 4, 2)
CODED_KERNEL(gemm90_int4_affine_n128, NIBBLES, true, 128, 5, 1)
CODED_KERNEL(gemm90_int8_n64, BYTES, false, 64, 3, 2)
CODED_KERNEL(gemm90_int8_n128, BYTES, false, 128, 4, 1)
CODED_KERNEL(gemm90_int8_affine_n64, BYTES, true, 64, 3, 2)
CODED_KERNEL(gemm90_int8_affine_n128, BYTES, true, 128, 4, 1)
CODED_KERNEL(gemm90_table_n64, TABLE, false, 64, 4, 2)
CODED_KERNEL(gemm90_table_n128, TABLE, false, 128, 5, 1)

// The 4 x 4 words of every 32 values turned around. One thread has 32 values.
extern "C" __global__ void __launch_bounds__(256) turn_rows(uint4* out, const uint4* x, i64 count) {
    release_next();
    wait_for_previous();
    i64 at = (i64)blockIdx.x * 256 + threadIdx.x;
    if (at >= count) return;
    uint4 v0 = x[at * 4], v1 = x[at * 4 + 1], v2 = x[at * 4 + 2], v3 = x[at * 4 + 3];
    out[at * 4] = make_uint4(v0.x, v1.x, v2.x, v3.x);
    out[at * 4 + 1] = make_uint4(v0.y, v1.y, v2.y, v3.y);
    out[at * 4 + 2] = make_uint4(v0.z, v1.z, v2.z, v3.z);
    out[at * 4 + 3] = make_uint4(v0.w, v1.w, v2.w, v3.w);
}
