// out[m, n] = x[m, k] . w[n, k]^T (+ bias) for up to eight rows, as linear_stream.cuh does it and with less to do for each
// byte, for decoding one sequence or a few. What stands before and behind a product is part of it where that is asked for:
//
//   - a norm of the rows: they are multiplied by the norm's weights as they are read, and the sum, in the end, by
//     1 / rms, which each warp has counted up for its part of k by then;
//   - adding the result to the residual stream;
//   - gating: half of a tile's rows are gates, half the same rows of what they gate, and act(gate) * up is given.
//
// A block takes tiles of 16 rows of weights, its warps the tile's chunks of k in turn; warps are added in their order.
// Weights come by asynchronous copies, `STAGES` chunks ahead, and a lane reads back only what it copied. x waits in shared
// memory, each warp's part brought there by itself. Codes of e4m3 become bf16 by a mask and a shift alone: so they are
// 2^-120 times what they should be, and x is 2^64 times what it is, so that sums are ordinary numbers.
//
// Registers are kept so that two blocks share a multiprocessor: the next product's first weights come while this one ends.
#pragma once
#include "gated.cuh"
#include "linear.cuh"

enum FewForm { PLAIN, FLOAT8 };

struct FewArgs {
    void* out;            // [m, out_stride]
    const void* x;        // [m, k] bf16; f32 where it is normed
    const u8* weights;    // [n, k]
    const u8* scales;     // FLOAT8: f32 [n / 128][k / 128], or null
    const float* factors; // [n], or null: multiply the whole sum
    const float* bias;    // [n], or null
    const float* norm;    // [k], or null
    i32 m, n, k;
    i32 out_stride; // of rows: the weight may be some outputs of several
    i32 finish;     // FINISH_...
    float eps;      // of the norm
    float scale;    // FINISH_ADD
    i32 activation; // of gates, with its constants
    float alpha, limit;
};
static_assert(sizeof(FewArgs) == 96, "as the host has it");

#define MEMBER __device__ __forceinline__

#define COPY_BYTES 2048 // a warp's weights of one chunk
#define MOST_WARPS 16

