// As gemm_sm90.cu for prompts: rows by the thousand, bf16 results. The same sums in the same order, so the same bits.
//
// What bounds such products is how fast a multiprocessor takes in both sides. A block has 128 weight rows by 256 tokens,
// 64 by 256 a warpgroup; the two blocks of a cluster have the same tokens, of which each loads one half for both. Results
// are turned around in shared memory and leave it by the copy engine while the next tile is multiplied.
//
// Where k is cut into slices, the sum of the slices before waits in `parked`, which stays in the second-level cache:
// registers hold one sum alone.
//   grid       2 * clusters, at most as many as fit at once; clusters of 2
//   threads    384
//   shared     1024 + stages * (49152 + 16) + 65536 / ROUNDS bytes
//   maps       weights [n, k] with boxes of 64 rows by 64, x [rows, k] with 128 rows by 64, out [rows, n], exactly so many
//              rows, with 256 / ROUNDS rows by 64; all bf16 in 128-byte swizzle. n and k are multiples of 8
//   parked     grid * 131072 bytes, or null where slices is 1
#include "hopper.cuh"

#define GROUPS 2
#define N 256
#define STEP_K 64
#define W_BYTES (GROUPS * 8192)
#define STAGE_BYTES (W_BYTES + N * 128)
#define METHOD __device__ __forceinline__

// By value; mirrored on the host.
struct Wide90Args {
    const float* bias;  // [n], or null
    float4* parked;
    i32 rows, n, k, slices, token_group, padding;
};
static_assert(sizeof(Wide90Args) == 40, "as the host has it");

// Place in the ring, of loader or multipliers.
template <int STAGES> struct Place {
    u32 memory, full, empty, phase;
    i32 stage;

    METHOD Place(u32 memory, u32 barriers, u32 phase)
        : memory(memory), full(barriers), empty(barriers + STAGES * 8), phase(phase), stage(0) {}
    METHOD u32 at() const { return memory + stage * STAGE_BYTES; }
    METHOD void next() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

// The first weight row and token of a block's tile: bands of `token_group` token tiles go through all weights, so that
// what runs at a time shares both sides in the second-level cache.
struct WideTile {
    i32 n, token;

    METHOD WideTile(const Wide90Args& args, i32 number, i32 rank) {
        i32 pairs = (args.n + 255) / 256, token_tiles = (args.rows + N - 1) / N;
        i32 in_band = args.token_group * pairs, band = number / in_band, inside = number % in_band;
        i32 width = min(args.token_group, token_tiles - band * args.token_group);
        n = inside / width * 256 + rank * 128;
        token = (band * args.token_group + inside % width) * N;
    }
};

template <int STAGES>
DEVICE void load_tiles(const TensorMap* w_map, const TensorMap* x_map, const Wide90Args& args, u32 memory, u32 barriers,
                       i32 tiles, i32 rank) {
    Place<STAGES> place(memory, barriers, 1);
    i32 first = blockIdx.x / 2, stride = gridDim.x / 2, steps = (args.k + STEP_K - 1) / STEP_K;
    auto weights = [&](i32 step, i32 n) {
        u32 barrier = place.full + place.stage * 8;
        barrier_expect(barrier, STAGE_BYTES);
#pragma unroll
        for (int g = 0; g < GROUPS; g++) copy_box(place.at() + g * 8192, w_map, step * STEP_K, n + g * 64, barrier);
    };
    // Weights do not depend on the kernel before: fill the ring with them, then wait for x.
    i32 ahead = min(STAGES, steps);
    WideTile start(args, first, rank);
    for (i32 step = 0; step < ahead; step++) {
        weights(step, start.n);
        place.next();
    }
    place = Place<STAGES>(memory, barriers, 1);
    wait_for_previous();
    for (i32 number = first; number < tiles; number += stride) {
        WideTile tile(args, number, rank);
        for (i32 step = 0; step < steps; step++, ahead--) {
            if (ahead <= 0) {
                barrier_wait(place.empty + place.stage * 8, place.phase);
                weights(step, tile.n);
            }
            copy_box_to(3, place.at() + W_BYTES + rank * (N / 2 * 128), x_map, step * STEP_K, tile.token + rank * (N / 2),
                        place.full + place.stage * 8);
            place.next();
        }
    }
}

// Steps of one slice, from zero. `empty`: of the block of the cluster that this lane tells, if it is one of the first two.
template <int STAGES> DEVICE void multiply(float (&sums)[N / 2], Place<STAGES>& place, i32 group, i32 steps, u32 empty) {
    bool tells = threadIdx.x % WARP < 2;
    u32 previous = 0;
    for (i32 step = 0; step < steps; step++) {
        u64 a = k_major_128(place.at() + group * 8192), b = k_major_128(place.at() + W_BYTES);
        barrier_wait(place.full + place.stage * 8, place.phase);
        group_fence();
#pragma unroll
        for (int part = 0; part < 4; part++)
            Product<N>::bf16_shared(sums, advance(a, part * 32), advance(b, part * 32), step | part);
        group_commit();
        if (step > 0) {
            group_wait<1>();
            if (tells) barrier_arrive_cluster(previous);
        }
        previous = empty + place.stage * 8;
        place.next();
    }
    group_wait<0>();
    pin(sums);
    if (tells) barrier_arrive_cluster(previous);
}

// A warpgroup's 64 weight rows by 256 tokens, ROUNDS times through `staging`.
template <int ROUNDS>
DEVICE void store_tile(const TensorMap* out_map, const Wide90Args& args, const WideTile& tile, i32 group,
                       const float (&sums)[N / 2], u32 staging) {
    const i32 TOKENS = N / ROUNDS;
    i32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4, first = tile.n + group * 64;
    i32 row = first + warp * 16 + lane / 4;
    bool has_bias = args.bias != nullptr, stores = threadIdx.x % 128 == 0;
    float low = has_bias && row < args.n ? args.bias[row] : 0.0f;
    float high = has_bias && row + 8 < args.n ? args.bias[row + 8] : 0.0f;
    // Matrices: both eights of weight rows, of eight tokens and of the next eight.
    u32 column = staging + (lane / 16 * 8 + lane % 8) * 128 + (((warp * 2 + lane / 8 % 2) ^ (lane % 8)) << 4);
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
        i32 token = tile.token + round * TOKENS;
        if (token >= args.rows || first >= args.n) continue;
        if (stores) wait_stores_read();
        named_barrier(1 + group, 128);
#pragma unroll
        for (int two = 0; two < TOKENS / 16; two++) {
            u32 packed[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float* pair = sums + (round * (TOKENS / 16) + two) * 8 + i * 2;
                float bias = i % 2 ? high : low;
                packed[i] = has_bias ? pack_bf16(pair[0] + bias, pair[1] + bias) : pack_bf16(pair[0], pair[1]);
            }
            store_matrices_turned(column + two * 2048, packed[0], packed[1], packed[2], packed[3]);
        }
        fence_async_shared();
        named_barrier(1 + group, 128);
        if (stores) {
            store_box(out_map, first, token, staging);
            commit_stores();
        }
    }
}

