// From rows of logits to tokens: what the kernels of sample.cu, draw.cu, draw_token.cu and logprobs.cu share. The order of
// operations is that of the engine's sampling on the host: check of the raw logits; masks, biases, penalties; then the best
// token, or temperature, min-p, top-k, top-p and a draw along the tokens in order of id; logprobs of the raw logits.
//
// One call, for any mix of rows (each kernel launched only where a row asks for it, except `sample_best`):
//   1. sample_edit(SampleArgs)        rows with lists: masks, biases, penalties in place; grid (rows), threads 256
//   2. sample_best(SampleArgs)        check, best token; greedy rows are done; grid (parts, rows), threads 512
//   3. draw_weigh(SampleArgs)         rows with a temperature; grid (parts, rows), threads 512
//   4. draw_gather(SampleArgs)        ... with top_k or top_p as well; grid (parts, rows), threads 512
//   5. draw_token(SampleArgs)         rows with a temperature; grid (rows), threads 1024
//   6. sample_logprobs(SampleArgs)    rows with `logprobs`; grid (rows), threads 1024
// parts = clamp(blocks / rows, 1, ceil(vocab / 4096)), blocks about 264 for sample_best and 528 for the others: results do
// not depend on it. No dynamic shared memory.
// `states` is zeroed once, when it is made; every call leaves it ready for the next.
#pragma once
#include "rows.cuh"

#define NONE 0xffffffffu
// Tokens whose weights a warp sums, in a fixed order: four times four a lane.
#define CHUNK 512
#define MAX_CHUNKS 512
#define FOURS (CHUNK / 4 / WARP)
// Bins of weights: an eighth of a power of two each; all positive weights up to 1.
#define BINS 1024
#define BIN_SHIFT 20
// Most candidates that are sorted; more are selected digit by digit.
#define MAX_LIST 3584
#define SORT_ROOM 4096  // the next power of two

#define SAMPLE_OK 0
#define SAMPLE_NOT_FINITE 1    // `token` and `value` say which logit
#define SAMPLE_NOTHING_LEFT 2

// Mirrored in Rust with repr(C): 80 bytes, alignment 8. Indices count words of `lists`.
struct SampleRow {
    double uniform;            // of [0, 1), for the draw
    float temperature;         // 0: the best token
    float min_p;               // 0: none
    float top_p;               // 1: none
    u32 top_k;                 // 0: none
    float repetition;          // 1: none
    float frequency, presence; // 0: none
    u32 masks, num_masks;      // tokens that may not be chosen; repeated ones do no harm
    u32 biases, num_biases;    // (token, f32 bias); repeated ones add up in their order
    u32 penalties, num_penalties;  // (token, times put out; 0: only in the prompt); tokens differ
    u32 allowed;               // a bit a token, or NONE: all tokens are allowed
    u32 target;                // a prompt's token whose logprob is wanted: nothing is chosen; or NONE
    u32 logprobs;              // how many best tokens are reported beside the token itself, or NONE: no logprobs
    u32 saved;                 // where in `saved` num_masks + num_biases + num_penalties raw logits go
    u32 padding;
};
// Token ids beyond the vocabulary are left out wherever they stand in a list.

// Mirrored in Rust with repr(C): 24 bytes.
struct SampleResult {
    u32 token;      // chosen, or of the wrong logit
    u32 status;     // SAMPLE_...
    float value;    // of the wrong logit
    float logprob;  // where asked for
    u32 rank;       // 1: the best
    u32 num_top;    // best tokens reported
};

// What one row's kernels leave each other: zeros before the first call. 40,992 bytes.
struct SampleState {
    u64 best;                // the best token's key, of all parts so far
    u32 wrong;               // the complement of the first token whose raw logit is not finite; 0: none
    u32 parts_done;
    u32 num_list;
    u32 mode;                // MODE_...
    u32 cutoff;              // bits of the least weight in the list
    float best_logit;
    double sums[MAX_CHUNKS]; // weights of the chunks
    u32 counts[BINS], remainders[BINS];
    u64 list[MAX_LIST];
};
#define MODE_ALL 0     // no filter: a draw from all weights
#define MODE_LIST 1    // candidates lie in the list
#define MODE_DIGITS 2  // too many candidates

