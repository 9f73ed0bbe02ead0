// What the kernels share that bring keys and values to storage: their arguments, and how values are rounded. Every format
// is rounded exactly as on the host.
//
// Keys, then values of a layer lie in sections of sixteen tokens. f32, f16, bf16: [kv_head][token][head_dim]. fp8 and
// int8: bytes in that order, then f32 scales [kv_head][token]. int4: [kv_head][token] heads of codes, group by group of
// 32, then an f16 pair (scale, minimum) a group; byte j of a group holds code j in its low and code j + 16 in its high bits.
#pragma once
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

// The scale that fp8 and int8 store for a head whose largest magnitude has these bits, and by what its values are
// multiplied to become levels: zero where all codes are, also those of values that are not finite.
struct Scale {
    float stored, inverse;
};
DEVICE Scale scale_of(u32 bits, int format) {
    const float levels = format == KV_FP8 ? 448.0f : 127.0f, largest = __uint_as_float(bits);
    if (bits >= 0x7f800000) return {__uint_as_float(0x7fc00000u), 0.0f};
    if (largest < KV_TINY) return {0.0f, 0.0f};
    return {__fdiv_rn(largest, levels), __fdiv_rn(levels, largest)};
}
DEVICE u8 code_of(float x, const Scale& scale, int format) {
    if (!(scale.inverse > 0.0f)) return 0;
    float level = __fmul_rn(x, scale.inverse);
    return format == KV_FP8 ? round_e4m3(level) : round_int(level);
}

// Keys or values of the sixteen tokens of a slot's block.
DEVICE u8* section_of(const PrepareQkvArgs& args, u32 slot, bool is_value) {
    return args.kv + (i64)(slot / BLOCK_TOKENS) * args.block_stride + args.layer_offset +
           (is_value ? args.value_offset : 0);
}
// Where a head of one token lies among all of a section.
DEVICE i64 place_of(int kv_head, u32 slot) { return (i64)kv_head * BLOCK_TOKENS + slot % BLOCK_TOKENS; }
DEVICE float* scale_at(const PrepareQkvArgs& args, u8* section, i64 place) {
    return reinterpret_cast<float*>(section + (i64)args.kv_heads * BLOCK_TOKENS * args.head_dim) + place;
}
DEVICE int int4_head_bytes(int head_dim) {
    return head_dim / 32 * 16 + min(head_dim % 32, 16) + (head_dim + 31) / 32 * 4;
}

// A head to four bits a value, a group of 32 at a time, a lane a value; `row` is the head's bytes.
DEVICE void store_nibbles(u8* row, const float* values, int head_dim) {
    const float most = 65504.0f;
    int lane = threadIdx.x % WARP;
    int code_bytes = head_dim / 32 * 16 + min(head_dim % 32, 16);
#pragma unroll 1
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

// 1 / rms over a whole row's heads, the same in all threads.
template <typename A> DEVICE float row_inverse(const A* values, int count, float eps, float4 (&scratch)[8]) {
    float sum = 0.0f;
#pragma unroll 1
    for (int at = threadIdx.x; at < count; at += blockDim.x) {
        float x = to_float(values[at]);
        sum += x * x;
    }
    return 1.0f / sqrtf(block_total(sum, scratch) / count + eps);
}
