// Which experts a row takes and with what weight, from that row's router logits alone: one warp a row.
#pragma once
#include "rows.cuh"

#define SOFTMAX 0
#define SOFTMAX_OF_BEST 1
#define SIGMOID 2
#define GONE 0u
#define NO_NUMBER 1u

// By value, mirrored in Rust with repr(C): 104 bytes.
struct RoutingArgs {
    const float* logits;       // [rows, experts]
    const float* choice_bias;  // [experts] or null: added to the scores for the choice only
    u32* experts_of;           // [rows, top_k] out: chosen experts, ascending
    float* weights;            // [rows, top_k] out
    u32* positions;            // [rows, top_k] out: the pair's place among all pairs in order of expert
    u32* sorted_rows;          // [rows * top_k] out: whose row stands at a place
    u32* sorted_experts;       // [rows * top_k] out: whose expert
    u32* offsets;              // [experts + 1] out: where an expert's pairs start
    void* unused;
    i32 rows, experts, top_k;
    i32 score;                 // SOFTMAX ...
    i32 normalize, groups, groups_kept;
    float scale;
};
static_assert(sizeof(RoutingArgs) == 104, "as the host has it");

// An order of integers that is the order of the numbers, minus zero below zero; what is not a number is last.
DEVICE u32 rank_of(float x) {
    u32 bits = __float_as_uint(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return NO_NUMBER;
    return bits ^ ((bits >> 31) ? 0xffffffffu : 0x80000000u);
}

// The largest of a warp's numbers, in one instruction; what is not a number counts for nothing.
DEVICE float lane_max(float x) {
    u32 most = __reduce_max_sync(FULL_MASK, rank_of(x));
    return __uint_as_float(most ^ ((most >> 31) ? 0x80000000u : 0xffffffffu));
}

// Which groups of experts stay in the race, as bits: those with the largest sums of their two best, the lower number
// first among equals. `ranked` is what the choice goes by, of all experts, in shared memory.
DEVICE u64 best_groups(const float* ranked, const RoutingArgs& args) {
    const int lane = threadIdx.x % WARP, groups = args.groups, size = args.experts / groups;
    const float none = __uint_as_float(0xff800000u);
    // So many lanes share a group; with more than 32 groups a lane has two.
    int share = 1;
    while (2 * share * groups <= WARP) share *= 2;
    float own[2] = {none, none};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int group = half * WARP + lane / share;
        if (half * WARP >= groups) break;
        float first = none, second = none;
        if (group < groups)
#pragma unroll 1
            for (int i = lane % share; i < size; i += share) {
                float value = ranked[group * size + i];
                if (value > first)
                    second = first, first = value;
                else if (value > second)
                    second = value;
            }
        for (int step = 1; step < share; step *= 2) {
            float other = __shfl_xor_sync(FULL_MASK, first, step), next = __shfl_xor_sync(FULL_MASK, second, step);
            second = fmaxf(fminf(first, other), fmaxf(second, next));
            first = fmaxf(first, other);
        }
        own[half] = size == 1 ? first : first + second;
    }
    u64 kept = 0;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (half * WARP >= groups) break;
        int group = half * WARP + lane / share, beaten = 0;
#pragma unroll 1
        for (int other = 0; other < groups; other++) {
            float theirs = __shfl_sync(FULL_MASK, other < WARP ? own[0] : own[1], other % WARP * share);
            beaten += theirs > own[half] || (theirs == own[half] && other < group);
        }
        u32 lanes = __ballot_sync(FULL_MASK, group < groups && beaten < args.groups_kept && lane % share == 0);
        for (; lanes; lanes &= lanes - 1) kept |= 1ull << (half * WARP + (__ffs(lanes) - 1) / share);
    }
    return kept;
}

// Past the first-level cache: a kernel may ask before the one ahead of it has ended (see experts_few.cuh).
DEVICE float load_fresh(const float* at) {
    float x;
    asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(x) : "l"(at) : "memory");
    return x;
}

