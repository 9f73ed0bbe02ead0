// Logarithms of probabilities under the model's own distribution: of the chosen token, or of a prompt's, with its rank,
// and of the best tokens. What is launched how is said in sample.cuh.
#include "sample.cuh"

// Most best tokens that one sorting finds; more are found one by one.
#define MAX_SORTED 1024

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

// Calls `body(token, logit)` for the tokens of this thread.
template <typename Body> DEVICE void for_tokens(const float* logits, int vocab, Body body) {
    for_chunks(logits, vocab, 0, 1, [&](int, int first, const float4(&fours)[FOURS]) {
#pragma unroll
        for (int i = 0; i < FOURS; i++) {
            int token = first + i * 4 * WARP;
            if (token < vocab) body(token, fours[i].x);
            if (token + 1 < vocab) body(token + 1, fours[i].y);
            if (token + 2 < vocab) body(token + 2, fours[i].z);
            if (token + 3 < vocab) body(token + 3, fours[i].w);
        }
    });
}

extern "C" __global__ void __launch_bounds__(1024) sample_logprobs(const __grid_constant__ SampleArgs args) {
    __shared__ u64 keys[SORT_ROOM];
    __shared__ u64 warps[WARP];
    __shared__ double sum_warps[WARP];
    __shared__ u32 count_warps[WARP];
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

    u64 own = 0;
    for_tokens(logits, vocab, [&](int at, float logit) { own = max(own, key_of(ordered(logit), at)); });
    const float best = unordered((u32)(block_most(own, warps) >> 32));
    // The best of each thread: at least as many tokens as threads lie at or above the least of the best `wanted` of them.
    u64 border = ~0ull;
    const bool sorted = wanted <= MAX_SORTED;
    if (wanted > 0 && sorted) {
        keys[threadIdx.x] = own;
        sort_keys(keys, MAX_SORTED);
        border = keys[wanted - 1];
    }
    if (threadIdx.x == 0) num_keys = 0;
    __syncthreads();

    const u64 chosen = key_of(ordered(logits[token]), token);
    double sum = 0.0, whole;
    u32 better = 0, num_better;
    for_tokens(logits, vocab, [&](int at, float logit) {
        u64 key = key_of(ordered(logit), at);
        sum += (double)expf(logit - best);
        better += key > chosen;
        if (key >= border) {
            u32 place = atomicAdd(&num_keys, 1u);
            if (place < SORT_ROOM) keys[place] = key;
        }
    });
    scan_block(sum, sum_warps, whole);
    scan_block(better, count_warps, num_better);
    const double log_sum = (double)best + log(whole);
    auto logprob = [&](u64 key) { return (float)((double)unordered((u32)(key >> 32)) - log_sum); };
    if (threadIdx.x == 0) {
        SampleResult& result = args.results[row];
        result.logprob = logprob(chosen);
        result.rank = num_better + 1;
        result.num_top = wanted;
    }
    if (wanted == 0) return;
    u32* top_tokens = args.top_tokens + (i64)row * args.max_top;
    float* top_logprobs = args.top_logprobs + (i64)row * args.max_top;
    const u32 count = num_keys;
    if (sorted && count <= SORT_ROOM) {
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
        for_tokens(logits, vocab, [&](int at, float logit) {
            u64 key = key_of(ordered(logit), at);
            if (key < last) next = max(next, key);
        });
        last = block_most(next, warps);
        if (threadIdx.x == 0) {
            top_tokens[i] = token_of(last);
            top_logprobs[i] = logprob(last);
        }
    }
}
