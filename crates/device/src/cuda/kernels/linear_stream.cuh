// out[m, n] = x[m, k] . w[n, k]^T (+ bias) for few rows, at the speed at which the weights come from memory.
//
// A block of eight warps takes tiles of 16 outputs (32 for nibbles), its warps every eighth chunk of 64 or 128 of k, and
// adds their sums in the order of the warps. Weights are the left side of the matrix instruction, rows of x its eight
// columns; nothing in the order of a sum depends on m.
//
// Weights go to shared memory by asynchronous copies of 16 bytes, `STAGES` chunks ahead (64 KB a block), so how much is
// under way does not hang on registers or on the compiler. A lane reads back only what it copied itself: k is permuted
// inside a chunk so that its 16 bytes are its own fragments of the next instructions, and x, read 16 bytes at a time
// through the first-level cache, is permuted alike by construction. The first copies start before the kernel ahead of
// this one has ended.
//
// Integers stay exact: a group's codes are multiplied as whole numbers, and the group's f32 sum is scaled once.
// Minimums meet the sums of x over the group, which one more instruction with a matrix of ones gives.
#pragma once
#include "linear.cuh"

enum Form { PLAIN, FLOAT8, BYTES, NIBBLES, TABLE };

struct StreamArgs {
    void* out;            // [m, n], bf16 or f32
    const bf16* x;        // [m, k]
    const u8* weights;    // PLAIN and FLOAT8 [n, k]; the others packed, see weight/layout.rs
    const u8* scales;     // of groups, f16, packed; FLOAT8: f32 [n / 16][k / 128], or null
    const float* factors; // [n], or null: multiply the whole sum
    const float* bias;    // [n], or null
    i32 m, n, k;
    i32 out_f32;
    i32 group_quarters; // of 32 values in a group: 1, 2 or 4
    u32 offset;         // NIBBLES: two bf16 of the least level less 128
    Levels levels;      // TABLE
};

#define MEMBER __device__ __forceinline__

#define STREAM_WARPS 8
#define STREAM_THREADS (STREAM_WARPS * WARP)
#define COPY_BYTES 2048 // a warp's weights of one chunk
#ifndef STREAM_STAGES
#define STREAM_STAGES 4
#endif

