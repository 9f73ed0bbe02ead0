// For few rows: a block computes one slice of one tile, a cluster all slices of it, and the sums meet in shared memory.
// More blocks than tiles keep the memory busy, and nothing is written but the result. See gemm_sm90.cu.
#pragma once
#include "gemm_sm90.cuh"

// Floats between tokens where the sums of a tile meet: 128 and a gap, so that writing meets no bank twice.
#define MEET_ROW 132

// This block's part of the weight rows, added slice after slice and stored.
template <bool FP8> DEVICE void add_slices(const Gemm90Args& args, const Tile& tile, i32 slice, u32 meet) {
    i32 share = 32 / args.slices, quad = slice * share + (i32)threadIdx.x % share, n = tile.n_first + quad * 4;
    Finish<FP8> finish(args, tile, n);
    if (finish.valid <= 0) return;
    for (i32 token = threadIdx.x / share; token < tile.tokens; token += 256 / share) {
        u32 from = meet + (token * MEET_ROW + quad * 4) * 4;
        float4 each[8];
#pragma unroll
        for (int s = 0; s < 8; s++)
            if (s < args.slices) each[s] = load_cluster(cluster_address(from, s));
        float4 total = each[0];
#pragma unroll
        for (int s = 1; s < 8; s++)
            if (s < args.slices) {
                total.x += each[s].x, total.y += each[s].y;
                total.z += each[s].z, total.w += each[s].w;
            }
        finish.store(args, tile.token + token, n, total);
    }
}

template <int N, int STAGES, bool BIG, bool FP8>
DEVICE void gemm90_slices(const TensorMap* w_map, const TensorMap* x_map, const Gemm90Args& args) {
    typedef Ring<2, N, STAGES, 1, FP8> R;
    const i32 ROWS = 128;
    static_assert(N * MEET_ROW * 4 <= STAGES * R::BYTES, "the sums lie where the ring was");
    extern __shared__ u8 raw[];
    u8* shared = (u8*)(((u64)raw + 1023) / 1024 * 1024);
    u32* starts = (u32*)(shared + STAGES * R::BYTES);
    u32 memory = shared_address(shared), barriers = shared_address(starts + MAX_EXPERTS + 4);

    i32 warp = threadIdx.x / WARP, group = warp / 4, slice = blockIdx.x % args.slices, number = blockIdx.x / args.slices;
    release_next();
    if (threadIdx.x == 0) R(memory, barriers, 0).init();
    Schedule schedule = Schedule::dense<ROWS, N, R::STEP_K>(args);
    if (args.offsets) {
        // Which experts there are is the kernel before's to say.
        wait_for_previous();
        if (warp == 0) count_tiles<N>(args, schedule.row_tiles, starts);
    }
    __syncthreads();
    if (args.offsets && number >= starts[args.experts]) return;
    Tile tile = locate<ROWS, N, 1>(args, schedule, starts, number, 0);
    i32 first = schedule.bound(args, slice), steps = schedule.bound(args, slice + 1) - first;

    if (group == 2) {
        if (BIG) give_registers<24>();
        if (warp == 8 && elect_one()) {
            R ring(memory, barriers, 1);
            // Weights do not depend on the kernel before: fill the ring with them, then wait for x.
            i32 ahead = min(steps, STAGES);
            for (i32 step = 0; step < ahead; step++) {
                ring.load_weights(w_map, first + step, tile.w_row);
                ring.advance_stage();
            }
            ring = R(memory, barriers, 1);
            wait_for_previous();
            for (i32 step = 0; step < steps; step++) {
                if (step >= ahead) {
                    barrier_wait(ring.empty + ring.stage * 8, ring.phase);
                    ring.load_weights(w_map, first + step, tile.w_row);
                }
                ring.load_tokens(x_map, first + step, tile.token, 0);
                ring.advance_stage();
            }
        }
        __syncwarp();
        if (args.slices > 1) {
            cluster_sync();
            cluster_leave();
        }
        return;
    }

    if (BIG) take_registers<240>();
    wait_for_previous();
    R ring(memory, barriers, 0);
    float sums[N / 2], products[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) sums[i] = products[i] = 0.0f;
    pin(sums);
    const float* scales = FP8 ? block_scales(args, tile, schedule.steps) : nullptr;
    ring.slice(sums, products, group, steps, scales ? scales + first : nullptr);

    // Both warpgroups have read all of the ring: the sums go there, token by token.
    named_barrier(1, 256);
    i32 lane = threadIdx.x % WARP;
    float* to = (float*)shared + lane % 4 * 2 * MEET_ROW + warp * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        if (j * 8 >= tile.tokens) continue;
        to[j * 8 * MEET_ROW] = sums[j * 4];
        to[(j * 8 + 1) * MEET_ROW] = sums[j * 4 + 1];
        to[j * 8 * MEET_ROW + 8] = sums[j * 4 + 2];
        to[(j * 8 + 1) * MEET_ROW + 8] = sums[j * 4 + 3];
    }
    if (args.slices > 1) cluster_sync();
    else named_barrier(1, 256);
    add_slices<FP8>(args, tile, slice, memory);
    // Others may still read this block's sums.
    if (args.slices > 1) cluster_leave();
}

#define SLICES_KERNEL(NAME, N, STAGES, BIG, FP8)                                                                       \
    extern "C" __global__ void __launch_bounds__(256 + (BIG ? 128 : 32), BIG ? 1 : 2)                                  \
        NAME(const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map,                         \
             const __grid_constant__ Gemm90Args args) {                                                                \
        gemm90_slices<N, STAGES, BIG, FP8>(&w_map, &x_map, args);                                                      \
    }
