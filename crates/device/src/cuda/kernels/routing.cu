// Mixture of experts, part one: which experts a row takes and with what weight, from that row's router logits alone; and
// all (row, expert) pairs in order of expert, then row. A warp routes a row. Chunks of 64 rows keep a bit a row and
// expert, so that a pair's place among its expert's rows is a count of bits.
//
//   route_{128,512}(RoutingArgs)                grid ceil(rows / 64); with one block (rows <= 64) everything is done
//   place_pairs_{128,512}(RoutingArgs)          then with more blocks: grid ceil(rows / 64)
//       128: experts <= 128, threads 1024; 512: experts <= 512, threads 512. At most 64 groups; top_k <= experts.
#include "rows.cuh"

#define SOFTMAX 0
#define SOFTMAX_OF_BEST 1
#define SIGMOID 2
#define CHUNK 64
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
    u32* counts;               // [ceil(rows / 64), experts] scratch of the two halves
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

// Which groups of experts stay in the race, as bits: those with the largest sums of their two best, the lower number
// first among equals. `ranked` is what the choice goes by, of expert e * 32 + lane.
template <int EACH> DEVICE u64 best_groups(const float (&ranked)[EACH], const RoutingArgs& args) {
    const int lane = threadIdx.x % WARP, size = args.experts / args.groups;
    const float none = __uint_as_float(0xff800000u);
    float own[2] = {none, none};  // of groups lane and lane + 32
    for (int group = 0; group < args.groups; group++) {
        float first = none, second = none;
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            int expert = e * WARP + lane;
            float value = expert / size == group && expert < args.experts ? ranked[e] : none;
            if (value > first)
                second = first, first = value;
            else if (value > second)
                second = value;
        }
#pragma unroll
        for (int step = 16; step > 0; step >>= 1) {
            float other = __shfl_xor_sync(FULL_MASK, first, step), next = __shfl_xor_sync(FULL_MASK, second, step);
            second = fmaxf(fminf(first, other), fmaxf(second, next));
            first = fmaxf(first, other);
        }
        float sum = size == 1 ? first : first + second;
        if (group == lane) own[0] = sum;
        if (group == lane + WARP) own[1] = sum;
    }
    u64 kept = 0;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int group = half * WARP + lane, beaten = 0;
        for (int other = 0; other < args.groups; other++) {
            float theirs = __shfl_sync(FULL_MASK, other < WARP ? own[0] : own[1], other % WARP);
            beaten += theirs > own[half] || (theirs == own[half] && other < group);
        }
        u32 bits = __ballot_sync(FULL_MASK, group < args.groups && beaten < args.groups_kept);
        kept |= (u64)bits << (half * WARP);
    }
    return kept;
}

// Routes one row with one warp: writes its experts and weights, and sets the row's bit in each expert's mask.
template <int EACH> DEVICE void route_row(const RoutingArgs& args, int row, u64* masks) {
    const int lane = threadIdx.x % WARP;
    const float none = __uint_as_float(0xff800000u);
    float scores[EACH];
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        int expert = e * WARP + lane;
        scores[e] = expert < args.experts ? args.logits[(i64)row * args.experts + expert] : none;
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
        largest = warp_max(largest);
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
            u64 kept = best_groups<EACH>(ranked, args);
            int size = args.experts / args.groups;
#pragma unroll
            for (int e = 0; e < EACH; e++)
                if (!((kept >> ((e * WARP + lane) / size & 63)) & 1)) ranked[e] = none;
        }
#pragma unroll
        for (int e = 0; e < EACH; e++) ranks[e] = rank_of(ranked[e]);
    }
#pragma unroll
    for (int e = 0; e < EACH; e++)
        if (e * WARP + lane >= args.experts) ranks[e] = GONE;

    u32 taken = 0;
    for (int choice = 0; choice < args.top_k; choice++) {
        u32 best = GONE, where = 0;
#pragma unroll
        for (int e = 0; e < EACH; e++)
            if (ranks[e] > best) best = ranks[e], where = e;
        u32 most = __reduce_max_sync(FULL_MASK, best);
        u32 expert = __reduce_min_sync(FULL_MASK, best == most ? where * WARP + lane : 0xffffffffu);
        if (expert % WARP == lane) {
            taken |= 1u << (expert / WARP);
#pragma unroll
            for (int e = 0; e < EACH; e++)
                if (e == expert / WARP) ranks[e] = GONE;
        }
    }

    if (args.score == SOFTMAX_OF_BEST) {
        float largest = none, sum = 0.0f;
#pragma unroll
        for (int e = 0; e < EACH; e++)
            if (taken >> e & 1) largest = fmaxf(largest, scores[e]);
        largest = warp_max(largest);
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
        if (taken >> e & 1) {
            i64 at = (i64)row * args.top_k + before + __popc(lanes & ((1u << lane) - 1));
            args.experts_of[at] = e * WARP + lane;
            args.weights[at] = scores[e] * factor;
            atomicOr(&masks[e * WARP + lane], 1ull << (row % CHUNK));
        }
        before += __popc(lanes);
    }
}

