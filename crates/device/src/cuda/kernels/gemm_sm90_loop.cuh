// One block's work: a warp that loads, warpgroups that multiply, and the sums of slices. See gemm_sm90.cu.
#pragma once
#include "gemm_sm90.cuh"

template <int GROUPS, int N, int STAGES> struct Ring {
    static constexpr int ROWS = GROUPS * 64, W_BYTES = ROWS * 128, BYTES = W_BYTES + N * 128;
    static constexpr int STAGE_AREA = GROUPS * 4 * STAGE_FLOATS * 4, STARTS = (MAX_EXPERTS + 4) * 4;
    static constexpr int SHARED = 1024 + STAGES * BYTES + STAGE_AREA + STARTS + 256;
};

// A warp is done with a stage: every block that writes into it must know.
template <int CLUSTER> DEVICE void release(u32 barrier) {
    u32 lane = threadIdx.x % WARP;
    if (CLUSTER == 1) {
        if (lane == 0) barrier_arrive(barrier);
    } else if (lane < CLUSTER) {
        barrier_arrive_remote(barrier, lane);
    }
}

// FP8: e4m3 on both sides. The tensor cores add such products in few bits, so that the sum leaves them after every step.
template <int GROUPS, int N, int STAGES, bool BIG, int CLUSTER, bool FP8>
DEVICE void gemm90(const TensorMap* w_map, const TensorMap* x_map, const Gemm90Args& args) {
    typedef Ring<GROUPS, N, STAGES> R;
    const i32 STEP_K = FP8 ? 128 : 64;  // 128 bytes, the width of the swizzle
    extern __shared__ u8 raw[];
    u8* shared = (u8*)(((u64)raw + 1023) / 1024 * 1024);
    float* staging = (float*)(shared + STAGES * R::BYTES);
    u32* starts = (u32*)((u8*)staging + R::STAGE_AREA);
    u64* barriers = (u64*)((u8*)starts + R::STARTS);
    volatile u32* flags = (volatile u32*)(barriers + 2 * STAGES);
    u32 ring = shared_address(shared), full = shared_address(barriers), empty = full + STAGES * 8;

    i32 warp = threadIdx.x / WARP, group = warp / 4, rank = CLUSTER > 1 ? cluster_rank() : 0;
    release_next();
    if (threadIdx.x == 0) {
        prefetch_map(w_map);
        prefetch_map(x_map);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full + i * 8, 1);
            barrier_init(empty + i * 8, GROUPS * 4 * CLUSTER);
        }
        barrier_init_done();
    }
    Schedule schedule = Schedule::dense<R::ROWS * CLUSTER, N, STEP_K>(args);
    if (args.offsets) {
        // Which experts there are is the kernel before's to say.
        wait_for_previous();
        if (warp == 0) count_tiles<N>(args, schedule.row_tiles, starts);
    }
    __syncthreads();
    if (CLUSTER > 1) cluster_sync();
    if (args.offsets) schedule.tiles = starts[args.experts];
    Pieces pieces(args, schedule.tiles, blockIdx.x / CLUSTER, gridDim.x / CLUSTER);
    Piece piece;

    if (group == GROUPS) {
        if (BIG) give_registers<GROUPS == 2 ? 24 : 32>();
        if (warp == GROUPS * 4 && elect_one()) {
            // Weights do not depend on the kernel before: fill the ring with them, then wait for x.
            i32 ahead = 0;
            if (!args.offsets) {
                Pieces look = pieces;
                while (ahead < STAGES + args.prefetch && look.next(piece)) {
                    Tile tile = locate<R::ROWS, N, CLUSTER>(args, schedule, starts, piece.tile, rank);
                    i32 step = schedule.bound(args, piece.first), end = schedule.bound(args, piece.last);
                    for (; step < end && ahead < STAGES + args.prefetch; step++, ahead++) {
                        if (ahead >= STAGES) {
                            for (int g = 0; g < GROUPS; g++) prefetch_box(w_map, step * STEP_K, tile.w_row + g * 64);
                            continue;
                        }
                        barrier_expect(full + ahead * 8, R::BYTES);
                        for (int g = 0; g < GROUPS; g++)
                            copy_box(ring + ahead * R::BYTES + g * 8192, w_map, step * STEP_K, tile.w_row + g * 64,
                                     full + ahead * 8);
                    }
                }
            }
            wait_for_previous();
            i32 stage = 0, count = 0;
            u32 phase = 1;
            while (pieces.next(piece)) {
                Tile tile = locate<R::ROWS, N, CLUSTER>(args, schedule, starts, piece.tile, rank);
                i32 step = schedule.bound(args, piece.first), end = schedule.bound(args, piece.last);
                for (; step < end; step++, count++) {
                    u32 at = ring + stage * R::BYTES, barrier = full + stage * 8;
                    if (count >= min(ahead, STAGES)) {
                        barrier_wait(empty + stage * 8, phase);
                        barrier_expect(barrier, R::BYTES);
                        for (int g = 0; g < GROUPS; g++)
                            copy_box(at + g * 8192, w_map, step * STEP_K, tile.w_row + g * 64, barrier);
                    }
                    if (CLUSTER == 1)
                        copy_box(at + R::W_BYTES, x_map, step * STEP_K, tile.token, barrier);
                    else
                        copy_box_multicast(at + R::W_BYTES + rank * (N / CLUSTER * 128), x_map, step * STEP_K,
                                           tile.token + rank * (N / CLUSTER), barrier, (1 << CLUSTER) - 1);
                    if (++stage == STAGES) stage = 0, phase ^= 1;
                }
            }
        }
        if (CLUSTER > 1) cluster_leave();
        return;
    }

    if (BIG) take_registers<GROUPS == 2 ? 240 : 160>();
    wait_for_previous();
    i32 thread = threadIdx.x % 128, stage = 0;
    u32 phase = 0;
    float* warp_stage = staging + warp * STAGE_FLOATS;
    float sums[N / 2], slice_sums[N / 2], total[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) sums[i] = slice_sums[i] = total[i] = 0.0f;
    const u64 partial_slice = (u64)R::ROWS * N / 4;  // float4 of one slice of a tile
    while (pieces.next(piece)) {
        Tile tile = locate<R::ROWS, N, CLUSTER>(args, schedule, starts, piece.tile, rank);
        bool whole = piece.first == 0 && piece.last == args.slices;
        float4* partial = (float4*)args.partial + group * (64 * N / 4) + thread;
        i32 slot = 0;
        if (!whole) {
            slot = pieces.slot(piece.tile) * CLUSTER + rank;
            partial += (u64)slot * args.slices * partial_slice;
        }
        for (i32 slice = piece.first; slice < piece.last; slice++) {
            i32 first_step = schedule.bound(args, slice), steps = schedule.bound(args, slice + 1) - first_step;
            u32 previous = 0;
            for (i32 step = 0; step < steps; step++) {
                u32 at = ring + stage * R::BYTES;
                u64 a = k_major_128(at + group * 8192), b = k_major_128(at + R::W_BYTES);
                float scale = 1.0f;
                if (FP8 && args.block_scales) scale = block_scale(args, tile, first_step + step, schedule.steps);
                barrier_wait(full + stage * 8, phase);
                group_fence();
#pragma unroll
                for (int part = 0; part < 4; part++) {
                    u64 a_part = advance(a, part * 32), b_part = advance(b, part * 32);
                    if (FP8) Product<N>::e4m3_shared(sums, a_part, b_part, part);
                    else Product<N>::bf16_shared(sums, a_part, b_part, step | part);
                }
                group_commit();
                if (FP8) {
                    group_wait<0>();
                    pin(sums);
                    release<CLUSTER>(empty + stage * 8);
#pragma unroll
                    for (int i = 0; i < N / 2; i++)
                        slice_sums[i] = step == 0 ? sums[i] * scale : fmaf(sums[i], scale, slice_sums[i]);
                } else if (step > 0) {
                    group_wait<1>();
                    release<CLUSTER>(previous);
                }
                previous = empty + stage * 8;
                if (++stage == STAGES) stage = 0, phase ^= 1;
            }
            if (!FP8) {
                group_wait<0>();
                pin(sums);
                release<CLUSTER>(previous);
            }
            const float(&done)[N / 2] = FP8 ? slice_sums : sums;
            if (piece.first != 0) {
                store_partial(partial + slice * partial_slice, done, N / 8);
            } else {
#pragma unroll
                for (int i = 0; i < N / 2; i++) total[i] = slice == 0 ? done[i] : total[i] + done[i];
            }
        }
        if (!whole) {
            if (piece.first == 0) store_partial(partial, total, N / 8);
            __threadfence();
            named_barrier(1 + group, 128);
            if (thread == 0) {
                u32* counter = args.counters + slot * GROUPS + group;
                u32 mine = piece.last - piece.first, there = atomicAdd(counter, mine) + mine;
                if (there == args.slices) *counter = 0;
                flags[group] = there == args.slices;
            }
            named_barrier(1 + group, 128);
            if (!flags[group]) continue;
            __threadfence();
            // The last to arrive adds the slices in order; the first piece is summed already.
            i32 held;
            pieces.owner(piece.tile, held);
#pragma unroll
            for (int j = 0; j < N / 8; j++) {
                float4 v = load_partial(partial + j * 128);
                total[j * 4] = v.x, total[j * 4 + 1] = v.y, total[j * 4 + 2] = v.z, total[j * 4 + 3] = v.w;
            }
            for (i32 slice = held; slice < args.slices; slice++) {
#pragma unroll
                for (int j = 0; j < N / 8; j++) {
                    float4 v = load_partial(partial + slice * partial_slice + j * 128);
                    total[j * 4] += v.x, total[j * 4 + 1] += v.y, total[j * 4 + 2] += v.z, total[j * 4 + 3] += v.w;
                }
            }
        }
        store_tile<N, FP8>(args, tile, group * 64 + warp % 4 * 16, total, warp_stage);
    }
    // The other block may still write into this one's memory or arrive at its barriers.
    if (CLUSTER > 1) cluster_leave();
}

#define GEMM90_KERNEL(NAME, GROUPS, N, STAGES, BIG, CLUSTER, FP8, ATTRIBUTE)                                           \
    extern "C" __global__ void __launch_bounds__(GROUPS * 128 + (BIG ? 128 : 32), BIG ? 1 : 2) ATTRIBUTE               \
        NAME(const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map,                         \
             const __grid_constant__ Gemm90Args args) {                                                                \
        gemm90<GROUPS, N, STAGES, BIG, CLUSTER, FP8>(&w_map, &x_map, args);                                            \
    }
#define SINGLE
#define PAIR __cluster_dims__(2, 1, 1)
