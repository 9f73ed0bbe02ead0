// For few rows: the weights are dealt out in strips, and a cluster computes a strip, each of its blocks one slice of k.
// Every multiprocessor has one block with the same number of bytes to read, and room for a block of the kernel after.
// The sums of slices meet in shared memory; nothing is written but the result. See gemm_sm90.cu.
#pragma once
#include "gated.cuh"
#include "gemm_sm90.cuh"

// The sums of one tile of a strip, token by token. A gap, so that writing meets no bank twice.
template <int GROUPS, int N> struct Meet {
    static constexpr int ROWS = GROUPS * 64, STRIDE = ROWS + 4, FLOATS = N * STRIDE;
};

// This block's part of every tile's weight rows, added slice after slice and stored. Sums of other blocks are far away: a
// thread asks for those of all slices, or where it has many sums for two slices of five, before it waits for the first.
template <int GROUPS, int N, bool FP8>
DEVICE void add_slices(const Gemm90Args& args, i32 first_row, i32 rows, i32 token0, i32 slice, u32 memory) {
    typedef Meet<GROUPS, N> M;
    constexpr int ITEMS = N < 64 ? 1 : 5, SLICES = N < 64 ? 8 : 2;
    i32 share = M::ROWS / 4 / args.slices, quad = slice * share + (i32)threadIdx.x % share;
    i32 tiles = (rows + M::ROWS - 1) / M::ROWS, step = GROUPS * 128 / share, tokens = min(N, args.rows - token0);
    i32 items = tiles * tokens;
    for (i32 first = threadIdx.x / share; first < items; first += step * ITEMS) {
        i32 row[ITEMS], token[ITEMS];
        u32 from[ITEMS];
        float4 total[ITEMS], each[SLICES][ITEMS];
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            i32 item = min(first + i * step, items - 1), tile = item / tokens;
            token[i] = item % tokens, row[i] = tile * M::ROWS + quad * 4;
            from[i] = memory + (tile * M::FLOATS + token[i] * M::STRIDE + quad * 4) * 4;
        }
#pragma unroll
        for (int base = 0; base < 8; base += SLICES) {
            if (base >= args.slices) break;
#pragma unroll
            for (int s = 0; s < SLICES; s++)
#pragma unroll
                for (int i = 0; i < ITEMS; i++)
                    if (base + s < args.slices) each[s][i] = load_cluster(cluster_address(from[i], base + s));
#pragma unroll
            for (int s = 0; s < SLICES; s++)
#pragma unroll
                for (int i = 0; i < ITEMS; i++) {
                    if (base + s == 0) total[i] = each[s][i];
                    else if (base + s < args.slices) total[i] = plus(total[i], each[s][i]);
                }
        }
#pragma unroll
        for (int i = 0; i < ITEMS; i++)
            if (first + i * step < items && row[i] < rows)
                Finish<FP8>(args, 0, first_row + row[i]).store(args, token0 + token[i], first_row + row[i], total[i]);
    }
}

DEVICE float as_stored(float value) { return to_float(from_float<bf16>(value)); }

// Of one slice, where boxes of gates and of ups take turns: what the product and then the gate's kernel would store.
template <int GROUPS, int N>
DEVICE void store_gated(const Gemm90Args& args, i32 first_row, i32 rows, i32 token0, const float* sums) {
    typedef Meet<GROUPS, N> M;
    constexpr int QUADS = M::ROWS / 8;
    i32 width = args.n / 2, tokens = min(N, args.rows - token0), quad = threadIdx.x % QUADS, row = quad / 16 * 128;
    for (; row < rows; row += M::ROWS, sums += M::FLOATS) {
        i32 column = (first_row + row) / 2 + quad % 16 * 4;
        float4 gate_bias = make_float4(0.0f, 0.0f, 0.0f, 0.0f), up_bias = gate_bias;
        if (args.bias) gate_bias = load_four(args.bias + column, 4), up_bias = load_four(args.bias + width + column, 4);
        for (i32 token = threadIdx.x / QUADS; token < tokens; token += 16) {
            const float* at = sums + token * M::STRIDE + quad / 16 * 128 + quad % 16 * 4;
            float4 gate = *(const float4*)at, up = *(const float4*)(at + 64);
            if (args.bias) gate = plus(gate, gate_bias), up = plus(up, up_bias);
            auto one = [&](float g, float u) {
                return gated<false, false>(args.activation, args.alpha, args.limit, as_stored(g), as_stored(u));
            };
            float4 y = make_float4(one(gate.x, up.x), one(gate.y, up.y), one(gate.z, up.z), one(gate.w, up.w));
            store_four(args.out, false, (i64)(token0 + token) * width + column, y, 4, true);
        }
    }
}

