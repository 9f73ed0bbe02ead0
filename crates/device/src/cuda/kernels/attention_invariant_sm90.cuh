// The 64 rows that one warpgroup holds in attention over prompt chunks, with the arithmetic of the decode form: tiles of 64
// keys in ascending order, sums that begin anew with every split and are merged with what came before. When it happens is
// in attention_invariant_sm90.cu.
#pragma once
#include "attention_softmax.cuh"
#include "attention_sm90_copies.cuh"

// A thread has two rows, 8 apart, and of every 8 columns two: entry 4 * j + 2 * r + e of an accumulator is row r of the
// two, column 8 * j + 2 * (lane % 4) + e. HEAD is the head size. Of the queries HELD units of 16 columns are in registers,
// and need not be read from shared memory for every tile. With AWAY the sums of the splits before this one are in shared
// memory, a place for every thread, HEAD / 8 times 4096 bytes in all.
template <int HEAD, int HELD, bool AWAY> struct SplitRows {
    static constexpr int TILE = 64, TILE_PANEL = TILE * 128, QUERY_PANEL = QUERY_ROWS * 128;
    float scores[TILE / 2];
    u32 weights[TILE / 16][4];
    float sums[HEAD / 2], totals[AWAY ? 16 : HEAD / 2];  // of this split; of those before it
    u32 queries[HELD > 0 ? HELD : 1][4];
    Rows<4> rows;   // of this split
    Rows<1> ended;  // of the split before it, until its sums are merged
    Rows<1> total;
    float rescale[2];

    template <int N> METHOD float (&units(float (&flat)[N]))[N / 8][2][4] { return *(float(*)[N / 8][2][4])flat; }

    METHOD void begin() {
        clear(rows, units(sums));
        clear(total, units(totals));
    }

    // From shared memory into registers, as the left operand of a product.
    METHOD void hold_queries(u32 from) {
        const int lane = threadIdx.x % WARP, row = threadIdx.x % 128 / WARP * 16 + lane % 16;
#pragma unroll
        for (int k = 0; k < HELD; k++) {
            int column = k % 4 * 2 + lane / 16;  // of 16 bytes
            load_matrices(queries[k], from + k / 4 * QUERY_PANEL + row * 128 + (column ^ row % 8) * 16);
        }
    }

    METHOD void start_scores(u32 from, u32 keys) {
        u64 a = k_major_128(from), b = k_major_128(keys);
        group_fence();
#pragma unroll
        for (int k = 0; k < HEAD / 16; k++) {
            u64 b_step = advance(b, k / 4 * TILE_PANEL + k % 4 * 32);
            if (k < HELD)
                Product<TILE>::template bf16_registers<0>(scores, queries[k < HELD ? k : 0], b_step, k > 0);
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

    // Dot products become scores but for a late factor.
    METHOD void score(const Scoring& scoring) {
        if (scoring.early == 0.0f) return;
#pragma unroll
        for (int i = 0; i < TILE / 2; i++) {
            float x = __fmul_rn(scores[i], scoring.early);
            scores[i] = scoring.cap > 0.0f ? capped(scoring, x) : x;
        }
    }
    // What a row does not see counts nothing. `low` and `high` are the first and last position that it sees, from the
    // tile's first key on.
    METHOD void hide(const i32 (&low)[2], const i32 (&high)[2]) {
        const i32 column = 2 * (threadIdx.x % 4);
#pragma unroll
        for (int i = 0; i < TILE / 2; i++) {
            i32 position = column + i / 4 * 8 + i % 2;
            if (position < low[i / 2 % 2] || position > high[i / 2 % 2]) scores[i] = NOTHING_SEEN;
        }
    }
    // Scores become weights (in f32); older sums must be multiplied with `rescale`.
    METHOD void weigh_tile(const Scoring& scoring) {
        float (&s)[TILE / 8][4] = *(float(*)[TILE / 8][4])scores;
        constexpr int QUARTER = TILE / 32;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float origin = origin_of_tile(rows, half, scoring, largest_of(s, half), rescale[half]);
            float (&sum)[4] = rows.sum[half];
            sum[0] = __fmaf_rn(sum[0], rescale[half], weigh<0, QUARTER>(s, half, scoring, origin));
            sum[1] = __fmaf_rn(sum[1], rescale[half], weigh<QUARTER, QUARTER>(s, half, scoring, origin));
            sum[2] = __fmaf_rn(sum[2], rescale[half], weigh<2 * QUARTER, QUARTER>(s, half, scoring, origin));
            sum[3] = __fmaf_rn(sum[3], rescale[half], weigh<3 * QUARTER, QUARTER>(s, half, scoring, origin));
        }
        pin(scores);
    }
    // Two neighbours of an accumulator's row are one register of the left operand.
    METHOD void pack_weights() {
#pragma unroll
        for (int i = 0; i < TILE / 4; i++) weights[i / 4][i % 4] = pack_bf16(scores[2 * i], scores[2 * i + 1]);
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
    METHOD void merge_ended(u8* away, bool is_first, bool is_last) {
        if constexpr (AWAY) {
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
            float4* place = (float4*)away + threadIdx.x;
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
        } else {
            merge_split(total, units(totals), ended, units(sums));
#pragma unroll
            for (int i = 0; i < HEAD / 2; i++) sums[i] = is_last ? totals[i] : 0.0f;
        }
    }
};
