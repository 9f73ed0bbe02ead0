// Sampling, first half: changes to single logits, the check of all of them, and the best token. What is launched how is
// said in sample.cuh.
#include "sample.cuh"

// Masks, biases and penalties in place; what stood there before is kept in `saved` for the logprobs. Raw logits that are
// not finite are noted here, since a mask would hide them.
extern "C" __global__ void __launch_bounds__(256) sample_edit(const __grid_constant__ SampleArgs args) {
    const SampleRow& want = args.rows[blockIdx.x];
    float* logits = logits_of(args, blockIdx.x);
    float* saved = args.saved + want.saved;
    SampleState& state = args.states[blockIdx.x];
    release_next();
    wait_for_previous();
#pragma unroll 1
    for (u32 i = threadIdx.x; i < want.num_masks; i += blockDim.x) {
        u32 token = args.lists[want.masks + i];
        if (token >= args.vocab) continue;
        // Of repeated tokens one finds the raw logit, the others minus infinity.
        float raw = atomicExch(&logits[token], minus_infinity());
        if (is_wrong(raw)) atomicMax(&state.wrong, ~token);
        saved[i] = raw;
    }
    __syncthreads();
    saved += want.num_masks;
    const u32* biases = args.lists + want.biases;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < want.num_biases; i += blockDim.x) {
        u32 token = biases[2 * i];
        bool again = token >= args.vocab;
#pragma unroll 1
        for (u32 other = 0; other < i && !again; other++) again = biases[2 * other] == token;
        if (again) continue;
        float raw = logits[token], logit = raw;
        if (is_wrong(raw)) atomicMax(&state.wrong, ~token);
#pragma unroll 1
        for (u32 other = i; other < want.num_biases; other++) {
            if (biases[2 * other] != token) continue;
            logit += __uint_as_float(biases[2 * other + 1]);
            saved[other] = raw;
        }
        logits[token] = logit;
    }
    __syncthreads();
    saved += want.num_biases;
    if (!penalizes(want)) return;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < want.num_penalties; i += blockDim.x) {
        u32 token = args.lists[want.penalties + 2 * i], count = args.lists[want.penalties + 2 * i + 1];
        if (token >= args.vocab) continue;
        float raw = logits[token];
        if (is_wrong(raw)) atomicMax(&state.wrong, ~token);
        saved[i] = raw;
        float logit = raw > 0.0f ? __fdiv_rn(raw, want.repetition) : __fmul_rn(raw, want.repetition);
        if (count > 0)
            logit = __fsub_rn(logit, __fadd_rn(__fmul_rn(want.frequency, (float)count), want.presence));
        logits[token] = logit;
    }
}

// A logit that a bias or a penalty made infinite is not the model's fault: its raw value was checked before.
DEVICE bool was_edited(const SampleArgs& args, const SampleRow& want, u32 token) {
#pragma unroll 1
    for (u32 i = 0; i < want.num_biases; i++)
        if (args.lists[want.biases + 2 * i] == token) return true;
#pragma unroll 1
    for (u32 i = 0; penalizes(want) && i < want.num_penalties; i++)
        if (args.lists[want.penalties + 2 * i] == token) return true;
    return false;
}

// What is known when all of a row has been seen.
DEVICE void finish_best(const SampleArgs& args, int row) {
    const SampleRow& want = args.rows[row];
    SampleState& state = args.states[row];
    SampleResult result = {0, SAMPLE_OK, 0.0f, 0.0f, 0, 0};
    u64 best = atomicExch(&state.best, 0ull);
    u32 wrong = atomicExch(&state.wrong, 0u);
    state.parts_done = 0;
    float best_logit = unordered((u32)(best >> 32));
    state.best_logit = best_logit;
    if (wrong != 0) {
        result.token = ~wrong;
        result.status = SAMPLE_NOT_FINITE;
        float value = logits_of(args, row)[result.token];
        result.value = is_wrong(value) ? value : __uint_as_float(0x7fc00000u);
    } else if (best == 0) {
        result.status = SAMPLE_NOTHING_LEFT;
    } else if (want.target != NONE) {
        result.token = want.target;
    } else {
        result.token = token_of(best);
        if (want.temperature > 0.0f && is_wrong(best_logit)) {
            // A penalty near zero divides a logit beyond what f32 holds.
            result.status = SAMPLE_NOT_FINITE;
            result.value = best_logit;
        }
    }
    args.results[row] = result;
    if (args.tokens) args.tokens[row] = result.token;
}

extern "C" __global__ void __launch_bounds__(512, 2) sample_best(const __grid_constant__ SampleArgs args) {
    __shared__ u64 warps[WARP];
    const int row = blockIdx.y, vocab = args.vocab;
    const float* logits = logits_of(args, row);
    const u32 allowed_at = args.rows[row].allowed;
    const u32* allowed = allowed_at == NONE ? nullptr : args.lists + allowed_at;
    release_next();
    wait_for_previous();
    float best = minus_infinity();
    u32 best_token = NONE, first_wrong = NONE;
    auto see = [&](float4 x, int token) {
        if (is_wrong(x.x) || is_wrong(x.y) || is_wrong(x.z) || is_wrong(x.w)) {
            const SampleRow& want = args.rows[row];
            const float each[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (is_wrong(each[i]) && token + i < vocab && !was_edited(args, want, token + i))
                    first_wrong = min(first_wrong, token + i);
        }
        x = allow_four(x, allowed, vocab, token);
        // Tokens come in ascending order, so the first of equals stays.
        if (x.x > best) best = x.x, best_token = token;
        if (x.y > best) best = x.y, best_token = token + 1;
        if (x.z > best) best = x.z, best_token = token + 2;
        if (x.w > best) best = x.w, best_token = token + 3;
    };
    // Each warp has chunks of its own; the next one is on its way while one is looked at.
    const int lane = threadIdx.x % WARP, step = gridDim.x * (blockDim.x / WARP) * CHUNK;
    int token = (threadIdx.x / WARP * gridDim.x + blockIdx.x) * CHUNK + lane * 4;
    float4 next[FOURS];
    auto fetch = [&](int from) {
#pragma unroll
        for (int i = 0; i < FOURS; i++) next[i] = read_four(logits, vocab, from + i * 4 * WARP);
    };
    fetch(token);
#pragma unroll 1
    for (; token - lane * 4 < vocab; token += step) {
        float4 fours[FOURS];
#pragma unroll
        for (int i = 0; i < FOURS; i++) fours[i] = next[i];
        fetch(token + step);
#pragma unroll
        for (int i = 0; i < FOURS; i++) see(fours[i], token + i * 4 * WARP);
    }
    // Plus zero: minus zero is equal to zero here.
    u64 key = best_token == NONE ? 0 : key_of(ordered(best + 0.0f), best_token);
    key = block_most(key, warps);
    u64 wrong = block_most(first_wrong == NONE ? 0 : (u32)~first_wrong, warps);
    if (threadIdx.x != 0) return;
    SampleState& state = args.states[row];
    if (key) atomicMax(&state.best, key);
    if (wrong) atomicMax(&state.wrong, (u32)wrong);
    __threadfence();
    if (atomicAdd(&state.parts_done, 1u) == gridDim.x - 1) {
        __threadfence();
        finish_best(args, row);
    }
}
