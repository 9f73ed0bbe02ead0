// Operations that take each value, or each row, by itself.
//
//   embed_{table}_{out}(out, table, tokens, scale, width)          out[r] = table[tokens[r]] * scale
//       table_out: bf16_f32, f32_f32, f32_bf16, bf16_bf16; grid (ceil(width / 1024), rows), threads 256.
//   rope_angles(cos, sin, positions, inv_freq, magnitude, pairs, count)      count = rows * pairs
//       grid ceil(count / 256), threads 256.
//   gate_{bf16,f32}(out, gate_up, activation, alpha, limit, width)      rows [gate | up] of 2 * width -> width
//       grid (ceil(width / 1024), rows), threads 128. activation: 0 silu, 1 gelu, 2 gelu tanh, 3 clamped swiglu.
//   add_gated_{bf16,f32}(out, x, gate, width)      out[r] += x[r] * sigmoid(gate[r]); gate is [rows, 1] of the same type
//   add_gated_bf16_scores(out, x, gate, width)      the same with an f32 gate
//       grid (ceil(width / 1024), rows), threads 256.
//   gather_rows_{f32,bf16}(out, x, rows, width)      out[i] = x[rows[i]]
//       grid (ceil(width / 1024), outputs), threads 256.
//   finish_logits(logits, scale, soft_cap, count: i64)      soft_cap 0: none; grid ceil(count / 1024), threads 256.
//   copy_blocks(kv, pairs, block_bytes: i64)      pairs of u32 (from, to), block_bytes a multiple of 16; the pairs touch
//       different blocks. grid (ceil(block_bytes / 16384), pairs), threads 256.
//   fill_words(target, word, count: i64)      32-bit words; grid ceil(count / 1024), threads 256.
//   put_inputs(to, from, sampled)      words of a step to their places. `from` begins with three words a part: to where, from
//       where, how many. Tokens are the first part: those from DRAWN_TOKEN on come from the step before, without the host.
//       grid (blocks a part, parts), threads 256.
#include "rows.cuh"

#define DRAWN_TOKEN 0x80000000u

// Calls `body(column, true)` for four columns at a time, or `body(column, false)` for single ones, of the 1024 columns
// that belong to block x of 256 threads.
template <typename Body> DEVICE void for_columns(int width, Body body) {
    int at = (blockIdx.x * 256 + threadIdx.x) * 4;
    if (width % 4 == 0) {
        if (at < width) body(at, true);
    } else {
#pragma unroll 1
        for (int end = min(at + 4, width); at < end; at++) body(at, false);
    }
}

template <typename T, typename O>
DEVICE void embed_row(O* out, const T* table, const u32* tokens, float scale, int width) {
    release_next();
    // Tokens may come from the kernel before (`put_tokens`).
    wait_for_previous();
    const T* from = table + (i64)tokens[blockIdx.y] * width;
    O* to = out + (i64)blockIdx.y * width;
    for_columns(width, [&](int at, bool four) {
        if (four) {
            float4 x = load4(from + at);
            store4(to + at, make_float4(x.x * scale, x.y * scale, x.z * scale, x.w * scale));
        } else {
            to[at] = from_float<O>(to_float(from[at]) * scale);
        }
    });
}
#define EMBED(NAME, T, O)                                                                                              \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        embed_##NAME(O* out, const T* table, const u32* tokens, float scale, int width) {                              \
        embed_row(out, table, tokens, scale, width);                                                                   \
    }
EMBED(bf16_f32, bf16, float)
EMBED(f32_f32, float, float)
EMBED(f32_bf16, float, bf16)
EMBED(bf16_bf16, bf16, bf16)

// The angle is rounded to f32 first; its cosine and sine are good to the last place or two for any position.
extern "C" __global__ void __launch_bounds__(256)
    rope_angles(float* cos, float* sin, const u32* positions, const float* inv_freq, float magnitude, int pairs,
                int count) {
    release_next();
    wait_for_previous();
    int at = blockIdx.x * 256 + threadIdx.x;
    if (at >= count) return;
    float angle = __fmul_rn((float)positions[at / pairs], inv_freq[at % pairs]);
    float s, c;
    sincosf(angle, &s, &c);
    cos[at] = c * magnitude;
    sin[at] = s * magnitude;
}

template <typename A>
DEVICE void gate_rows(A* out, const A* gate_up, int activation, float alpha, float limit, int width) {
    release_next();
    wait_for_previous();
    const bool exact = IsExact<A>::value;
    const A* gate = gate_up + (i64)blockIdx.y * 2 * width;
    A* to = out + (i64)blockIdx.y * width;
    int at = (blockIdx.x * 128 + threadIdx.x) * 8;
    if (width % 8 == 0 && activation != GELU) {
        if (at >= width) return;
        Eight g = load8(gate + at), u = load8(gate + width + at), y;
        auto one = [&](float a, float b) { return gated<exact, false>(activation, alpha, limit, a, b); };
        y.low = make_float4(one(g.low.x, u.low.x), one(g.low.y, u.low.y), one(g.low.z, u.low.z), one(g.low.w, u.low.w));
        y.high = make_float4(one(g.high.x, u.high.x), one(g.high.y, u.high.y), one(g.high.z, u.high.z),
                             one(g.high.w, u.high.w));
        store8(to + at, y);
    } else {
#pragma unroll 1
        for (int end = min(at + 8, width); at < end; at++)
            to[at] = from_float<A>(
                gated<exact, true>(activation, alpha, limit, to_float(gate[at]), to_float(gate[width + at])));
    }
}
#define GATE(NAME, A)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(128)                                                                  \
        gate_##NAME(A* out, const A* gate_up, int activation, float alpha, float limit, int width) {                   \
        gate_rows(out, gate_up, activation, alpha, limit, width);                                                      \
    }
