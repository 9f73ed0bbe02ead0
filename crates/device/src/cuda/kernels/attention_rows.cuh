// Rows of queries in registers: what they see, their scores, the online softmax, merging splits, writing results.
//
// A warp has 16 packed rows, a lane parts of two of them: rows lane / 4 and lane / 4 + 8, as mma.sync wants it.
#pragma once
#include "attention_tile.cuh"

// Division by a number that stays the same; exact while the product of dividend and divisor is below 2^32.
struct Divisor {
    u32 by, factor;
};
DEVICE Divisor divisor_of(u32 by) {
    Divisor out = {by, 0xffffffffu / by + 1};
    return out;
}
DEVICE u32 quotient(u32 x, const Divisor& divisor) { return divisor.by == 1 ? x : __umulhi(x, divisor.factor); }

// The rows of a span: their place in the batch, their number, and the first one's position.
struct SpanRows {
    u32 first, num;
    i32 base;
};

// What the 16 packed rows of a warp see; in shared memory, since it is seldom needed.
struct RowSight {
    i32 first, last;
    u64 own;
};
// And what all of them see: from `begin` to before `end`. None sees anything before `none_end` or after `last`.
struct WarpSight {
    i32 begin, end, none_end, last;
    i32 base;
    bool tree;
};
DEVICE WarpSight load_sights(RowSight* to, const AttentionArgs& args, const Divisor& group, const SpanRows& span,
                            u32 first, int lane) {
    WarpSight out;
    u32 num_packed = span.num * group.by;
    i32 window = args.window;
    out.base = span.base;
    out.tree = args.ancestors != nullptr && span.num > 1 && span.num <= 64;
    i32 first_row = out.base + (i32)quotient(first, group);
    out.last = first < num_packed ? out.base + (i32)quotient(min(first + 15, num_packed - 1), group) : -1;
    out.end = out.tree ? out.base : first_row + 1;
    out.begin = window == 0 ? 0 : out.tree ? out.base : out.last - window + 1;  // rows of a tree have windows of their own
    out.none_end = window == 0 ? 0 : (out.tree ? out.base : first_row) - window + 1;
    __syncwarp();
    if (lane < 16) {
        Sight sight = sight_at(args, span.first, span.num, span.base, min(quotient(first + lane, group), span.num - 1));
        to[lane] = {sight.first, sight.last, sight.own};
    }
    __syncwarp();
    return out;
}

// Which of the packed rows is one of this lane's two.
struct Place {
    u32 index, head;  // row of the span, head
    bool real;
};
DEVICE Place place_of(const AttentionArgs& args, const Divisor& group, u32 kv_head, u32 packed, u32 num_packed) {
    Place out;
    out.index = quotient(packed, group);
    out.head = kv_head * group.by + packed - out.index * group.by;
    out.real = packed < num_packed;
    return out;
}

template <int D, bool SORTED>
DEVICE void load_queries(u32 (&q)[D / 16][4], const AttentionArgs& args, const Divisor& group, const SpanRows& span, u32 kv_head,
                         u32 first, int lane) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        Place place = place_of(args, group, kv_head, first + lane / 4 + half * 8, span.num * group.by);
        const bf16* at = (const bf16*)args.qkv + (u64)(span.first + place.index) * (u32)args.qkv_width +
                         place.head * args.head_dim;
#pragma unroll
        for (int step = 0; step < D / 16; step++) {
            q[step][half] = q[step][half + 2] = 0;
            if (place.real && step * 16 < args.head_dim)
                load_query<SORTED>(q[step][half], q[step][half + 2], at + step * 16, lane);
        }
    }
}

