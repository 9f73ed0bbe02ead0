// The arithmetic of attention's softmax, written once: a row gets the same bits whether its splits have blocks of their
// own or one block walks through them all. Every rounding is spelled out, since a compiler may fuse a product and a sum
// in one kernel and not in another. Scores are in units of ln 2, so that weights are powers of two. A lane has parts of two
// rows and of every eight tokens two, as the results of matrix instructions lie.
#pragma once
#include "attention.cuh"

#define LOG2_E 1.4426950408889634f
#define NOTHING_SEEN __int_as_float(0xff800000)

DEVICE float power_of_two(float x) {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}
DEVICE float inverse_of(float x) {
    float out;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}
// What is subtracted from scores whose largest is `largest`: a row that saw nothing yet must not subtract infinities. A
// largest score that is not a number is passed over, but makes the sum of weights one.
DEVICE float origin_of(float largest) { return largest == NOTHING_SEEN ? 0.0f : largest; }

// Keeps a compiler from making a copy of the loop around a condition that does not change in it.
DEVICE float hidden(float x) {
    asm volatile("" : "+f"(x));
    return x;
}
DEVICE i32 hidden(i32 x) {
    asm volatile("" : "+r"(x));
    return x;
}

// How a dot product becomes a score: it is multiplied at last, within the exponent, or at first where that is not all.
struct Scoring {
    float late;   // scale * log2(e), or 1
    float early;  // 0: the dot product stays as it is; else scale * log2(e), with a cap 2 * scale / cap * log2(e)
    float cap;    // cap * log2(e), or 0
};
DEVICE Scoring scoring_of(const AttentionArgs& args) {
    Scoring out;
    float factor = __fmul_rn(args.scale, LOG2_E);
    out.cap = __fmul_rn(args.soft_cap, LOG2_E);
    if (args.soft_cap > 0.0f) factor = __fmul_rn(__fmul_rn(factor, 2.0f), inverse_of(args.soft_cap));
    // The largest score is that of the largest product only if the factor is above 0.
    bool at_last = args.soft_cap <= 0.0f && factor > 0.0f;
    out.late = at_last ? factor : 1.0f;
    out.early = at_last ? 0.0f : factor;
    return out;
}
// tanh(y) = 1 - 2 / (exp(2 y) + 1), which ends at -1 and 1 without special cases; `x` is 2 y in units of ln 2.
DEVICE float capped(const Scoring& scoring, float x) {
    return __fmul_rn(scoring.cap, __fmaf_rn(-2.0f, inverse_of(__fadd_rn(power_of_two(x), 1.0f)), 1.0f));
}

// The largest score and the sums of weights of two of the tile's rows: lane / 4 and lane / 4 + 8. Within a split each
// quarter of a tile has a sum of its own, and each lane its share of it.
template <int QUARTERS> struct Rows {
    float largest[2], sum[2][QUARTERS];
};

// The online softmax's step over one tile, in three parts. The largest of this lane's row, of `N` groups of 8 tokens:
template <int N> DEVICE float largest_of(const float (&s)[N][4], int half) {
    float largest = s[0][half * 2];
#pragma unroll
    for (int n = 0; n < N; n++) largest = fmaxf(largest, fmaxf(s[n][half * 2], s[n][half * 2 + 1]));
    largest = fmaxf(largest, __shfl_xor_sync(FULL_MASK, largest, 1));
    return fmaxf(largest, __shfl_xor_sync(FULL_MASK, largest, 2));
}
// what is subtracted from scores, with `rescale`, by which all earlier sums are multiplied;
template <int QUARTERS>
DEVICE float origin_of_tile(Rows<QUARTERS>& rows, int half, const Scoring& scoring, float largest, float& rescale) {
    largest = fmaxf(__fmul_rn(largest, scoring.late), rows.largest[half]);
    float origin = origin_of(largest);
    rescale = power_of_two(__fadd_rn(rows.largest[half], -origin));
    rows.largest[half] = largest;
    return origin;
}
// and the weights of a quarter's groups, the first of them `FIRST`, which are returned summed.
template <int FIRST, int NUM, int N>
DEVICE float weigh(float (&s)[N][4], int half, const Scoring& scoring, float origin) {
    float sum = 0.0f;
#pragma unroll
    for (int n = FIRST; n < FIRST + NUM; n++)
#pragma unroll
        for (int i = half * 2; i < half * 2 + 2; i++) {
            s[n][i] = power_of_two(__fmaf_rn(s[n][i], scoring.late, -origin));
            sum = __fadd_rn(sum, s[n][i]);
        }
    return sum;
}

