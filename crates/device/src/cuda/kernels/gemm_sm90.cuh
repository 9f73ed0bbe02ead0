// What the kernels of gemm_sm90.cu share: which tile a block computes, how warpgroups multiply, how results are stored.
#pragma once
#include "hopper.cuh"

#define MAX_EXPERTS 512
#define NOT_GATED -1
#define METHOD __device__ __forceinline__

// By value; mirrored on the host.
struct Gemm90Args {
    void* out;              // [rows, n], f32 or bf16
    const float* bias;      // [n] (grouped: [experts, n]) or null
    const u32* offsets;     // [experts + 1] first rows, or null: one dense matrix
    const float* w_scales;  // fp8 alone
    const float* x_scales;  // fp8 alone
    i32 rows, n, k, slices, experts, out_is_f32, token_group, block_scales, height;
    i32 activation;      // gates are the first half of n, ups the second, and out is [rows, n / 2], bf16; or NOT_GATED
    float alpha, limit;  // the activation's
};
static_assert(sizeof(Gemm90Args) == 88, "as the host has it");

// One tile of the output: `w_row` of the weights' map and rows of x from `token`.
struct Tile {
    i32 w_row, n_first, token, tokens, expert;
};

// All that follows from the sizes; the same in every thread.
struct Schedule {
    i32 row_tiles, token_tiles, tiles, steps;

    template <int ROWS, int N, int STEP_K> static METHOD Schedule dense(const Gemm90Args& args) {
        Schedule s;
        s.row_tiles = (args.n + ROWS - 1) / ROWS;
        s.token_tiles = (args.rows + N - 1) / N;
        s.tiles = s.row_tiles * s.token_tiles;
        s.steps = (args.k + STEP_K - 1) / STEP_K;
        return s;
    }
    // First step of a slice: depends on k and the number of slices alone.
    METHOD i32 bound(const Gemm90Args& args, i32 slice) const { return slice * steps / args.slices; }
};

// First tile of every expert, into `starts[experts + 1]`, by one warp.
template <int N> DEVICE void count_tiles(const Gemm90Args& args, i32 row_tiles, u32* starts) {
    u32 lane = threadIdx.x % WARP, before = 0;
    for (i32 base = 0; base < args.experts; base += WARP) {
        i32 expert = base + lane;
        u32 count = 0;
        if (expert < args.experts)
            count = (args.offsets[expert + 1] - args.offsets[expert] + N - 1) / N * row_tiles;
        u32 sum = count;
#pragma unroll
        for (int step = 1; step < WARP; step *= 2) {
            u32 other = __shfl_up_sync(FULL_MASK, sum, step);
            if (lane >= step) sum += other;
        }
        if (expert < args.experts) starts[expert] = before + sum - count;
        before += __shfl_sync(FULL_MASK, sum, WARP - 1);
    }
    if (lane == 0) starts[args.experts] = before;
}

// Tiles that share weight rows or tokens come close together, so that L2 holds what blocks share.
template <int ROWS, int N>
DEVICE Tile locate(const Gemm90Args& args, const Schedule& schedule, const u32* starts, i32 tile) {
    Tile t;
    if (args.offsets) {
        i32 low = 0, high = args.experts;
        while (high - low > 1) {
            i32 middle = (low + high) / 2;
            if (starts[middle] <= (u32)tile) low = middle;
            else high = middle;
        }
        i32 inside = tile - starts[low], columns = (starts[low + 1] - starts[low]) / schedule.row_tiles;
        i32 begin = args.offsets[low], end = args.offsets[low + 1];
        t.expert = low;
        t.n_first = inside / columns * ROWS;
        t.w_row = low * args.n + t.n_first;
        t.token = begin + inside % columns * N;
        t.tokens = end - t.token;
    } else {
        i32 in_band = args.token_group * schedule.row_tiles, band = tile / in_band, inside = tile % in_band;
        i32 width = min(args.token_group, schedule.token_tiles - band * args.token_group);
        t.expert = 0;
        t.n_first = inside / width * ROWS;
        t.w_row = t.n_first;
        t.token = (band * args.token_group + inside % width) * N;
        t.tokens = args.rows - t.token;
    }
    t.tokens = min(t.tokens, N);
    return t;
}

DEVICE void store_four(void* out, bool is_f32, i64 index, float4 v, i32 valid, bool vector) {
    if (vector && valid >= 4) {
        if (is_f32) {
            *(float4*)((float*)out + index) = v;
        } else {
            uint2 pair = make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
            *(uint2*)((bf16*)out + index) = pair;
        }
        return;
    }
    float each[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (i >= valid) continue;
        if (is_f32) ((float*)out)[index + i] = each[i];
        else ((bf16*)out)[index + i] = from_float<bf16>(each[i]);
    }
}

DEVICE float4 load_four(const float* from, i32 valid) {
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (valid > 0) v.x = from[0];
    if (valid > 1) v.y = from[1];
    if (valid > 2) v.z = from[2];
    if (valid > 3) v.w = from[3];
    return v;
}

