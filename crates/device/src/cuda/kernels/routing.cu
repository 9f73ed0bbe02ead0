// Mixture of experts, part one: which experts a row takes and with what weight, from that row's router logits alone; and
// all (row, expert) pairs in order of expert, then row. A warp routes a row. A bit a row and expert makes a pair's place
// among its expert's rows a count of bits.
//
//   route_{128,512}(RoutingArgs)
//       rows <= 16: grid 1, threads 512 (256 up to 8 rows): everything is done. Else grid ceil(rows / 8), threads 256, and then
//   place_pairs(RoutingArgs)
//       grid ceil(rows / 64), threads 1024.
//       128: experts <= 128; 512: experts <= 512. At most 64 groups; top_k <= experts, top_k <= 32.
#include "rows.cuh"

#define SOFTMAX 0
#define SOFTMAX_OF_BEST 1
#define SIGMOID 2
#define CHUNK 64
// Most rows of a block that does everything; most experts of a row.
#define MAX_ROWS 16
#define MAX_TOP 32
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

// Routes one row with one warp: writes its experts and weights, the experts to `chosen` as well; and everything, where the
// row is alone. `staged` is room for a score an expert.
template <int EACH> DEVICE void route_row(const RoutingArgs& args, int row, bool alone, u16* chosen, float* staged) {
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
        if (taken >> e & 1) {
            int place = before + __popc(lanes & ((1u << lane) - 1));
            args.experts_of[(i64)row * args.top_k + place] = e * WARP + lane;
            args.weights[(i64)row * args.top_k + place] = scores[e] * factor;
            chosen[place] = e * WARP + lane;
            if (alone) {
                // One row: its experts are in order already.
                args.positions[place] = place;
                args.sorted_rows[place] = 0;
                args.sorted_experts[place] = e * WARP + lane;
            }
        }
        if (alone && e * WARP + lane < args.experts)
            args.offsets[e * WARP + lane] = before + __popc(lanes & ((1u << lane) - 1));
        before += __popc(lanes);
    }
    if (alone && lane == 0) args.offsets[args.experts] = args.top_k;
}

// Of each expert's count the sum of all counts before it, in place, in shared memory; returns the sum of all.
template <int LIMIT> DEVICE u32 counts_before(u32* counts, u32* warps) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int each = LIMIT <= 128 ? 1 : 2, used = LIMIT / each / WARP;
    u32 own[each], sum = 0;
    if (warp < used) {
#pragma unroll
        for (int i = 0; i < each; i++) own[i] = counts[threadIdx.x * each + i], sum += own[i];
        u32 mine = sum;
#pragma unroll
        for (int step = 1; step < WARP; step <<= 1) {
            u32 other = __shfl_up_sync(FULL_MASK, sum, step);
            if (lane >= step) sum += other;
        }
        if (lane == WARP - 1) warps[warp] = sum;
        sum -= mine;
    }
    __syncthreads();
    u32 total = 0;
#pragma unroll
    for (int other = 0; other < used; other++) {
        if (other < warp) sum += warps[other];
        total += warps[other];
    }
    if (warp < used) {
#pragma unroll
        for (int i = 0; i < each; i++) counts[threadIdx.x * each + i] = sum, sum += own[i];
    }
    __syncthreads();
    return total;
}

DEVICE void write_offsets(const RoutingArgs& args, const u32* starts, u32 total) {
#pragma unroll 1
    for (int expert = threadIdx.x; expert <= args.experts; expert += blockDim.x)
        args.offsets[expert] = expert < args.experts ? starts[expert] : total;
}

template <int EACH> DEVICE void route(const RoutingArgs& args) {
    const int limit = EACH * WARP;
    __shared__ u16 chosen[MAX_ROWS][MAX_TOP];
    __shared__ float staged[MAX_ROWS][limit];
    __shared__ u32 masks[limit], starts[limit], warps[WARP];
    const int warp = threadIdx.x / WARP, row = blockIdx.x * (blockDim.x / WARP) + warp;
    release_next();
    wait_for_previous();
    if (row < args.rows) route_row<EACH>(args, row, args.rows == 1, chosen[warp], staged[warp]);
    if (gridDim.x > 1 || args.rows == 1) return;

#pragma unroll 1
    for (int expert = threadIdx.x; expert < limit; expert += blockDim.x) masks[expert] = 0;
    __syncthreads();
    const int pairs = args.rows * args.top_k;
#pragma unroll 1
    for (int pair = threadIdx.x; pair < pairs; pair += blockDim.x)
        atomicOr(&masks[chosen[pair / args.top_k][pair % args.top_k]], 1u << (pair / args.top_k));
    __syncthreads();
#pragma unroll 1
    for (int expert = threadIdx.x; expert < limit; expert += blockDim.x) starts[expert] = __popc(masks[expert]);
    __syncthreads();
    u32 total = counts_before<limit>(starts, warps);
    write_offsets(args, starts, total);
#pragma unroll 1
    for (int pair = threadIdx.x; pair < pairs; pair += blockDim.x) {
        int of_row = pair / args.top_k;
        u32 expert = chosen[of_row][pair % args.top_k];
        u32 at = starts[expert] + __popc(masks[expert] & ((1u << of_row) - 1));
        args.positions[pair] = at;
        args.sorted_rows[at] = of_row;
        args.sorted_experts[at] = expert;
    }
}

// Each block counts all pairs, and those of earlier rows apart, and places its own. Counts are sums of integers and masks
// are unions, so the order in which threads arrive does not matter.
extern "C" __global__ void __launch_bounds__(1024) place_pairs(const __grid_constant__ RoutingArgs args) {
    const int limit = 512;
    __shared__ u64 masks[limit];
    __shared__ u32 earlier[limit], starts[limit], warps[WARP];
#pragma unroll 1
    for (int expert = threadIdx.x; expert < limit; expert += blockDim.x)
        masks[expert] = 0, earlier[expert] = 0, starts[expert] = 0;
    __syncthreads();
    release_next();
    wait_for_previous();
    const int pairs = args.rows * args.top_k, first = blockIdx.x * CHUNK * args.top_k;
    const int end = min(first + CHUNK * args.top_k, pairs);
#pragma unroll 4
    for (int pair = threadIdx.x; pair < pairs; pair += blockDim.x)
        atomicAdd(pair < first ? &earlier[args.experts_of[pair]] : &starts[args.experts_of[pair]], 1u);
#pragma unroll 1
    for (int pair = first + threadIdx.x; pair < end; pair += blockDim.x)
        atomicOr(&masks[args.experts_of[pair]], 1ull << (pair / args.top_k % CHUNK));
    __syncthreads();
#pragma unroll 1
    for (int expert = threadIdx.x; expert < limit; expert += blockDim.x) starts[expert] += earlier[expert];
    __syncthreads();
    u32 total = counts_before<limit>(starts, warps);
    if (blockIdx.x == 0) write_offsets(args, starts, total);
#pragma unroll 1
    for (int pair = first + threadIdx.x; pair < end; pair += blockDim.x) {
        int row = pair / args.top_k;
        u32 expert = args.experts_of[pair];
        u32 at = starts[expert] + earlier[expert] + __popcll(masks[expert] & ((1ull << (row % CHUNK)) - 1));
        args.positions[pair] = at;
        args.sorted_rows[at] = row;
        args.sorted_experts[at] = expert;
    }
}

extern "C" __global__ void __launch_bounds__(512) route_128(const __grid_constant__ RoutingArgs args) {
    route<4>(args);
}
extern "C" __global__ void __launch_bounds__(512) route_512(const __grid_constant__ RoutingArgs args) {
    route<16>(args);
}