template <int FORM, bool GATED, int STAGES> struct Few {
    static constexpr int ROWS = 16;
    static constexpr int OUTPUTS = GATED ? ROWS / 2 : ROWS;
    static constexpr int CHUNK = FORM == PLAIN ? 64 : 128;
    static constexpr int QUARTERS = CHUNK / 32;
    // A lane's scale of a chunk.
    static constexpr int SCALE_BYTES = FORM == FLOAT8 ? 4 : 0;
    static constexpr int SLOT = COPY_BYTES + WARP * SCALE_BYTES;
    // Times which x is staged.
    static constexpr float LARGE = FORM == PLAIN ? 1.0f : 18446744073709551616.0f; // 2^64

    const FewArgs& a;
    int lane, warp, warps, g, t;
    int tiles, chunks, steps;
    u32 ring, rows_at, x_at;
    float *sums, *squares;
    int stride; // of a row's sums: the tokens, an even number of them
    // What the next copies read: rows g and g + 8, and their scale.
    const u8 *next_low, *next_high, *next_scales;
    int fetch_tile, fetch_step;
    u32 fetch_slot;

    // Shared memory: the ring, rows of x [chunk][token][CHUNK], sums twice [warp][ROWS][stride], squares [token][warp].
    MEMBER Few(const FewArgs& args, u8* shared) : a(args) {
        u32 thread;
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
        lane = thread % WARP, warp = thread / WARP, warps = blockDim.x / WARP, g = lane / 4, t = lane % 4;
        tiles = (outputs() + OUTPUTS - 1) / OUTPUTS, chunks = (a.k + CHUNK - 1) / CHUNK;
        steps = (chunks - warp + warps - 1) / warps;
        stride = (a.m + 1) / 2 * 2;
        u32 at = warps * STAGES * SLOT;
        ring = shared_address(shared) + warp * STAGES * SLOT;
        rows_at = shared_address(shared) + at;
        at += chunks * a.m * CHUNK * 2;
        sums = (float*)(shared + at);
        x_at = rows_at + (min(g, a.m - 1) * CHUNK + t * (FORM == FLOAT8 ? 16 : 8)) * 2;
        squares = sums + 2 * warps * ROWS * stride;
    }

    MEMBER int outputs() const { return GATED ? a.n / 2 : a.n; }

    // Word `index`, which is known when compiling.
    MEMBER static u32 word(const uint4& v, int index) { return index == 0 ? v.x : index == 1 ? v.y : index == 2 ? v.z : v.w; }

    MEMBER const u8* row_at(int tile, int row) const {
        int output = GATED ? min(tile * 8 + row % 8, a.n / 2 - 1) + (row < 8 ? 0 : a.n / 2) : min(tile * 16 + row, a.n - 1);
        return a.weights + (i64)output * a.k * (FORM == PLAIN ? 2 : 1);
    }

    // Where the warp's first chunk of a tile lies.
    MEMBER void point_at(int tile) {
        int at = warp * 128 + t * 16;
        next_low = row_at(tile, g) + at, next_high = row_at(tile, g + 8) + at;
        if (FORM == FLOAT8) next_scales = a.scales + ((i64)(tile / 8) * chunks + warp) * 4;
    }

    // Starts the copies of the warp's next chunk, of this tile or of its next.
    MEMBER void fetch() {
        if (fetch_tile < tiles && steps > 0) {
            u32 to = fetch_slot + lane * 16;
            constexpr int ALONG = FORM == PLAIN ? 8 : 16;
            int left = a.k - (fetch_step * warps + warp) * CHUNK - t * ALONG;
#pragma unroll
            for (int part = 0; part < 2; part++) {
                bool valid = part * CHUNK / 2 < left;
                copy_async_16(to + part * 512, next_low + part * 64, valid);
                copy_async_16(to + 1024 + part * 512, next_high + part * 64, valid);
            }
            if (FORM == FLOAT8 && a.scales) copy_async_small<4>(fetch_slot + COPY_BYTES + lane * SCALE_BYTES, next_scales);
            if (++fetch_step == steps) {
                fetch_step = 0, fetch_tile += gridDim.x;
                if (fetch_tile < tiles) point_at(fetch_tile);
            } else {
                next_low += warps * 128, next_high += warps * 128;
                if (FORM == FLOAT8) next_scales += warps * 4;
            }
        }
        commit_copies();
        fetch_slot = fetch_slot == ring + (STAGES - 1) * SLOT ? ring : fetch_slot + SLOT;
    }

    // Where a lane's four values lie of 128 that the warp stages at a time: two chunks of plain weights.
    MEMBER int stage_chunk(int unit) const { return FORM == PLAIN ? warp + (2 * unit + lane / 16) * warps : warp + unit * warps; }
    MEMBER int stage_column() const { return (FORM == PLAIN ? lane % 16 : lane) * 4; }

    // Brings the warp's part of x to shared memory.
    MEMBER void stage_rows() {
        const int units = FORM == PLAIN ? (steps + 1) / 2 : steps;
        constexpr int AHEAD = 4;
        if (a.norm) {
            constexpr int HELD = 2;
            float4 by[HELD];
#pragma unroll
            for (int unit = 0; unit < HELD; unit++) by[unit] = norm_at(unit, units);
            wait_for_previous();
#pragma unroll 1
            for (int token = 0; token < a.m; token++) {
                const float* row = (const float*)a.x + (i64)token * a.k;
                float sum = 0.0f;
                auto stage = [&](int unit, float4 x, float4 weight) {
                    int chunk = stage_chunk(unit);
                    sum += (x.x * x.x + x.y * x.y) + (x.z * x.z + x.w * x.w);
                    x = make_float4(x.x * weight.x, x.y * weight.y, x.z * weight.z, x.w * weight.w);
                    if (unit < units && chunk < chunks)
                        store_8(place(chunk, token), pack_bf16(x.x * LARGE, x.y * LARGE), pack_bf16(x.z * LARGE, x.w * LARGE));
                };
                float4 x[HELD];
#pragma unroll
                for (int unit = 0; unit < HELD; unit++) x[unit] = row_of(row, unit, units);
#pragma unroll
                for (int unit = 0; unit < HELD; unit++) stage(unit, x[unit], by[unit]);
#pragma unroll 1
                for (int unit = HELD; unit < units; unit++) stage(unit, row_of(row, unit, units), norm_at(unit, units));
                sum = warp_sum(sum);
                if (lane == 0) squares[token * MOST_WARPS + warp] = sum;
            }
        } else {
            wait_for_previous();
#pragma unroll 1
            for (int token = 0; token < a.m; token++) {
                const bf16* row = (const bf16*)a.x + (i64)token * a.k;
#pragma unroll 1
                for (int first = 0; first < units; first += AHEAD) {
                    u32 low[AHEAD], high[AHEAD];
#pragma unroll
                    for (int i = 0; i < AHEAD; i++) {
                        int chunk = stage_chunk(first + i), at = chunk * CHUNK + stage_column();
                        low[i] = high[i] = 0;
                        load_8(low[i], high[i], row + at, first + i < units && at < a.k);
                    }
#pragma unroll
                    for (int i = 0; i < AHEAD; i++) {
                        int chunk = stage_chunk(first + i);
                        if (FORM != PLAIN) low[i] = fma_bf16x2(low[i], 0x5f805f80u, 0x80008000u), high[i] = fma_bf16x2(high[i], 0x5f805f80u, 0x80008000u);
                        if (first + i < units && chunk < chunks) store_8(place(chunk, token), low[i], high[i]);
                    }
                }
            }
        }
        __syncwarp();
    }

    // Four values of a row, zeros behind its end.
    MEMBER float4 row_of(const float* row, int unit, int units) const {
        int at = stage_chunk(unit) * CHUNK + stage_column();
        return unit < units && at < a.k ? *(const float4*)(row + at) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    MEMBER float4 norm_at(int unit, int units) const { return row_of(a.norm, unit, units); }
    MEMBER u32 place(int chunk, int token) const { return rows_at + ((chunk * a.m + token) * CHUNK + stage_column()) * 2; }

    // The lane's eight values of a quarter. Columns without a token repeat the last one, and are not looked at.
    MEMBER uint4 load_x(int chunk, int quarter) const {
        int along = FORM == FLOAT8 ? quarter / 2 * 64 + quarter % 2 * 8 : quarter * 32;
        return load_shared_16(x_at + chunk * (a.m * CHUNK * 2) + along * 2);
    }

    MEMBER static void store_8(u32 to, u32 low, u32 high) { asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to), "r"(low), "r"(high) : "memory"); }

    // The fragments of instruction `s` of a quarter: rows g and g + 8, of one quarter of plain weights or two of codes.
    MEMBER void weights(u32 out[4], const uint4 own[2], int quarter, int s) const {
        if (FORM == PLAIN) {
            out[0] = word(own[0], 2 * s), out[2] = word(own[0], 2 * s + 1);
            out[1] = word(own[1], 2 * s), out[3] = word(own[1], 2 * s + 1);
        } else {
            u32 low = word(own[0], quarter % 2 * 2 + s), high = word(own[1], quarter % 2 * 2 + s);
            out[0] = small_e4m3(pick_bytes(low, 0, 0x9180)), out[2] = small_e4m3(pick_bytes(low, 0, 0xb3a2));
            out[1] = small_e4m3(pick_bytes(high, 0, 0x9180)), out[3] = small_e4m3(pick_bytes(high, 0, 0xb3a2));
        }
    }
    // Two codes, each a byte and its sign eight times over: the sign and seven bits where bf16 has its lowest exponents.
    MEMBER static u32 small_e4m3(u32 pair) { return (pair * 16) & 0x87f087f0u; }

    MEMBER void multiply_chunk(float total[4], u32 slot, int chunk) const {
        uint4 own[2];
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        u32 from = slot + lane * 16;
#pragma unroll
        for (int quarter = 0; quarter < QUARTERS; quarter++) {
            if (FORM == PLAIN || quarter % 2 == 0) {
                int part = FORM == PLAIN ? quarter : quarter / 2;
                own[0] = load_shared_16(from + part * 512), own[1] = load_shared_16(from + 1024 + part * 512);
            }
            uint4 x = load_x(chunk, quarter);
#pragma unroll
            for (int s = 0; s < 2; s++) {
                u32 w[4];
                weights(w, own, quarter, s);
                multiply(FORM == PLAIN ? total : sum, w, word(x, 2 * s), word(x, 2 * s + 1));
            }
        }
        if (FORM == FLOAT8) {
            u32 bits = 0x3f800000u;
            if (a.scales) asm volatile("ld.shared.u32 %0, [%1];" : "=r"(bits) : "r"(slot + COPY_BYTES + lane * SCALE_BYTES) : "memory");
#pragma unroll
            for (int i = 0; i < 4; i++) total[i] = fmaf(sum[i], __uint_as_float(bits), total[i]);
        }
    }

    // Keeps the warp's sums of a tile for `write`.
    MEMBER void keep(const float total[4], float* to) const {
        if (2 * t >= stride) return;
        float* at = to + g * stride + 2 * t;
        *(float2*)at = make_float2(total[0], total[1]);
        *(float2*)(at + 8 * stride) = make_float2(total[2], total[3]);
    }

    // 1 / rms of a token's row.
    MEMBER float inverse(int token) const {
        float sum = 0.0f;
#pragma unroll 4
        for (int other = 0; other < warps; other++) sum += squares[token * MOST_WARPS + other];
        return 1.0f / sqrtf(sum / a.k + a.eps);
    }

    // A row's sum of all warps in their order, as it should be, with its bias.
    MEMBER float finished(const float* from, int row, int token, int output, float by) const {
        float factor = a.factors ? a.factors[output] : 1.0f, bias = a.bias ? a.bias[output] : 0.0f, sum = 0.0f;
#pragma unroll 8
        for (int other = 0; other < warps; other++) sum += from[(other * ROWS + row) * stride + token];
        // 2^-64 * 2^120
        if (FORM == FLOAT8) sum *= 72057594037927936.0f;
        return sum * by * factor + bias;
    }

    // Finishes a tile of outputs. The warp that begins changes from tile to tile, so that none lags behind.
    MEMBER void write(const float* from, int tile, int turn) const {
#pragma unroll 1
        for (int i = (warp >= turn ? warp - turn : warp - turn + warps) * WARP + lane; i < OUTPUTS * a.m; i += warps * WARP) {
            int row = i % OUTPUTS, token = i / OUTPUTS, output = tile * OUTPUTS + row;
            if (output >= outputs()) continue;
            i64 at = (i64)token * a.out_stride + output;
            float before = !GATED && a.finish == FINISH_ADD ? ((const float*)a.out)[at] : 0.0f;
            float by = a.norm ? inverse(token) : 1.0f, sum = finished(from, row, token, output, by);
            if (GATED) {
                float gate = to_float(from_float<bf16>(sum));
                float up = to_float(from_float<bf16>(finished(from, row + OUTPUTS, token, output + a.n / 2, by)));
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

    MEMBER void run() {
        fetch_tile = blockIdx.x, fetch_step = 0, fetch_slot = ring;
        point_at(fetch_tile);
#pragma unroll 1
        for (int stage = 0; stage < STAGES; stage++) fetch();
        release_next();
        ask_for(blockIdx.x);
        stage_rows();
        u32 slot = ring;
        int turn = 0, begins = 0;
        // Two places for sums in turn, and one barrier a tile: at the next, whoever wrote this tile is done.
#pragma unroll 1
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            float total[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
            for (int chunk = warp; chunk < chunks; chunk += warps) {
                wait_copies<STAGES - 1>();
                __syncwarp();
                multiply_chunk(total, slot, chunk);
                fetch();
                slot = slot == ring + (STAGES - 1) * SLOT ? ring : slot + SLOT;
            }
            float* mine = sums + turn * warps * ROWS * stride;
            keep(total, mine + warp * ROWS * stride);
            __syncthreads();
            write(mine, tile, begins);
            if (tile + gridDim.x < tiles) ask_for(tile + gridDim.x);
            turn ^= 1;
            begins = begins + 1 == warps ? 0 : begins + 1;
        }
    }
};

#define FEW_KERNEL(NAME, ...)                                                                                          \
    extern "C" __global__ void __launch_bounds__(MOST_WARPS * WARP, 2) NAME(const __grid_constant__ FewArgs args) {    \
        extern __shared__ __align__(16) u8 shared[];                                                                   \
        Few<__VA_ARGS__>(args, shared).run();                                                                          \
    }
