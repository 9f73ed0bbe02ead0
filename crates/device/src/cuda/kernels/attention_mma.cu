// Paged attention with mma.sync: bf16 activations, KV in bf16, fp8 or int8, sums in f32. Any grouping, window, soft cap,
// sinks, trees. Heads are any multiple of 16 up to 256.
//
// Query rows of a span are packed with the heads of one kv head's group: packed row x is row x / group of the span and
// head x % group of the group, so that a tile of 16 packed rows reads keys and values once for all of them.
//
//   attention_decode_<format>_<D>(AttentionArgs)     192 threads; format: bf16, fp8, int8. Work item (span, split): see
//       attention.cuh for the order of items and for `partial`. Writes the output: the block that ends a span's last split
//       merges them, so spans * kv_heads must be at most 65,536, and two such kernels must not run at once. Four warps work
//       on the same 16 packed rows: each makes the scores of a quarter of a tile's tokens and sums a quarter of the
//       columns. Best grid: 2 blocks a multiprocessor. Dynamic shared bytes:
//           5504 + places * 2 * tile,  tile = bf16: wide;  fp8, int8: narrow
//       with as many places as fit so many blocks (a block has 1024 bytes beside its own), at least 2 and at most 6.
//   attention_chunk_bf16_<D>(AttentionArgs)          128 threads. Work item (span, tile): packed rows 128 tile to
//   attention_chunk_coded_<D>(AttentionArgs, i32 fp8)     128 tile + 127; a span has ceil(rows * group / 128) items. Long
//       items first is best. A warp has 16 rows. Writes the output; `partial` is not used. coded: fp8 if `fp8` is not 0,
//       else int8. Best grid: 2 blocks a multiprocessor. Dynamic shared bytes:
//           bf16: 4 * wide + 1024;  coded: 2 * wide + 2 * narrow + 8 * tokens + 1024
//
// A row gets the same bits from both forms. D is the smallest of 64, 128, 256 that holds head_dim; tokens = D <= 128 ? 64 :
// 32, wide = tokens * (2 * D + 16), narrow = tokens * (D + 20). Grids may be of any size: blocks stride over the work. More
// than 48 KiB of shared memory must be asked for (cuFuncSetAttribute).
#include "attention_decode.cuh"

