// The 64 rows that one warpgroup holds in attention over prompt chunks, with the arithmetic of the decode form: tiles of 64
// keys in ascending order, sums that begin anew with every split and are merged with what came before. Two tiles are taken at
// a time, so that the second's scores and exponentials do not wait for the first's. When it happens is in
// attention_invariant_sm90.cu.
#pragma once
#include "attention_softmax.cuh"
#include "attention_sm90_copies.cuh"

// A thread has two rows, 8 apart, and of every 8 columns two: entry 4 * j + 2 * r + e of an accumulator is row r of the
// two, column 8 * j + 2 * (lane % 4) + e. HEAD is the head size. Queries are in registers; the sums of the splits before this
// one are in shared memory, a place for every thread.
template <int HEAD> struct SplitRows {
    static constexpr int PAIR = 128, TILE = 64, TILE_PANEL = PAIR * 128, QUERY_PANEL = QUERY_ROWS * 128;
    float scores[PAIR / 2];
    u32 weights[PAIR / 16][4];
    float sums[HEAD / 2];
    u32 queries[HEAD / 16][4];
    Rows<4> rows;   // of this split
    Rows<1> ended;  // of the split before it, until its sums are merged
    Rows<1> total;
    float rescale[2][2];  // [tile of the two][row]

    METHOD float (&units())[HEAD / 16][2][4] { return *(float(*)[HEAD / 16][2][4])sums; }

    METHOD void begin() {
        clear(rows, units());
        clear(total, units());
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

    METHOD void start_scores(u32 keys) {
        u64 b = k_major_128(keys);
        group_fence();
#pragma unroll
        for (int k = 0; k < HEAD / 16; k++)
            Product<PAIR>::template bf16_registers<0>(scores, queries[k], advance(b, k / 4 * TILE_PANEL + k % 4 * 32), k > 0);
        group_commit();
    }

    // Of one of the two tiles.
    template <int WHICH> METHOD void start_sums(u32 values) {
        u64 b = n_major_128(values, TILE_PANEL);
        group_fence();
#pragma unroll
        for (int k = WHICH * TILE / 16; k < (WHICH + 1) * TILE / 16; k++)
            Product<HEAD>::template bf16_registers<1>(sums, weights[k], advance(b, k * 2048), 1);
        group_commit();
    }

    // Dot products become scores but for a late factor.
    METHOD void score(const Scoring& scoring) {
        if (scoring.early == 0.0f) return;
#pragma unroll
        for (int i = 0; i < PAIR / 2; i++) {
            float x = __fmul_rn(scores[i], scoring.early);
            scores[i] = scoring.cap > 0.0f ? capped(scoring, x) : x;
        }
    }
    // What a row does not see counts nothing. `low` and `high` are the first and last position that it sees, from the
    // tile's first key on.
    METHOD void hide(const i32 (&low)[2], const i32 (&high)[2]) {
        const i32 column = 2 * (threadIdx.x % 4);
#pragma unroll
        for (int i = 0; i < PAIR / 2; i++) {
            i32 position = column + i / 4 * 8 + i % 2;
            if (position < low[i / 2 % 2] || position > high[i / 2 % 2]) scores[i] = NOTHING_SEEN;
        }
    }
    // Scores become weights (in f32). Sums must be multiplied with rescale[0] before the first tile's values are added, and
    // with rescale[1] before the second's.
    METHOD void weigh_tile(const Scoring& scoring) {
        constexpr int QUARTER = TILE / 32;
        typedef float Tile[TILE / 8][4];
        Tile &s0 = *(Tile*)scores, &s1 = *(Tile*)(scores + TILE / 2);
        float found[2][2];
#pragma unroll
        for (int r = 0; r < 2; r++) found[0][r] = largest_of(s0, r), found[1][r] = largest_of(s1, r);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float (&sum)[4] = rows.sum[r];
            float first = origin_of_tile(rows, r, scoring, found[0][r], rescale[0][r]);
            float second = origin_of_tile(rows, r, scoring, found[1][r], rescale[1][r]);
            sum[0] = __fmaf_rn(sum[0], rescale[0][r], weigh<0, QUARTER>(s0, r, scoring, first));
            sum[1] = __fmaf_rn(sum[1], rescale[0][r], weigh<QUARTER, QUARTER>(s0, r, scoring, first));
            sum[2] = __fmaf_rn(sum[2], rescale[0][r], weigh<2 * QUARTER, QUARTER>(s0, r, scoring, first));
            sum[3] = __fmaf_rn(sum[3], rescale[0][r], weigh<3 * QUARTER, QUARTER>(s0, r, scoring, first));
            sum[0] = __fmaf_rn(sum[0], rescale[1][r], weigh<0, QUARTER>(s1, r, scoring, second));
            sum[1] = __fmaf_rn(sum[1], rescale[1][r], weigh<QUARTER, QUARTER>(s1, r, scoring, second));
            sum[2] = __fmaf_rn(sum[2], rescale[1][r], weigh<2 * QUARTER, QUARTER>(s1, r, scoring, second));
            sum[3] = __fmaf_rn(sum[3], rescale[1][r], weigh<3 * QUARTER, QUARTER>(s1, r, scoring, second));
        }
        pin(scores);
    }
    // Two neighbours of an accumulator's row are one register of the left operand.
    METHOD void pack_weights() {
#pragma unroll
        for (int i = 0; i < PAIR / 4; i++) weights[i / 4][i % 4] = pack_bf16(scores[2 * i], scores[2 * i + 1]);
    }
    // The last tile of a split is weighed: its sums of weights are complete, its sums of values may yet be under way.
    METHOD void end_split() {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float (&sum)[4] = rows.sum[half];
            ended.largest[half] = rows.largest[half];
            ended.sum[half][0] = sum_of_quarters(gathered(sum[0]), gathered(sum[1]), gathered(sum[2]), gathered(sum[3]));
            rows.largest[half] = NOTHING_SEEN;
            sum[0] = sum[1] = sum[2] = sum[3] = 0.0f;
        }
    }
    // At last the merged sums stay in registers.
    METHOD void merge_ended(u8* totals, bool is_first, bool is_last) {
        Merge merge[2];
        bool skips[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            skips[half] = ended.sum[half][0] == 0.0f;
            merge[half] = merge_of(total.largest[half], ended.largest[half]);
            if (skips[half]) continue;
            total.largest[half] = merge[half].largest;
            total.sum[half][0] = merged(merge[half], total.sum[half][0], ended.sum[half][0]);
        }
        float4* place = (float4*)totals + threadIdx.x;
#pragma unroll
        for (int j = 0; j < HEAD / 8; j++) {
            float4 four = is_first ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : place[j * CONSUMER_THREADS];
            if (!skips[0]) four.x = merged(merge[0], four.x, sums[4 * j]);
            if (!skips[0]) four.y = merged(merge[0], four.y, sums[4 * j + 1]);
            if (!skips[1]) four.z = merged(merge[1], four.z, sums[4 * j + 2]);
            if (!skips[1]) four.w = merged(merge[1], four.w, sums[4 * j + 3]);
            if (!is_last) place[j * CONSUMER_THREADS] = four;
            sums[4 * j] = is_last ? four.x : 0.0f;
            sums[4 * j + 1] = is_last ? four.y : 0.0f;
            sums[4 * j + 2] = is_last ? four.z : 0.0f;
            sums[4 * j + 3] = is_last ? four.w : 0.0f;
        }
    }
};
