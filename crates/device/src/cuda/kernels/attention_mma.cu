// Paged attention with mma.sync: bf16 activations, KV in bf16, fp8 or int8, sums in f32. Any grouping, window, soft cap,
// sinks, trees. Heads are any multiple of 16 up to 256.
//
// Query rows of a span are packed with the heads of one kv head's group: packed row x is row x / group of the span and
// head x % group of the group, so that a tile of 16 packed rows reads keys and values once for all of them.
//
//   attention_decode_<format>_<D>(AttentionArgs)     128 threads; format: bf16, fp8, int8. Work item (span, split): see
//       attention.cuh for the order of items and for `partial`. Writes the output: the block that ends a span's last split
//       merges them, so spans * kv_heads must be at most 65,536, and two such kernels must not run at once. All four warps
//       work on the same 16 packed rows: each makes the scores of a quarter of a tile's tokens and sums a quarter of the
//       columns.
//   attention_chunk_bf16_<D>(AttentionArgs)          128 threads. Work item (span, tile): packed rows 128 tile to
//   attention_chunk_coded_<D>(AttentionArgs, i32 fp8)     128 tile + 127; a span has ceil(rows * group / 128) items. Long
//       items first is best. A warp has 16 rows. Writes the output; `partial` is not used. coded: fp8 if `fp8` is not 0,
//       else int8.
//
// A row gets the same bits from both forms. D is the smallest of 64, 128, 256 that holds head_dim.
// Grid: any number of blocks, best 3 (decode, D = 256: 2) or 2 (chunk) a multiprocessor: they stride over the work. Dynamic shared bytes, with tokens = D <= 128 ? 64 : 32, wide = tokens * (2 * D + 16) and
// narrow = tokens * (D + 20):
//     decode bf16: 4 * wide + 64 * tokens + 1024      decode fp8, int8: 4 * narrow + 64 * tokens + 1024
//     chunk bf16:  4 * wide + 1024                    chunk coded:      2 * wide + 2 * narrow + 8 * tokens + 1024
// More than 48 KiB must be asked for (cuFuncSetAttribute); none needs more than 73 KiB.
#include "attention_merge.cuh"

// One split of one span for one kv head, 16 packed rows of it, and a tile of its tokens.
struct Unit {
    u32 span, item, packed_rows;
    Source source;
    i32 begin, num_splits;
    u32 first;  // packed row
    i32 start;  // position
};

// What the units of a block are made of is read before it is needed: the work list two units ahead, the rest one.
struct Units {
    u32 number, num;           // this unit, and how many there are
    u32 span, split;           // of the next one
    u32 rows, context, table;
    u32 later_span, later_split;
    Divisor kv_heads;
};
DEVICE void read_item(const AttentionArgs& args, const Units& units, u32 number, u32& span, u32& split) {
    u32 item = quotient(min(number, units.num - 1), units.kv_heads);
    span = __ldg(args.work + item * 2);
    split = __ldg(args.work + item * 2 + 1);
}
DEVICE void read_span(const AttentionArgs& args, Units& units) {
    units.rows = __ldg(args.num_rows + units.span);
    units.context = __ldg(args.context + units.span);
    units.table = __ldg(args.first_block + units.span);
}
// Takes the unit that was read, and reads the one after it.
template <int TOKENS> DEVICE Unit next_unit(const AttentionArgs& args, Units& units, u32 group) {
    Unit out;
    i32 low = args.window > 0 ? max((i32)(units.context - units.rows) - args.window + 1, 0) : 0;
    out.span = units.span;
    out.item = quotient(units.number, units.kv_heads);
    out.packed_rows = units.rows * group;
    out.source.table = args.blocks + units.table;
    out.source.kv_head = units.number - out.item * units.kv_heads.by;
    out.source.low = low;
    out.source.high = min(units.split * SPLIT + SPLIT, units.context);
    out.begin = max((i32)units.split * SPLIT, low) / TOKENS * TOKENS;
    out.num_splits = (units.context + SPLIT - 1) / SPLIT - low / SPLIT;
    out.first = 0;
    out.start = out.begin;
    units.number += gridDim.x;
    units.span = units.later_span;
    units.split = units.later_split;
    read_span(args, units);
    read_item(args, units, units.number + gridDim.x, units.later_span, units.later_split);
    return out;
}

// Before the kernel that writes this step's keys is done, a block that has one piece of work alone fetches that piece's
// keys and values into the second-level cache. Nothing is read, so what is still to be written is not missed.
template <int F> DEVICE void warm_up(const AttentionArgs& args, const Unit& unit) {
#if __CUDA_ARCH__ >= 900
    i32 position = unit.start / SPLIT * SPLIT + threadIdx.x / 2 * BLOCK_TOKENS;
    if (threadIdx.x >= 2 * SPLIT / BLOCK_TOKENS || position + BLOCK_TOKENS <= unit.source.low || position >= unit.source.high)
        return;
    u32 bytes = head_bytes_of<F>(args);
    const u8* at = kv_section(args, __ldg(unit.source.table + position / BLOCK_TOKENS), threadIdx.x % 2) +
                   kv_head_at(unit.source.kv_head, 0, bytes);
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(at), "r"(BLOCK_TOKENS * bytes) : "memory");
#endif
}