// By value, mirrored in Rust with repr(C): 88 bytes.
struct SampleArgs {
    float* logits;          // [rows, vocab]; used up, but raw again where `sample_logprobs` ran
    const SampleRow* rows;  // [rows]
    const u32* lists;
    float* saved;
    SampleState* states;    // [rows]
    SampleResult* results;  // [rows]
    u32* tokens;            // [rows] chosen tokens once more, or null
    u32* top_tokens;        // [rows, max_top]
    float* top_logprobs;
    i32 vocab;
    i32 max_top;
    i32 num_rows;
    i32 padding;
};

static_assert(sizeof(SampleRow) == 80 && sizeof(SampleResult) == 24 && sizeof(SampleState) == 40992, "as the host has it");
static_assert(sizeof(SampleArgs) == 88, "as the host has it");

DEVICE float* logits_of(const SampleArgs& args, int row) {
    return args.logits + (i64)row * args.vocab;
}
DEVICE bool penalizes(const SampleRow& want) {
    return want.repetition != 1.0f || want.frequency != 0.0f || want.presence != 0.0f;
}
DEVICE bool wants_draw(const SampleArgs& args, int row) {
    const SampleRow& want = args.rows[row];
    return want.temperature > 0.0f && want.target == NONE && args.results[row].status == SAMPLE_OK;
}
DEVICE bool has_top_k(const SampleRow& want, int vocab) { return want.top_k > 0 && want.top_k < vocab; }

DEVICE float minus_infinity() { return __uint_as_float(0xff800000u); }
DEVICE bool is_wrong(float logit) { return !(logit < __uint_as_float(0x7f800000u)); }

// An order of integers that is the order of the numbers, minus zero below zero.
DEVICE u32 ordered(float x) {
    u32 bits = __float_as_uint(x);
    return bits ^ ((bits >> 31) ? 0xffffffffu : 0x80000000u);
}
DEVICE float unordered(u32 order) {
    return __uint_as_float(order ^ ((order >> 31) ? 0x80000000u : 0xffffffffu));
}
// A number and its token as one: the better token has the larger key, the lower id among equals.
DEVICE u64 key_of(u32 order, u32 token) { return (u64)order << 32 | (u32)~token; }
DEVICE u32 token_of(u64 key) { return ~(u32)key; }

// Four logits from a token that is a multiple of four; minus infinity beyond the vocabulary.
DEVICE float4 read_four(const float* logits, int vocab, int token) {
    if (vocab % 4 == 0) {
        if (token < vocab) return load4(logits + token);
        return make_float4(minus_infinity(), minus_infinity(), minus_infinity(), minus_infinity());
    }
    float4 four;
    four.x = token < vocab ? logits[token] : minus_infinity();
    four.y = token + 1 < vocab ? logits[token + 1] : minus_infinity();
    four.z = token + 2 < vocab ? logits[token + 2] : minus_infinity();
    four.w = token + 3 < vocab ? logits[token + 3] : minus_infinity();
    return four;
}
// Calls `body(chunk, first token, fours)` for each chunk of this warp, a part of the row's. Lane l has tokens
// first + 128 i to first + 128 i + 3 in fours[i], where `first` counts the lane in.
template <typename Body> DEVICE void for_chunks(const float* logits, int vocab, int part, int parts, Body body) {
    const int lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
#pragma unroll 1
    for (int chunk = threadIdx.x / WARP * parts + part; chunk * CHUNK < vocab; chunk += parts * warps) {
        int first = chunk * CHUNK + lane * 4;
        float4 fours[FOURS];
#pragma unroll
        for (int i = 0; i < FOURS; i++) fours[i] = read_four(logits, vocab, first + i * 4 * WARP);
        body(chunk, first, fours);
    }
}
// Minus infinity where the bit of a token is not set.
DEVICE float4 allow_four(float4 four, const u32* allowed, int vocab, int token) {
    if (!allowed || token >= vocab) return four;
    u32 bits = allowed[token / 32] >> (token % 32);
    if (!(bits & 1)) four.x = minus_infinity();
    if (!(bits & 2)) four.y = minus_infinity();
    if (!(bits & 4)) four.z = minus_infinity();
    if (!(bits & 8)) four.w = minus_infinity();
    return four;
}

