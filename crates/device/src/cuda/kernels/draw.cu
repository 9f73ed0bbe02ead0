// Sampling, second half: temperature, min-p, top-k, top-p and the draw. What is launched how is said in sample.cuh.
//
// Weights are never stored: each kernel computes them again from the logits. `draw_weigh` sums chunks of weights and
// counts weights by size, all parts of a row together; the last part to arrive picks the size down to which candidates are
// needed. `draw_gather` collects those, `draw_token` sorts them and draws. Where candidates are too many to sort, the
// borders are found digit by digit instead, exactly as well. Counts are integers and sums have a fixed order, so nothing
// depends on which part comes first.
#include "sample.cuh"

DEVICE bool wants_draw(const SampleArgs& args, int row) {
    const SampleRow& want = args.rows[row];
    return want.temperature > 0.0f && want.target == NONE && args.results[row].status == SAMPLE_OK;
}
DEVICE bool has_top_k(const SampleRow& want, int vocab) { return want.top_k > 0 && want.top_k < vocab; }

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

DEVICE double weight_of(u64 key) { return (double)__uint_as_float((u32)(key >> 32)); }

// Tokens that `draw_token` takes at a time, four a thread.
#define SWEEP 4096

// What `draw_token` keeps in shared memory.
struct Room {
    union {
        u64 keys[SORT_ROOM];
        struct {
            u32 counts[BINS], low[BINS], high[BINS];
        } digits;
    };
    double warps[WARP];
    u32 count_warps[WARP];
    double sums[MAX_CHUNKS];
    u64 found;
    double before;
    u32 remaining, bin, last;
};

// Of `count` keys in order, four a thread, the first whose sum of weights reaches (or, `strictly`, passes) the target; the
// last if none does. In all threads.
DEVICE u32 first_to_reach(Room& room, u32 count, double target, bool strictly) {
    double sums[4], sum = 0.0, total;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 at = threadIdx.x * 4 + i;
        if (at < count) sum += weight_of(room.keys[at]);
        sums[i] = sum;
    }
    double before = scan_block(sum, room.warps, total) - sum;
    if (threadIdx.x == 0) room.bin = count - 1;
    __syncthreads();
#pragma unroll
    for (int i = 3; i >= 0; i--) {
        u32 at = threadIdx.x * 4 + i;
        double reached = before + sums[i];
        if (at < count && (strictly ? reached > target : reached >= target)) atomicMin(&room.bin, at);
    }
    __syncthreads();
    u32 found = room.bin;
    __syncthreads();
    return found;
}

// The sum of the weights of the first `count` keys, in all threads.
DEVICE double sum_of(Room& room, u32 count) {
    double sum = 0.0, total;
    for (int i = 0; i < 4; i++) {
        u32 at = threadIdx.x * 4 + i;
        if (at < count) sum += weight_of(room.keys[at]);
    }
    scan_block(sum, room.warps, total);
    return total;
}

DEVICE u32 draw_from_list(const SampleArgs& args, int row, Room& room) {
    const SampleRow& want = args.rows[row];
    SampleState& state = args.states[row];
    u32 count = min(state.num_list, (u32)MAX_LIST);
    int size = power_of_two(count);
#pragma unroll 1
    for (int i = threadIdx.x; i < size; i += blockDim.x) room.keys[i] = i < count ? state.list[i] : 0;
    sort_keys(room.keys, size);
    bool top_k = has_top_k(want, args.vocab);
    if (top_k) count = min(count, want.top_k);
    if (want.top_p < 1.0f) {
        double total = 0.0;
        if (top_k)
            total = sum_of(room, count);
        else
            scan_block(threadIdx.x * CHUNK < args.vocab ? state.sums[threadIdx.x] : 0.0, room.warps, total);
        count = first_to_reach(room, count, (double)want.top_p * total, false) + 1;
    }
    // In order of token: the halves change places, and the complement of a lower token is larger.
    size = power_of_two(count);
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < size; i += blockDim.x) {
        u64 key = room.keys[i];
        room.keys[i] = i < count ? key << 32 | key >> 32 : 0;
    }
    sort_keys(room.keys, size);
#pragma unroll 1
    for (int i = threadIdx.x; i < size; i += blockDim.x) {
        u64 key = room.keys[i];
        room.keys[i] = key << 32 | key >> 32;
    }
    __syncthreads();
    double total = sum_of(room, count);
    u32 at = first_to_reach(room, count, want.uniform * total, true);
    return token_of(room.keys[at]);
}

