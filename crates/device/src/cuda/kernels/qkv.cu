// From projections to stored keys and values: norms of q and k, rotation, and the write to the step's slots. A warp, or
// half of one, holds a head in registers; q goes back to where it came from, k and v go to the paged storage in its format
// and stay in f32 until then.
//
//   prepare_qkv_bf16_fast(PrepareQkvArgs)
//       head_dim <= 128, head_dim % 8 == 0, pairs % 4 == 0, any format but int4; grid (rows, ceil(all heads / 16)), or
//       (rows, 1) where rows are many: a block then reads a row's angles once.
//   prepare_qkv_bf16_256(PrepareQkvArgs)
//       head_dim <= 256, head_dim % 4 == 0, pairs % 2 == 0; grid (rows, ceil(all heads / 8)).
//   qkv_any.cu has the rest. With a norm over whole rows the grid is (rows, 1). All heads: heads + 2 * kv_heads. Threads 256.
#include "qkv.cuh"

#define THREADS 256

// V neighbours of a row.
template <int V> struct Few {
    float x[V];
};
DEVICE void load(Few<2>& to, const float* at) {
    float2 raw = *reinterpret_cast<const float2*>(at);
    to.x[0] = raw.x, to.x[1] = raw.y;
}
DEVICE void load(Few<2>& to, const bf16* at) {
    u32 raw = *reinterpret_cast<const u32*>(at);
    to.x[0] = low_bf16(raw), to.x[1] = high_bf16(raw);
}
DEVICE void load(Few<4>& to, const float* at) {
    float4 raw = load4(at);
    to.x[0] = raw.x, to.x[1] = raw.y, to.x[2] = raw.z, to.x[3] = raw.w;
}
DEVICE void load(Few<4>& to, const bf16* at) {
    float4 raw = load4(at);
    to.x[0] = raw.x, to.x[1] = raw.y, to.x[2] = raw.z, to.x[3] = raw.w;
}
DEVICE void store(float* at, const Few<2>& x) { *reinterpret_cast<float2*>(at) = make_float2(x.x[0], x.x[1]); }
DEVICE void store(bf16* at, const Few<2>& x) { *reinterpret_cast<u32*>(at) = pack_bf16(x.x[0], x.x[1]); }
DEVICE void store(float* at, const Few<4>& x) { store4(at, make_float4(x.x[0], x.x[1], x.x[2], x.x[3])); }
DEVICE void store(bf16* at, const Few<4>& x) { store4(at, make_float4(x.x[0], x.x[1], x.x[2], x.x[3])); }
DEVICE u32 two_halves(float low, float high) { return float_to_half(low) | (u32)float_to_half(high) << 16; }
DEVICE void store_half(u16* at, const Few<2>& x) { *reinterpret_cast<u32*>(at) = two_halves(x.x[0], x.x[1]); }
DEVICE void store_half(u16* at, const Few<4>& x) {
    *reinterpret_cast<uint2*>(at) = make_uint2(two_halves(x.x[0], x.x[1]), two_halves(x.x[2], x.x[3]));
}
DEVICE void store_bytes(u8* at, const u8 (&codes)[2]) { *reinterpret_cast<u16*>(at) = codes[0] | codes[1] << 8; }
DEVICE void store_bytes(u8* at, const u8 (&codes)[4]) {
    *reinterpret_cast<u32*>(at) = codes[0] | codes[1] << 8 | codes[2] << 16 | (u32)codes[3] << 24;
}

// The lanes that share a head with this one.
template <int LANES> DEVICE u32 head_mask() {
    return LANES == WARP ? FULL_MASK : ((1u << (LANES % WARP)) - 1) << (threadIdx.x % WARP / LANES * LANES);
}

// A head in the registers of its lanes: of each step, `low` holds the V values from `low_at` and `high` those from `high_at`.
// Within the rotated part these are partners; behind it they are neighbours.
template <int V, int STEPS> struct Head {
    Few<V> low[STEPS], high[STEPS];
};
template <int V, int LANES> struct Place {
    int low, high;
    bool has_low, has_high, turns;
    __device__ __forceinline__ Place(int step, int head_dim, int pairs) {
        int couple = (step * LANES + threadIdx.x % LANES) * V;
        turns = couple < pairs;
        low = turns ? couple : 2 * couple;
        high = turns ? couple + pairs : 2 * couple + V;
        has_low = low < head_dim;
        has_high = high < head_dim;
    }
};