// Those of the tile's 128 weight rows, one for every step of 128; or none.
DEVICE const float* block_scales(const Gemm90Args& args, const Tile& tile, i32 steps) {
    if (!args.block_scales) return nullptr;
    i32 row_blocks = (args.n + 127) / 128;
    return args.w_scales + ((i64)tile.expert * row_blocks + tile.n_first / 128) * steps;
}
// Scale of row and token, and bias, of four neighbours along n.
template <bool FP8> struct Finish {
    float4 scales, bias;
    i32 valid;

    METHOD Finish(const Gemm90Args& args, i32 expert, i32 n) : valid(args.n - n) {
        bias = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        scales = make_float4(1.0f, 1.0f, 1.0f, 1.0f);
        i64 at = (i64)expert * args.n + n;
        if (args.bias) bias = load_four(args.bias + at, valid);
        if (FP8 && !args.block_scales) scales = load_four(args.w_scales + at, valid);
    }
    METHOD void store(const Gemm90Args& args, i64 row, i32 n, float4 v) const {
        if (FP8) {
            float x = args.x_scales[row];
            v = make_float4(v.x * scales.x * x, v.y * scales.y * x, v.z * scales.z * x, v.w * scales.w * x);
        }
        if (args.bias) v = make_float4(v.x + bias.x, v.y + bias.y, v.z + bias.z, v.w + bias.w);
        store_four(args.out, args.out_is_f32, row * args.n + n, v, valid, args.n % 4 == 0);
    }
};

// A warp is done with a stage.
DEVICE void release(u32 barrier) {
    if (threadIdx.x % WARP == 0) barrier_arrive(barrier);
}

// The stages a block goes through, each the weights' rows and then the tokens' rows of 128 bytes of k. Loader and
// multipliers keep one each.
template <int GROUPS, int N, int STAGES, bool FP8> struct Ring {
    static constexpr int STEP_K = FP8 ? 128 : 64, W_BYTES = GROUPS * 8192, BYTES = W_BYTES + N * 128;
    u32 memory, full, empty, phase;
    i32 stage;

    METHOD Ring(u32 memory, u32 barriers, u32 phase)
        : memory(memory), full(barriers), empty(barriers + STAGES * 8), phase(phase), stage(0) {}
    METHOD void init() const {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full + i * 8, 1);
            barrier_init(empty + i * 8, GROUPS * 4);
        }
        barrier_init_done();
    }
    METHOD void advance_stage() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
    METHOD void load_weights(const TensorMap* map, i32 step, i32 row) const {
        u32 at = memory + stage * BYTES, barrier = full + stage * 8;
        barrier_expect(barrier, BYTES);
#pragma unroll
        for (int g = 0; g < GROUPS; g++) copy_box(at + g * 8192, map, step * STEP_K, row + g * 64, barrier);
    }
    // Only so many boxes of 64 rows, which nobody reads again. `apart`: a box of gates and one of ups in turn, so far apart.
    METHOD void load_weights_once(const TensorMap* map, i32 step, i32 row, i32 apart, i32 boxes, u64 policy) const {
        u32 at = memory + stage * BYTES, barrier = full + stage * 8;
        barrier_expect(barrier, BYTES - (GROUPS - boxes) * 8192);
        for (int g = 0; g < boxes; g++) {
            i32 first = apart ? (row + g * 64) / 128 * 64 + g % 2 * apart : row + g * 64;
            copy_box(at + g * 8192, map, step * STEP_K, first, barrier, policy);
        }
    }
    METHOD void load_tokens(const TensorMap* map, i32 step, i32 token) const {
        copy_box(memory + stage * BYTES + W_BYTES, map, step * STEP_K, token, full + stage * 8);
    }
    // One slice, from zero, into `sums`. FP8: the tensor cores add such products in few bits, so that they go to
    // `sums` from `products` after every step, times that step's scale where there are `scales`.
    METHOD void slice(float (&sums)[N / 2], float (&products)[N / 2], i32 group, i32 steps, const float* scales) {
        u32 previous = 0;
        for (i32 step = 0; step < steps; step++) {
            u32 at = memory + stage * BYTES;
            u64 a = k_major_128(at + group * 8192), b = k_major_128(at + W_BYTES);
            float scale = FP8 && scales ? scales[step] : 1.0f;
            barrier_wait(full + stage * 8, phase);
            group_fence();
#pragma unroll
            for (int part = 0; part < 4; part++) {
                if (FP8) Product<N>::e4m3_shared(products, advance(a, part * 32), advance(b, part * 32), part);
                else Product<N>::bf16_shared(sums, advance(a, part * 32), advance(b, part * 32), step | part);
            }
            group_commit();
            if (FP8) {
                group_wait<0>();
                pin(products);
                release(empty + stage * 8);
#pragma unroll
                for (int i = 0; i < N / 2; i++)
                    sums[i] = step == 0 ? products[i] * scale : fmaf(products[i], scale, sums[i]);
            } else if (step > 0) {
                group_wait<1>();
                release(previous);
            }
            previous = empty + stage * 8;
            advance_stage();
        }
        if (!FP8) {
            group_wait<0>();
            pin(sums);
            release(previous);
        }
    }
};
