// Sampling with a temperature, first half: sums of weights, and the candidates that top-k and top-p leave. What is launched
// how is said in sample.cuh.
//
// Weights are never stored: each kernel computes them again from the logits. `draw_weigh` sums chunks of weights and
// counts weights by size, all parts of a row together; the last part to arrive picks the size down to which candidates are
// needed, and `draw_gather` collects those. Counts are integers and sums have a fixed order, so nothing depends on which
// part comes first.
#include "sample.cuh"

// Twelve bits of a weight's mantissa behind those that its bin knows.
DEVICE u32 remainder_of(u32 bits) { return (bits >> (BIN_SHIFT - 12)) & 4095; }
// At most what weights of one bin sum up to, and at least all but a 32,000th of it.
DEVICE double bin_mass(int bin, u32 count, u32 remainders) {
    double least = (double)__uint_as_float((u32)bin << BIN_SHIFT);
    double step = (double)__uint_as_float((u32)(bin + 1) << BIN_SHIFT) - least;
    return count * least + remainders * (step / 4096.0);
}

// Picks mode and cutoff of a row from its counts, with all 512 threads, and leaves the counts zero.
DEVICE void pick_cutoff(const SampleArgs& args, int row, double total) {
    __shared__ u32 count_warps[WARP];
    __shared__ double mass_warps[WARP];
    __shared__ u64 cutoff;  // bin, then the number of weights from it upwards
    const SampleRow& want = args.rows[row];
    SampleState& state = args.states[row];
    const bool by_count = has_top_k(want, args.vocab);
    // Thread t has two bins, the best but 2 t first.
    const int best = BINS - 1 - 2 * threadIdx.x;
    u32 counts[2], all_counts, own_count = 0;
    double masses[2], all_masses, own_mass = 0.0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        counts[i] = __ldcg(&state.counts[best - i]);
        masses[i] = by_count ? 0.0 : bin_mass(best - i, counts[i], __ldcg(&state.remainders[best - i]));
        own_count += counts[i];
        own_mass += masses[i];
    }
    u32 count = scan_block(own_count, count_warps, all_counts) - own_count;
    double mass = scan_block(own_mass, mass_warps, all_masses) - own_mass;
    if (threadIdx.x == 0) cutoff = all_counts;
    __syncthreads();
    // With a top-k the best k are needed; top-p then chooses among them. Without one, what holds enough of all weight.
    const double target = (double)want.top_p * total * (1.0 + 1e-12);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        count += counts[i];
        mass += masses[i];
        // The first to reach it has the largest bin.
        if (by_count ? count >= want.top_k : mass >= target) atomicMax(&cutoff, (u64)(best - i) << 32 | count);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        state.mode = (u32)cutoff <= MAX_LIST ? MODE_LIST : MODE_DIGITS;
        state.cutoff = max((u32)(cutoff >> 32) << BIN_SHIFT, 1u);
        state.num_list = 0;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) state.counts[best - i] = state.remainders[best - i] = 0;
}

extern "C" __global__ void __launch_bounds__(512, 2) draw_weigh(const __grid_constant__ SampleArgs args) {
    __shared__ u32 counts[BINS], remainders[BINS];
    __shared__ bool is_last;
    const int row = blockIdx.y, vocab = args.vocab;
#pragma unroll 1
    for (int bin = threadIdx.x; bin < BINS; bin += blockDim.x) counts[bin] = remainders[bin] = 0;
    __syncthreads();
    release_next();
    wait_for_previous();
    if (!wants_draw(args, row)) return;
    const SampleRow& want = args.rows[row];
    SampleState& state = args.states[row];
    const bool top_k = has_top_k(want, vocab), top_p = want.top_p < 1.0f, filtered = top_k || top_p;
    const Weigher weigher(args, row);
    auto count = [&](float weight) {
        u32 bits = __float_as_uint(weight);
        if (bits == 0) return;
        u32 bin = bits >> BIN_SHIFT;
        atomicAdd(&counts[bin], 1u);
        if (!top_k) atomicAdd(&remainders[bin], remainder_of(bits));
    };
    for_chunks(weigher.logits, vocab, blockIdx.x, gridDim.x, [&](int chunk, int token, const float4(&fours)[FOURS]) {
        double sum = 0.0;
#pragma unroll
        for (int i = 0; i < FOURS; i++) {
            float4 weights = weigher.of(fours[i], token + i * 4 * WARP);
            if (filtered) count(weights.x), count(weights.y), count(weights.z), count(weights.w);
            sum += sum_four(weights);
        }
        if (top_k) return;  // the sum of all is not needed
        sum = warp_total(sum);
        if (threadIdx.x % WARP == 0) state.sums[chunk] = sum;
    });
    if (filtered) {
        __syncthreads();
#pragma unroll 1
        for (int bin = threadIdx.x; bin < BINS; bin += blockDim.x) {
            if (counts[bin]) atomicAdd(&state.counts[bin], counts[bin]);
            if (remainders[bin]) atomicAdd(&state.remainders[bin], remainders[bin]);
        }
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(&state.parts_done, 1u) == gridDim.x - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    if (filtered) {
        __shared__ double warps[WARP];
        double total = 0.0;
        if (!top_k) {
            double own = threadIdx.x * CHUNK < vocab ? __ldcg(&state.sums[threadIdx.x]) : 0.0;
            scan_block(own, warps, total);
        }
        pick_cutoff(args, row, total);
    } else if (threadIdx.x == 0) {
        state.mode = MODE_ALL;
    }
    if (threadIdx.x == 0) state.parts_done = 0;
}

extern "C" __global__ void __launch_bounds__(512, 2) draw_gather(const __grid_constant__ SampleArgs args) {
    const int row = blockIdx.y;
    release_next();
    wait_for_previous();
    SampleState& state = args.states[row];
    if (!wants_draw(args, row) || state.mode != MODE_LIST) return;
    const u32 cutoff = state.cutoff;
    const Weigher weigher(args, row);
    // Below this no weight can reach the cutoff: most tokens need no exponential.
    const float reach = logf(__uint_as_float(cutoff)) - 0.01f;
    const float least = weigher.best + args.rows[row].temperature * reach - fabsf(weigher.best) * 1e-6f;
    auto take = [&](float weight, int token) {
        u32 bits = __float_as_uint(weight);
        if (bits < cutoff) return;
        u32 place = atomicAdd(&state.num_list, 1u);
        if (place < MAX_LIST) state.list[place] = key_of(bits, token);
    };
    for_chunks(weigher.logits, args.vocab, blockIdx.x, gridDim.x, [&](int, int first, const float4(&fours)[FOURS]) {
#pragma unroll
        for (int i = 0; i < FOURS; i++) {
            float4 x = fours[i];
            if (fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)) < least) continue;
            int token = first + i * 4 * WARP;
            float4 weights = weigher.of(x, token);
            take(weights.x, token), take(weights.y, token + 1), take(weights.z, token + 2), take(weights.w, token + 3);
        }
    });
}