template <int D, bool CODED> DEVICE void chunk(const AttentionArgs& args, i32 fp8) {
    typedef Shape<D, BF16> S;
    typedef Shape<D, INT8> C;
    constexpr int PACKED = 64, WIDE = S::BYTES, SLOTS = CODED ? 1 : 2;
    extern __shared__ __align__(16) u8 memory[];
    u32 keys = shared_address(memory);  // then as many tiles of values
    u8* codes = memory + 2 * WIDE;                               // CODED: keys, values
    float* scales = (float*)(memory + 2 * WIDE + 2 * C::BYTES);  // CODED: [keys, values][tokens]
    RowSight* sights = (RowSight*)(memory + (CODED ? 2 * WIDE + 2 * C::BYTES + 8 * S::TOKENS : 4 * WIDE)) + threadIdx.x / WARP * 16;
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    Divisor group = divisor_of(args.heads / args.kv_heads), heads = divisor_of(2 * args.kv_heads);
    u32 num_units = *args.num_work * heads.by;
    Scoring scoring = scoring_of(args);
    release_next();
    if (CODED) clear_keys<D, INT8, 128>(args, codes, 1);
    else clear_keys<D, BF16, 128>(args, memory, 2);
    wait_for_previous();
#pragma unroll 1
    for (u32 unit = blockIdx.x; unit < num_units; unit += gridDim.x) {
        // An item's two halves are different units.
        u32 item = quotient(unit, heads), half_of_head = unit - item * heads.by, kv_head = half_of_head / 2;
        u32 span = args.work[item * 2], first_packed = (args.work[item * 2 + 1] * 2 + half_of_head % 2) * PACKED;
        SpanRows span_rows = {args.first_row[span], args.num_rows[span], (i32)(args.context[span] - args.num_rows[span])};
        u32 packed_rows = span_rows.num * group.by, first = first_packed + warp * 16;
        i32 base = span_rows.base;
        if (first_packed >= packed_rows) continue;
        Source source = {args.blocks + args.first_block[span], earliest(args, span), 0, kv_head};
        WarpSight sight = load_sights(sights, args, group, span_rows, first, lane);
        // What any row of the block sees.
        i32 end = base + (i32)quotient(min(first_packed + PACKED, packed_rows) - 1, group) + 1;
        if (args.window > 0 && !sight.tree) source.low = max(base + (i32)quotient(first_packed, group) - args.window + 1, 0);
        source.high = end;
        i32 begin = source.low / S::TOKENS * S::TOKENS;
        u32 q[S::STEPS][4];
        load_queries<D, CODED>(q, args, group, span_rows, kv_head, first, lane);
        Rows<4> rows;
        Rows<1> total;
        float sums[S::STEPS][2][4], totals[S::STEPS][2][4];
        clear(rows, sums);
        clear(total, totals);
        int slot = 0;
        // The first round begins copies alone.
#pragma unroll 1
        for (i32 start = begin - S::TOKENS; start < end; start += S::TOKENS, slot ^= 1) {
            constexpr int STORED = CODED ? INT8 : BF16, BETWEEN = CODED ? C::BYTES : 2 * WIDE;
            Blocks<D, STORED, 128> blocks;
            if (start + S::TOKENS < end) read_blocks(blocks, source, start + S::TOKENS);
            wait_for_copies<0>();
            __syncthreads();  // this tile is here, and the one before is done with
            if (CODED && start >= begin) {
                if (fp8) widen_tile<D, FP8, 128>(memory, codes), widen_tile<D, FP8, 128>(memory + WIDE, codes + C::BYTES);
                else widen_tile<D, INT8, 128>(memory, codes), widen_tile<D, INT8, 128>(memory + WIDE, codes + C::BYTES);
                if (threadIdx.x < 2 * S::TOKENS)
                    scales[threadIdx.x] = *(float*)(codes + threadIdx.x / S::TOKENS * C::BYTES + C::SCALES_AT +
                                                    threadIdx.x % S::TOKENS * 4);
                __syncthreads();
            }
            if (start + S::TOKENS < end) {
                u32 to = CODED ? shared_address(codes) : keys + (slot ^ 1) * WIDE;
                begin_tile(args, source, blocks, start + S::TOKENS, to, to + BETWEEN);
            }
            if (start >= begin && start <= sight.last && start + S::TOKENS > sight.none_end) {
                u32 tile = CODED ? keys : keys + slot * WIDE;
                float s[S::EIGHTS][4], rescale[2];
                dot_products<D, BF16>(s, q, tile, 0, lane);
                score<CODED>(s, scoring, sight, sights, start, shared_address(scales), lane);
                constexpr int QUARTER = S::EIGHTS / 4;
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    float origin = origin_of_tile(rows, half, scoring, largest_of(s, half), rescale[half]);
                    float (&sum)[4] = rows.sum[half];
                    sum[0] = __fmaf_rn(sum[0], rescale[half], weigh<0, QUARTER>(s, half, scoring, origin));
                    sum[1] = __fmaf_rn(sum[1], rescale[half], weigh<QUARTER, QUARTER>(s, half, scoring, origin));
                    sum[2] = __fmaf_rn(sum[2], rescale[half], weigh<2 * QUARTER, QUARTER>(s, half, scoring, origin));
                    sum[3] = __fmaf_rn(sum[3], rescale[half], weigh<3 * QUARTER, QUARTER>(s, half, scoring, origin));
                }
                u32 packed[S::EIGHTS][2], weights[S::TOKENS / 16][4];
                pack_weights<CODED>(packed, s, shared_address(scales + S::TOKENS), lane);
#pragma unroll
                for (int i = 0; i < S::TOKENS / 4; i++) weights[i / 4][i % 4] = packed[i / 2][i % 2];
                // Most tiles leave every largest score as it is, and a factor of 1 changes nothing.
                if (__any_sync(FULL_MASK, rescale[0] != 1.0f || rescale[1] != 1.0f)) rescale_sums(sums, rescale);
#pragma unroll
                for (int u = 0; u < S::STEPS; u++) add_values<D, BF16, false>(sums[u], weights, tile + SLOTS * WIDE, u, lane);
            }
            if (start >= begin && ((start + S::TOKENS) % SPLIT == 0 || start + S::TOKENS >= end)) {
                Rows<1> split;
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const float (&sum)[4] = rows.sum[half];
                    split.largest[half] = rows.largest[half];
                    split.sum[half][0] =
                        sum_of_quarters(gathered(sum[0]), gathered(sum[1]), gathered(sum[2]), gathered(sum[3]));
                }
                merge_split(total, totals, split, sums);
                clear(rows, sums);
            }
        }
        __syncthreads();
#pragma unroll
        for (int half = 0; half < 2; half++) {
            Place place = place_of(args, group, kv_head, first + lane / 4 + half * 8, packed_rows);
            if (!place.real) continue;
            bf16* out = output_at(args, span_rows.first, place.index, place.head);
            float factor = finish_of(sink_of(args, place.head), total.largest[half], total.sum[half][0]);
#pragma unroll
            for (int u = 0; u < S::STEPS; u++)
                if (u * 16 < args.head_dim) write_unit<CODED>(out + u * 16, totals[u], half, factor, lane);
        }
    }
}

#define DECODE(name, format, D, blocks)                                                                         \
    extern "C" __global__ void __launch_bounds__(192, blocks) attention_decode_##name##_##D(AttentionArgs args) { \
        decode<D, format>(args);                                                                                \
    }
#define CHUNK(D)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(128, 2) attention_chunk_bf16_##D(AttentionArgs args) {           \
        chunk<D, false>(args, 0);                                                                                 \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(128, 2) attention_chunk_coded_##D(AttentionArgs args, i32 fp8) { \
        chunk<D, true>(args, fp8);                                                                                \
    }
DECODE(bf16, BF16, 64, 2)
DECODE(fp8, FP8, 64, 2)
DECODE(int8, INT8, 64, 2)
DECODE(bf16, BF16, 128, 2)
DECODE(fp8, FP8, 128, 2)
DECODE(int8, INT8, 128, 2)
DECODE(bf16, BF16, 256, 2)
DECODE(fp8, FP8, 256, 2)
DECODE(int8, INT8, 256, 2)
CHUNK(64)
CHUNK(128)
CHUNK(256)