// Chooses one row's experts with one warp. `visit(expert, before, taken, weight)` is called for every expert, by one lane:
// how many of those before it were taken, whether it was, and with what weight then. `staged` is room for a score an
// expert.
template <int EACH, typename Visit>
DEVICE void choose_experts(const RoutingArgs& args, int row, float* staged, Visit visit) {
    const int lane = threadIdx.x % WARP;
    const float none = __uint_as_float(0xff800000u);
    float scores[EACH];
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        int expert = e * WARP + lane;
        scores[e] = expert < args.experts ? load_fresh(args.logits + (i64)row * args.experts + expert) : none;
    }
    u32 ranks[EACH];
    // Scores grow with logits: without a bias or groups the logits decide, where rounding cannot make two equal.
    const bool by_logits = !args.choice_bias && args.groups <= 1;
    if (by_logits) {
#pragma unroll
        for (int e = 0; e < EACH; e++) ranks[e] = rank_of(scores[e]);
    }
    if (args.score == SOFTMAX) {
        float largest = none, sum = 0.0f;
#pragma unroll
        for (int e = 0; e < EACH; e++) largest = fmaxf(largest, scores[e]);
        largest = lane_max(largest);
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            scores[e] = e * WARP + lane < args.experts ? expf(scores[e] - largest) : 0.0f;
            sum += scores[e];
        }
        float inverse = 1.0f / warp_sum(sum);
#pragma unroll
        for (int e = 0; e < EACH; e++) scores[e] = scores[e] * inverse;
    } else if (args.score == SIGMOID) {
#pragma unroll
        for (int e = 0; e < EACH; e++) scores[e] = sigmoid(scores[e]);
    }
    if (!by_logits) {
        float ranked[EACH];
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            int expert = e * WARP + lane;
            ranked[e] = scores[e];
            if (args.choice_bias && expert < args.experts) ranked[e] += args.choice_bias[expert];
        }
        if (args.groups > 1) {
#pragma unroll
            for (int e = 0; e < EACH; e++) staged[e * WARP + lane] = ranked[e];
            __syncwarp();
            u64 kept = best_groups(staged, args);
            float inverse = 1.0f / (args.experts / args.groups);
#pragma unroll
            for (int e = 0; e < EACH; e++) {
                // Exact: experts and groups are few.
                int group = (int)((e * WARP + lane + 0.5f) * inverse);
                if (!((kept >> (group & 63)) & 1)) ranked[e] = none;
            }
        }
#pragma unroll
        for (int e = 0; e < EACH; e++) ranks[e] = rank_of(ranked[e]);
    }
#pragma unroll
    for (int e = 0; e < EACH; e++)
        if (e * WARP + lane >= args.experts) ranks[e] = GONE;

    u32 taken = 0;
#pragma unroll 1
    for (int choice = 0; choice < args.top_k; choice++) {
        u32 best = GONE, where = 0;
#pragma unroll
        for (int e = 0; e < EACH; e++)
            if (ranks[e] > best) best = ranks[e], where = e;
        u32 most = __reduce_max_sync(FULL_MASK, best);
        u32 lanes = __ballot_sync(FULL_MASK, best == most), winner = __ffs(lanes) - 1;
        // Several lanes have it: the lowest expert of all.
        if (lanes & (lanes - 1))
            winner = __reduce_min_sync(FULL_MASK, best == most ? where * WARP + lane : 0xffffffffu) % WARP;
        if (winner == lane) {
            taken |= 1u << where;
#pragma unroll
            for (int e = 0; e < EACH; e++)
                if (e == where) ranks[e] = GONE;
        }
    }

    if (args.score == SOFTMAX_OF_BEST) {
        float largest = none, sum = 0.0f;
#pragma unroll
        for (int e = 0; e < EACH; e++)
            if (taken >> e & 1) largest = fmaxf(largest, scores[e]);
        largest = lane_max(largest);
#pragma unroll
        for (int e = 0; e < EACH; e++)
            if (taken >> e & 1) scores[e] = expf(scores[e] - largest), sum += scores[e];
        float inverse = 1.0f / warp_sum(sum);
#pragma unroll
        for (int e = 0; e < EACH; e++) scores[e] = scores[e] * inverse;
    }
    float factor = args.scale;
    if (args.normalize) {
        float sum = 0.0f;
#pragma unroll
        for (int e = 0; e < EACH; e++)
            if (taken >> e & 1) sum += scores[e];
        // The small term guards against a sum of zero.
        factor = args.scale / (warp_sum(sum) + 1e-20f);
    }
    int before = 0;
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        u32 lanes = __ballot_sync(FULL_MASK, taken >> e & 1);
        int expert = e * WARP + lane, earlier = before + __popc(lanes & ((1u << lane) - 1));
        if (expert < args.experts) visit(expert, earlier, taken >> e & 1, scores[e] * factor);
        before += __popc(lanes);
    }
}