template <int FORM, bool AFFINE, bool BY_16, int COLUMNS> struct Stream {
    static constexpr int ROWS = FORM == NIBBLES || FORM == TABLE ? 32 : 16;
    static constexpr int HALVES = ROWS / 16;
    static constexpr int CHUNK = FORM == PLAIN ? 64 : 128;
    static constexpr int QUARTERS = CHUNK / 32;
    static constexpr bool CODED = FORM == BYTES || FORM == NIBBLES || FORM == TABLE;
    // A lane's scales (and minimums beside them) of a chunk.
    static constexpr int SCALE_BYTES = CODED ? ROWS / 8 * 2 * (AFFINE ? 2 : 1) * (BY_16 ? 2 : 1) : FORM == FLOAT8 ? 4 : 0;
    static constexpr int SLOT = COPY_BYTES + WARP * SCALE_BYTES;
    static constexpr int STAGES = BY_16 && SCALE_BYTES == 32 ? 3 : STREAM_STAGES;
    static constexpr int TOKENS = 8 * COLUMNS;
    static constexpr int STRIDE = TOKENS + 2;
    static constexpr int SHARED = STREAM_WARPS * (STAGES * SLOT + 16 * STRIDE * 4);

    const StreamArgs& a;
    int lane, warp, g, t;
    int tiles, chunks, steps;
    int first_token;
    u32 ring;

    MEMBER Stream(const StreamArgs& args, u8* shared) : a(args) {
        lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
        tiles = (a.n + ROWS - 1) / ROWS, chunks = (a.k + CHUNK - 1) / CHUNK;
        steps = (chunks + STREAM_WARPS - 1) / STREAM_WARPS;
        first_token = blockIdx.y * TOKENS;
        ring = shared_address(shared) + warp * STAGES * SLOT;
    }

    // Word `index`, which is known when compiling.
    MEMBER u32 word(const uint4& v, int index) const { return index == 0 ? v.x : index == 1 ? v.y : index == 2 ? v.z : v.w; }

    template <int WORDS> MEMBER void load_words(u32 out[WORDS], u32 from) const {
        if (WORDS == 1) asm volatile("ld.shared.u32 %0, [%1];" : "=r"(out[0]) : "r"(from) : "memory");
        else asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(out[0]), "=r"(out[WORDS - 1]) : "r"(from) : "memory");
    }

    // Starts the copies of one chunk of a tile.
    MEMBER void fetch(int tile, int chunk, u32 slot) const {
        u32 to = slot + lane * 16;
        if (!CODED) {
            constexpr int SIZE = FORM == PLAIN ? 2 : 1, ALONG = 16 / SIZE;
            int low = min(tile * 16 + g, a.n - 1), high = min(tile * 16 + g + 8, a.n - 1);
#pragma unroll
            for (int part = 0; part < 2; part++) {
                int at = chunk * CHUNK + part * CHUNK / 2 + t * ALONG;
                bool valid = at < a.k;
                int safe = valid ? at : 0;
                copy_async_16(to + part * 512, a.weights + ((i64)low * a.k + safe) * SIZE, valid);
                copy_async_16(to + 1024 + part * 512, a.weights + ((i64)high * a.k + safe) * SIZE, valid);
            }
        } else {
            const u8* from = a.weights + ((i64)tile * chunks + chunk) * COPY_BYTES + lane * 16;
#pragma unroll
            for (int part = 0; part < 4; part++) copy_async_16(to + part * 512, from + part * 512);
        }
        u32 to_scales = slot + COPY_BYTES + lane * SCALE_BYTES;
        if (FORM == FLOAT8) {
            if (a.scales) copy_async_small<4>(to_scales, (const float*)a.scales + (i64)tile * chunks + chunk);
        } else if (CODED) {
            // Lane t has the groups of quarter t.
            int groups = 4 / a.group_quarters;
            const u8* from = a.scales + (((i64)tile * chunks + chunk) * groups + t / a.group_quarters) * (8 * SCALE_BYTES) + g * SCALE_BYTES;
            if (SCALE_BYTES <= 8) {
                copy_async_small<SCALE_BYTES == 4 ? 4 : 8>(to_scales, from);
            } else {
#pragma unroll
                for (int at = 0; at < SCALE_BYTES; at += 16) copy_async_16(to_scales + at, from + at);
            }
        }
    }

    // A lane's eight values of a quarter for each of its tokens, in the order of the weights' fragments.
    MEMBER void load_x(uint4 x[COLUMNS], int chunk, int quarter) const {
        int at = chunk * CHUNK + (FORM == FLOAT8 ? quarter / 2 * 64 + t * 16 + quarter % 2 * 8 : quarter * 32 + t * (BY_16 ? 4 : 8));
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            int token = first_token + 8 * c + g;
            const bf16* from = a.x + (i64)token * a.k + at;
            if (BY_16) {
                uint2 low = load_8(from, token < a.m && at < a.k), high = load_8(from + 16, token < a.m && at + 16 < a.k);
                x[c] = make_uint4(low.x, low.y, high.x, high.y);
            } else {
                x[c] = load_16(from, token < a.m && at < a.k);
            }
        }
    }

    // The fragments of instruction `s` of a quarter for the outputs of half `half`, from the lane's own bytes.
    MEMBER void weights(u32 out[4], const uint4 own[4], int half, int quarter, int s) const {
        if (FORM == PLAIN) { // own: [row g, row g + 8][quarter]
            uint4 low = own[quarter], high = own[2 + quarter];
            out[0] = s ? low.z : low.x, out[2] = s ? low.w : low.y;
            out[1] = s ? high.z : high.x, out[3] = s ? high.w : high.y;
        } else if (FORM == FLOAT8) { // own: [row g, row g + 8][half of the chunk]
            u32 low = word(own[quarter / 2], quarter % 2 * 2 + s), high = word(own[2 + quarter / 2], quarter % 2 * 2 + s);
            out[0] = e4m3_to_bf16(pick_bytes(low, 0, 0x1404)), out[2] = e4m3_to_bf16(pick_bytes(low, 0, 0x3424));
            out[1] = e4m3_to_bf16(pick_bytes(high, 0, 0x1404)), out[3] = e4m3_to_bf16(pick_bytes(high, 0, 0x3424));
        } else if (FORM == BYTES) {
            codes(out, own[quarter], 0, s);
        } else {
            codes(out, own[half * 2 + quarter / 2], quarter % 2, s);
        }
    }

    // The same from 16 bytes of codes: a quarter's, words [s][row g, row g + 8], or two quarters' nibbles, words
    // [quarter][s].
    MEMBER void codes(u32 out[4], const uint4& own, int quarter, int s) const {
        if (FORM == BYTES) {
            u32 low = word(own, 2 * s), high = word(own, 2 * s + 1);
            out[0] = bytes_to_bf16(low), out[2] = bytes_to_bf16(low >> 8);
            out[1] = bytes_to_bf16(high), out[3] = bytes_to_bf16(high >> 8);
        } else if (FORM == TABLE) {
            look_up(a.levels, word(own, quarter * 2 + s), out);
        } else {
            u32 nibbles = word(own, quarter * 2 + s);
#pragma unroll
            for (int j = 0; j < 4; j++) out[j] = nibbles_to_bf16(nibbles >> (4 * j), a.offset);
        }
    }

    // total += scale * sum (+ minimum * sum of x), for the group that quarter `quarter` (and, for groups of 16,
    // instruction `s`) ends; the sums begin anew.
    MEMBER void scale(float total[HALVES][COLUMNS][4], float sum[HALVES][COLUMNS][4], float ones[COLUMNS][4], u32 slot, int quarter, int s) const {
        constexpr int EACH = AFFINE ? 2 : 1;
        u32 from = slot + COPY_BYTES + (lane - t + quarter) * SCALE_BYTES + (BY_16 ? s * SCALE_BYTES / 2 : 0);
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
            // Row g and row g + 8, each with its minimum if there is one.
            u32 words[EACH];
            load_words<EACH>(words, from + half * 4 * EACH);
            float low = half_to_float(words[0]), high, low_least = 0.0f, high_least = 0.0f;
            if (AFFINE) {
                low_least = half_to_float(words[0] >> 16);
                high = half_to_float(words[EACH - 1]), high_least = half_to_float(words[EACH - 1] >> 16);
            } else {
                high = half_to_float(words[0] >> 16);
            }
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float by = i < 2 ? low : high;
                    total[half][c][i] = fmaf(sum[half][c][i], by, total[half][c][i]);
                    if (AFFINE) total[half][c][i] = fmaf(ones[c][i], i < 2 ? low_least : high_least, total[half][c][i]);
                    sum[half][c][i] = 0.0f;
                }
            }
        }
        if (AFFINE) {
#pragma unroll
            for (int c = 0; c < COLUMNS; c++)
#pragma unroll
                for (int i = 0; i < 4; i++) ones[c][i] = 0.0f;
        }
    }

    // One chunk: `x` holds its first quarter, and in the end that of `next_chunk`.
    MEMBER void chunk_of(float total[HALVES][COLUMNS][4], uint4 x[2][COLUMNS], u32 slot, int chunk, int next_chunk) const {
        uint4 own[4];
#pragma unroll
        for (int part = 0; part < 4; part++) own[part] = load_shared_16(slot + part * 512 + lane * 16);
        float sum[HALVES][COLUMNS][4], ones[COLUMNS][4];
        if (FORM != PLAIN) {
#pragma unroll
            for (int i = 0; i < HALVES * COLUMNS * 4; i++) (&sum[0][0][0])[i] = 0.0f;
#pragma unroll
            for (int i = 0; i < COLUMNS * 4; i++) (&ones[0][0])[i] = 0.0f;
        }
#pragma unroll
        for (int quarter = 0; quarter < QUARTERS; quarter++) {
            bool last = quarter == QUARTERS - 1;
            load_x(x[(quarter + 1) % 2], last ? next_chunk : chunk, last ? 0 : quarter + 1);
            const uint4* now = x[quarter % 2];
#pragma unroll
            for (int s = 0; s < 2; s++) {
#pragma unroll
                for (int half = 0; half < HALVES; half++) {
                    u32 w[4];
                    weights(w, own, half, quarter, s);
#pragma unroll
                    for (int c = 0; c < COLUMNS; c++) {
                        float* into = FORM == PLAIN ? total[half][c] : sum[half][c];
                        multiply(into, w, s ? now[c].z : now[c].x, s ? now[c].w : now[c].y);
                    }
                }
                if (AFFINE) {
                    const u32 w[4] = {BF16_ONES, BF16_ONES, BF16_ONES, BF16_ONES};
#pragma unroll
                    for (int c = 0; c < COLUMNS; c++) multiply(ones[c], w, s ? now[c].z : now[c].x, s ? now[c].w : now[c].y);
                }
                if (BY_16) scale(total, sum, ones, slot, quarter, s);
            }
            if (CODED && !BY_16 && (quarter + 1) % a.group_quarters == 0) scale(total, sum, ones, slot, quarter, 0);
        }
        if (FORM == FLOAT8) {
            float by = 1.0f;
            if (a.scales) {
                u32 bits[1];
                load_words<1>(bits, slot + COPY_BYTES + lane * SCALE_BYTES);
                by = __uint_as_float(bits[0]);
            }
#pragma unroll
            for (int c = 0; c < COLUMNS; c++)
#pragma unroll
                for (int i = 0; i < 4; i++) total[0][c][i] = fmaf(sum[0][c][i], by, total[0][c][i]);
        }
    }

    // Adds the warps' sums in their order and writes a tile of outputs.
    MEMBER void write(const float total[HALVES][COLUMNS][4], float* partial, int tile) const {
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) {
                float* to = partial + (warp * 16 + g) * STRIDE + 8 * c + 2 * t;
                *(float2*)to = make_float2(total[half][c][0], total[half][c][1]);
                *(float2*)(to + 8 * STRIDE) = make_float2(total[half][c][2], total[half][c][3]);
            }
            __syncthreads();
