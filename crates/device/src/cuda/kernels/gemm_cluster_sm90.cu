// The same products and the same bits as gemm_sm90.cu, for few rows: a block computes one slice of one tile, the blocks
// of a cluster all slices of it, and the sums meet in shared memory. More blocks than tiles keep the memory busy, and
// nothing is written but the result.
//
// Kernels gemm90_cluster_{n8, n16, n32, n64, n128, n256}: N tokens and 128 weight rows a tile.
//   arguments  weights' map, x's map, Gemm90Args, as there (partial, counters, split, prefetch unused)
//   grid       slices * tiles (grouped: tiles of the worst case, clusters beyond the last tile leave), clusters of
//              `slices`: 1, 2, 4 or 8
//   threads    288 (n256: 384); dynamic shared bytes: 1024 + stages * (16384 + N * 128) + 2064 + 128
#include "gemm_sm90_loop.cuh"

// Floats between tokens where the sums of a tile meet: 128 and a gap, so that writing meets no bank twice.
#define MEET_ROW 132

template <int N, int STAGES, bool BIG>
DEVICE void gemm90_cluster(const TensorMap* w_map, const TensorMap* x_map, const Gemm90Args& args) {
    const i32 STEP_K = 64, ROWS = 128, W_BYTES = ROWS * 128, BYTES = W_BYTES + N * 128;
    static_assert(N * MEET_ROW * 4 <= STAGES * BYTES, "the sums lie where the ring was");
    extern __shared__ u8 raw[];
    u8* shared = (u8*)(((u64)raw + 1023) / 1024 * 1024);
    u32* starts = (u32*)(shared + STAGES * BYTES);
    u64* barriers = (u64*)((u8*)starts + (MAX_EXPERTS + 4) * 4);
    u32 ring = shared_address(shared), full = shared_address(barriers), empty = full + STAGES * 8;

    i32 warp = threadIdx.x / WARP, group = warp / 4, slice = blockIdx.x % args.slices;
    release_next();
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full + i * 8, 1);
            barrier_init(empty + i * 8, 8);
        }
        barrier_init_done();
    }
    Schedule schedule = Schedule::dense<ROWS, N, STEP_K>(args);
    if (args.offsets) {
        wait_for_previous();
        if (warp == 0) count_tiles<N>(args, schedule.row_tiles, starts);
    }
    __syncthreads();
    i32 tile_number = blockIdx.x / args.slices;
    if (args.offsets && tile_number >= starts[args.experts]) return;
    Tile tile = locate<ROWS, N, 1>(args, schedule, starts, tile_number, 0);
    i32 first = schedule.bound(args, slice), steps = schedule.bound(args, slice + 1) - first;

    if (group == 2) {
        if (BIG) give_registers<24>();
        if (warp == 8 && elect_one()) {
            // Weights do not depend on the kernel before: fill the ring with them, then wait for x.
            i32 ahead = min(steps, STAGES);
            for (i32 step = 0; step < ahead; step++) {
                u32 at = ring + step * BYTES, barrier = full + step * 8;
                barrier_expect(barrier, BYTES);
                copy_box(at, w_map, (first + step) * STEP_K, tile.w_row, barrier);
                copy_box(at + 8192, w_map, (first + step) * STEP_K, tile.w_row + 64, barrier);
            }
            wait_for_previous();
            i32 stage = 0;
            u32 phase = 1;
            for (i32 step = 0; step < steps; step++) {
                u32 at = ring + stage * BYTES, barrier = full + stage * 8;
                if (step >= ahead) {
                    barrier_wait(empty + stage * 8, phase);
                    barrier_expect(barrier, BYTES);
                    copy_box(at, w_map, (first + step) * STEP_K, tile.w_row, barrier);
                    copy_box(at + 8192, w_map, (first + step) * STEP_K, tile.w_row + 64, barrier);
                }
                copy_box(at + W_BYTES, x_map, (first + step) * STEP_K, tile.token, barrier);
                if (++stage == STAGES) stage = 0, phase ^= 1;
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
    i32 stage = 0, lane = threadIdx.x % WARP;
    u32 phase = 0, previous = 0;
    float sums[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) sums[i] = 0.0f;
    for (i32 step = 0; step < steps; step++) {
        u32 at = ring + stage * BYTES;
        u64 a = k_major_128(at + group * 8192), b = k_major_128(at + W_BYTES);
        barrier_wait(full + stage * 8, phase);
        group_fence();
#pragma unroll
        for (int part = 0; part < 4; part++)
            Product<N>::bf16_shared(sums, advance(a, part * 32), advance(b, part * 32), step | part);
        group_commit();
        if (step > 0) {
            group_wait<1>();
            release<1>(previous);
        }
        previous = empty + stage * 8;
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
    group_wait<0>();
    pin(sums);

    // Both warpgroups have read all of the ring: the sums go there, token by token.
    named_barrier(1, 256);
    float* meet = (float*)shared;
    float* to = meet + lane % 4 * 2 * MEET_ROW + warp * 16 + lane / 4;
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

    // Every block adds its part of the weight rows, slice after slice.
    i32 share = 32 / args.slices, quad = slice * share + (i32)threadIdx.x % share;
    i32 n = tile.n_first + quad * 4, valid = args.n - n;
    bool vector = args.n % 4 == 0;
    float4 bias = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (args.bias && valid > 0) bias = load_four(args.bias + (i64)tile.expert * args.n + n, valid);
    if (valid > 0) {
        for (i32 token = threadIdx.x / share; token < tile.tokens; token += 256 / share) {
            u32 from = ring + (token * MEET_ROW + quad * 4) * 4;
            float4 total;
            if (args.slices == 1) {
                total = *(const float4*)(meet + token * MEET_ROW + quad * 4);
            } else {
                float4 each[8];
#pragma unroll
                for (int s = 0; s < 8; s++)
                    if (s < args.slices) each[s] = load_cluster(cluster_address(from, s));
                total = each[0];
#pragma unroll
                for (int s = 1; s < 8; s++)
                    if (s < args.slices) {
                        total.x += each[s].x, total.y += each[s].y;
                        total.z += each[s].z, total.w += each[s].w;
                    }
            }
            if (args.bias)
                total = make_float4(total.x + bias.x, total.y + bias.y, total.z + bias.z, total.w + bias.w);
            store_four(args.out, args.out_is_f32, (i64)(tile.token + token) * args.n + n, total, valid, vector);
        }
    }
    // Others may still read this block's sums.
    if (args.slices > 1) cluster_leave();
}

#define CLUSTER_KERNEL(NAME, N, STAGES, BIG)                                                                           \
    extern "C" __global__ void __launch_bounds__(256 + (BIG ? 128 : 32), BIG ? 1 : 2)                                  \
        NAME(const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map,                         \
             const __grid_constant__ Gemm90Args args) {                                                                \
        gemm90_cluster<N, STAGES, BIG>(&w_map, &x_map, args);                                                          \
    }

CLUSTER_KERNEL(gemm90_cluster_n8, 8, 6, false)
CLUSTER_KERNEL(gemm90_cluster_n16, 16, 6, false)
CLUSTER_KERNEL(gemm90_cluster_n32, 32, 5, false)
CLUSTER_KERNEL(gemm90_cluster_n64, 64, 4, false)
CLUSTER_KERNEL(gemm90_cluster_n128, 128, 3, false)
CLUSTER_KERNEL(gemm90_cluster_n256, 256, 4, true)
