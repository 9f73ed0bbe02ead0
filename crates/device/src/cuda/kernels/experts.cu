// Mixture of experts, part two: rows in order of expert before, between and after the grouped matmuls. The lists come
// from routing.cu; `pairs` is rows * top_k.
//
//   expert_rows_{bf16,f32}(out, x, sorted_rows, pairs, width)      out[p] = x[sorted_rows[p]]
//       grid (ceil(pairs / 4), ceil(width / 1024)), threads 128.
//   expert_gate_{bf16,f32}(out, gate_up, bias, sorted_experts, activation, alpha, limit, width)
//       bias [experts, 2 * width] f32 or null is added first; then as gate. grid (pairs, ceil(width / 1024)), threads 128.
//   expert_sum_{y}_{out}(out, y, weights, positions, experts_of, bias, top_k, width)
//       out[r] = sum over its experts, ascending, of weight * (y + bias[expert]); bias [experts, width] f32 or null.
//       y_out: bf16_bf16, f32_bf16, f32_f32; grid (rows, ceil(width / 1024)), threads 128.
#include "rows.cuh"

// Rows that a block copies at once, so that enough reads are on their way.
#define COPIED 4

template <typename A> DEVICE void copy_rows(A* out, const A* x, const u32* sorted_rows, int pairs, int width) {
    release_next();
    wait_for_previous();
    const int each = 16 / sizeof(A), first = blockIdx.x * COPIED, step = 128 * each;
    int at = (blockIdx.y * 128 + threadIdx.x) * 8;
    if (width % 8 != 0) {
#pragma unroll 1
        for (int row = first; row < min(first + COPIED, pairs); row++)
#pragma unroll 1
            for (int column = at; column < min(at + 8, width); column++)
                out[(i64)row * width + column] = x[(i64)sorted_rows[row] * width + column];
        return;
    }
    // Sixteen bytes a thread and a time; f32 rows take two turns.
    at = blockIdx.y * 1024 + threadIdx.x * each;
#pragma unroll
    for (int turn = 0; turn < 8 / each; turn++, at += step) {
        if (at >= width) return;
        uint4 held[COPIED];
#pragma unroll
        for (int i = 0; i < COPIED; i++)
            if (first + i < pairs)
                held[i] = *reinterpret_cast<const uint4*>(x + (i64)sorted_rows[first + i] * width + at);
#pragma unroll
        for (int i = 0; i < COPIED; i++)
            if (first + i < pairs) *reinterpret_cast<uint4*>(out + (i64)(first + i) * width + at) = held[i];
    }
}
extern "C" __global__ void __launch_bounds__(128)
    expert_rows_bf16(bf16* out, const bf16* x, const u32* sorted_rows, int pairs, int width) {
    copy_rows(out, x, sorted_rows, pairs, width);
}
extern "C" __global__ void __launch_bounds__(128)
    expert_rows_f32(float* out, const float* x, const u32* sorted_rows, int pairs, int width) {
    copy_rows(out, x, sorted_rows, pairs, width);
}

DEVICE Eight plus(Eight a, Eight b) { return {plus(a.low, b.low), plus(a.high, b.high)}; }