// All weights with keys of at least `border`, laid out in order of token.
DEVICE u32 draw_from_all(const SampleArgs& args, int row, u64 border, bool have_sums, Room& room) {
    const SampleRow& want = args.rows[row];
    const Weigher weigher(args, row);
    const int chunks = (args.vocab + CHUNK - 1) / CHUNK;
    auto kept = [&](float weight, int token) {
        return key_of(__float_as_uint(weight), token) >= border ? weight : 0.0f;
    };
    if (!have_sums) {
        for_chunks(weigher.logits, args.vocab, 0, 1, [&](int chunk, int first, const float4(&fours)[FOURS]) {
            double sum = 0.0;
#pragma unroll
            for (int i = 0; i < FOURS; i++) {
                int token = first + i * 4 * WARP;
                float4 x = weigher.of(fours[i], token);
                sum += sum_four(make_float4(kept(x.x, token), kept(x.y, token + 1), kept(x.z, token + 2),
                                            kept(x.w, token + 3)));
            }
            sum = warp_total(sum);
            if (threadIdx.x % WARP == 0) room.sums[chunk] = sum;
        });
        __syncthreads();
    }
    if (threadIdx.x == 0) room.bin = NONE, room.last = 0;
    // A thread a chunk: the one in which the sum passes the target, or the last with any weight.
    double own = 0.0, total;
    if (threadIdx.x < chunks) own = have_sums ? args.states[row].sums[threadIdx.x] : room.sums[threadIdx.x];
    double sum = scan_block(own, room.warps, total);
    const double target = want.uniform * total;
    if (own > 0.0) {
        atomicMax(&room.last, threadIdx.x);
        if (sum > target) atomicMin(&room.bin, threadIdx.x);
    }
    __syncthreads();
    const int found = room.bin == NONE ? room.last : room.bin;
    if (threadIdx.x == found) room.before = sum - own;
    __syncthreads();
    // Then a thread a token. Keys: those that pass the target come before those that do not, the lowest of the former and
    // the highest of the latter.
    const u32 token = found * CHUNK + threadIdx.x;
    float weight = 0.0f;
    if (threadIdx.x < CHUNK && token < args.vocab) {
        bool allowed = !weigher.allowed || weigher.allowed[token / 32] >> (token % 32) & 1;
        weight = allowed ? kept(weigher.of(weigher.logits[token]), token) : 0.0f;
    }
    sum = room.before + scan_block((double)weight, room.warps, total);
    u64 key = !(weight > 0.0f) ? 0 : sum > target ? 1ull << 32 | (u32)~token : token;
    key = block_most(key, reinterpret_cast<u64*>(room.warps));
    return key >> 32 ? ~(u32)key : (u32)key;
}

// The last of the best `ties` tokens, lowest ids first, with weights of exactly these bits.
DEVICE u32 last_tie(const Weigher& weigher, u32 bits, u32 ties, Room& room) {
    u32 before = 0;
    for (int first = 0; first < weigher.vocab; first += SWEEP) {
        int token = first + threadIdx.x * 4;
        float4 four = weigher.four(token);
        float each[4] = {four.x, four.y, four.z, four.w};
        u32 own = 0, total;
        for (int i = 0; i < 4; i++) own += __float_as_uint(each[i]) == bits;
        u32 seen = before + scan_block(own, room.count_warps, total) - own;
        for (int i = 0; i < 4; i++)
            if (__float_as_uint(each[i]) == bits && ++seen == ties) room.bin = token + i;
        before += total;
        if (before >= ties) break;
    }
    __syncthreads();
    u32 found = room.bin;
    __syncthreads();
    return found;
}

