// out[m, n] = x[m, k] . w[n, k]^T (+ bias) for few rows, at the speed at which the weights come from memory.
//
// A block takes tiles of 16 outputs (32 for nibbles). Chunks of k (64 or 128) are dealt out to `slices`, whose number the
// weight's shape decides; a slice is summed up by one warp, and slices are added in their order. Weights are the left
// side of the matrix instruction, rows of x its eight columns, one or two instructions side by side. So nothing in the
// order of a sum depends on m, on the number of warps or on the device.
//
// Weights go to shared memory by asynchronous copies of 16 bytes, `STAGES` chunks ahead, so how much is under way does
// not hang on registers or on the compiler. A lane reads back only what it copied itself: k is permuted inside a chunk so
// that its 16 bytes are its own fragments of the next instructions, and x, read 16 bytes at a time through the
// first-level cache a whole chunk ahead, is permuted alike by construction. The first copies start before the kernel
// ahead of this one has ended.
//
// A product may end with what would be a kernel of its own, rounding where that does: it adds its result to the residual
// stream, or its tiles are half rows of a gate and half the same rows of what is gated, and it gives act(gate) * up.
//
// Integers stay exact: a group's codes are multiplied as whole numbers, and the group's f32 sum is scaled once.
// Minimums meet the sums of x over the group, which one more instruction with a matrix of ones gives.
#pragma once
#include "gated.cuh"
#include "linear.cuh"

enum Form { PLAIN, FLOAT8, BYTES, NIBBLES, TABLE };

struct StreamArgs {
    void* out;            // [m, out_stride], bf16 or f32
    const bf16* x;        // [m, k]
    const u8* weights;    // PLAIN and FLOAT8 [n, k]; the others packed, see weight/codes.rs
    const u8* scales;     // of groups, f16, packed; FLOAT8: f32 [n / 128][k / 128], or null
    const float* factors; // [n], or null: multiply the whole sum
    const float* bias;    // [n], or null
    i32 m, n, k;
    i32 out_stride; // of rows: the weight may be some outputs of several
    i32 finish;     // FINISH_...
    i32 slices;
    i32 group_quarters; // of 32 values in a group: 1, 2 or 4
    u32 offset;         // NIBBLES: two bf16 of the least level less 128
    Levels levels;      // TABLE
    float scale;        // FINISH_ADD
    i32 activation;     // of gates, with its constants
    float alpha, limit;
};
static_assert(sizeof(StreamArgs) == 128, "as the host has it");

#define MEMBER __device__ __forceinline__

#define COPY_BYTES 2048 // a warp's weights of one chunk
#ifndef STREAM_STAGES
#define STREAM_STAGES 2
#endif

