// Products with bf16 weights on Hopper, dense or by expert: out[rows, n] = x[rows, k] * w[n, k]^T (+ bias[n]), f32 sums.
//
// The weights are the 64 rows of the warpgroup product and the tokens its columns: eight tokens waste nothing, and one
// kernel family serves 1 to 8192 rows. A loading warp keeps a ring of stages filled (a stage: 64 of k, in 128-byte
// swizzle); two warpgroups (r192: three) multiply, 64 weight rows each.
//
// A row's bits depend on that row and the weight alone. k is cut into `slices` by the weight's shape alone; every slice is
// summed from zero and slices are added in ascending order. `split = 0`: a block computes all slices of its tiles.
// `split = 1`: all slices of all tiles are dealt out evenly; a block that has a part of a tile writes its sums to
// `partial` (a run that begins with slice 0 is added up first), and the last to arrive adds in order and stores.
//
// Kernels gemm90_{n8, n16, n32, n64, n128, n192}: N tokens a tile, 128 weight rows. c2: pairs of blocks, 256 weight rows
// of one tile between them, each loads half of the tokens for both; the grid is even.
//   arguments  weights' map, x's map, Gemm90Args, by value
//   threads    groups * 128 + 32 (N <= 64) or + 128; dynamic shared bytes Ring::SHARED
//   maps       bf16, 128-byte swizzle, box 64 columns; weights [n or experts * n, k] box of 64 rows; x [any rows >= rows,
//              k] box of N (c2: N / 2) rows. k is a multiple of 8; n is any, best a multiple of 4.
//   grid       split or grouped: as many blocks as fit at once; otherwise no more than there are tiles
//   partial    min(tiles, blocks) * slices * 128 * N floats with split, else unused
//   counters   blocks * groups u32, zero before the first launch; every launch leaves them zero
//   offsets    grouped: expert e has rows offsets[e] to offsets[e + 1] of x and out and the weight rows e * n on; read on
//              the device, so that a recorded launch serves any routing
//   slices     1 to the steps of k (64 each); the fewest that make tiles * slices fill whole rounds of 132 blocks
//   token_group  token tiles that go through all weights together (dense)
//   prefetch   steps beyond the ring that are fetched into L2 before the kernel waits for the one before
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

template <int GROUPS, int N, int STAGES, bool BIG, int CLUSTER>
DEVICE void gemm90(const TensorMap* w_map, const TensorMap* x_map, const Gemm90Args& args) {
    typedef Ring<GROUPS, N, STAGES> R;
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
    Schedule schedule = Schedule::dense<R::ROWS * CLUSTER, N>(args);
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
        if (CLUSTER > 1) cluster_sync();
        return;
    }

    if (BIG) take_registers<GROUPS == 2 ? 240 : 160>();
    wait_for_previous();
    i32 thread = threadIdx.x % 128, stage = 0;
    u32 phase = 0;
    float* warp_stage = staging + warp * STAGE_FLOATS;
    float sums[N / 2], total[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) sums[i] = total[i] = 0.0f;
    const u64 partial_slice = (u64)R::ROWS * N / 4;  // float4 of one slice of a tile
    while (pieces.next(piece)) {
        bool whole = piece.first == 0 && piece.last == args.slices;
        float4* partial = (float4*)args.partial + group * (64 * N / 4) + thread;
        i32 slot = 0;
        if (!whole) {
            slot = pieces.slot(piece.tile) * CLUSTER + rank;
            partial += (u64)slot * args.slices * partial_slice;
        }
        for (i32 slice = piece.first; slice < piece.last; slice++) {
            i32 steps = schedule.bound(args, slice + 1) - schedule.bound(args, slice);
            u32 previous = 0;
            for (i32 step = 0; step < steps; step++) {
                u32 at = ring + stage * R::BYTES;
                u64 a = k_major_128(at + group * 8192), b = k_major_128(at + R::W_BYTES);
                barrier_wait(full + stage * 8, phase);
                group_fence();
#pragma unroll
                for (int part = 0; part < STEP_K / 16; part++)
                    Product<N>::bf16_shared(sums, advance(a, part * 32), advance(b, part * 32), step | part);
                group_commit();
                if (step > 0) {
                    group_wait<1>();
                    release<CLUSTER>(previous);
                }
                previous = empty + stage * 8;
                if (++stage == STAGES) stage = 0, phase ^= 1;
            }
            group_wait<0>();
            pin(sums);
            release<CLUSTER>(previous);
            if (piece.first != 0) {
                store_partial(partial + slice * partial_slice, sums, N / 8);
            } else {
#pragma unroll
                for (int i = 0; i < N / 2; i++) total[i] = slice == 0 ? sums[i] : total[i] + sums[i];
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
        Tile tile = locate<R::ROWS, N, CLUSTER>(args, schedule, starts, piece.tile, rank);
        store_tile<N>(args, tile, group * 64 + warp % 4 * 16, total, warp_stage);
    }
    // The other block may still write into this one's memory or arrive at its barriers.
    if (CLUSTER > 1) cluster_sync();
}

#define KERNEL(NAME, GROUPS, N, STAGES, BIG, CLUSTER, ATTRIBUTE)                                                       \
    extern "C" __global__ void __launch_bounds__(GROUPS * 128 + (BIG ? 128 : 32), BIG ? 1 : 2) ATTRIBUTE                \
        NAME(const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map,                          \
             const __grid_constant__ Gemm90Args args) {                                                                 \
        gemm90<GROUPS, N, STAGES, BIG, CLUSTER>(&w_map, &x_map, args);                                                  \
    }
#define SINGLE
#define PAIR __cluster_dims__(2, 1, 1)

KERNEL(gemm90_n8, 2, 8, 6, false, 1, SINGLE)
KERNEL(gemm90_n16, 2, 16, 5, false, 1, SINGLE)
KERNEL(gemm90_n32, 2, 32, 5, false, 1, SINGLE)
KERNEL(gemm90_n64, 2, 64, 4, false, 1, SINGLE)
KERNEL(gemm90_n128, 2, 128, 6, true, 1, SINGLE)
KERNEL(gemm90_n192, 2, 192, 5, true, 1, SINGLE)
KERNEL(gemm90_r192_n128, 3, 128, 5, true, 1, SINGLE)
KERNEL(gemm90_c2_n128, 2, 128, 6, true, 2, PAIR)
KERNEL(gemm90_c2_n192, 2, 192, 5, true, 2, PAIR)
