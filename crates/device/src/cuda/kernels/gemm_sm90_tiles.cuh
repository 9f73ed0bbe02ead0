// For many rows: blocks go through whole tiles, all slices of each; sums of slices stay in registers. See gemm_sm90.cu.
#pragma once
#include "gemm_sm90.cuh"

// Floats between tokens in a warp's staging area: 16 and a gap, so that neither side meets a bank twice.
#define STAGE_ROW 20
#define STAGE_FLOATS (8 * STAGE_ROW)

// A warp's 16 weight rows by N tokens, turned around through `stage` so that neighbours along n are stored together.
template <int N, bool FP8>
DEVICE void store_tile(const Gemm90Args& args, const Tile& tile, i32 row_in_tile, const float (&sums)[N / 2],
                       float* stage) {
    i32 lane = threadIdx.x % WARP, n = tile.n_first + row_in_tile + lane % 4 * 4;
    Finish<FP8> finish(args, tile.expert, n);
    float* to = stage + lane % 4 * 2 * STAGE_ROW + lane / 4;
    const float* from = stage + lane / 4 * STAGE_ROW + lane % 4 * 4;
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        if (j * 8 >= tile.tokens) continue;
        to[0] = sums[j * 4];
        to[STAGE_ROW] = sums[j * 4 + 1];
        to[8] = sums[j * 4 + 2];
        to[STAGE_ROW + 8] = sums[j * 4 + 3];
        __syncwarp();
        float4 v = *(const float4*)from;
        __syncwarp();
        i32 token = j * 8 + lane / 4;
        if (token < tile.tokens && finish.valid > 0) finish.store(args, tile.token + token, n, v);
    }
}

template <int GROUPS, int N, int STAGES, bool BIG, bool FP8>
DEVICE void gemm90_tiles(const TensorMap* w_map, const TensorMap* x_map, const Gemm90Args& args) {
    typedef Ring<GROUPS, N, STAGES, FP8> R;
    const i32 ROWS = GROUPS * 64;
    extern __shared__ u8 raw[];
    u8* shared = (u8*)(((u64)raw + 1023) / 1024 * 1024);
    float* staging = (float*)(shared + STAGES * R::BYTES);
    u32* starts = (u32*)(staging + GROUPS * 4 * STAGE_FLOATS);
    u32 memory = shared_address(shared), barriers = shared_address(starts + MAX_EXPERTS + 4);

    i32 warp = threadIdx.x / WARP, group = warp / 4;
    release_next();
    if (threadIdx.x == 0) {
        prefetch_map(w_map);
        prefetch_map(x_map);
        R(memory, barriers, 0).init();
    }
    Schedule schedule = Schedule::dense<ROWS, N, R::STEP_K>(args);
    if (args.offsets) {
        // Which experts there are is the kernel before's to say.
        wait_for_previous();
        if (warp == 0) count_tiles<N>(args, schedule.row_tiles, starts);
    }
    __syncthreads();
    i32 tiles = args.offsets ? starts[args.experts] : schedule.tiles;
    i32 first_tile = blockIdx.x, stride = gridDim.x;

    if (group == GROUPS) {
        if (BIG) give_registers<24>();
        if (warp == GROUPS * 4 && elect_one()) {
            R ring(memory, barriers, 1);
            // Weights do not depend on the kernel before: fill the ring with them, then wait for x.
            i32 ahead = 0;
            if (!args.offsets && first_tile < tiles) {
                Tile tile = locate<ROWS, N>(args, schedule, starts, first_tile);
                for (; ahead < min(STAGES, schedule.steps); ahead++) {
                    ring.load_weights(w_map, ahead, tile.w_row);
                    ring.advance_stage();
                }
                ring = R(memory, barriers, 1);
            }
            wait_for_previous();
            for (i32 number = first_tile; number < tiles; number += stride) {
                Tile tile = locate<ROWS, N>(args, schedule, starts, number);
                for (i32 step = 0; step < schedule.steps; step++, ahead--) {
                    if (ahead <= 0) {
                        barrier_wait(ring.empty + ring.stage * 8, ring.phase);
                        ring.load_weights(w_map, step, tile.w_row);
                    }
                    ring.load_tokens(x_map, step, tile.token);
                    ring.advance_stage();
                }
            }
        }
        return;
    }

    if (BIG) take_registers<240>();
    wait_for_previous();
    R ring(memory, barriers, 0);
    float sums[N / 2], products[N / 2], total[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) sums[i] = products[i] = total[i] = 0.0f;
    for (i32 number = first_tile; number < tiles; number += stride) {
        Tile tile = locate<ROWS, N>(args, schedule, starts, number);
        const float* scales = FP8 ? block_scales(args, tile, schedule.steps) : nullptr;
        for (i32 slice = 0; slice < args.slices; slice++) {
            i32 first = schedule.bound(args, slice), end = schedule.bound(args, slice + 1);
            ring.slice(sums, products, group, end - first, scales ? scales + first : nullptr);
#pragma unroll
            for (int i = 0; i < N / 2; i++) total[i] = slice == 0 ? sums[i] : total[i] + sums[i];
        }
        store_tile<N, FP8>(args, tile, warp * 16, total, staging + warp * STAGE_FLOATS);
    }
}

#define TILES_KERNEL(NAME, GROUPS, N, STAGES, BIG, FP8)                                                                \
    extern "C" __global__ void __launch_bounds__(GROUPS * 128 + (BIG ? 128 : 32), BIG ? 1 : 2)                         \
        NAME(const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map,                         \
             const __grid_constant__ Gemm90Args args) {                                                                \
        gemm90_tiles<GROUPS, N, STAGES, BIG, FP8>(&w_map, &x_map, args);                                               \
    }