template <typename A>
DEVICE void gate_row(A* out, const A* gate_up, const float* bias, const u32* sorted_experts, int activation,
                     float alpha, float limit, int width) {
    release_next();
    wait_for_previous();
    const bool exact = IsExact<A>::value;
    const A* gate = gate_up + (i64)blockIdx.x * 2 * width;
    A* to = out + (i64)blockIdx.x * width;
    if (bias) bias += (i64)sorted_experts[blockIdx.x] * 2 * width;
    int at = (blockIdx.y * 128 + threadIdx.x) * 8;
    if (width % 8 == 0 && activation != GELU) {
        if (at >= width) return;
        Eight g = load8(gate + at), u = load8(gate + width + at), y;
        if (bias) g = plus(g, load8(bias + at)), u = plus(u, load8(bias + width + at));
        auto one = [&](float a, float b) { return gated<exact, false>(activation, alpha, limit, a, b); };
        y.low = make_float4(one(g.low.x, u.low.x), one(g.low.y, u.low.y), one(g.low.z, u.low.z), one(g.low.w, u.low.w));
        y.high = make_float4(one(g.high.x, u.high.x), one(g.high.y, u.high.y), one(g.high.z, u.high.z),
                             one(g.high.w, u.high.w));
        store8(to + at, y);
    } else {
#pragma unroll 1
        for (int end = min(at + 8, width); at < end; at++) {
            float g = to_float(gate[at]), u = to_float(gate[width + at]);
            if (bias) g += bias[at], u += bias[width + at];
            to[at] = from_float<A>(gated<exact, true>(activation, alpha, limit, g, u));
        }
    }
}
#define EXPERT_GATE(NAME, A)                                                                                           \
    extern "C" __global__ void __launch_bounds__(128)                                                                  \
        expert_gate_##NAME(A* out, const A* gate_up, const float* bias, const u32* sorted_experts, int activation,     \
                           float alpha, float limit, int width) {                                                      \
        gate_row(out, gate_up, bias, sorted_experts, activation, alpha, limit, width);                                 \
    }
EXPERT_GATE(bf16, bf16)
EXPERT_GATE(f32, float)

DEVICE float4 add_scaled(float4 sum, float4 y, float weight) {
    return make_float4(fmaf(weight, y.x, sum.x), fmaf(weight, y.y, sum.y), fmaf(weight, y.z, sum.z),
                       fmaf(weight, y.w, sum.w));
}

template <typename Y, typename O>
DEVICE void sum_row(O* out, const Y* y, const float* weights, const u32* positions, const u32* experts_of,
                    const float* bias, int top_k, int width) {
    release_next();
    wait_for_previous();
    weights += (i64)blockIdx.x * top_k;
    positions += (i64)blockIdx.x * top_k;
    experts_of += (i64)blockIdx.x * top_k;
    O* to = out + (i64)blockIdx.x * width;
    int at = (blockIdx.y * 128 + threadIdx.x) * 8;
    if (width % 8 == 0) {
        if (at >= width) return;
        Eight sum = {make_float4(0.0f, 0.0f, 0.0f, 0.0f), make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
#pragma unroll 4
        for (int choice = 0; choice < top_k; choice++) {
            Eight value = load8(y + (i64)positions[choice] * width + at);
            if (bias) value = plus(value, load8(bias + (i64)experts_of[choice] * width + at));
            sum.low = add_scaled(sum.low, value.low, weights[choice]);
            sum.high = add_scaled(sum.high, value.high, weights[choice]);
        }
        store8(to + at, sum);
    } else {
#pragma unroll 1
        for (int end = min(at + 8, width); at < end; at++) {
            float sum = 0.0f;
#pragma unroll 1
            for (int choice = 0; choice < top_k; choice++) {
                float value = to_float(y[(i64)positions[choice] * width + at]);
                if (bias) value += bias[(i64)experts_of[choice] * width + at];
                sum = fmaf(weights[choice], value, sum);
            }
            to[at] = from_float<O>(sum);
        }
    }
}
#define EXPERT_SUM(NAME, Y, O)                                                                                         \
    extern "C" __global__ void __launch_bounds__(128)                                                                  \
        expert_sum_##NAME(O* out, const Y* y, const float* weights, const u32* positions, const u32* experts_of,       \
                          const float* bias, int top_k, int width) {                                                   \
        sum_row(out, y, weights, positions, experts_of, bias, top_k, width);                                           \
    }
EXPERT_SUM(bf16_bf16, bf16, bf16)
EXPERT_SUM(f32_bf16, float, bf16)
EXPERT_SUM(f32_f32, float, float)