// GROUP: 16, 128, or 32 for any that is a multiple of it and divides 128.
template <int FORM, bool AFFINE, int GROUP, int COLUMNS, bool GATED = false> struct Stream {
    static constexpr bool BY_16 = GROUP == 16;
    static constexpr int ROWS = FORM == NIBBLES || FORM == TABLE ? 32 : 16;
    static constexpr int HALVES = ROWS / 16;
    static constexpr int OUTPUTS = GATED ? ROWS / 2 : ROWS;
    static_assert(!GATED || (ROWS == 32 && !BY_16), "halves of tiles can be picked");
    static constexpr int CHUNK = FORM == PLAIN ? 64 : 128;
    static constexpr int QUARTERS = CHUNK / 32;
    static constexpr bool CODED = FORM == BYTES || FORM == NIBBLES || FORM == TABLE;
    // A lane's scales (and minimums beside them) of a chunk.
    static constexpr int SCALE_BYTES = CODED ? ROWS / 8 * 2 * (AFFINE ? 2 : 1) * (BY_16 ? 2 : 1) : FORM == FLOAT8 ? 4 : 0;
    static constexpr int SLOT = COPY_BYTES + WARP * SCALE_BYTES;
    static constexpr int STAGES = FORM == PLAIN ? STREAM_STAGES + 2 : STREAM_STAGES;
    static constexpr int TOKENS = 8 * COLUMNS;
    static constexpr int STRIDE = TOKENS + 2;
    // On a multiprocessor, as far as registers go.
    static constexpr int THREADS = COLUMNS == 1 ? 768 : 512;

    const StreamArgs& a;
    int lane, warp, warps, g, t;
    int tiles, chunks, steps;
    u32 ring, above, least;
    // What the next copies read: rows g and g + 8 of plain weights, or a lane's place of a tile.
    const u8 *next_low, *next_high, *next_scales, *next_scales_high;
    int fetch_tile, fetch_slice, fetch_step;
    u32 fetch_slot;
    // The lane's own place in x.
    const bf16* x_row;
    int tokens_left;

    MEMBER Stream(const StreamArgs& args, u8* shared) : a(args) {
        // Read once: the compiler would read it again in every step.
        u32 thread;
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
        lane = thread % WARP, warp = thread / WARP, warps = blockDim.x / WARP, g = lane / 4, t = lane % 4;
        tiles = (outputs() + OUTPUTS - 1) / OUTPUTS, chunks = (a.k + CHUNK - 1) / CHUNK;
        steps = (chunks + a.slices - 1) / a.slices;
        ring = shared_address(shared) + warp * STAGES * SLOT;
        // BF16_128S, by a way that does not show: n is positive.
        above = BF16_128S + (u32)(a.n >> 31);
        // The least level times 2^-6.
        least = fma_bf16x2(a.offset, 0x3c803c80u, 0x40004000u);
        int first_token = blockIdx.y * TOKENS;
        tokens_left = a.m - first_token - g;
        x_row = a.x + (i64)(first_token + g) * a.k + t * (FORM == FLOAT8 ? 16 : BY_16 ? 4 : 8);
    }

    MEMBER int outputs() const { return GATED ? a.n / 2 : a.n; }

    // Word `index`, which is known when compiling.
    MEMBER static u32 word(const uint4& v, int index) { return index == 0 ? v.x : index == 1 ? v.y : index == 2 ? v.z : v.w; }

    template <int WORDS> MEMBER static void load_words(u32 out[WORDS], u32 from) {
        if (WORDS == 1) asm volatile("ld.shared.u32 %0, [%1];" : "=r"(out[0]) : "r"(from) : "memory");
        else asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(out[0]), "=r"(out[WORDS - 1]) : "r"(from) : "memory");
    }

    MEMBER int scale_shift() const { return GROUP == 128 ? 0 : BY_16 ? 2 : 2 - (a.group_quarters >> 1); }

    // Where a slice's first chunk of a tile lies.
    MEMBER void point_at(int tile, int slice) {
        if (CODED) {
            // A gated tile has half of a packed tile of gates and half of one of what they gate.
            i64 chunk = (i64)(GATED ? tile / 2 : tile) * chunks + slice, distance = (i64)(a.n / 64) * chunks;
            int part = GATED ? tile % 2 : 0, shift = scale_shift();
            next_low = a.weights + chunk * COPY_BYTES + part * (COPY_BYTES / 2) + lane * 16;
            // Lane t has the groups of quarter t. 4, 2 or 1 groups are 2, 1 or 0 shifts.
            next_scales = a.scales + ((chunk << shift) + (t >> (2 - shift))) * (8 * SCALE_BYTES) + g * SCALE_BYTES + part * (SCALE_BYTES / 2);
            if (GATED) next_high = next_low + distance * COPY_BYTES, next_scales_high = next_scales + (distance << shift) * (8 * SCALE_BYTES);
        } else {
            constexpr int SIZE = FORM == PLAIN ? 2 : 1;
            int low = min(tile * 16 + g, a.n - 1), high = min(tile * 16 + g + 8, a.n - 1), at = slice * CHUNK * SIZE + t * 16;
            next_low = a.weights + (i64)low * a.k * SIZE + at, next_high = a.weights + (i64)high * a.k * SIZE + at;
            if (FORM == FLOAT8) next_scales = a.scales + ((i64)(tile / 8) * chunks + slice) * 4;
        }
    }

    // Starts the copies of the warp's next chunk: of this slice, its next slice, or the next tile.
    MEMBER void fetch() {
        int chunk = fetch_step * a.slices + fetch_slice;
        if (fetch_tile < tiles && chunk < chunks) {
            u32 to = fetch_slot + lane * 16, to_scales = fetch_slot + COPY_BYTES + lane * SCALE_BYTES;
            if (CODED) {
#pragma unroll
                for (int part = 0; part < 4; part++)
                    copy_async_16(to + part * 512, GATED && part >= 2 ? next_high + (part - 2) * 512 : next_low + part * 512);
                if (GATED) {
                    copy_async_small<SCALE_BYTES / 2>(to_scales, next_scales);
                    copy_async_small<SCALE_BYTES / 2>(to_scales + SCALE_BYTES / 2, next_scales_high);
                } else if (SCALE_BYTES <= 8) {
                    copy_async_small<SCALE_BYTES == 4 ? 4 : 8>(to_scales, next_scales);
                } else {
#pragma unroll
                    for (int at = 0; at < SCALE_BYTES; at += 16) copy_async_16(to_scales + at, next_scales + at);
                }
            } else {
                constexpr int ALONG = FORM == PLAIN ? 8 : 16;
                int left = a.k - chunk * CHUNK - t * ALONG;
#pragma unroll
                for (int part = 0; part < 2; part++) {
                    bool valid = part * CHUNK / 2 < left;
                    copy_async_16(to + part * 512, next_low + part * 64, valid);
                    copy_async_16(to + 1024 + part * 512, next_high + part * 64, valid);
                }
                if (FORM == FLOAT8 && a.scales) copy_async_small<4>(to_scales, next_scales);
            }
        }
        commit_copies();
        fetch_slot = fetch_slot == ring + (STAGES - 1) * SLOT ? ring : fetch_slot + SLOT;
        if (++fetch_step == steps) {
            fetch_step = 0, fetch_slice += warps;
            if (fetch_slice >= a.slices) fetch_slice = warp, fetch_tile += gridDim.x;
            if (fetch_tile < tiles) point_at(fetch_tile, fetch_slice);
        } else if (CODED) {
            int along = a.slices * COPY_BYTES, scales_along = (a.slices * 8 * SCALE_BYTES) << scale_shift();
            next_low += along, next_scales += scales_along;
            if (GATED) next_high += along, next_scales_high += scales_along;
        } else {
            int along = a.slices * CHUNK * (FORM == PLAIN ? 2 : 1);
            next_low += along, next_high += along;
            if (FORM == FLOAT8) next_scales += a.slices * 4;
        }
    }

    // A lane's eight values of a quarter for each of its tokens, in the order of the weights' fragments. Lanes without a
    // token hold zeros from the start; past the end of k stays what was there, where it meets zeros.
    MEMBER void load_x(uint4 x[COLUMNS], int chunk, int quarter) const {
        int along = FORM == FLOAT8 ? quarter / 2 * 64 + quarter % 2 * 8 : quarter * 32;
        int left = a.k - chunk * CHUNK - t * (FORM == FLOAT8 ? 16 : BY_16 ? 4 : 8);
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            const bf16* from = x_row + (i64)(8 * c) * a.k + chunk * CHUNK + along;
            bool valid = tokens_left > 8 * c;
            if (BY_16) {
                load_8(x[c].x, x[c].y, from, valid && along < left);
                load_8(x[c].z, x[c].w, from + 16, valid && along + 16 < left);
            } else {
                load_16(x[c], from, valid && along < left);
            }
        }
    }

    // The lane's own bytes of a quarter, or of it and the next; what the quarter before loaded stays.
    MEMBER void load_own(uint4 own[2], u32 slot, int quarter) const {
        u32 from = slot + lane * 16;
        if (FORM == BYTES) own[0] = load_shared_16(from + quarter * 512);
        if (FORM == PLAIN) own[0] = load_shared_16(from + quarter * 512), own[1] = load_shared_16(from + 1024 + quarter * 512);
        if ((FORM == FLOAT8 || ROWS == 32) && quarter % 2 == 0)
            own[0] = load_shared_16(from + quarter / 2 * 512), own[1] = load_shared_16(from + 1024 + quarter / 2 * 512);
    }

    // The fragments of instruction `s` of a quarter for half `half` of the outputs.
    MEMBER void weights(u32 out[4], const uint4 own[2], int half, int quarter, int s) const {
        if (FORM == PLAIN) { // rows g and g + 8
            out[0] = word(own[0], 2 * s), out[2] = word(own[0], 2 * s + 1);
            out[1] = word(own[1], 2 * s), out[3] = word(own[1], 2 * s + 1);
        } else if (FORM == FLOAT8) { // likewise, of two quarters
            u32 low = word(own[0], quarter % 2 * 2 + s), high = word(own[1], quarter % 2 * 2 + s);
            out[0] = low_e4m3_to_bf16(low), out[2] = high_e4m3_to_bf16(low);
            out[1] = low_e4m3_to_bf16(high), out[3] = high_e4m3_to_bf16(high);
        } else if (FORM == NIBBLES) {
            small_nibbles(out, word(own[half], quarter % 2 * 2 + s), least);
        } else {
            codes(out, own[half], FORM == BYTES ? 0 : quarter % 2, s);
        }
    }

    // The same from 16 bytes of codes: a quarter's, words [s][row g, row g + 8], or two quarters' nibbles, words
    // [quarter][s].
    MEMBER void codes(u32 out[4], const uint4& own, int quarter, int s) const {
        if (FORM == BYTES) {
            u32 low = word(own, 2 * s), high = word(own, 2 * s + 1);
            out[0] = bytes_to_bf16(low, above), out[2] = bytes_to_bf16(low >> 8, above);
            out[1] = bytes_to_bf16(high, above), out[3] = bytes_to_bf16(high >> 8, above);
        } else if (FORM == TABLE) {
            look_up(a.levels, word(own, quarter * 2 + s), out);
        } else {
            u32 nibbles = word(own, quarter * 2 + s);
#pragma unroll
            for (int j = 0; j < 4; j++) out[j] = nibbles_to_bf16(nibbles >> (4 * j), above, a.offset);
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
        if (AFFINE) zero<COLUMNS * 4>(&ones[0][0]);
    }

    template <int COUNT> MEMBER static void zero(float* values) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) values[i] = 0.0f;
    }

    // One chunk: `x` is read, and becomes that of `next_chunk`.
    MEMBER void multiply_chunk(float total[HALVES][COLUMNS][4], uint4 x[QUARTERS][COLUMNS], u32 slot, int next_chunk) const {
        uint4 own[2];
        float sum[HALVES][COLUMNS][4], ones[COLUMNS][4];
        if (FORM != PLAIN) zero<HALVES * COLUMNS * 4>(&sum[0][0][0]);
        if (AFFINE) zero<COLUMNS * 4>(&ones[0][0]);
#pragma unroll
        for (int quarter = 0; quarter < QUARTERS; quarter++) {
            load_own(own, slot, quarter);
#pragma unroll
            for (int s = 0; s < 2; s++) {
#pragma unroll
                for (int half = 0; half < HALVES; half++) {
                    u32 w[4];
                    weights(w, own, half, quarter, s);
#pragma unroll
                    for (int c = 0; c < COLUMNS; c++)
                        multiply(FORM == PLAIN ? total[half][c] : sum[half][c], w, word(x[quarter][c], 2 * s), word(x[quarter][c], 2 * s + 1));
                }
                if (AFFINE) {
                    // As small as the levels are.
                    constexpr u32 ONES = FORM == NIBBLES ? 0x3c803c80u : BF16_ONES;
                    const u32 w[4] = {ONES, ONES, ONES, ONES};
#pragma unroll
                    for (int c = 0; c < COLUMNS; c++) multiply(ones[c], w, word(x[quarter][c], 2 * s), word(x[quarter][c], 2 * s + 1));
                }
                if (BY_16) scale(total, sum, ones, slot, quarter, s);
            }
            load_x(x[quarter], next_chunk, quarter);
            // Holds the loads here: the compiler would put them all at the end, just before they are needed.
            __syncwarp();
            if (GROUP == 128 ? quarter == 3 : CODED && !BY_16 && ((quarter + 1) & (a.group_quarters - 1)) == 0)
                scale(total, sum, ones, slot, quarter, 0);
        }
        if (FORM == FLOAT8) {
            u32 bits[1] = {0x3f800000u};
            if (a.scales) load_words<1>(bits, slot + COPY_BYTES + lane * SCALE_BYTES);
#pragma unroll
            for (int i = 0; i < COLUMNS * 4; i++) (&total[0][0][0])[i] = fmaf((&sum[0][0][0])[i], __uint_as_float(bits[0]), (&total[0][0][0])[i]);
        }
    }

    // Keeps a slice's sums for `write`.
    MEMBER void keep(const float total[HALVES][COLUMNS][4], float* sums) const {
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) {
                float* to = sums + (half * 16 + g) * STRIDE + 8 * c + 2 * t;
                *(float2*)to = make_float2(total[half][c][0], total[half][c][1]);
                *(float2*)(to + 8 * STRIDE) = make_float2(total[half][c][2], total[half][c][3]);
            }
        }
    }

    // A row's sum of all slices in their order, scaled, with its bias.
    MEMBER float finished(const float* sums, int row, int token, int output) const {
        float factor = a.factors ? a.factors[output] : 1.0f, bias = a.bias ? a.bias[output] : 0.0f, sum = 0.0f;
#pragma unroll 4
        for (int slice = 0; slice < a.slices; slice++) sum += sums[(slice * ROWS + row) * STRIDE + token];
        // Levels of nibbles were 2^-6 of themselves.
        if (FORM == NIBBLES) sum *= 64.0f;
        if (a.factors) sum = __fmul_rn(sum, factor);
        if (a.bias) sum = __fadd_rn(sum, bias);
        return sum;
    }

    // Finishes a tile of outputs. The warp that begins changes from tile to tile, so that none lags behind.
    MEMBER void write(const float* sums, int tile, int turn) const {
#pragma unroll 1
        for (int i = (warp >= turn ? warp - turn : warp - turn + warps) * WARP + lane; i < OUTPUTS * TOKENS; i += warps * WARP) {
            int row = i % OUTPUTS, token = i / OUTPUTS, output = tile * OUTPUTS + row, line = blockIdx.y * TOKENS + token;
            if (line >= a.m) break;
            if (output >= outputs()) continue;
            i64 at = (i64)line * a.out_stride + output;
            float before = !GATED && a.finish == FINISH_ADD ? ((const float*)a.out)[at] : 0.0f;
            float sum = finished(sums, row, token, output);
            if (GATED) {
                float gate = to_float(from_float<bf16>(sum));
                float up = to_float(from_float<bf16>(finished(sums, row + OUTPUTS, token, output + a.n / 2)));
                ((bf16*)a.out)[at] = from_float<bf16>(gated<false, false>(a.activation, a.alpha, a.limit, gate, up));
            } else if (a.finish == FINISH_ADD) {
                ((float*)a.out)[at] = fmaf(to_float(from_float<bf16>(sum)), a.scale, before);
            } else if (a.finish == FINISH_F32) {
                ((float*)a.out)[at] = sum;
            } else {
                ((bf16*)a.out)[at] = from_float<bf16>(sum);
            }
        }
    }

    // Asks for what `write` will need of a tile.
    MEMBER void ask_for(int tile) const {
        int thread = warp * WARP + lane;
        if (thread < ROWS) {
            int beyond = GATED && thread >= OUTPUTS ? a.n / 2 - OUTPUTS : 0, output = min(tile * OUTPUTS + thread + beyond, a.n - 1);
            if (a.factors) prefetch(a.factors + output);
            if (a.bias) prefetch(a.bias + output);
        }
    }

    // `sums`: twice [slices][ROWS][STRIDE] behind the ring.
    MEMBER void run(u8* shared) {
        float* sums = (float*)(shared + warps * STAGES * SLOT);
        const int size = a.slices * ROWS * STRIDE;
        fetch_tile = blockIdx.x, fetch_slice = warp, fetch_step = 0, fetch_slot = ring;
        point_at(fetch_tile, fetch_slice);
#pragma unroll 1
        for (int stage = 0; stage < STAGES; stage++) fetch();
        ask_for(blockIdx.x);
        release_next();
        wait_for_previous();
        uint4 x[QUARTERS][COLUMNS];
#pragma unroll
        for (int i = 0; i < QUARTERS * COLUMNS; i++) (&x[0][0])[i] = make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int quarter = 0; quarter < QUARTERS; quarter++) load_x(x[quarter], warp, quarter);
        u32 slot = ring;
        int place = 0, turn = 0;
        // Two places for sums in turn, and one barrier a tile: at the next, whoever wrote this tile is done.
