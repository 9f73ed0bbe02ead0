// Logarithms of probabilities under the model's own distribution: of the chosen token, or of a prompt's, with its rank,
// and of the best tokens. What is launched how is said in sample.cuh.
#include "sample.cuh"

// Undoes what `sample_edit` did to a row, the last change first.
DEVICE void restore(const SampleArgs& args, const SampleRow& want, float* logits) {
    const float* masked = args.saved + want.saved;
    const float* biased = masked + want.num_masks;
    const float* penalized = biased + want.num_biases;
    if (penalizes(want)) {
#pragma unroll 1
        for (u32 i = threadIdx.x; i < want.num_penalties; i += blockDim.x) {
            u32 token = args.lists[want.penalties + 2 * i];
            if (token < args.vocab) logits[token] = penalized[i];
        }
        __syncthreads();
    }
#pragma unroll 1
    for (u32 i = threadIdx.x; i < want.num_biases; i += blockDim.x) {
        u32 token = args.lists[want.biases + 2 * i];
        if (token < args.vocab) logits[token] = biased[i];
    }
    __syncthreads();
#pragma unroll 1
    for (u32 i = threadIdx.x; i < want.num_masks; i += blockDim.x) {
        u32 token = args.lists[want.masks + i];
        // Minus infinity stands there already; and it marks a token that was masked before.
        if (token < args.vocab && masked[i] != minus_infinity()) logits[token] = masked[i];
    }
    __syncthreads();
}

// A logit such that at least `wanted` tokens have one as large: of all warps' largest, or of all threads', the one with so
// many as large. `largest` is the thread's own; `keys` has room for a key a thread.
DEVICE float border_of(float largest, u32 wanted, bool by_warps, u64* keys) {
    const int lane = threadIdx.x % WARP;
    __syncthreads();
    if (by_warps) {
        float most = warp_max(largest);
        if (lane == 0) keys[threadIdx.x / WARP] = key_of(ordered(most), threadIdx.x / WARP);
        __syncthreads();
        u64 own = keys[lane];
        u32 better = 0;
#pragma unroll 8
        for (int other = 0; other < WARP; other++) better += keys[other] > own;
        u32 holder = __ffs(__ballot_sync(FULL_MASK, better == wanted - 1)) - 1;
        return unordered((u32)(keys[holder] >> 32));
    }
    keys[threadIdx.x] = key_of(ordered(largest), threadIdx.x);
    sort_keys(keys, 1024);
    return unordered((u32)(keys[wanted - 1] >> 32));
}

// What one row's pass over its logits finds.
struct Pass {
    double sum;   // of exponentials, in all threads
    u32 better;   // tokens before the chosen one, in all threads
};
// Every token with a logit of at least `border` becomes one of `keys`, as many as there is room for; `num_keys` counts all.
DEVICE Pass look_through(const float* logits, int vocab, float best, u32 chosen, float border, u64* keys, u32& num_keys) {
    __shared__ double sum_warps[WARP];
    __shared__ u32 count_warps[WARP];
    __syncthreads();
    if (threadIdx.x == 0) num_keys = 0;
    __syncthreads();
    const float own = logits[chosen];
    double sum = 0.0;
    u32 better = 0;
    auto see = [&](float logit, u32 token) {
        better += logit > own;
        if (logit >= border || logit == own) {
            // Few come here; minus zero lies below zero.
            u64 key = key_of(ordered(logit), token);
            if (logit == own && token < vocab) better += key > key_of(ordered(own), chosen);
            if (logit >= border && token < vocab) {
                u32 place = atomicAdd(&num_keys, 1u);
                if (place < SORT_ROOM) keys[place] = key;
            }
        }
    };
    for_chunks(logits, vocab, 0, 1, [&](int, int first, const float4(&fours)[FOURS]) {
#pragma unroll
        for (int i = 0; i < FOURS; i++) {
            float4 x = fours[i];
            int token = first + i * 4 * WARP;
            sum += sum_four(make_float4(expf(x.x - best), expf(x.y - best), expf(x.z - best), expf(x.w - best)));
            see(x.x, token), see(x.y, token + 1), see(x.z, token + 2), see(x.w, token + 3);
        }
    });
    Pass pass;
    scan_block(sum, sum_warps, pass.sum);
    scan_block(better, count_warps, pass.better);
    return pass;
}

