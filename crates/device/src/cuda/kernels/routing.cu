// Mixture of experts, part one: which experts a row takes and with what weight (routing.cuh); and all (row, expert) pairs in
// order of expert, then row. A bit a row and expert makes a pair's place among its expert's rows a count of bits.
//
//   route_{128,512}(RoutingArgs)
//       rows <= 16: grid 1, threads 512 (256 up to 8 rows): everything is done. Else grid ceil(rows / 8), threads 256, and then
//   place_pairs(RoutingArgs)
//       grid ceil(rows / 64), threads 1024.
//       128: experts <= 128; 512: experts <= 512. At most 64 groups; top_k <= experts, top_k <= 32.
#include "routing.cuh"

#define CHUNK 64
// Most rows of a block that does everything; most experts of a row.
#define MAX_ROWS 16
#define MAX_TOP 32

// Writes a row's experts and weights, the experts to `chosen` as well; and everything, where the row is alone.
template <int EACH> DEVICE void route_row(const RoutingArgs& args, int row, bool alone, u16* chosen, float* staged) {
    choose_experts<EACH>(args, row, staged, [&](int expert, int before, bool taken, float weight) {
        if (taken) {
            args.experts_of[(i64)row * args.top_k + before] = expert;
            args.weights[(i64)row * args.top_k + before] = weight;
            chosen[before] = expert;
            if (alone) {
                // One row: its experts are in order already.
                args.positions[before] = before;
                args.sorted_rows[before] = 0;
                args.sorted_experts[before] = expert;
            }
        }
        if (alone) args.offsets[expert] = before;
    });
    if (alone && threadIdx.x % WARP == 0) args.offsets[args.experts] = args.top_k;
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