// Dot products of `N` groups of 8 tokens, the first at `start`, become scores but for a late factor; what a row does not
// see counts nothing. `scales` is the shared address of the first token's scale.
template <bool SCALED, int N>
DEVICE void score(float (&s)[N][4], const Scoring& scoring, const WarpSight& warp, const RowSight* rows, i32 start, u32 scales,
                  int lane) {
#pragma unroll
    for (int n = 0; n < N; n++) {
        if (!SCALED) continue;
        float first, second;
        load_scales(first, second, scales + (n * 8 + lane % 4 * 2) * 4);
#pragma unroll
        for (int i = 0; i < 4; i++) s[n][i] = __fmul_rn(s[n][i], i % 2 ? second : first);
    }
    if (hidden(scoring.early) != 0.0f) {
#pragma unroll
        for (int i = 0; i < 4 * N; i++) {
            float x = __fmul_rn(s[i / 4][i % 4], scoring.early);
            s[i / 4][i % 4] = scoring.cap > 0.0f ? capped(scoring, x) : x;
        }
    }
    if (start >= warp.begin && start + 8 * N <= warp.end) return;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        RowSight row = rows[lane / 4 + half * 8];
        Sight sight = {row.first, row.last, warp.base, row.own, hidden((i32)warp.tree) != 0};
        u64 seen = seen_from(sight, start) >> (lane % 4 * 2);
        u32 words[2] = {(u32)seen, (u32)(seen >> 32)};
#pragma unroll
        for (int i = 0; i < 2 * N; i++) {
            int token = i / 2 * 8 + i % 2;
            if (!(words[token / 32] >> (token % 32) & 1)) s[i / 2][half * 2 + i % 2] = NOTHING_SEEN;
        }
    }
}

// Weights as an operand of the second product, two words a group; with a scale a value they carry it.
template <bool SCALED, int N> DEVICE void pack_weights(u32 (&out)[N][2], float (&s)[N][4], u32 scales, int lane) {
#pragma unroll
    for (int n = 0; n < N; n++) {
        if (SCALED) {
            float first, second;
            load_scales(first, second, scales + (n * 8 + lane % 4 * 2) * 4);
#pragma unroll
            for (int i = 0; i < 4; i++) s[n][i] = __fmul_rn(s[n][i], i % 2 ? second : first);
        }
        out[n][0] = pack_bf16(s[n][0], s[n][1]);
        out[n][1] = pack_bf16(s[n][2], s[n][3]);
    }
}

// One row's 16 columns of a unit, multiplied by `factor`, as the output.
template <bool SORTED> DEVICE void write_unit(bf16* to, const float (&sums)[2][4], int half, float factor, int lane) {
    float x[2][2];
#pragma unroll
    for (int i = 0; i < 4; i++) x[i / 2][i % 2] = __fmul_rn(sums[i / 2][half * 2 + i % 2], factor);
    if (!SORTED) {
        *(u32*)(to + column_of<SORTED>(0, 0, lane)) = pack_bf16(x[0][0], x[0][1]);
        *(u32*)(to + column_of<SORTED>(1, 0, lane)) = pack_bf16(x[1][0], x[1][1]);
    } else {
        *(uint2*)(to + column_of<SORTED>(0, 0, lane)) = make_uint2(pack_bf16(x[0][0], x[1][0]), pack_bf16(x[0][1], x[1][1]));
    }
}
template <bool SORTED> DEVICE void write_unit(float* to, const float (&sums)[2][4], int half, int lane) {
    if (!SORTED) {
        *(float2*)(to + column_of<SORTED>(0, 0, lane)) = make_float2(sums[0][half * 2], sums[0][half * 2 + 1]);
        *(float2*)(to + column_of<SORTED>(1, 0, lane)) = make_float2(sums[1][half * 2], sums[1][half * 2 + 1]);
    } else {
        *(float4*)(to + column_of<SORTED>(0, 0, lane)) =
            make_float4(sums[0][half * 2], sums[1][half * 2], sums[0][half * 2 + 1], sums[1][half * 2 + 1]);
    }
}
DEVICE bf16* output_at(const AttentionArgs& args, u32 first_row, u32 index, u32 head) {
    return (bf16*)args.out + (u64)((first_row + index) * args.heads + head) * (u32)args.head_dim;
}