#pragma unroll 1
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
#pragma unroll 1
            for (int slice = warp; slice < a.slices; slice += warps) {
                float total[HALVES][COLUMNS][4];
                zero<HALVES * COLUMNS * 4>(&total[0][0][0]);
                // The next one that has a chunk.
                int next_slice = slice + warps < min(a.slices, chunks) ? slice + warps : warp;
#pragma unroll 1
                for (int chunk = slice, step = 0; step < steps; step++, chunk += a.slices) {
                    wait_copies<STAGES - 1>();
                    // Scales are read by lanes that did not copy them.
                    __syncwarp();
                    int next_chunk = chunk + a.slices;
                    if (chunk < chunks) multiply_chunk(total, x, slot, next_chunk < chunks ? next_chunk : next_slice);
                    __syncwarp();
                    fetch();
                    slot = slot == ring + (STAGES - 1) * SLOT ? ring : slot + SLOT;
                }
                keep(total, sums + place + slice * ROWS * STRIDE);
            }
            __syncthreads();
            write(sums + place, tile, turn);
            if (tile + gridDim.x < tiles) ask_for(tile + gridDim.x);
            place = size - place;
            turn = turn + 1 == warps ? 0 : turn + 1;
        }
    }
};

#define STREAM_KERNEL(NAME, ...)                                                                                       \
    extern "C" __global__ void __launch_bounds__((Stream<__VA_ARGS__>::THREADS), 1)                                    \
        NAME(const __grid_constant__ StreamArgs args) {                                                                \
        extern __shared__ __align__(16) u8 shared[];                                                                   \
        Stream<__VA_ARGS__>(args, shared).run(shared);                                                                 \
    }
