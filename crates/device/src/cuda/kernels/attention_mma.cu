// Paged attention with mma.sync: bf16 activations, KV in bf16, fp8 or int8, sums in f32. Any grouping, window, soft cap,
// sinks, trees.
//
// Query rows of a span are packed with the heads of one kv head's group: packed row x is row x / group of the span and
// head x % group of the group, so that a tile of 16 packed rows reads keys and values once for all of them.
//
//   attention_decode_<format>_<head>   128 threads. Work item (span, split): see attention.cuh for the order of items and
//                                      for `partial`. Writes partial results, or the output where a span has one split.
//                                      All four warps work on the same 16 packed rows: each makes the scores of a
//                                      quarter of a tile's tokens and sums a quarter of the columns.
//   attention_chunk_<format>_<head>    256 threads. Work item (span, tile): packed rows 128 tile to 128 tile + 127; a span
//                                      has ceil(rows * group / 128) of them. Long items first is best. A warp has 16 rows.
//                                      Writes the output; `partial` is not used.
//
// A row gets the same bits from both. format: bf16, fp8, int8; head: 64, 80, 96, 128, 192, 256.
// Grid: any number of blocks, best the number of multiprocessors times 3 (decode bf16), 4 (decode fp8, int8) or 1 (chunk);
// they stride over *num_work * kv_heads. Dynamic shared bytes, with tokens = head <= 128 ? 64 : 32:
//     tile = bf16: tokens * (2 * head + 16);  fp8, int8: tokens * (head + (head / 16 even ? 16 : 0) + 4)
//     decode: 4 * tile + 64 * tokens          chunk: 4 * tile
// More than 48 KiB must be asked for (cuFuncSetAttribute); none needs more than 72 KiB.
#include "attention_tile.cuh"

// The largest score and the sum of weights of two of the tile's rows: lane / 4 and lane / 4 + 8. Sums are a lane's own
// share until the split ends.
struct Rows {
    float largest[2], sum[2];
};

// Which of a tile of packed rows this lane has, and what they see.
struct Lane {
    Sight sight[2];
    u32 index[2], head[2];  // row of the span, head
    bool real[2];
};

template <int D, int F>
DEVICE Lane load_rows(u32 (&q)[D / 16][4], const AttentionArgs& args, u32 span, u32 kv_head, u32 first, int lane) {
    Lane out;
    u32 group = args.heads / args.kv_heads, rows = args.num_rows[span];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u32 packed = first + lane / 4 + half * 8;
        out.real[half] = packed < rows * group;
        out.index[half] = min(packed / group, rows - 1);
        out.head[half] = kv_head * group + packed % group;
        out.sight[half] = sight_of(args, span, out.index[half]);
        const bf16* at = (const bf16*)args.qkv + (i64)(args.first_row[span] + out.index[half]) * args.qkv_width +
                         out.head[half] * D;
#pragma unroll
        for (int step = 0; step < D / 16; step++) {
            q[step][half] = q[step][half + 2] = 0;
            if (out.real[half]) load_query<F>(q[step][half], q[step][half + 2], at + step * 16, lane);
        }
    }
    return out;
}

// Dot products of `N` groups of 8 tokens, the first at `start`, become scores; what a row does not see counts nothing.
// `scales` is the shared address of the first token's scale.
template <int F, int N>
DEVICE void score(float (&s)[N][4], const Scoring& scoring, const Lane& rows, i32 start, bool all_seen, u32 scales, int lane) {
#pragma unroll
    for (int n = 0; n < N; n++) {
        float first = 1.0f, second = 1.0f;
        if (F != BF16) load_scales(first, second, scales + (n * 8 + lane % 4 * 2) * 4);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (F != BF16) s[n][i] = __fmul_rn(s[n][i], i % 2 ? second : first);
            s[n][i] = __fmul_rn(s[n][i], scoring.factor);
        }
    }
    if (hidden(scoring.cap) > 0.0f) {
#pragma unroll
        for (int i = 0; i < 4 * N; i++) s[i / 4][i % 4] = capped(scoring, s[i / 4][i % 4]);
    }
    if (all_seen) return;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        Sight sight = rows.sight[half];
        sight.tree = hidden((i32)sight.tree);
        u64 seen = seen_from(sight, start) >> (lane % 4 * 2);
        u32 words[2] = {(u32)seen, (u32)(seen >> 32)};