// All rows of a unit's span and kv head, from the partial results of its splits.
template <int D> DEVICE void merge_rows(const AttentionArgs& args, const Divisor& group, const Unit& unit, int warp, float4* factors) {
    u64 stride = partial_at(args, 1, 0, 0);
    __syncthreads();  // `factors` held what told that this block is the last
    u32 first_item = unit.item - (unit.begin / SPLIT - unit.source.low / SPLIT);
#pragma unroll 1
    for (u32 packed = warp; packed < unit.packed_rows; packed += 4) {
        u32 index = quotient(packed, group), head = unit.source.kv_head * group.by + packed - index * group.by;
        merge_row<(D > 128 ? 2 : 1)>(args.partial + partial_at(args, first_item, index, head), stride, unit.num_splits,
                                     args.head_dim, sink_of(args, head), output_at(args, unit.span, index, head),
                                     factors + warp * WARP);
    }
}

template <int D, int F> DEVICE void decode(const AttentionArgs& args) {
    typedef Shape<D, F> S;
    constexpr int WARPS = 4, UNITS = S::STEPS / WARPS, EIGHTS = S::EIGHTS / WARPS;
    constexpr bool CODED = F != BF16;
    extern __shared__ __align__(16) u8 memory[];
    u32 keys = shared_address(memory), values = keys + 2 * S::BYTES;
    float4* scores = (float4*)(memory + 4 * S::BYTES);  // [groups of 8 tokens][lane]
    RowSight* sights = (RowSight*)(scores + S::EIGHTS * WARP) + threadIdx.x / WARP * 16;
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, slot = 0;
    Scoring scoring = scoring_of(args);
    Divisor group = divisor_of(args.heads / args.kv_heads);
    Units units;
    units.kv_heads = divisor_of(args.kv_heads);
    units.num = *args.num_work * args.kv_heads;
    units.number = blockIdx.x;
    release_next();
    if (units.number >= units.num) return wait_for_previous();
    read_item(args, units, units.number, units.span, units.split);
    read_item(args, units, units.number + gridDim.x, units.later_span, units.later_split);
    read_span(args, units);
    Unit now, next = next_unit<S::TOKENS>(args, units, group.by);
    bool more = true;
    i32 begun = 0;  // the first round begins copies alone
    if (units.num <= gridDim.x) warm_up<F>(args, next);
    clear_keys<D, F, 128>(args, memory, 2);
    wait_for_previous();
    u32 q[S::STEPS][4];
    WarpSight sight;
    Rows rows;
    Blocks<D, F, 128> blocks;
    float sums[UNITS][2][4];
#pragma unroll 1
    for (; more; now = next, slot ^= 1) {
        begun = hidden(begun);
        if (begun) next.start += S::TOKENS;
        if (next.start >= next.source.high) {
            next.first += 16;
            next.start = next.begin;
            if (next.first >= next.packed_rows) {
                more = units.number < units.num;
                next = next_unit<S::TOKENS>(args, units, group.by);
            }
        }
        if (more) read_blocks(blocks, next.source, next.start);
        wait_for_copies<0>();
        __syncthreads();  // this tile is here, and the one before is done with
        if (more)
            begin_tile(args, next.source, blocks, next.start, keys + (slot ^ 1) * S::BYTES, values + (slot ^ 1) * S::BYTES);
        if (!begun) {
            begun = 1;
            continue;
        }
        if (now.start == now.begin) {
            load_queries<D, CODED>(q, args, group, now.span, now.source.kv_head, now.first, lane);
            sight = load_sights(sights, args, group, now.span, now.first, lane);
            clear(rows, sums);
        }
        u32 tile = keys + slot * S::BYTES;
        int eighth = warp * EIGHTS;
        float own[EIGHTS][4], s[S::EIGHTS][4], rescale[2];
        dot_products<D, F>(own, q, tile, eighth, lane);
        score<CODED>(own, scoring, sight, sights, now.start + eighth * 8, tile + S::SCALES_AT + eighth * 32, lane);
#pragma unroll
        for (int n = 0; n < EIGHTS; n++)
            scores[(eighth + n) * WARP + lane] = make_float4(own[n][0], own[n][1], own[n][2], own[n][3]);
        __syncthreads();
#pragma unroll
        for (int n = 0; n < S::EIGHTS; n++) {
            float4 four = scores[n * WARP + lane];
            s[n][0] = four.x, s[n][1] = four.y, s[n][2] = four.z, s[n][3] = four.w;
        }
        soften(s, scoring, rows, rescale);
        u32 weights[S::TOKENS / 16][4];
        tile = values + slot * S::BYTES;
        pack_weights<CODED>(weights, s, tile + S::SCALES_AT, lane);
        rescale_sums(sums, rescale);
#pragma unroll
        for (int u = 0; u < UNITS; u++) add_values<D, F>(sums[u], weights, tile, u * WARPS + warp, lane);
        if (now.start + S::TOKENS < now.source.high) continue;

        // The split is done.
        gather(rows);
        bool alone = now.num_splits == 1;
        Rows total;
        float totals[UNITS][2][4];
        clear(total, totals);
        if (alone) merge_split(total, totals, rows, sums);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            Place place = place_of(args, group, now.source.kv_head, now.first + lane / 4 + half * 8, now.packed_rows);
            if (!place.real) continue;
            float* partial = args.partial + partial_at(args, now.item, place.index, place.head);
            bf16* out = output_at(args, now.span, place.index, place.head);
            float factor = finish_of(sink_of(args, place.head), total.largest[half], total.sum[half]);
#pragma unroll
            for (int u = 0; u < UNITS; u++) {
                int column = (u * WARPS + warp) * 16;
                if (column >= args.head_dim) continue;
                if (alone) write_unit<CODED>(out + column, totals[u], half, factor, lane);
                else write_unit<CODED>(partial + column, sums[u], half, lane);
            }
            if (!alone && warp == 0 && lane % 4 == 0)
                *(float2*)(partial + args.head_dim) = make_float2(rows.largest[half], rows.sum[half]);
        }
        if (alone) continue;
        if (now.first + 16 < now.packed_rows) continue;
        if (last_to_arrive(now.span * args.kv_heads + now.source.kv_head, now.num_splits, (u32*)scores))
            merge_rows<D>(args, group, now, warp, scores);
    }
}

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
        u32 packed_rows = args.num_rows[span] * group.by, first = first_packed + warp * 16;
        if (first_packed >= packed_rows) continue;
        i32 base = (i32)(args.context[span] - args.num_rows[span]);
        Source source = {args.blocks + args.first_block[span], earliest(args, span), 0, kv_head};
        WarpSight sight = load_sights(sights, args, group, span, first, lane);
        // What any row of the block sees.
        i32 end = base + (i32)quotient(min(first_packed + PACKED, packed_rows) - 1, group) + 1;
        if (args.window > 0 && !sight.tree) source.low = max(base + (i32)quotient(first_packed, group) - args.window + 1, 0);
        source.high = end;
        i32 begin = source.low / S::TOKENS * S::TOKENS;
        u32 q[S::STEPS][4];
        load_queries<D, CODED>(q, args, group, span, kv_head, first, lane);
        Rows rows, total;
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
                soften(s, scoring, rows, rescale);
                u32 weights[S::TOKENS / 16][4];
                pack_weights<CODED>(weights, s, shared_address(scales + S::TOKENS), lane);
                // Most tiles leave every largest score as it is, and a factor of 1 changes nothing.
                if (__any_sync(FULL_MASK, rescale[0] != 1.0f || rescale[1] != 1.0f)) rescale_sums(sums, rescale);
