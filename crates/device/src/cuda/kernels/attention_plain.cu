// Attention for whatever the faster kernels do not take: activations in f32 or bf16, KV in any format, any head size up
// to 256, any grouping, window, cap, sinks, trees. One warp a row and head, f32 arithmetic on plain cores.
//
//   attention_plain_<format>(AttentionArgs, i32 wide)   128 threads, no dynamic shared memory, any grid: warps stride over
//       *num_work * heads. Work item (span, row of the span); every row has one. `partial` is not used. Activations are
//       f32 if wide is not 0, else bf16. format: f32, f16, bf16, fp8, int8, int4.
//
// Tokens are taken in tiles of 32 counted from position 0, in ascending order: bits depend on the row alone.
#include "attention.cuh"

enum Format { F32, F16, BF16, FP8, INT8, INT4 };
#define COLUMNS 8  // of a lane: lane, lane + 32, ...

template <int F> DEVICE u32 head_bytes_of(u32 head_dim) {
    return F == F32 ? head_dim * 4 : F == F16 || F == BF16 ? head_dim * 2 : F == INT4 ? int4_head_bytes(head_dim) : head_dim;
}
template <int F> DEVICE float load_value(const u8* head, u32 head_dim, u32 i, float scale) {
    if (F == F32) return ((const float*)head)[i];
    if (F == F16) return half_to_float(((const u16*)head)[i]);
    if (F == BF16) return to_float(((const bf16*)head)[i]);
    if (F == FP8) {
        // Moved to where f32 has its exponent, e4m3 lacks a factor of 2^120, small numbers too.
        u32 code = head[i];
        float level = __uint_as_float((code & 0x80) << 24 | (code & 0x7f) << 20);
        return __fmul_rn(__fmul_rn(level, __uint_as_float(247u << 23)), scale);
    }
    if (F == INT8) return __fmul_rn((float)(i8)head[i], scale);
    return int4_value(head, head_dim, i);
}

// One token's key (value = 0) or value, this lane's columns of it.
template <int F>
DEVICE void load_token(float (&out)[COLUMNS], const AttentionArgs& args, const u32* table, u32 kv_head, int value,
                       i32 place, int lane) {
    const u8* section = kv_section(args, __ldg(table + place / BLOCK_TOKENS), value);
    u32 token = place % BLOCK_TOKENS;
    const u8* head = section + kv_head_at(kv_head, token, head_bytes_of<F>(args.head_dim));
    float scale = F == FP8 || F == INT8 ? *(const float*)(section + kv_scale_at(args, kv_head, token)) : 1.0f;
#pragma unroll
    for (int j = 0; j < COLUMNS; j++) {
        out[j] = 0.0f;
        if (j * WARP + lane < args.head_dim) out[j] = load_value<F>(head, args.head_dim, j * WARP + lane, scale);
    }
}

template <int F> DEVICE void attend(const AttentionArgs& args, bool wide, u32 span, u32 index, u32 head, int lane) {
    const float nothing = __int_as_float(0xff800000);
    u32 kv_head = head / (args.heads / args.kv_heads), row = args.first_row[span] + index;
    const u32* table = args.blocks + args.first_block[span];
    i64 query = (i64)row * args.qkv_width + head * args.head_dim;
    float q[COLUMNS], sums[COLUMNS], largest = nothing, sum = 0.0f;
#pragma unroll
    for (int j = 0; j < COLUMNS; j++) {
        i32 column = j * WARP + lane;
        q[j] = sums[j] = 0.0f;
        if (column < args.head_dim)
            q[j] = wide ? ((const float*)args.qkv)[query + column] : to_float(((const bf16*)args.qkv)[query + column]);
    }
    Sight sight = sight_of(args, span, index);
    u64 own = path_of(args, row, args.num_rows[span]);
    i32 path_start = path_base(own, args.context[span]);
    i32 begin = (sight.tree ? min(sight.first, sight.base) : sight.first) / WARP * WARP;
#pragma unroll 1
    for (i32 start = begin; start <= sight.last; start += WARP) {
        u32 seen = __ballot_sync(FULL_MASK, sees(sight, start + lane));
        if (seen == 0) continue;
        float score = nothing;
        i32 place = start + lane;  // of this lane's token
        if (own != 0) place = path_place(own, path_start, place);
#pragma unroll 4
        for (int t = 0; t < WARP; t++) {
            float k[COLUMNS], dot = 0.0f;
            if (!(seen >> t & 1)) continue;
            load_token<F>(k, args, table, kv_head, 0, __shfl_sync(FULL_MASK, place, t), lane);
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) dot = __fmaf_rn(q[j], k[j], dot);
            dot = warp_sum(dot);
            if (lane == t) score = dot;
        }
        score = __fmul_rn(score, args.scale);
        if (args.soft_cap > 0.0f) score = __fmul_rn(args.soft_cap, tanhf(__fdiv_rn(score, args.soft_cap)));
        if (!(seen >> lane & 1)) score = nothing;
        float before = largest;
        largest = fmaxf(largest, warp_max(score));
        float origin = largest == nothing ? 0.0f : largest;
        float rescale = expf(__fadd_rn(before, -origin)), weight = expf(__fadd_rn(score, -origin));
        sum = __fmaf_rn(sum, rescale, warp_sum(weight));
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) sums[j] = __fmul_rn(sums[j], rescale);
#pragma unroll 4
        for (int t = 0; t < WARP; t++) {
            float v[COLUMNS], factor = __shfl_sync(FULL_MASK, weight, t);
            if (!(seen >> t & 1)) continue;
            load_token<F>(v, args, table, kv_head, 1, __shfl_sync(FULL_MASK, place, t), lane);
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) sums[j] = __fmaf_rn(factor, v[j], sums[j]);
        }
    }
    if (args.sinks != nullptr) {
        float sink = args.sinks[head], before = largest;
        largest = fmaxf(largest, sink);
        float rescale = expf(__fadd_rn(before, -largest));
        sum = __fmaf_rn(sum, rescale, expf(__fadd_rn(sink, -largest)));
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) sums[j] = __fmul_rn(sums[j], rescale);
    }
    i64 out = ((i64)row * args.heads + head) * args.head_dim;
#pragma unroll
    for (int j = 0; j < COLUMNS; j++) {
        i32 column = j * WARP + lane;
        float x = __fdiv_rn(sums[j], sum);
        if (column >= args.head_dim) continue;
        if (wide) ((float*)args.out)[out + column] = x;
        else ((bf16*)args.out)[out + column] = from_float<bf16>(x);
    }
}

template <int F> DEVICE void plain(const AttentionArgs& args, i32 wide) {
    int lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    u32 num_units = *args.num_work * args.heads;
    release_next();
    wait_for_previous();
#pragma unroll 1
    for (u32 unit = blockIdx.x * warps + threadIdx.x / WARP; unit < num_units; unit += gridDim.x * warps) {
        u32 item = unit / args.heads;
        attend<F>(args, wide != 0, args.work[item * 2], args.work[item * 2 + 1], unit % args.heads, lane);
    }
}

#define PLAIN(name, F)                                                                                  \
    extern "C" __global__ void __launch_bounds__(128) attention_plain_##name(AttentionArgs args, i32 wide) { \
        plain<F>(args, wide);                                                                           \
    }
PLAIN(f32, F32)
PLAIN(f16, F16)
PLAIN(bf16, BF16)
PLAIN(fp8, FP8)
PLAIN(int8, INT8)
PLAIN(int4, INT4)