#pragma unroll
        for (int i = 0; i < 2 * N; i++) {
            int token = i / 2 * 8 + i % 2;
            if (!(words[token / 32] >> (token % 32) & 1)) s[i / 2][half * 2 + i % 2] = NOTHING_SEEN;
        }
    }
}

// The online softmax's step over one tile: scores become weights. `rescale` is what earlier sums are multiplied by.
template <int N> DEVICE void soften(float (&s)[N][4], Rows& rows, float (&rescale)[2]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float largest = s[0][half * 2];
#pragma unroll
        for (int n = 0; n < N; n++) largest = fmaxf(largest, fmaxf(s[n][half * 2], s[n][half * 2 + 1]));
        largest = fmaxf(largest, __shfl_xor_sync(FULL_MASK, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(FULL_MASK, largest, 2));
        largest = fmaxf(largest, rows.largest[half]);
        float origin = origin_of(largest), sum = 0.0f;
        rescale[half] = power_of_two(__fadd_rn(rows.largest[half], -origin));
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = half * 2; i < half * 2 + 2; i++) {
                s[n][i] = power_of_two(__fadd_rn(s[n][i], -origin));
                sum = __fadd_rn(sum, s[n][i]);
            }
        rows.sum[half] = __fmaf_rn(rows.sum[half], rescale[half], sum);
        rows.largest[half] = largest;
    }
}

// Weights as an operand of the second product; with a scale a value they carry it.
template <int F, int N> DEVICE void pack_weights(u32 (&out)[N / 2][4], float (&s)[N][4], u32 scales, int lane) {
#pragma unroll
    for (int n = 0; n < N; n++) {
        if (F != BF16) {
            float first, second;
            load_scales(first, second, scales + (n * 8 + lane % 4 * 2) * 4);
#pragma unroll
            for (int i = 0; i < 4; i++) s[n][i] = __fmul_rn(s[n][i], i % 2 ? second : first);
        }
        out[n / 2][n % 2 * 2] = pack_bf16(s[n][0], s[n][1]);
        out[n / 2][n % 2 * 2 + 1] = pack_bf16(s[n][2], s[n][3]);
    }
}

template <int UNITS> DEVICE void rescale_sums(float (&sums)[UNITS][2][4], const float (&rescale)[2]) {
#pragma unroll
    for (int u = 0; u < UNITS; u++)
#pragma unroll
        for (int i = 0; i < 8; i++) sums[u][i / 4][i % 4] = __fmul_rn(sums[u][i / 4][i % 4], rescale[i % 4 / 2]);
}

// Ends a split: a row's sum of weights is gathered from its four lanes.
DEVICE void gather(Rows& rows) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum = rows.sum[half];
        sum = __fadd_rn(sum, __shfl_xor_sync(FULL_MASK, sum, 1));
        rows.sum[half] = __fadd_rn(sum, __shfl_xor_sync(FULL_MASK, sum, 2));
    }
}
// Merges a split into what came before it.
template <int UNITS>
DEVICE void merge_split(Rows& total, float (&totals)[UNITS][2][4], const Rows& rows, const float (&sums)[UNITS][2][4]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (rows.sum[half] == 0.0f) continue;
        Merge merge = merge_of(total.largest[half], rows.largest[half]);
        total.largest[half] = merge.largest;
        total.sum[half] = merged(merge, total.sum[half], rows.sum[half]);
#pragma unroll
        for (int u = 0; u < UNITS; u++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float& sum = totals[u][i / 2][half * 2 + i % 2];
                sum = merged(merge, sum, sums[u][i / 2][half * 2 + i % 2]);
            }
    }
}
template <int UNITS> DEVICE void clear(Rows& rows, float (&sums)[UNITS][2][4]) {
#pragma unroll
    for (int half = 0; half < 2; half++) rows.largest[half] = NOTHING_SEEN, rows.sum[half] = 0.0f;
#pragma unroll
    for (int u = 0; u < UNITS; u++)
#pragma unroll
        for (int i = 0; i < 8; i++) sums[u][i / 4][i % 4] = 0.0f;
}

