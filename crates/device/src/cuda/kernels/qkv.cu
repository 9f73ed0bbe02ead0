// From projections to stored keys and values: norms of q and k, rotation, and the write to the step's slots. A warp, or
// half of one, takes a head; q goes back to where it came from, k and v go to the paged storage in its format and stay in
// f32 until then.
//
//   prepare_qkv_{bf16,f32}_{128,256,any}(PrepareQkvArgs)
//       128: head_dim <= 128, 256: head_dim <= 256, both with head_dim % 4 == 0 and pairs % 2 == 0; any: up to 512.
//       grid (rows, ceil((heads + 2 * kv_heads) / 8)), or (rows, 1) with a norm over whole rows; threads 256.
//   prepare_qkv_bf16_fast(PrepareQkvArgs)
//       head_dim <= 128, head_dim % 8 == 0, pairs % 4 == 0, any format but int4.
//       grid (rows, ceil((heads + 2 * kv_heads) / 16)), or (rows, 1) with a norm over whole rows; threads 256.
#include "rows.cuh"

#define KV_F32 0
#define KV_F16 1
#define KV_BF16 2
#define KV_FP8 3
#define KV_INT8 4
#define KV_INT4 5

// 2^-110: smaller heads are zeros in fp8 and int8.
#define KV_TINY 7.703719777548943e-34f
#define NO_SLOT 0xffffffffu
#define THREADS 256

// By value, mirrored in Rust with repr(C): 112 bytes.
struct PrepareQkvArgs {
    void* qkv;            // [rows, (heads + 2 * kv_heads) * head_dim]
    u8* kv;               // the layer group's storage
    const u32* slots;     // [rows]; NO_SLOT: nothing is stored
    const float* cos;     // [rows, pairs]
    const float* sin;
    const float* q_norm;  // null: none
    const float* k_norm;
    i64 block_stride;     // bytes from a block to the next
    i64 layer_offset;     // bytes from a block's start to the layer's keys
    i64 value_offset;     // bytes from the layer's keys to its values
    i32 heads, kv_heads, head_dim;
    i32 pairs;            // 0: no rotation
    float eps;
    i32 row_span;         // 1: norms run over all heads of the row, else over each head
    i32 format;           // KV_...
    i32 padding;
};
static_assert(sizeof(PrepareQkvArgs) == 112, "as the host has it");

// The nearest e4m3 code of a level within 448, halves to even.
DEVICE u8 round_e4m3(float level) {
    u32 bits = __float_as_uint(level), sign = (bits >> 24) & 0x80, size = bits & 0x7fffffff;
    // Half of what is cut off is added, less a bit where the rest is even; then the exponent's bias changes.
    u32 normal = ((size + 0x7ffff + ((size >> 20) & 1)) >> 20) - ((127 - 7) << 3);
    // At 2^14 an f32 ends at 2^-9, the distance of the numbers below the normal ones.
    u32 below = __float_as_uint(__fadd_rn(__uint_as_float(size), 16384.0f)) - __float_as_uint(16384.0f);
    return (u8)(sign | (size < ((127 - 6) << 23) ? below : normal));
}
// Above 2^23 an f32 has no fraction left, so this sum rounds at the unit, halves to even, and ends in the integer's bits.
DEVICE u8 round_int(float level) { return (u8)__float_as_uint(__fadd_rn(level, 12582912.0f)); }

// V neighbours of a row.
template <int V> struct Few {
    float x[V];
};
DEVICE void load(Few<1>& to, const float* at) { to.x[0] = *at; }
DEVICE void load(Few<1>& to, const bf16* at) { to.x[0] = to_float(*at); }
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
DEVICE void store(float* at, const Few<1>& x) { *at = x.x[0]; }
DEVICE void store(bf16* at, const Few<1>& x) { *at = from_float<bf16>(x.x[0]); }
DEVICE void store(float* at, const Few<2>& x) { *reinterpret_cast<float2*>(at) = make_float2(x.x[0], x.x[1]); }
DEVICE void store(bf16* at, const Few<2>& x) { *reinterpret_cast<u32*>(at) = pack_bf16(x.x[0], x.x[1]); }
DEVICE void store(float* at, const Few<4>& x) { store4(at, make_float4(x.x[0], x.x[1], x.x[2], x.x[3])); }
DEVICE void store(bf16* at, const Few<4>& x) { store4(at, make_float4(x.x[0], x.x[1], x.x[2], x.x[3])); }
DEVICE u32 two_halves(float low, float high) { return float_to_half(low) | (u32)float_to_half(high) << 16; }
DEVICE void store_half(u16* at, const Few<1>& x) { *at = float_to_half(x.x[0]); }
DEVICE void store_half(u16* at, const Few<2>& x) {
    *reinterpret_cast<u32*>(at) = two_halves(x.x[0], x.x[1]);
}
DEVICE void store_half(u16* at, const Few<4>& x) {
    *reinterpret_cast<uint2*>(at) = make_uint2(two_halves(x.x[0], x.x[1]), two_halves(x.x[2], x.x[3]));
}
DEVICE void store_bytes(u8* at, const u8 (&codes)[1]) { *at = codes[0]; }
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