// Rounds one head of one token to its place in the section of keys or values. `staged` is room for a head.
template <int V, int STEPS, int LANES>
DEVICE void store_head(const PrepareQkvArgs& args, u8* section, i64 place, const Head<V, STEPS>& head, int pairs,
                       float* staged) {
    const int head_dim = args.head_dim, format = args.format;
    if (format == KV_FP8 || format == KV_INT8) {
        // Magnitudes are ordered as their bits are; what is not finite comes last.
        u32 bits = 0;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            Place<V, LANES> at(step, head_dim, pairs);
#pragma unroll
            for (int v = 0; v < V; v++) {
                if (at.has_low) bits = max(bits, __float_as_uint(head.low[step].x[v]) & 0x7fffffff);
                if (at.has_high) bits = max(bits, __float_as_uint(head.high[step].x[v]) & 0x7fffffff);
            }
        }
#pragma unroll
        for (int step = LANES / 2; step > 0; step >>= 1) bits = max(bits, __shfl_xor_sync(head_mask<LANES>(), bits, step));
        const Scale scale = scale_of(bits, format);
        u8* row = section + place * head_dim;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            Place<V, LANES> at(step, head_dim, pairs);
            u8 low[V], high[V];
#pragma unroll
            for (int v = 0; v < V; v++) {
                low[v] = code_of(head.low[step].x[v], scale, format);
                high[v] = code_of(head.high[step].x[v], scale, format);
            }
            if (at.has_low) store_bytes(row + at.low, low);
            if (at.has_high) store_bytes(row + at.high, high);
        }
        if (threadIdx.x % LANES == 0) *scale_at(args, section, place) = scale.stored;
        return;
    }
    if (LANES == WARP && format == KV_INT4) {
        __syncwarp();
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            Place<V, LANES> at(step, head_dim, pairs);
            if (at.has_low) store(staged + at.low, head.low[step]);
            if (at.has_high) store(staged + at.high, head.high[step]);
        }
        __syncwarp();
        store_nibbles(section + place * int4_head_bytes(head_dim), staged, head_dim);
        return;
    }
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        Place<V, LANES> at(step, head_dim, pairs);
        i64 low = place * head_dim + at.low, high = place * head_dim + at.high;
        if (format == KV_BF16) {
            if (at.has_low) store(reinterpret_cast<bf16*>(section) + low, head.low[step]);
            if (at.has_high) store(reinterpret_cast<bf16*>(section) + high, head.high[step]);
        } else if (format == KV_F16) {
            if (at.has_low) store_half(reinterpret_cast<u16*>(section) + low, head.low[step]);
            if (at.has_high) store_half(reinterpret_cast<u16*>(section) + high, head.high[step]);
        } else {
            if (at.has_low) store(reinterpret_cast<float*>(section) + low, head.low[step]);
            if (at.has_high) store(reinterpret_cast<float*>(section) + high, head.high[step]);
        }
    }
}

// Reads a head, or anything laid out like one.
template <int V, int STEPS, int LANES, typename T>
DEVICE void load_head(Head<V, STEPS>& head, const T* from, int head_dim, int pairs) {
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        Place<V, LANES> at(step, head_dim, pairs);
        if (at.has_low) load(head.low[step], from + at.low);
        if (at.has_high) load(head.high[step], from + at.high);
    }
}

// Norms a head; `inverse` is that of the whole row, or is found here.
template <int V, int STEPS, int LANES>
DEVICE void norm_head(const PrepareQkvArgs& args, Head<V, STEPS>& head, const Head<V, STEPS>& weight, float inverse) {
    if (!args.row_span) {
        float sum = 0.0f;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            Place<V, LANES> at(step, args.head_dim, args.pairs);
#pragma unroll
            for (int v = 0; v < V; v++) {
                if (at.has_low) sum += head.low[step].x[v] * head.low[step].x[v];
                if (at.has_high) sum += head.high[step].x[v] * head.high[step].x[v];
            }
        }
#pragma unroll
        for (int step = LANES / 2; step > 0; step >>= 1) sum += __shfl_xor_sync(head_mask<LANES>(), sum, step);
        inverse = 1.0f / sqrtf(sum / args.head_dim + args.eps);
    }