// Of thread e's count the sum of all counts before it; of the first LIMIT threads, in all threads of those.
template <int LIMIT> DEVICE u32 counts_before(u32 count, u32* warps) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    u32 sum = count;
#pragma unroll
    for (int step = 1; step < WARP; step <<= 1) {
        u32 other = __shfl_up_sync(FULL_MASK, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == WARP - 1 && warp < LIMIT / WARP) warps[warp] = sum;
    __syncthreads();
    u32 before = sum - count;
    if (threadIdx.x < LIMIT)
        for (int other = 0; other < warp; other++) before += warps[other];
    return before;
}

template <int EACH> DEVICE void route_chunk(const RoutingArgs& args, u64* masks) {
    const int warp = threadIdx.x / WARP;
    if (threadIdx.x < EACH * WARP) masks[threadIdx.x] = 0;
    __syncthreads();
    release_next();
    wait_for_previous();
#pragma unroll 1
    for (int local = warp; local < CHUNK; local += blockDim.x / WARP) {
        int row = blockIdx.x * CHUNK + local;
        if (row < args.rows) route_row<EACH>(args, row, masks);
    }
    __syncthreads();
}

DEVICE u32 rank_in_chunk(const u64* masks, u32 expert, int row) {
    return __popcll(masks[expert] & ((1ull << (row % CHUNK)) - 1));
}

// With one block all is done; else each pair's rank within its chunk and expert is left in `positions`, and each chunk's
// counts.
template <int EACH> DEVICE void route(const RoutingArgs& args) {
    const int limit = EACH * WARP;
    __shared__ u64 masks[limit];
    __shared__ u32 starts[limit], warps[WARP];
    route_chunk<EACH>(args, masks);
    const bool alone = gridDim.x == 1;
    u32 count = threadIdx.x < limit ? __popcll(masks[threadIdx.x]) : 0;
    u32 start = counts_before<limit>(count, warps);
    if (threadIdx.x < limit) starts[threadIdx.x] = alone ? start : 0;
    if (threadIdx.x < args.experts) {
        if (!alone) args.counts[(i64)blockIdx.x * args.experts + threadIdx.x] = count;
        if (alone) args.offsets[threadIdx.x] = start;
        if (alone && threadIdx.x == args.experts - 1) args.offsets[args.experts] = start + count;
    }
    __syncthreads();
    int first = blockIdx.x * CHUNK, rows = min(CHUNK, args.rows - first);
    for (int index = threadIdx.x; index < rows * args.top_k; index += blockDim.x) {
        int pair = first * args.top_k + index, row = pair / args.top_k;
        u32 expert = args.experts_of[pair];
        u32 at = starts[expert] + rank_in_chunk(masks, expert, row);
        args.positions[pair] = at;
        if (!alone) continue;
        args.sorted_rows[at] = row;
        args.sorted_experts[at] = expert;
    }
}

template <int EACH> DEVICE void place_pairs(const RoutingArgs& args) {
    const int limit = EACH * WARP, shares = blockDim.x / limit;
    __shared__ u32 totals[limit], starts[limit], warps[WARP];
    if (threadIdx.x < limit) totals[threadIdx.x] = starts[threadIdx.x] = 0;
    __syncthreads();
    release_next();
    wait_for_previous();
    // Sums of integers, so the order in which shares arrive does not matter.
    int expert = threadIdx.x % limit, chunks = (args.rows + CHUNK - 1) / CHUNK;
    if (expert < args.experts) {
        u32 total = 0, before = 0;
#pragma unroll 8
        for (int chunk = threadIdx.x / limit; chunk < chunks; chunk += shares) {
            u32 count = args.counts[(i64)chunk * args.experts + expert];
            total += count;
            before += chunk < blockIdx.x ? count : 0;
        }
        atomicAdd(&totals[expert], total);
        atomicAdd(&starts[expert], before);
    }
    __syncthreads();
    u32 total = threadIdx.x < limit ? totals[threadIdx.x] : 0;
    u32 start = counts_before<limit>(total, warps);
    if (threadIdx.x < limit) starts[threadIdx.x] += start;
    if (blockIdx.x == 0 && threadIdx.x < args.experts) {
        args.offsets[threadIdx.x] = start;
        if (threadIdx.x == args.experts - 1) args.offsets[args.experts] = start + total;
    }
    __syncthreads();
    int first = blockIdx.x * CHUNK, rows = min(CHUNK, args.rows - first);
    for (int index = threadIdx.x; index < rows * args.top_k; index += blockDim.x) {
        int pair = first * args.top_k + index;
        u32 chosen = args.experts_of[pair], at = starts[chosen] + args.positions[pair];
        args.positions[pair] = at;
        args.sorted_rows[at] = pair / args.top_k;
        args.sorted_experts[at] = chosen;
    }
}

#define ROUTING(LIMIT, EACH, THREADS)                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS) route_##LIMIT(const __grid_constant__ RoutingArgs args) {    \
        route<EACH>(args);                                                                                             \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS) place_pairs_##LIMIT(const __grid_constant__ RoutingArgs args) { \
        place_pairs<EACH>(args);                                                                                       \
    }
ROUTING(128, 4, 1024)
ROUTING(512, 16, 512)