// One row's 16 columns of a unit, multiplied by `factor`, as the output.
template <int F> DEVICE void write_unit(bf16* to, const float (&sums)[2][4], int half, float factor, int lane) {
    float x[2][2];
#pragma unroll
    for (int i = 0; i < 4; i++) x[i / 2][i % 2] = __fmul_rn(sums[i / 2][half * 2 + i % 2], factor);
    if (F == BF16) {
        *(u32*)(to + column_of<F>(0, 0, lane)) = pack_bf16(x[0][0], x[0][1]);
        *(u32*)(to + column_of<F>(1, 0, lane)) = pack_bf16(x[1][0], x[1][1]);
    } else {
        *(uint2*)(to + column_of<F>(0, 0, lane)) = make_uint2(pack_bf16(x[0][0], x[1][0]), pack_bf16(x[0][1], x[1][1]));
    }
}
template <int F> DEVICE void write_unit(float* to, const float (&sums)[2][4], int half, int lane) {
    if (F == BF16) {
        *(float2*)(to + column_of<F>(0, 0, lane)) = make_float2(sums[0][half * 2], sums[0][half * 2 + 1]);
        *(float2*)(to + column_of<F>(1, 0, lane)) = make_float2(sums[1][half * 2], sums[1][half * 2 + 1]);
    } else {
        *(float4*)(to + column_of<F>(0, 0, lane)) =
            make_float4(sums[0][half * 2], sums[1][half * 2], sums[0][half * 2 + 1], sums[1][half * 2 + 1]);
    }
}
DEVICE bf16* output_at(const AttentionArgs& args, u32 span, u32 index, u32 head) {
    return (bf16*)args.out + ((i64)(args.first_row[span] + index) * args.heads + head) * args.head_dim;
}

// Before the kernel that writes this step's keys is done, a block that has one piece of work alone fetches that piece's
// keys and values into the second-level cache. Nothing is read, so what is still to be written is not missed.
template <int D, int F> DEVICE void warm_up(const AttentionArgs& args, u32 num_units) {
#if __CUDA_ARCH__ >= 900
    u32 unit = blockIdx.x;
    if (num_units > gridDim.x || unit >= num_units || threadIdx.x >= 2 * SPLIT / BLOCK_TOKENS) return;
    u32 span = args.work[unit / args.kv_heads * 2], split = args.work[unit / args.kv_heads * 2 + 1];
    i32 position = split * SPLIT + threadIdx.x / 2 * BLOCK_TOKENS;
    if (position + BLOCK_TOKENS <= earliest(args, span) || position >= (i32)args.context[span]) return;
    const u8* at = kv_section(args, args.blocks[args.first_block[span] + position / BLOCK_TOKENS], threadIdx.x % 2) +
                   kv_head_at(unit % args.kv_heads, 0, Shape<D, F>::HEAD_BYTES);
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(at), "r"(BLOCK_TOKENS * Shape<D, F>::HEAD_BYTES) : "memory");
#endif
}