#pragma unroll
                for (int u = 0; u < S::STEPS; u++) add_values<D, BF16>(sums[u], weights, tile + SLOTS * WIDE, u, lane);
            }
            if (start >= begin && ((start + S::TOKENS) % SPLIT == 0 || start + S::TOKENS >= end)) {
                gather(rows);
                merge_split(total, totals, rows, sums);
                clear(rows, sums);
            }
        }
        __syncthreads();
#pragma unroll
        for (int half = 0; half < 2; half++) {
            Place place = place_of(args, group, kv_head, first + lane / 4 + half * 8, packed_rows);
            if (!place.real) continue;
            bf16* out = output_at(args, span, place.index, place.head);
            float factor = finish_of(sink_of(args, place.head), total.largest[half], total.sum[half]);
#pragma unroll
            for (int u = 0; u < S::STEPS; u++)
                if (u * 16 < args.head_dim) write_unit<CODED>(out + u * 16, totals[u], half, factor, lane);
        }
    }
}

#define DECODE(name, format, D, blocks)                                                                         \
    extern "C" __global__ void __launch_bounds__(128, blocks) attention_decode_##name##_##D(AttentionArgs args) { \
        decode<D, format>(args);                                                                                \
    }
#define CHUNK(D)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(128, 2) attention_chunk_bf16_##D(AttentionArgs args) {           \
        chunk<D, false>(args, 0);                                                                                 \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(128, 2) attention_chunk_coded_##D(AttentionArgs args, i32 fp8) { \
        chunk<D, true>(args, fp8);                                                                                \
    }
DECODE(bf16, BF16, 64, 3)
DECODE(fp8, FP8, 64, 3)
DECODE(int8, INT8, 64, 3)
DECODE(bf16, BF16, 128, 3)
DECODE(fp8, FP8, 128, 3)
DECODE(int8, INT8, 128, 3)
DECODE(bf16, BF16, 256, 2)
DECODE(fp8, FP8, 256, 2)
DECODE(int8, INT8, 256, 2)
CHUNK(64)
CHUNK(128)
CHUNK(256)