extern "C" __global__ void __launch_bounds__(1024) sample_logprobs(const __grid_constant__ SampleArgs args) {
    __shared__ u64 keys[SORT_ROOM];
    __shared__ u64 warps[WARP];
    __shared__ u32 num_keys;
    const int row = blockIdx.x, vocab = args.vocab;
    const SampleRow& want = args.rows[row];
    release_next();
    wait_for_previous();
    float* logits = logits_of(args, row);
    restore(args, want, logits);
    if (want.logprobs == NONE || args.results[row].status != SAMPLE_OK) return;
    const u32 token = args.results[row].token;
    const u32 wanted = min(min(want.logprobs, (u32)args.max_top), (u32)vocab);

    float largest = minus_infinity();
    for_chunks(logits, vocab, 0, 1, [&](int, int, const float4(&fours)[FOURS]) {
#pragma unroll
        for (int i = 0; i < FOURS; i++)
            largest = fmaxf(largest, fmaxf(fmaxf(fours[i].x, fours[i].y), fmaxf(fours[i].z, fours[i].w)));
    });
    const float best = unordered((u32)(block_most((u64)ordered(largest) << 32, warps) >> 32));
    // The coarser border is found faster, but may leave too many tokens where the best ones are neighbours.
    bool by_warps = wanted <= 16 && vocab >= WARP * CHUNK;
    float border = __uint_as_float(0x7f800000u);
    if (wanted > 0 && wanted <= 1024) border = border_of(largest, wanted, by_warps, keys);
    Pass pass = look_through(logits, vocab, best, token, border, keys, num_keys);
    if (by_warps && num_keys > SORT_ROOM) {
        border = border_of(largest, wanted, false, keys);
        pass = look_through(logits, vocab, best, token, border, keys, num_keys);
    }
    const double log_sum = (double)best + log(pass.sum);
    auto logprob = [&](u64 key) { return (float)((double)unordered((u32)(key >> 32)) - log_sum); };
    if (threadIdx.x == 0) {
        SampleResult& result = args.results[row];
        result.logprob = logprob(key_of(ordered(logits[token]), token));
        result.rank = pass.better + 1;
        result.num_top = wanted;
    }
    if (wanted == 0) return;
    u32* top_tokens = args.top_tokens + (i64)row * args.max_top;
    float* top_logprobs = args.top_logprobs + (i64)row * args.max_top;
    const u32 count = num_keys;
    if (wanted <= 1024 && count <= SORT_ROOM) {
        int size = power_of_two(count);
#pragma unroll 1
        for (int i = count + threadIdx.x; i < size; i += blockDim.x) keys[i] = 0;
        sort_keys(keys, size);
#pragma unroll 1
        for (int i = threadIdx.x; i < wanted; i += blockDim.x) {
            top_tokens[i] = token_of(keys[i]);
            top_logprobs[i] = logprob(keys[i]);
        }
        return;
    }
    // One by one: the largest below the last.
    u64 last = ~0ull;
#pragma unroll 1
    for (u32 i = 0; i < wanted; i++) {
        u64 next = 0;
#pragma unroll 1
        for (u32 at = threadIdx.x; at < vocab; at += blockDim.x) {
            u64 key = key_of(ordered(logits[at]), at);
            if (key < last) next = max(next, key);
        }
        last = block_most(next, warps);
        if (threadIdx.x == 0) {
            top_tokens[i] = token_of(last);
            top_logprobs[i] = logprob(last);
        }
    }
}