template <int D, int F> DEVICE void decode(const AttentionArgs& args) {
    typedef Shape<D, F> S;
    constexpr int WARPS = 4, UNITS = (S::STEPS + WARPS - 1) / WARPS, EIGHTS = S::EIGHTS / WARPS;
    extern __shared__ __align__(16) u8 memory[];
    u32 keys = shared_address(memory), values = keys + 2 * S::BYTES;
    float4* scores = (float4*)(memory + 4 * S::BYTES);  // [groups of 8 tokens][lane]
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    u32 group = args.heads / args.kv_heads, num_units = *args.num_work * args.kv_heads;
    Scoring scoring = scoring_of(args);
    release_next();
    warm_up<D, F>(args, num_units);
    wait_for_previous();
#pragma unroll 1
    for (u32 unit = blockIdx.x; unit < num_units; unit += gridDim.x) {
        u32 item = unit / args.kv_heads, kv_head = unit % args.kv_heads;
        u32 span = args.work[item * 2], split = args.work[item * 2 + 1], packed_rows = args.num_rows[span] * group;
        Source source = source_of(args, span, kv_head);
        Splits splits = splits_of(args, span);
        i32 begin = max((i32)split * SPLIT, source.low) / S::TOKENS * S::TOKENS;
        i32 end = min((i32)(split + 1) * SPLIT, source.high);
        source.high = end;  // what lies behind the split is not begun
#pragma unroll 1
        for (u32 first = 0; first < packed_rows; first += 16) {
            u32 q[S::STEPS][4];
            Lane mine = load_rows<D, F>(q, args, span, kv_head, first, lane);
            Rows rows;
            float sums[UNITS][2][4];
            clear(rows, sums);
            int slot = 0;
            // Keys are begun two tiles ahead, values one: the first two rounds begin copies alone.
#pragma unroll 1
            for (i32 start = begin - 2 * S::TOKENS; start < end; start += S::TOKENS, slot ^= 1) {
                u32 tile = keys + slot * S::BYTES;
                if (start >= begin) {
                    wait_for_copies<2>();
                    __syncthreads();  // these keys are here, and the values before are done with
                }
                if (start >= begin - S::TOKENS)
                    begin_tile<D, F, 128>(args, source, 1, start + S::TOKENS, values + (slot ^ 1) * S::BYTES);
                if (start >= begin) {
                    int eighth = warp * EIGHTS;
                    float own[EIGHTS][4];
                    dot_products<D, F>(own, q, tile, eighth, lane);
                    score<F>(own, scoring, mine, start + eighth * 8, false, tile + S::SCALES_AT + eighth * 32, lane);
#pragma unroll
                    for (int n = 0; n < EIGHTS; n++)
                        scores[(eighth + n) * WARP + lane] = make_float4(own[n][0], own[n][1], own[n][2], own[n][3]);
                    wait_for_copies<2>();
                    __syncthreads();  // all scores and these values are here, and the keys are done with
                }
                begin_tile<D, F, 128>(args, source, 0, start + 2 * S::TOKENS, tile);
                if (start < begin) continue;
                float s[S::EIGHTS][4], rescale[2];
#pragma unroll
                for (int n = 0; n < S::EIGHTS; n++) {
                    float4 four = scores[n * WARP + lane];
                    s[n][0] = four.x, s[n][1] = four.y, s[n][2] = four.z, s[n][3] = four.w;
                }
                soften(s, rows, rescale);
                u32 weights[S::TOKENS / 16][4];
                tile = values + slot * S::BYTES;
                pack_weights<F>(weights, s, tile + S::SCALES_AT, lane);
                rescale_sums(sums, rescale);
#pragma unroll
                for (int u = 0; u < UNITS; u++)
                    if (S::STEPS % WARPS == 0 || u * WARPS + warp < S::STEPS)
                        add_values<D, F>(sums[u], weights, tile, u * WARPS + warp, lane);
            }
            wait_for_copies<0>();
            __syncthreads();
            gather(rows);
            Rows total;
            float totals[UNITS][2][4];
            bool alone = splits.end - splits.first == 1;
            if (alone) {
                clear(total, totals);
                merge_split(total, totals, rows, sums);
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                if (!mine.real[half]) continue;
                float* partial = args.partial + partial_at(args, item, mine.index[half], mine.head[half]);
                bf16* out = output_at(args, span, mine.index[half], mine.head[half]);
                float factor = alone ? finish_of(args, mine.head[half], total.largest[half], total.sum[half]) : 0.0f;
#pragma unroll
                for (int u = 0; u < UNITS; u++) {
                    int column = (u * WARPS + warp) * 16;
                    if (S::STEPS % WARPS != 0 && column >= D) continue;
                    if (alone) write_unit<F>(out + column, totals[u], half, factor, lane);
                    else write_unit<F>(partial + column, sums[u], half, lane);
                }
                if (!alone && warp == 0 && lane % 4 == 0)
                    *(float2*)(partial + D) = make_float2(rows.largest[half], rows.sum[half]);
            }
        }
    }
}