// The key at which the number of weights (by_count) or their sum, best first, reaches the target; 0 if it never does. Only
// keys of at least `border` take part. Three passes of ten bits of the weight each, then its ties.
DEVICE u64 border_by_digits(const Weigher& weigher, bool by_count, double target, u64 border, Room& room) {
    auto& digits = room.digits;
    u32 prefix = 0;
    double before = 0.0;
    for (int shift = 20; shift >= 0; shift -= 10) {
        __syncthreads();
        digits.counts[threadIdx.x] = digits.low[threadIdx.x] = digits.high[threadIdx.x] = 0;
        __syncthreads();
#pragma unroll 1
        for (int token = threadIdx.x * 4; token < weigher.vocab; token += SWEEP) {
            float4 four = weigher.four(token);
            float each[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 bits = __float_as_uint(each[i]);
                bool fits = shift == 20 || bits >> (shift + 10) == prefix;
                if (bits == 0 || !fits || key_of(bits, token + i) < border) continue;
                u32 bin = bits >> shift & 1023, mantissa = bits & 0x7fffff;
                if (bits >> 23) mantissa |= 0x800000;
                atomicAdd(&digits.counts[bin], 1u);
                if (by_count) continue;
                atomicAdd(&digits.low[bin], mantissa & 4095);
                atomicAdd(&digits.high[bin], mantissa >> 12);
            }
        }
        __syncthreads();
        // The best bin first. All weights of a bin have one exponent, so its mass is exact.
        u32 bin = BINS - 1 - threadIdx.x, count = digits.counts[bin];
        double value = count;
        if (!by_count) {
            u32 any = (shift == 20 ? bin : prefix << 10 | bin) << shift, exponent = max(any >> 23, 1u);
            double unit = __longlong_as_double((i64)(exponent - 150 + 1023) << 52);
            value = ((double)digits.high[bin] * 4096.0 + digits.low[bin]) * unit;
        }
        double total, sum = before + scan_block(value, room.warps, total);
        if (threadIdx.x == 0) room.found = 0;
        __syncthreads();
        // The first to reach it; empty bins reach nothing new.
        if (count && sum >= target) atomicMax(&room.found, (u64)bin << 32 | 1);
        __syncthreads();
        u64 found = room.found;
        __syncthreads();
        if (found == 0) {
            // Rounding of the sum alone can keep a later pass from reaching what the one before did: then the last.
            if (shift == 20) return 0;
            if (threadIdx.x == 0) room.found = ~0ull;
            __syncthreads();
            if (count) atomicMin(&room.found, (u64)bin << 32 | 1);
            __syncthreads();
            found = room.found;
        }
        u32 chosen = found >> 32;
        if (bin == chosen) room.before = sum - value, room.remaining = count;
        __syncthreads();
        before = room.before;
        prefix = shift == 20 ? chosen : prefix << 10 | chosen;
    }
    const u32 equal = room.remaining;
    u32 ties;
    if (by_count) {
        ties = (u32)(target - before);
    } else {
        double weight = (double)__uint_as_float(prefix), needed = ceil((target - before) / weight);
        ties = needed < 1.0 ? 1 : needed > equal ? equal : (u32)needed;
        // The quotient is rounded; the sum decides.
        if (ties > 1 && before + (ties - 1) * weight >= target) ties--;
    }
    ties = min(max(ties, 1u), equal);
    return key_of(prefix, last_tie(weigher, prefix, ties, room));
}

extern "C" __global__ void __launch_bounds__(1024) draw_token(const __grid_constant__ SampleArgs args) {
    __shared__ Room room;
    const int row = blockIdx.x;
    release_next();
    wait_for_previous();
    if (!wants_draw(args, row)) return;
    const SampleRow& want = args.rows[row];
    const u32 mode = args.states[row].mode;
    u32 token;
    if (mode == MODE_LIST) {
        token = draw_from_list(args, row, room);
    } else if (mode == MODE_ALL) {
        token = draw_from_all(args, row, 0, true, room);
    } else {
        const Weigher weigher(args, row);
        u64 border = 0;
        if (has_top_k(want, args.vocab)) border = border_by_digits(weigher, true, want.top_k, border, room);
        if (want.top_p < 1.0f) {
            double sum = 0.0, total;
#pragma unroll 1
            for (int at = threadIdx.x * 4; at < args.vocab; at += SWEEP) {
                float4 four = weigher.four(at);
                float each[4] = {four.x, four.y, four.z, four.w};
                for (int i = 0; i < 4; i++)
                    if (key_of(__float_as_uint(each[i]), at + i) >= border) sum += each[i];
            }
            scan_block(sum, room.warps, total);
            u64 higher = border_by_digits(weigher, false, (double)want.top_p * total, border, room);
            border = max(border, higher);
        }
        token = draw_from_all(args, row, border, false, room);
    }
    if (threadIdx.x != 0) return;
    args.results[row].token = token;
    if (args.tokens) args.tokens[row] = token;
}