template <int STAGES, int ROUNDS>
DEVICE void gemm90_wide(const TensorMap* w_map, const TensorMap* x_map, const TensorMap* out_map, const Wide90Args& args) {
    extern __shared__ u8 raw[];
    u8* shared = (u8*)(((u64)raw + 1023) / 1024 * 1024);
    const u32 STAGED = N / ROUNDS * 128;
    u32 memory = shared_address(shared), staging = memory + STAGES * STAGE_BYTES, barriers = staging + GROUPS * STAGED;
    i32 warp = threadIdx.x / WARP, group = warp / 4, rank = blockIdx.x % 2;
    i32 tiles = (args.n + 255) / 256 * ((args.rows + N - 1) / N);
    release_next();
    if (threadIdx.x == 0) {
        prefetch_map(w_map);
        prefetch_map(x_map);
        prefetch_map(out_map);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(barriers + i * 8, 1);
            // All warps of both blocks: a stage is filled by both.
            barrier_init(barriers + (STAGES + i) * 8, 2 * GROUPS * 4);
        }
        barrier_init_done();
    }
    cluster_sync();

    if (group == GROUPS) {
        give_registers<24>();
        if (warp == GROUPS * 4 && elect_one()) load_tiles<STAGES>(w_map, x_map, args, memory, barriers, tiles, rank);
        __syncwarp();
    } else {
        take_registers<240>();
        wait_for_previous();
        Place<STAGES> place(memory, barriers, 0);
        u32 empty = cluster_address(place.empty, threadIdx.x % 2);
        float4* parked = args.parked + (i64)blockIdx.x * 8192 + threadIdx.x;
        i32 steps = (args.k + STEP_K - 1) / STEP_K;
        float sums[N / 2];
#pragma unroll
        for (int i = 0; i < N / 2; i++) sums[i] = 0.0f;
        for (i32 number = blockIdx.x / 2; number < tiles; number += gridDim.x / 2) {
            WideTile tile(args, number, rank);
            for (i32 slice = 0; slice < args.slices; slice++) {
                i32 first = slice * steps / args.slices, end = (slice + 1) * steps / args.slices;
                multiply<STAGES>(sums, place, group, end - first, empty);
                if (slice > 0) {
#pragma unroll
                    for (int i = 0; i < N / 8; i++) {
                        float4 before = parked[i * 256];
                        sums[i * 4] = before.x + sums[i * 4], sums[i * 4 + 1] = before.y + sums[i * 4 + 1];
                        sums[i * 4 + 2] = before.z + sums[i * 4 + 2], sums[i * 4 + 3] = before.w + sums[i * 4 + 3];
                    }
                }
                if (slice + 1 < args.slices) {
#pragma unroll
                    for (int i = 0; i < N / 8; i++)
                        parked[i * 256] = make_float4(sums[i * 4], sums[i * 4 + 1], sums[i * 4 + 2], sums[i * 4 + 3]);
                }
            }
            store_tile<ROUNDS>(out_map, args, tile, group, sums, staging + group * STAGED);
        }
        if (threadIdx.x % 128 == 0) wait_stores_read();
    }
    // The other block may still tell this one's barriers.
    cluster_sync();
}

#ifndef WIDE_STAGES
#define WIDE_STAGES 4
#define WIDE_ROUNDS 2
#endif
extern "C" __global__ void __launch_bounds__(GROUPS * 128 + 128, 1)
    gemm90_wide(const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map,
                const __grid_constant__ TensorMap out_map, const __grid_constant__ Wide90Args args) {
    gemm90_wide<WIDE_STAGES, WIDE_ROUNDS>(&w_map, &x_map, &out_map, args);
}
