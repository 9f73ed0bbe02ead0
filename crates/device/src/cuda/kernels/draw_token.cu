// Sampling with a temperature, second half: the borders of top-k and top-p, and the draw. What is launched how is said in
// sample.cuh. Candidates that `draw_gather` collected are sorted. Where they are too many for that, borders are found digit
// by digit instead, exactly as well.
#include "sample.cuh"

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
    u64 found, passed;
    double before;
    u32 remaining, bin, last;
};

// Of `count` keys in order, four a thread, the first at which the sum of weights, `before` counted in, reaches the target;
// the last if none does. In all threads.
DEVICE u32 first_to_reach(Room& room, u32 count, double before, double target) {
    double sums[4], sum = 0.0, total;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 at = threadIdx.x * 4 + i;
        if (at < count) sum += weight_of(room.keys[at]);
        sums[i] = sum;
    }
    before += scan_block(sum, room.warps, total) - sum;
    if (threadIdx.x == 0) room.bin = count - 1;
    __syncthreads();
#pragma unroll
    for (int i = 3; i >= 0; i--) {
        u32 at = threadIdx.x * 4 + i;
        if (at < count && before + sums[i] >= target) atomicMin(&room.bin, at);
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

// Weights in units of 2^-44: sums of integers do not depend on the order, and lists have none.
#define UNITS 17592186044416.0f
DEVICE u64 units_of(u64 key) { return (u64)(__uint_as_float((u32)(key >> 32)) * UNITS); }

// Where, of `mine` of all threads laid out in order, the sum passes the target; the last place with anything if it never
// does. `room.passed` is the sum before that place.
DEVICE u32 place_of(Room& room, u64 mine, u64 before, bool is_first, double uniform, u64& target) {
    if (threadIdx.x == 0) room.bin = NONE, room.last = 0;
    u64 total, sum = before + scan_block(mine, reinterpret_cast<u64*>(room.warps), total);
    if (is_first) target = (u64)(uniform * (double)total);
    if (mine) {
        atomicMax(&room.last, threadIdx.x);
        if (sum > target) atomicMin(&room.bin, threadIdx.x);
    }
    __syncthreads();
    u32 found = room.bin == NONE ? room.last : room.bin;
    if (threadIdx.x == found) room.passed = sum - mine;
    __syncthreads();
    return found;
}

// A draw along the tokens in order of id from those of four keys a thread that are at least `border`: 512 tokens at a time,
// then within those.
DEVICE u32 draw_in_order(Room& room, const u64 (&own)[4], u64 border, double uniform) {
    u64 *coarse = room.keys, *fine = room.keys + 512;
    __syncthreads();
    room.keys[threadIdx.x] = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (own[i] && own[i] >= border) atomicAdd(&coarse[token_of(own[i]) >> 9], units_of(own[i]));
    __syncthreads();
    u64 target = 0;
    u32 group = place_of(room, threadIdx.x < 512 ? coarse[threadIdx.x] : 0, 0, true, uniform, target);
    const u64 before = room.passed;
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (own[i] && own[i] >= border && token_of(own[i]) >> 9 == group)
            fine[token_of(own[i]) & 511] = units_of(own[i]);
    __syncthreads();
    return group << 9 | place_of(room, threadIdx.x < 512 ? fine[threadIdx.x] : 0, before, false, uniform, target);
}

DEVICE u32 draw_from_list(const SampleArgs& args, int row, Room& room) {
    const SampleRow& want = args.rows[row];
    SampleState& state = args.states[row];
    const bool top_k = has_top_k(want, args.vocab), top_p = want.top_p < 1.0f;
    u32 count = min(state.num_list, (u32)MAX_LIST);
    u64 own[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 at = i * 1024 + threadIdx.x;
        own[i] = at < count ? state.list[at] : 0;
    }
    // Without a top-k all but the lowest bin of the list may be inside: only that one needs an order then.
    double sure = 0.0, target = 0.0;
    u64 least_sure = 0;
    if (!top_k) {
        double total;
        scan_block(threadIdx.x * CHUNK < args.vocab ? state.sums[threadIdx.x] : 0.0, room.warps, total);
        target = (double)want.top_p * total;
        least_sure = (u64)((state.cutoff >> BIN_SHIFT) + 1) << (BIN_SHIFT + 32);
        u64 units = 0, all_units;
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (own[i] >= least_sure) units += units_of(own[i]);
        scan_block(units, reinterpret_cast<u64*>(room.warps), all_units);
        sure = (double)all_units / UNITS;
        // Bins were counted from below: the border may lie higher after all.
        if (sure >= target) sure = 0.0, least_sure = 0;
    }
    if (threadIdx.x == 0) room.bin = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (own[i] && (least_sure == 0 || own[i] < least_sure)) room.keys[atomicAdd(&room.bin, 1u)] = own[i];
    __syncthreads();
    u32 unsure = room.bin;
    int size = power_of_two(unsure);
    for (int i = unsure + threadIdx.x; i < size; i += blockDim.x) room.keys[i] = 0;
    sort_keys(room.keys, size);
    if (top_k) {
        unsure = min(unsure, want.top_k);
        if (top_p) target = (double)want.top_p * sum_of(room, unsure);
    }
    u64 border = least_sure;
    if (unsure > 0) {
        u32 last = top_p ? first_to_reach(room, unsure, sure, target) : unsure - 1;
        border = room.keys[last];
    }
    return draw_in_order(room, own, border, want.uniform);
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
