// Which part of a product each block computes, and how a finished tile leaves the registers. See gemm_sm90.cu.
#pragma once
#include "hopper.cuh"

#define MAX_EXPERTS 512
#define METHOD __device__ __forceinline__
// Floats between tokens in a warp's staging area: 16 and a gap, so that neither side meets a bank twice.
#define STAGE_ROW 20
#define STAGE_FLOATS (8 * STAGE_ROW)

// By value; mirrored on the host.
struct Gemm90Args {
    void* out;           // [rows, n], f32 or bf16
    const float* bias;   // [n] (grouped: [experts, n]) or null
    float* partial;      // sums of slices whose tile is shared by blocks
    u32* counters;       // slices that have arrived; zero before and after every launch
    const u32* offsets;  // [experts + 1] first rows, or null: one dense matrix
    i32 rows, n, k, slices, experts, split, out_is_f32, token_group, prefetch, block_scales;
    const float* w_scales;  // fp8 alone
    const float* x_scales;  // fp8 alone
};

// One tile of the output: `w_row` of the weights' map and rows of x from `token`.
struct Tile {
    i32 w_row, n_first, token, tokens, expert;
};

// A run of slices of one tile.
struct Piece {
    i32 tile, first, last;
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
// The blocks of a cluster take neighbouring weight rows of one tile `CLUSTER` times as high.
template <int BLOCK_ROWS, int N, int CLUSTER>
DEVICE Tile locate(const Gemm90Args& args, const Schedule& schedule, const u32* starts, i32 tile, i32 rank) {
    const i32 ROWS = BLOCK_ROWS * CLUSTER;
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
        t.n_first = inside / columns * ROWS + rank * BLOCK_ROWS;
        t.w_row = low * args.n + t.n_first;
        t.token = begin + inside % columns * N;
        t.tokens = end - t.token;
    } else {
        i32 in_band = args.token_group * schedule.row_tiles, band = tile / in_band, inside = tile % in_band;
        i32 width = min(args.token_group, schedule.token_tiles - band * args.token_group);
        t.expert = 0;
        t.n_first = inside / width * ROWS + rank * BLOCK_ROWS;
        t.w_row = t.n_first;
        t.token = (band * args.token_group + inside % width) * N;
        t.tokens = args.rows - t.token;
    }
    t.tokens = min(t.tokens, N);
    return t;
}

// This block's pieces, in order: whole tiles, one in every `blocks`; or (split) an equal share of all slices of all
// tiles, so that a few tiles fill all processors. A tile's slices are summed in ascending order either way.
struct Pieces {
    i32 at, end, tiles, slices, split, blocks;

    METHOD Pieces(const Gemm90Args& args, i32 tiles, i32 block, i32 blocks)
        : tiles(tiles), slices(args.slices), split(args.split), blocks(blocks) {
        at = split ? share(block) : block;
        end = split ? share(block + 1) : tiles;
    }
    METHOD i32 share(i32 block) const { return (i32)((u64)(tiles * slices) * block / blocks); }
    METHOD bool next(Piece& piece) {
        if (at >= end) return false;
        if (split) {
            piece.tile = at / slices;
            piece.first = at % slices;
            piece.last = min(slices, piece.first + end - at);
            at += piece.last - piece.first;
        } else {
            piece.tile = at;
            piece.first = 0;
            piece.last = slices;
            at += blocks;
        }
        return true;
    }
    // The block that holds the tile's first slice, and how many it holds.
    METHOD i32 owner(i32 tile, i32& held) const {
        u64 units = (u64)tiles * slices, unit = (u64)tile * slices;
        i32 block = (i32)(((unit + 1) * blocks - 1) / units);
        held = min(slices, share(block + 1) - (i32)unit);
        return block;
    }
    // Where a shared tile's partial sums lie: at most min(tiles, blocks) tiles are shared.
    METHOD i32 slot(i32 tile) const {
        i32 held;
        return tiles <= blocks ? tile : owner(tile, held);
    }
};

// Of the tile's 128 weight rows and one step of 128.
DEVICE float block_scale(const Gemm90Args& args, const Tile& tile, i32 step, i32 steps) {
    i32 row_blocks = (args.n + 127) / 128;
    return args.w_scales[((i64)tile.expert * row_blocks + tile.n_first / 128) * steps + step];
}

DEVICE void store_partial(float4* to, const float* values, int count) {
#pragma unroll
    for (int j = 0; j < count; j++)
        to[j * 128] = make_float4(values[j * 4], values[j * 4 + 1], values[j * 4 + 2], values[j * 4 + 3]);
}
// Past L1: other blocks wrote it during this kernel.
DEVICE float4 load_partial(const float4* from) {
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
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

// A warp's 16 weight rows by N tokens, turned around through `stage` so that neighbours along n are stored together.
template <int N, bool FP8>
DEVICE void store_tile(const Gemm90Args& args, const Tile& tile, i32 row_in_tile, const float (&sums)[N / 2],
                       float* stage) {
    i32 lane = threadIdx.x % WARP, n = tile.n_first + row_in_tile + lane % 4 * 4, valid = args.n - n;
    float4 bias = make_float4(0.0f, 0.0f, 0.0f, 0.0f), scales = make_float4(1.0f, 1.0f, 1.0f, 1.0f);
    if (args.bias) bias = load_four(args.bias + (i64)tile.expert * args.n + n, valid);
    if (FP8 && !args.block_scales) scales = load_four(args.w_scales + (i64)tile.expert * args.n + n, valid);
    bool vector = args.n % 4 == 0;
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
        if (token >= tile.tokens || valid <= 0) continue;
        if (FP8) {
            float x_scale = args.x_scales[tile.token + token];
            v = make_float4(v.x * scales.x * x_scale, v.y * scales.y * x_scale, v.z * scales.z * x_scale,
                            v.w * scales.w * x_scale);
        }
        if (args.bias) v = make_float4(v.x + bias.x, v.y + bias.y, v.z + bias.z, v.w + bias.w);
        store_four(args.out, args.out_is_f32, (i64)(tile.token + token) * args.n + n, v, valid, vector);
    }
}