// Sums of values lie as the results of products do: [16 columns][8 columns][row, row, row + 8, row + 8].
template <int UNITS> DEVICE void rescale_sums(float (&sums)[UNITS][2][4], const float (&rescale)[2]) {
#pragma unroll
    for (int u = 0; u < UNITS; u++)
#pragma unroll
        for (int i = 0; i < 8; i++) sums[u][i / 4][i % 4] = __fmul_rn(sums[u][i / 4][i % 4], rescale[i % 4 / 2]);
}

// Ends a split: a sum of weights is gathered from a row's four lanes, then from a tile's quarters.
DEVICE float gathered(float sum) {
    sum = __fadd_rn(sum, __shfl_xor_sync(FULL_MASK, sum, 1));
    return __fadd_rn(sum, __shfl_xor_sync(FULL_MASK, sum, 2));
}
DEVICE float sum_of_quarters(float first, float second, float third, float fourth) {
    return __fadd_rn(__fadd_rn(__fadd_rn(first, second), third), fourth);
}

// Merging two results with largest scores `before` and `next`: both are scaled to the larger of the two. A result that
// saw nothing, and so has a sum of 0, is left out by the caller: it changes no bit.
struct Merge {
    float largest, before, next;
};
DEVICE Merge merge_of(float before, float next) {
    Merge out;
    out.largest = fmaxf(before, next);
    float origin = origin_of(out.largest);
    out.before = power_of_two(__fadd_rn(before, -origin));
    out.next = power_of_two(__fadd_rn(next, -origin));
    return out;
}
DEVICE float merged(const Merge& merge, float before, float next) {
    return __fmaf_rn(before, merge.before, __fmul_rn(next, merge.next));
}

// Merges a split into what came before it.
template <int UNITS>
DEVICE void merge_split(Rows<1>& total, float (&totals)[UNITS][2][4], const Rows<1>& rows, const float (&sums)[UNITS][2][4]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (rows.sum[half][0] == 0.0f) continue;
        Merge merge = merge_of(total.largest[half], rows.largest[half]);
        total.largest[half] = merge.largest;
        total.sum[half][0] = merged(merge, total.sum[half][0], rows.sum[half][0]);
#pragma unroll
        for (int u = 0; u < UNITS; u++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float& sum = totals[u][i / 2][half * 2 + i % 2];
                sum = merged(merge, sum, sums[u][i / 2][half * 2 + i % 2]);
            }
    }
}
template <int QUARTERS, int UNITS> DEVICE void clear(Rows<QUARTERS>& rows, float (&sums)[UNITS][2][4]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        rows.largest[half] = NOTHING_SEEN;
#pragma unroll
        for (int quarter = 0; quarter < QUARTERS; quarter++) rows.sum[half][quarter] = 0.0f;
    }
#pragma unroll
    for (int u = 0; u < UNITS; u++)
#pragma unroll
        for (int i = 0; i < 8; i++) sums[u][i / 4][i % 4] = 0.0f;
}

// What a row's merged sums are multiplied by at last. A sink is one more weight, whose value is nothing.
DEVICE float sink_of(const AttentionArgs& args, u32 head) {
    return args.sinks == nullptr ? NOTHING_SEEN : __fmul_rn(args.sinks[head], LOG2_E);
}
DEVICE float finish_of(float sink, float largest, float sum) {
    if (sum == 0.0f) return 0.0f;
    if (sink == NOTHING_SEEN) return inverse_of(sum);
    Merge merge = merge_of(largest, sink);
    return __fmul_rn(merge.before, inverse_of(merged(merge, sum, 1.0f)));
}