GATE(bf16, bf16)
GATE(f32, float)

template <typename A, typename G> DEVICE void add_gated_rows(A* out, const A* x, const G* gate, int width) {
    release_next();
    wait_for_previous();
    float open = sigmoid(to_float(gate[blockIdx.y]));
    const A* from = x + (i64)blockIdx.y * width;
    A* to = out + (i64)blockIdx.y * width;
    for_columns(width, [&](int at, bool four) {
        if (four) {
            float4 value = load4(to + at), by = load4(from + at);
            store4(to + at, make_float4(fmaf(by.x, open, value.x), fmaf(by.y, open, value.y),
                                        fmaf(by.z, open, value.z), fmaf(by.w, open, value.w)));
        } else {
            to[at] = from_float<A>(fmaf(to_float(from[at]), open, to_float(to[at])));
        }
    });
}
#define ADD_GATED(NAME, A, G)                                                                                          \
    extern "C" __global__ void __launch_bounds__(256) add_gated_##NAME(A* out, const A* x, const G* gate, int width) { \
        add_gated_rows(out, x, gate, width);                                                                           \
    }
ADD_GATED(bf16, bf16, bf16)
ADD_GATED(f32, float, float)
ADD_GATED(bf16_scores, bf16, float)

template <typename T> DEVICE void gather(T* out, const T* x, const u32* rows, int width) {
    u32 row = rows[blockIdx.y];
    release_next();
    wait_for_previous();
    const T* from = x + (i64)row * width;
    T* to = out + (i64)blockIdx.y * width;
    for_columns(width, [&](int at, bool four) {
        if (four)
            store4(to + at, load4(from + at));
        else
            to[at] = from[at];
    });
}
extern "C" __global__ void __launch_bounds__(256) gather_rows_f32(float* out, const float* x, const u32* rows, int width) {
    gather(out, x, rows, width);
}
extern "C" __global__ void __launch_bounds__(256) gather_rows_bf16(bf16* out, const bf16* x, const u32* rows, int width) {
    gather(out, x, rows, width);
}

extern "C" __global__ void __launch_bounds__(256) finish_logits(float* logits, float scale, float soft_cap, i64 count) {
    release_next();
    wait_for_previous();
    auto finish = [&](float x) { return soft_cap > 0.0f ? soft_cap * tanhf(x * scale / soft_cap) : x * scale; };
    i64 at = ((i64)blockIdx.x * 256 + threadIdx.x) * 4;
    if (at + 4 <= count) {
        float4 x = load4(logits + at);
        store4(logits + at, make_float4(finish(x.x), finish(x.y), finish(x.z), finish(x.w)));
    } else {
#pragma unroll 1
        for (; at < count; at++) logits[at] = finish(logits[at]);
    }
}

extern "C" __global__ void __launch_bounds__(256) copy_blocks(u8* kv, const u32* pairs, i64 block_bytes) {
    release_next();
    wait_for_previous();
    const u8* from = kv + pairs[2 * blockIdx.y] * block_bytes;
    u8* to = kv + pairs[2 * blockIdx.y + 1] * block_bytes;
#pragma unroll
    for (int part = 0; part < 4; part++) {
        i64 at = ((i64)blockIdx.x * 1024 + part * 256 + threadIdx.x) * 16;
        if (at < block_bytes) *reinterpret_cast<uint4*>(to + at) = *reinterpret_cast<const uint4*>(from + at);
    }
}

extern "C" __global__ void __launch_bounds__(256) fill_words(u32* target, u32 word, i64 count) {
    release_next();
    wait_for_previous();
#pragma unroll
    for (int part = 0; part < 4; part++) {
        i64 at = (i64)blockIdx.x * 1024 + part * 256 + threadIdx.x;
        if (at < count) target[at] = word;
    }
}

extern "C" __global__ void __launch_bounds__(256) put_inputs(u32* to, const u32* from, const u32* sampled) {
    release_next();
    wait_for_previous();
    const u32 first = from[3 * blockIdx.y], start = from[3 * blockIdx.y + 1], count = from[3 * blockIdx.y + 2];
    const bool is_tokens = blockIdx.y == 0;
    for (u32 at = blockIdx.x * 256 + threadIdx.x; at < count; at += gridDim.x * 256) {
        u32 word = from[start + at];
        if (is_tokens && word >= DRAWN_TOKEN) word = sampled[word - DRAWN_TOKEN];
        to[first + at] = word;
    }
}