#pragma unroll 1
            for (int i = threadIdx.x; i < 16 * TOKENS; i += STREAM_THREADS) {
                int row = i % 16, token = i / 16, output = tile * ROWS + half * 16 + row;
                if (output < a.n && first_token + token < a.m) {
                    float sum = 0.0f;
#pragma unroll
                    for (int w = 0; w < STREAM_WARPS; w++) sum += partial[(w * 16 + row) * STRIDE + token];
                    if (a.factors) sum *= a.factors[output];
                    if (a.bias) sum += a.bias[output];
                    i64 at = (i64)(first_token + token) * a.n + output;
                    if (a.out_f32) ((float*)a.out)[at] = sum;
                    else ((bf16*)a.out)[at] = from_float<bf16>(sum);
                }
            }
            __syncthreads();
        }
    }

    MEMBER void run(float* partial) {
        int fetch_tile = blockIdx.x, fetch_step = 0;
        u32 fetch_slot = ring, slot = ring;
        auto fetch_next = [&]() {
            int chunk = fetch_step * STREAM_WARPS + warp;
            if (fetch_tile < tiles && chunk < chunks) fetch(fetch_tile, chunk, fetch_slot);
            commit_copies();
            fetch_slot = fetch_slot == ring + (STAGES - 1) * SLOT ? ring : fetch_slot + SLOT;
            if (++fetch_step == steps) fetch_step = 0, fetch_tile += gridDim.x;
        };
#pragma unroll 1
        for (int stage = 0; stage < STAGES; stage++) fetch_next();
        release_next();
        wait_for_previous();
        uint4 x[2][COLUMNS];
        load_x(x[0], warp, 0);
#pragma unroll 1
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            float total[HALVES][COLUMNS][4];
#pragma unroll
            for (int i = 0; i < HALVES * COLUMNS * 4; i++) (&total[0][0][0])[i] = 0.0f;
#pragma unroll 1
            for (int step = 0; step < steps; step++) {
                int chunk = step * STREAM_WARPS + warp;
                int next_chunk = step + 1 < steps ? chunk + STREAM_WARPS : warp;
                wait_copies<STAGES - 1>();
                // Scales are read by lanes that did not copy them.
                __syncwarp();
                if (chunk < chunks) chunk_of(total, x, slot, chunk, next_chunk);
                else load_x(x[0], next_chunk, 0);
                __syncwarp();
                fetch_next();
                slot = slot == ring + (STAGES - 1) * SLOT ? ring : slot + SLOT;
            }
            write(total, partial, tile);
        }
    }
};

#define STREAM_KERNEL(NAME, FORM, AFFINE, BY_16, COLUMNS)                                                              \
    extern "C" __global__ void __launch_bounds__(STREAM_THREADS, COLUMNS <= 2 ? 2 : 1) NAME##_##COLUMNS(               \
        const __grid_constant__ StreamArgs args) {                                                                     \
        extern __shared__ __align__(16) u8 shared[];                                                                   \
        typedef Stream<FORM, AFFINE, BY_16, COLUMNS> Kernel;                                                           \
        Kernel kernel(args, shared);                                                                                   \
        kernel.run((float*)(shared + STREAM_WARPS * Kernel::STAGES * Kernel::SLOT));                                   \
    }
#define STREAM_KERNELS(NAME, FORM, AFFINE, BY_16)                                                                      \
    STREAM_KERNEL(NAME, FORM, AFFINE, BY_16, 1)                                                                        \
    STREAM_KERNEL(NAME, FORM, AFFINE, BY_16, 2)                                                                        \
    STREAM_KERNEL(NAME, FORM, AFFINE, BY_16, 4)
