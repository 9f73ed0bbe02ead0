// From projections to stored keys and values as in qkv.cu, for any head size and for f32: a warp takes a head through
// shared memory, value by value.
//
//   prepare_qkv_{bf16,f32}_any(PrepareQkvArgs)
//       head_dim <= 512; grid (rows, ceil((heads + 2 * kv_heads) / 8)), or (rows, 1) with a norm over whole rows; threads 256.
#include "qkv.cuh"

#define WARPS 8
#define MAX_HEAD 512

// Calls `body(i)` for this lane's values of a head.
template <typename Body> DEVICE void for_values(int count, Body body) {
#pragma unroll 1
    for (int i = threadIdx.x % WARP; i < count; i += WARP) body(i);
}

DEVICE void store_head(const PrepareQkvArgs& args, u8* section, i64 place, const float* head) {
    const int head_dim = args.head_dim, format = args.format;
    const i64 first = place * head_dim;
    if (format == KV_INT4) {
        store_nibbles(section + place * int4_head_bytes(head_dim), head, head_dim);
    } else if (format == KV_FP8 || format == KV_INT8) {
        // Magnitudes are ordered as their bits are; what is not finite comes last.
        u32 bits = 0;
        for_values(head_dim, [&](int i) { bits = max(bits, __float_as_uint(head[i]) & 0x7fffffff); });
        const Scale scale = scale_of(__reduce_max_sync(FULL_MASK, bits), format);
        for_values(head_dim, [&](int i) { section[first + i] = code_of(head[i], scale, format); });
        if (threadIdx.x % WARP == 0) *scale_at(args, section, place) = scale.stored;
    } else if (format == KV_F32) {
        for_values(head_dim, [&](int i) { reinterpret_cast<float*>(section)[first + i] = head[i]; });
    } else if (format == KV_F16) {
        for_values(head_dim, [&](int i) { reinterpret_cast<u16*>(section)[first + i] = float_to_half(head[i]); });
    } else {
        for_values(head_dim, [&](int i) { reinterpret_cast<bf16*>(section)[first + i] = from_float<bf16>(head[i]); });
    }
}

template <typename A> DEVICE void prepare(const PrepareQkvArgs& args) {
    __shared__ float4 scratch[2][8];
    __shared__ float staged[WARPS][MAX_HEAD];
    const int warp = threadIdx.x / WARP, row = blockIdx.x, head_dim = args.head_dim, pairs = args.pairs;
    const int q_heads = args.heads, k_end = q_heads + args.kv_heads, num_heads = k_end + args.kv_heads;
    const u32 slot = args.slots[row];
    A* values = reinterpret_cast<A*>(args.qkv) + (i64)row * num_heads * head_dim;
    float* head = staged[warp];
    release_next();
    wait_for_previous();
    float inverse_q = 0.0f, inverse_k = 0.0f;
    if (args.row_span) {
        // One block has the whole row, and nothing is written before all have read.
        if (args.q_norm) inverse_q = row_inverse(values, q_heads * head_dim, args.eps, scratch[0]);
        if (args.k_norm)
            inverse_k = row_inverse(values + q_heads * head_dim, args.kv_heads * head_dim, args.eps, scratch[1]);
        __syncthreads();
    }
#pragma unroll 1
    for (int number = blockIdx.y * WARPS + warp; number < num_heads; number += gridDim.y * WARPS) {
        const bool is_q = number < q_heads, is_v = number >= k_end;
        A* from = values + number * head_dim;
        float sum = 0.0f;
        __syncwarp();
        for_values(head_dim, [&](int i) {
            head[i] = to_float(from[i]);
            sum += head[i] * head[i];
        });
        const float* norm = is_v ? nullptr : is_q ? args.q_norm : args.k_norm;
        if (norm) {
            float inverse = is_q ? inverse_q : inverse_k;
            if (args.row_span)
                norm += (is_q ? number : number - q_heads) * head_dim;
            else
                inverse = 1.0f / sqrtf(warp_sum(sum) / head_dim + args.eps);
            for_values(head_dim, [&](int i) { head[i] = head[i] * inverse * norm[i]; });
        }
        __syncwarp();
        if (!is_v)
            for_values(pairs, [&](int i) {
                float a = head[i], b = head[i + pairs];
                float c = args.cos[(i64)row * pairs + i], s = args.sin[(i64)row * pairs + i];
                head[i] = a * c - b * s;
                head[i + pairs] = b * c + a * s;
            });
        __syncwarp();
        if (is_q)
            for_values(head_dim, [&](int i) { from[i] = from_float<A>(head[i]); });
        else if (slot != NO_SLOT)
            store_head(args, section_of(args, slot, is_v), place_of(number - (is_v ? k_end : q_heads), slot), head);
    }
}

extern "C" __global__ void __launch_bounds__(256) prepare_qkv_bf16_any(const __grid_constant__ PrepareQkvArgs args) {
    prepare<bf16>(args);
}
extern "C" __global__ void __launch_bounds__(256) prepare_qkv_f32_any(const __grid_constant__ PrepareQkvArgs args) {
    prepare<float>(args);
}