// A token's weight: its probability up to a common factor, the best token's being 1.
struct Weigher {
    const float* logits;
    const u32* allowed;
    float best, inverse, min_p;
    int vocab;

    __device__ __forceinline__ Weigher(const SampleArgs& args, int row) {
        const SampleRow& want = args.rows[row];
        logits = logits_of(args, row);
        allowed = want.allowed == NONE ? nullptr : args.lists + want.allowed;
        best = args.states[row].best_logit;
        inverse = 1.0f / want.temperature;
        min_p = want.min_p;
        vocab = args.vocab;
    }
    __device__ __forceinline__ float of(float logit) const {
        float below = __fsub_rn(logit, best);
        // The best keeps its weight where the inverse of a tiny temperature is infinite.
        float weight = below == 0.0f ? 1.0f : expf(__fmul_rn(below, inverse));
        return weight < min_p ? 0.0f : weight;
    }
    __device__ __forceinline__ float4 of(float4 x, int token) const {
        x = allow_four(x, allowed, vocab, token);
        return make_float4(of(x.x), of(x.y), of(x.z), of(x.w));
    }
    __device__ __forceinline__ float4 four(int token) const { return of(read_four(logits, vocab, token), token); }
};
DEVICE float sum_four(float4 x) { return (x.x + x.y) + (x.z + x.w); }
DEVICE double warp_total(double x) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(FULL_MASK, x, step);
    return x;
}

// The best first, in shared memory; `count` is a power of two. Starts and ends with a barrier.
DEVICE void sort_keys(u64* keys, int count) {
    // A warp's 32 pairs lie within 64 neighbours where the stride is 32 or less: only longer strides cross warps.
    bool crossed = true;
    for (int size = 2; size <= count; size <<= 1) {
        for (int stride = size / 2; stride > 0; stride >>= 1) {
            if (crossed || stride > WARP)
                __syncthreads();
            else
                __syncwarp();
            crossed = stride > WARP;
            for (int i = threadIdx.x; i < count / 2; i += blockDim.x) {
                int a = 2 * i - (i & (stride - 1)), b = a + stride;
                u64 x = keys[a], y = keys[b];
                if ((x < y) == ((a & size) == 0)) keys[a] = y, keys[b] = x;
            }
        }
    }
    __syncthreads();
}
DEVICE int power_of_two(u32 count) { return count <= 1 ? 1 : 1 << (32 - __clz(count - 1)); }

// The sum over all threads up to and with this one; `total` is that of all. `warps` has a place a warp and is free again
// after the next barrier.
template <typename T> DEVICE T scan_block(T x, T* warps, T& total) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
#pragma unroll
    for (int step = 1; step < WARP; step <<= 1) {
        T other = __shfl_up_sync(FULL_MASK, x, step);
        if (lane >= step) x += other;
    }
    __syncthreads();
    if (lane == WARP - 1) warps[warp] = x;
    __syncthreads();
    T sums = lane < blockDim.x / WARP ? warps[lane] : T(0);
#pragma unroll
    for (int step = 1; step < WARP; step <<= 1) {
        T other = __shfl_up_sync(FULL_MASK, sums, step);
        if (lane >= step) sums += other;
    }
    total = __shfl_sync(FULL_MASK, sums, WARP - 1);
    T before = __shfl_sync(FULL_MASK, sums, max(warp - 1, 0));
    return warp == 0 ? x : before + x;
}

// The largest of all threads, in all of them; `warps` as above.
DEVICE u64 block_most(u64 x, u64* warps) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) x = max(x, __shfl_xor_sync(FULL_MASK, x, step));
    __syncthreads();
    if (threadIdx.x % WARP == 0) warps[threadIdx.x / WARP] = x;
    __syncthreads();
    x = threadIdx.x % WARP < blockDim.x / WARP ? warps[threadIdx.x % WARP] : 0;
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) x = max(x, __shfl_xor_sync(FULL_MASK, x, step));
    return x;
}