template <int D, int F> DEVICE void chunk(const AttentionArgs& args) {
    typedef Shape<D, F> S;
    constexpr int PACKED = 128;
    extern __shared__ __align__(16) u8 memory[];
    u32 keys = shared_address(memory), values = keys + 2 * S::BYTES;
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    u32 group = args.heads / args.kv_heads, num_units = *args.num_work * args.kv_heads;
    Scoring scoring = scoring_of(args);
    release_next();
    wait_for_previous();
#pragma unroll 1
    for (u32 unit = blockIdx.x; unit < num_units; unit += gridDim.x) {
        u32 item = unit / args.kv_heads, kv_head = unit % args.kv_heads;
        u32 span = args.work[item * 2], tile_of_rows = args.work[item * 2 + 1];
        u32 packed_rows = args.num_rows[span] * group, first = tile_of_rows * PACKED + warp * 16;
        if (tile_of_rows * PACKED >= packed_rows) continue;
        Source source = source_of(args, span, kv_head);
        i32 base = source.high - (i32)args.num_rows[span];
        bool tree = args.ancestors != nullptr && args.num_rows[span] <= 64;
        // What any row of the block sees.
        i32 first_index = tile_of_rows * PACKED / group;
        i32 last_index = (min((tile_of_rows + 1) * PACKED, packed_rows) - 1) / group;
        i32 end = base + last_index + 1;
        if (args.window > 0 && !tree) source.low = max(base + first_index - args.window + 1, 0);
        source.high = end;
        i32 begin = source.low / S::TOKENS * S::TOKENS;
        // What all rows of the warp see, and what none sees.
        i32 warp_first = base + (i32)(first / group), warp_last = base + (i32)(min(first + 15, packed_rows - 1) / group);
        i32 all_end = tree ? base : warp_first + 1;
        i32 all_begin = args.window > 0 ? (tree ? base : warp_last) - args.window + 1 : 0;
        if (tree && args.window > 0) all_begin = base;  // rows of a tree have windows of their own
        i32 none_end = args.window > 0 && !tree ? warp_first - args.window + 1 : 0;
        bool idle = first >= packed_rows;
        u32 q[S::STEPS][4];
        Lane mine = load_rows<D, F>(q, args, span, kv_head, first, lane);
        Rows rows, total;
        float sums[S::STEPS][2][4], totals[S::STEPS][2][4];
        clear(rows, sums);
        clear(total, totals);
        int slot = 0;
#pragma unroll 1
        for (i32 start = begin - 2 * S::TOKENS; start < end; start += S::TOKENS, slot ^= 1) {
            u32 tile = keys + slot * S::BYTES;
            bool seen = !hidden((i32)idle) && start >= begin && start <= warp_last && start + S::TOKENS > none_end;
            bool all_seen = start >= all_begin && start + S::TOKENS <= all_end;
            float s[S::EIGHTS][4], rescale[2];
            if (start >= begin) {
                wait_for_copies<2>();
                __syncthreads();
            }
            if (start >= begin - S::TOKENS)
                begin_tile<D, F, 256>(args, source, 1, start + S::TOKENS, values + (slot ^ 1) * S::BYTES);
            if (seen) {
                dot_products<D, F>(s, q, tile, 0, lane);
                score<F>(s, scoring, mine, start, all_seen, tile + S::SCALES_AT, lane);
            }
            if (start >= begin) {
                wait_for_copies<2>();
                __syncthreads();
            }
            begin_tile<D, F, 256>(args, source, 0, start + 2 * S::TOKENS, tile);
            if (start < begin) continue;
            if (seen) {
                soften(s, rows, rescale);
                u32 weights[S::TOKENS / 16][4];
                tile = values + slot * S::BYTES;
                pack_weights<F>(weights, s, tile + S::SCALES_AT, lane);
                rescale_sums(sums, rescale);
#pragma unroll
                for (int u = 0; u < S::STEPS; u++) add_values<D, F>(sums[u], weights, tile, u, lane);
            }
            if ((start + S::TOKENS) % SPLIT == 0 || start + S::TOKENS >= end) {
                gather(rows);
                merge_split(total, totals, rows, sums);
                clear(rows, sums);
            }
        }
        wait_for_copies<0>();
        __syncthreads();
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (!mine.real[half]) continue;
            bf16* out = output_at(args, span, mine.index[half], mine.head[half]);
            float factor = finish_of(args, mine.head[half], total.largest[half], total.sum[half]);
#pragma unroll
            for (int u = 0; u < S::STEPS; u++) write_unit<F>(out + u * 16, totals[u], half, factor, lane);
        }
    }
}

#define ATTENTION(name, format, head)                                                                            \
    extern "C" __global__ void __launch_bounds__(128, head <= 128 ? 3 : 2)                                       \
        attention_decode_##name##_##head(AttentionArgs args) {                                                   \
        decode<head, format>(args);                                                                              \
    }                                                                                                            \
    extern "C" __global__ void __launch_bounds__(256, 1) attention_chunk_##name##_##head(AttentionArgs args) {   \
        chunk<head, format>(args);                                                                               \
    }
ATTENTION(bf16, BF16, 64)
ATTENTION(bf16, BF16, 80)
ATTENTION(bf16, BF16, 96)
ATTENTION(bf16, BF16, 128)
ATTENTION(bf16, BF16, 192)
ATTENTION(bf16, BF16, 256)
ATTENTION(fp8, FP8, 64)
ATTENTION(fp8, FP8, 128)
ATTENTION(fp8, FP8, 256)
ATTENTION(int8, INT8, 64)
ATTENTION(int8, INT8, 128)
ATTENTION(int8, INT8, 256)
