// The 64 rows that one warpgroup holds in attention over prompt chunks: scores of a tile of keys, weights, and the sums
// of values so far. What is summed and in which order is here; when it happens is in attention_sm90.cu.
#pragma once
#include "attention_sm90_copies.cuh"

#define LOG2_E 1.4426950408889634f
#define MINUS_INFINITY __uint_as_float(0xff800000u)

DEVICE float power_of_two(float x) {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}
DEVICE float reciprocal(float x) {
    float out;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}
// Four neighbouring lanes share a row.
DEVICE float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(FULL_MASK, x, 1));
    return fmaxf(x, __shfl_xor_sync(FULL_MASK, x, 2));
}
DEVICE float quad_sum(float x) {
    x += __shfl_xor_sync(FULL_MASK, x, 1);
    return x + __shfl_xor_sync(FULL_MASK, x, 2);
}

// A thread has two rows, 8 apart, and of every 8 columns two: entry 4 * j + 2 * r + e of an accumulator is row r of the
// two, column 8 * j + 2 * (lane % 4) + e. HEAD is the head size, TILE the number of keys at a time; shared memory holds
// panels of 64 columns with TILE_PANEL (keys, values) or QUERY_PANEL bytes.
// With HELD the queries are in registers: they need not be read from shared memory again for every tile, where the
// products and the copies already take most of the bandwidth.
template <int HEAD, int TILE, bool HELD> struct Rows {
    static constexpr int TILE_PANEL = TILE * 128, QUERY_PANEL = QUERY_ROWS * 128;
    float scores[TILE / 2];
    u32 weights[TILE / 16][4];
    float sums[HEAD / 2];
    u32 queries[HELD ? HEAD / 16 : 1][4];
    float largest[2], total[2], shrink[2];  // of scores; of weights, this thread's columns alone; of what came before
    i32 low[2], high[2];                    // first and last position seen
    i32 sure_low, sure_high;                // seen by all rows of the warpgroup

    METHOD void begin() {
#pragma unroll
        for (int i = 0; i < HEAD / 2; i++) sums[i] = 0.0f;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            largest[r] = MINUS_INFINITY;
            total[r] = 0.0f;
        }
    }

    // From shared memory into registers, as the left operand of a product.
    METHOD void hold_queries(u32 from) {
        const int lane = threadIdx.x % WARP, row = threadIdx.x % 128 / WARP * 16 + lane % 16;
#pragma unroll
        for (int k = 0; k < HEAD / 16; k++) {
            int column = k % 4 * 2 + lane / 16;  // of 16 bytes
            load_matrices(queries[k], from + k / 4 * QUERY_PANEL + row * 128 + (column ^ row % 8) * 16);
        }
    }

    // `from`: the queries in shared memory, if they are not held.
    METHOD void start_scores(u32 from, u32 keys) {
        u64 a = k_major_128(from), b = k_major_128(keys);
        group_fence();
#pragma unroll
        for (int k = 0; k < HEAD / 16; k++) {
            u64 b_step = advance(b, k / 4 * TILE_PANEL + k % 4 * 32);
            if constexpr (HELD)
                Product<TILE>::template bf16_registers<0>(scores, queries[k], b_step, k > 0);
            else
                Product<TILE>::bf16_shared(scores, advance(a, k / 4 * QUERY_PANEL + k % 4 * 32), b_step, k > 0);
        }
        group_commit();
    }

    METHOD void start_sums(u32 values) {
        u64 b = n_major_128(values, TILE_PANEL);
        group_fence();
#pragma unroll
        for (int k = 0; k < TILE / 16; k++)
            Product<HEAD>::template bf16_registers<1>(sums, weights[k], advance(b, k * 2048), 1);
        group_commit();
    }

    // Scores of the tile of keys at `start` become weights (in f32); older sums must be multiplied with `shrink`.
    METHOD void weigh(const AttentionArgs& args, i32 start, float factor) {
        if (args.soft_cap > 0.0f) {
            // cap * tanh(x / cap), exact to f32: the hardware's own tanh has 11 bits.
            float inner = 2.0f * LOG2_E * args.scale / args.soft_cap;
#pragma unroll
            for (int i = 0; i < TILE / 2; i++)
                scores[i] = args.soft_cap - 2.0f * args.soft_cap * reciprocal(power_of_two(scores[i] * inner) + 1.0f);
        }
        if (start < sure_low || start + TILE - 1 > sure_high) {
            i32 column = start + 2 * (threadIdx.x % 4);
#pragma unroll
            for (int i = 0; i < TILE / 2; i++) {
                i32 position = column + i / 4 * 8 + i % 2;
                if (position < low[i / 2 % 2] || position > high[i / 2 % 2]) scores[i] = MINUS_INFINITY;
            }
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float found = largest[r];
#pragma unroll
            for (int i = 2 * r; i < TILE / 2; i += 4) found = fmaxf(found, fmaxf(scores[i], scores[i + 1]));
            found = quad_max(found);
            // A row that has seen nothing yet keeps weights of zero.
            // Products are rounded first: where nothing larger was found, sums must not change by a bit.
            float base = found == MINUS_INFINITY ? 0.0f : __fmul_rn(found, factor);
            shrink[r] = power_of_two(__fmul_rn(largest[r], factor) - base);
            largest[r] = found;
            float sum = 0.0f;
#pragma unroll
            for (int i = 2 * r; i < TILE / 2; i += 4) {
                scores[i] = power_of_two(scores[i] * factor - base);
                scores[i + 1] = power_of_two(scores[i + 1] * factor - base);
                sum += scores[i] + scores[i + 1];
            }
            total[r] = total[r] * shrink[r] + sum;
        }
        pin(scores);
    }

    METHOD void shrink_sums() {
#pragma unroll
        for (int i = 0; i < HEAD / 2; i++) sums[i] *= shrink[i / 2 % 2];
    }
    // Two neighbours of an accumulator's row are one register of the left operand.
    METHOD void pack_weights() {
#pragma unroll
        for (int i = 0; i < TILE / 4; i++) weights[i / 4][i % 4] = pack_bf16(scores[2 * i], scores[2 * i + 1]);
    }
};