// A head to four bits a value, a group of 32 at a time, a lane a value; `row` is the head's bytes.
DEVICE void store_nibbles(u8* row, const float* values, int head_dim) {
    const float most = 65504.0f;
    int lane = threadIdx.x % WARP;
    int code_bytes = head_dim / 32 * 16 + min(head_dim % 32, 16);
    for (int group = 0; group * 32 < head_dim; group++) {
        int count = min(head_dim - group * 32, 32);
        // Lanes beyond the group repeat its first value.
        float value = values[group * 32 + (lane < count ? lane : 0)];
        bool finite = __all_sync(FULL_MASK, (__float_as_uint(value) & 0x7fffffff) < 0x7f800000);
        float end = fminf(fmaxf(value, -most), most);
        float low = -warp_max(-end), high = warp_max(end);
        u16 scale = finite ? float_to_half(__fdiv_rn(high - low, 15.0f)) : 0x7e00;
        u16 least = finite ? float_to_half(low) : 0x7e00;
        u32 code = 0;
        float step = half_to_float(scale);
        if (step > 0.0f) {
            float level = __fmul_rn(__fsub_rn(value, half_to_float(least)), __fdiv_rn(1.0f, step));
            code = round_int(fminf(fmaxf(level, 0.0f), 15.0f)) & 15;
        }
        if (lane >= count) code = 0;
        u32 upper = __shfl_down_sync(FULL_MASK, code, 16);
        if (lane < min(count, 16)) row[group * 16 + lane] = (u8)(code | upper << 4);
        // Odd head sizes have it at odd addresses.
        if (lane < 4) row[code_bytes + group * 4 + lane] = (u8)((lane < 2 ? scale : least) >> (lane % 2 * 8));
    }
}

// Rounds one head of one token to its place in the section of keys or values. `staged` is room for a head.
template <int V, int STEPS, int LANES>
DEVICE void store_head(const PrepareQkvArgs& args, u8* section, int kv_head, int token, const Head<V, STEPS>& head,
                       int pairs, float* staged) {
    const int head_dim = args.head_dim, format = args.format;
    const i64 place = (i64)kv_head * BLOCK_TOKENS + token;
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
        const float levels = format == KV_FP8 ? 448.0f : 127.0f, largest = __uint_as_float(bits);
        float scale = 0.0f, inverse = 0.0f;
        if (bits >= 0x7f800000)
            scale = __uint_as_float(0x7fc00000u);
        else if (largest >= KV_TINY)
            scale = __fdiv_rn(largest, levels), inverse = __fdiv_rn(levels, largest);
        u8* row = section + place * head_dim;
        // Without a scale all codes are zero, also those of values that are not finite.
        auto code = [&](float x) -> u8 {
            if (!(inverse > 0.0f)) return 0;
            float level = __fmul_rn(x, inverse);
            return format == KV_FP8 ? round_e4m3(level) : round_int(level);
        };
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            Place<V, LANES> at(step, head_dim, pairs);
            u8 low[V], high[V];
#pragma unroll
            for (int v = 0; v < V; v++) low[v] = code(head.low[step].x[v]), high[v] = code(head.high[step].x[v]);
            if (at.has_low) store_bytes(row + at.low, low);
            if (at.has_high) store_bytes(row + at.high, high);
        }
        if (threadIdx.x % LANES == 0)
            reinterpret_cast<float*>(section + (i64)args.kv_heads * BLOCK_TOKENS * head_dim)[place] = scale;
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
        int bytes = head_dim / 32 * 16 + min(head_dim % 32, 16) + (head_dim + 31) / 32 * 4;
        store_nibbles(section + place * bytes, staged, head_dim);
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

// 1 / rms over a whole row's heads, the same in all threads.
template <typename A> DEVICE float row_inverse(const A* values, int count, float eps, float4 (&scratch)[8]) {
    float sum = 0.0f;
    for (int at = threadIdx.x; at < count; at += blockDim.x) {
        float x = to_float(values[at]);
        sum += x * x;
    }
    return 1.0f / sqrtf(block_total(sum, scratch) / count + eps);
}