#pragma unroll
    for (int step = 0; step < STEPS; step++)
#pragma unroll
        for (int v = 0; v < V; v++) {
            head.low[step].x[v] = head.low[step].x[v] * inverse * weight.low[step].x[v];
            head.high[step].x[v] = head.high[step].x[v] * inverse * weight.high[step].x[v];
        }
}

template <typename A, int V, int STEPS, int LANES> DEVICE void prepare(const PrepareQkvArgs& args) {
    __shared__ float4 scratch[2][8];
    const int units = THREADS / LANES, unit = threadIdx.x / LANES, row = blockIdx.x;
    __shared__ float2 staged[LANES == WARP ? units : 1][STEPS * WARP * V];
    const int head_dim = args.head_dim, pairs = args.pairs, q_heads = args.heads, k_end = q_heads + args.kv_heads;
    const int num_heads = k_end + args.kv_heads, stride = gridDim.y * units;
    A* values = reinterpret_cast<A*>(args.qkv) + (i64)row * num_heads * head_dim;
    auto norm_of = [&](int number) -> const float* {
        const bool is_q = number < q_heads;
        const float* norm = number >= k_end ? nullptr : is_q ? args.q_norm : args.k_norm;
        return norm && args.row_span ? norm + (is_q ? number : number - q_heads) * head_dim : norm;
    };
    int number = blockIdx.y * units + unit;
    const u32 slot = args.slots[row];
    Head<V, STEPS> weight, turn, coming;
    const float* norm = norm_of(number);
    if (norm) load_head<V, STEPS, LANES>(weight, norm, head_dim, pairs);
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
    if (number >= num_heads) return;
    load_head<V, STEPS, LANES>(coming, values + number * head_dim, head_dim, pairs);
    // Cosines and sines are the same for all heads of the row.
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        Place<V, LANES> at(step, head_dim, pairs);
        if (!at.turns) continue;
        load(turn.low[step], args.cos + (i64)row * pairs + at.low);
        load(turn.high[step], args.sin + (i64)row * pairs + at.low);
    }
    while (true) {
        // The next head is on its way while this one is prepared.
        Head<V, STEPS> head = coming;
        const int next = number + stride;
        if (next < num_heads) load_head<V, STEPS, LANES>(coming, values + next * head_dim, head_dim, pairs);
        const bool is_q = number < q_heads, is_v = number >= k_end;
        if (norm) norm_head<V, STEPS, LANES>(args, head, weight, is_q ? inverse_q : inverse_k);
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            if (is_v || !Place<V, LANES>(step, head_dim, pairs).turns) continue;
#pragma unroll
            for (int v = 0; v < V; v++) {
                float a = head.low[step].x[v], b = head.high[step].x[v];
                float c = turn.low[step].x[v], s = turn.high[step].x[v];
                head.low[step].x[v] = a * c - b * s;
                head.high[step].x[v] = b * c + a * s;
            }
        }
        if (is_q) {
            A* to = values + number * head_dim;
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                Place<V, LANES> at(step, head_dim, pairs);
                if (at.has_low) store(to + at.low, head.low[step]);
                if (at.has_high) store(to + at.high, head.high[step]);
            }
        } else if (slot != NO_SLOT) {
            i64 place = place_of(number - (is_v ? k_end : q_heads), slot);
            store_head<V, STEPS, LANES>(args, section_of(args, slot, is_v), place, head, pairs,
                                        reinterpret_cast<float*>(staged[LANES == WARP ? unit : 0]));
        }
        if (next >= num_heads) return;
        number = next;
        norm = norm_of(number);
        if (norm) load_head<V, STEPS, LANES>(weight, norm, head_dim, pairs);
    }
}

#define PREPARE(NAME, A, V, STEPS, LANES)                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS, 4)                                                           \
        prepare_qkv_##NAME(const __grid_constant__ PrepareQkvArgs args) {                                              \
        prepare<A, V, STEPS, LANES>(args);                                                                             \
    }
PREPARE(bf16_fast, bf16, 4, 1, 16)
PREPARE(bf16_256, bf16, 2, 2, 32)