// TILES: of 64 * GROUPS rows, at most, in a strip.
template <int GROUPS, int N, int STAGES, int TILES, bool FP8>
DEVICE void gemm90_slices(const TensorMap* w_map, const TensorMap* x_map, const Gemm90Args& args) {
    typedef Ring<GROUPS, N, STAGES, FP8> R;
    typedef Meet<GROUPS, N> M;
    static_assert(TILES * M::FLOATS * 4 <= STAGES * R::BYTES, "the sums lie where the ring was");
    extern __shared__ u8 raw[];
    u8* shared = (u8*)(((u64)raw + 1023) / 1024 * 1024);
    u32 memory = shared_address(shared), barriers = memory + STAGES * R::BYTES;

    i32 warp = threadIdx.x / WARP, group = warp / 4, slice = blockIdx.x % args.slices;
    i32 token0 = blockIdx.y * N, tokens = min(N, args.rows - token0);
    i32 first_row = (i32)blockIdx.x / args.slices * args.height, rows = min(args.height, args.n - first_row);
    i32 tiles = (rows + M::ROWS - 1) / M::ROWS, all_steps = (args.k + R::STEP_K - 1) / R::STEP_K;
    i32 first = slice * all_steps / args.slices, steps = (slice + 1) * all_steps / args.slices - first;
    release_next();
    if (threadIdx.x == 0) R(memory, barriers, 0).init();
    __syncthreads();

    if (group == GROUPS) {
        if (elect_one()) {
            u64 policy = evict_first();
            i32 apart = args.activation == NOT_GATED ? 0 : args.n / 2;
            // Weights do not depend on the kernel before: fill the ring with them, then wait for x.
            R ring(memory, barriers, 1), ahead = ring;
            i32 loaded = 0, count = 0;
            for (i32 tile = 0; tile < tiles; tile++) {
                i32 row = first_row + tile * M::ROWS, boxes = min(GROUPS, (rows - tile * M::ROWS + 63) / 64);
                for (i32 step = first; step < first + steps && loaded < STAGES; step++, loaded++) {
                    ahead.load_weights_once(w_map, step, row, apart, boxes, policy);
                    ahead.advance_stage();
                }
            }
            wait_for_previous();
            for (i32 tile = 0; tile < tiles; tile++) {
                i32 row = first_row + tile * M::ROWS, boxes = min(GROUPS, (rows - tile * M::ROWS + 63) / 64);
                for (i32 step = first; step < first + steps; step++, count++) {
                    if (count >= loaded) {
                        barrier_wait(ring.empty + ring.stage * 8, ring.phase);
                        ring.load_weights_once(w_map, step, row, apart, boxes, policy);
                    }
                    ring.load_tokens(x_map, step, token0);
                    ring.advance_stage();
                }
            }
        }
        __syncwarp();
        if (args.slices > 1) {
            cluster_sync();
            cluster_leave();
        }
        return;
    }

    wait_for_previous();
    R ring(memory, barriers, 0);
    float sums[TILES][N / 2], products[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) products[i] = 0.0f;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
        for (int i = 0; i < N / 2; i++) sums[tile][i] = 0.0f;
        // Not later, in the middle of the products.
        pin(sums[tile]);
    }
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        if (tile >= tiles) continue;
        const float* scales = nullptr;
        if (FP8 && args.block_scales)
            scales = args.w_scales + (first_row + tile * M::ROWS + group * 64) / 128 * all_steps + first;
        ring.slice(sums[tile], products, group, steps, scales);
    }

    // All of the ring has been read: the sums go there.
    named_barrier(1, GROUPS * 128);
    i32 lane = threadIdx.x % WARP;
    float* to = (float*)shared + lane % 4 * 2 * M::STRIDE + warp * 16 + lane / 4;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        if (tile >= tiles) continue;
#pragma unroll
        for (int j = 0; j < N / 8; j++) {
            if (j * 8 >= tokens) continue;
            float* at = to + tile * M::FLOATS + j * 8 * M::STRIDE;
            at[0] = sums[tile][j * 4];
            at[M::STRIDE] = sums[tile][j * 4 + 1];
            at[8] = sums[tile][j * 4 + 2];
            at[M::STRIDE + 8] = sums[tile][j * 4 + 3];
        }
    }
    if (args.slices > 1) cluster_sync();
    else named_barrier(1, GROUPS * 128);
    if (!FP8 && GROUPS > 1 && N >= 16 && N <= 96 && args.activation != NOT_GATED)
        store_gated<GROUPS, N>(args, first_row, rows, token0, (const float*)shared);
    else add_slices<GROUPS, N, FP8>(args, first_row, rows, token0, slice, memory);
    // Others may still read this block's sums.
    if (args.slices > 1) cluster_leave();
}

#define SLICES_KERNEL(NAME, GROUPS, N, STAGES, TILES, BLOCKS, FP8)                                                     \
    extern "C" __global__ void __launch_bounds__(GROUPS * 128 + 32, BLOCKS)                                            \
        NAME(const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map,                         \
             const __grid_constant__ Gemm90Args args) {                                                                \
        gemm90_slices<GROUPS, N, STAGES, TILES, FP8>(&w_map, &x_map, args);                                            \
    }