template <typename A, int V, int STEPS, int LANES> DEVICE void prepare(const PrepareQkvArgs& args) {
    __shared__ float4 scratch[2][8];
    const int units = THREADS / LANES, unit = threadIdx.x / LANES, row = blockIdx.x;
    __shared__ float2 staged[LANES == WARP ? units : 1][STEPS * WARP * V];
    const int head_dim = args.head_dim, q_heads = args.heads, k_end = q_heads + args.kv_heads;
    const int num_heads = k_end + args.kv_heads;
    A* values = reinterpret_cast<A*>(args.qkv) + (i64)row * num_heads * head_dim;
    const u32 slot = args.slots[row];
    bool waited = false;
    float inverse_q = 0.0f, inverse_k = 0.0f;
    release_next();
    for (int number = blockIdx.y * units + unit;; number += gridDim.y * units) {
        const bool any = number < num_heads, is_q = number < q_heads, is_v = number >= k_end;
        const float* norm = !any || is_v ? nullptr : is_q ? args.q_norm : args.k_norm;
        if (norm && args.row_span) norm += (is_q ? number : number - q_heads) * head_dim;
        const int pairs = is_v ? 0 : args.pairs;
        Head<V, STEPS> weight, head;
        if (norm) {
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                Place<V, LANES> at(step, head_dim, pairs);
                if (at.has_low) load(weight.low[step], norm + at.low);
                if (at.has_high) load(weight.high[step], norm + at.high);
            }
        }
        if (!waited) {
            wait_for_previous();
            waited = true;
            if (args.row_span) {
                // One block has the whole row, and nothing is written before all have read.
                if (args.q_norm) inverse_q = row_inverse(values, q_heads * head_dim, args.eps, scratch[0]);
                if (args.k_norm)
                    inverse_k = row_inverse(values + q_heads * head_dim, args.kv_heads * head_dim, args.eps, scratch[1]);
                __syncthreads();
            }
        }
        if (!any) break;

        A* from = values + number * head_dim;
        Head<V, STEPS> cos;  // low: cosines, high: sines
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            Place<V, LANES> at(step, head_dim, pairs);
            if (at.has_low) load(head.low[step], from + at.low);
            if (at.has_high) load(head.high[step], from + at.high);
            if (at.turns) {
                load(cos.low[step], args.cos + (i64)row * pairs + at.low);
                load(cos.high[step], args.sin + (i64)row * pairs + at.low);
            }
        }
        if (norm) {
            float inverse = is_q ? inverse_q : inverse_k;
            if (!args.row_span) {
                float sum = 0.0f;
#pragma unroll
                for (int step = 0; step < STEPS; step++) {
                    Place<V, LANES> at(step, head_dim, pairs);
#pragma unroll
                    for (int v = 0; v < V; v++) {
                        if (at.has_low) sum += head.low[step].x[v] * head.low[step].x[v];
                        if (at.has_high) sum += head.high[step].x[v] * head.high[step].x[v];
                    }
                }
#pragma unroll
                for (int step = LANES / 2; step > 0; step >>= 1) sum += __shfl_xor_sync(head_mask<LANES>(), sum, step);
                inverse = 1.0f / sqrtf(sum / head_dim + args.eps);
            }
#pragma unroll
            for (int step = 0; step < STEPS; step++)
#pragma unroll
                for (int v = 0; v < V; v++) {
                    head.low[step].x[v] = head.low[step].x[v] * inverse * weight.low[step].x[v];
                    head.high[step].x[v] = head.high[step].x[v] * inverse * weight.high[step].x[v];
                }
        }
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            if (!Place<V, LANES>(step, head_dim, pairs).turns) continue;
#pragma unroll
            for (int v = 0; v < V; v++) {
                float a = head.low[step].x[v], b = head.high[step].x[v];
                float c = cos.low[step].x[v], s = cos.high[step].x[v];
                head.low[step].x[v] = a * c - b * s;
                head.high[step].x[v] = b * c + a * s;
            }
        }
        if (is_q) {
            if (!args.q_norm && !args.pairs) continue;
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                Place<V, LANES> at(step, head_dim, pairs);
                if (at.has_low) store(from + at.low, head.low[step]);
                if (at.has_high) store(from + at.high, head.high[step]);
            }
        } else if (slot != NO_SLOT) {
            u8* section = args.kv + (i64)(slot / BLOCK_TOKENS) * args.block_stride + args.layer_offset +
                          (is_v ? args.value_offset : 0);
            store_head<V, STEPS, LANES>(args, section, number - (is_v ? k_end : q_heads), slot % BLOCK_TOKENS, head, pairs,
                                 reinterpret_cast<float*>(staged[LANES == WARP ? unit : 0]));
        }
    }
}

#define PREPARE(NAME, A, V, STEPS, LANES)                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        prepare_qkv_##NAME(const __grid_constant__ PrepareQkvArgs args) {                                              \
        prepare<A, V, STEPS, LANES>(args);                                                                             \
    }
PREPARE(bf16_fast, bf16, 4, 1, 16)
PREPARE(bf16_128, bf16, 2, 1, 32)
PREPARE(bf16_256, bf16, 2, 2, 32)
PREPARE(bf16_any, bf16, 1, 8, 32)
PREPARE(f32_128, float, 2, 1, 32)
PREPARE(f32_256, float, 2, 2, 32)
PREPARE(f32_any, float, 1, 8, 32)
