// Attention in decode form: four warps work on tiles of keys and values, a fifth copies them, a sixth counts splits.
//
// The copying warp walks through the block's units and runs ahead by as many tiles as shared memory holds, from one unit
// into the next, so that there is always much under way. A tile of keys and one of values have a place each, told full
// and empty by barriers in shared memory. The working warps learn what a tile is from a note beside it. When they have
// written a partial result they post that; the counting warp waits for memory in their stead and, where all splits of a
// span are done, asks them to merge.
#pragma once
#include "attention_merge.cuh"
#include "attention_path.cuh"

#define WORKERS 128
#define MOST_PLACES 6
#define NOTES (MOST_PLACES + 1)  // one more, so that a tile's note outlives its keys
#define MOST_POSTS 4
#define MOST_REQUESTS 8

// Of the four warps that work.
DEVICE void workers_barrier() { asm volatile("bar.sync 1, 128;" ::: "memory"); }

// One split of one span for one kv head, 16 packed rows of it, and a tile of its tokens.
struct Unit {
    u32 span, item, packed_rows;
    SpanRows rows;
    Source source;
    i32 begin, num_splits;
    u32 first;  // packed row
    i32 start;  // position
    u64 own;    // of a row of a tree, and where its path begins
    i32 path_start;
};

// What the units of a block are made of is read before it is needed: the work list two units ahead, the rest one.
struct Units {
    u32 number, num;           // this unit, and how many there are
    u32 span, split;           // of the next one
    u32 rows, context, table, first_row;
    u64 own;
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
    units.first_row = __ldg(args.first_row + units.span);
    units.own = path_of(args, units.first_row, units.rows);
}
// Takes the unit that was read, and reads the one after it.
template <int TOKENS> DEVICE Unit next_unit(const AttentionArgs& args, Units& units, u32 group) {
    Unit out;
    i32 low = args.window > 0 ? max((i32)(units.context - units.rows) - args.window + 1, 0) : 0;
    out.span = units.span;
    out.item = quotient(units.number, units.kv_heads);
    out.packed_rows = units.rows * group;
    out.rows = {units.first_row, units.rows, (i32)(units.context - units.rows)};
    out.source.table = args.blocks + units.table;
    out.source.kv_head = units.number - out.item * units.kv_heads.by;
    out.source.low = low;
    out.source.high = min(units.split * SPLIT + SPLIT, units.context);
    out.begin = max((i32)units.split * SPLIT, low) / TOKENS * TOKENS;
    out.num_splits = (units.context + SPLIT - 1) / SPLIT - low / SPLIT;
    out.first = 0;
    out.start = out.begin;
    out.own = units.own;
    out.path_start = path_base(units.own, units.context);
    units.number += gridDim.x;
    units.span = units.later_span;
    units.split = units.later_split;
    read_span(args, units);
    read_item(args, units, units.number + gridDim.x, units.later_span, units.later_split);
    return out;
}

// Before the kernel that writes this step's keys is done, a block that has one piece of work alone fetches that piece's
// keys and values into the second-level cache. Nothing is read, so what is still to be written is not missed.
template <int F> DEVICE void warm_up(const AttentionArgs& args, const Unit& unit, int lane) {
#if __CUDA_ARCH__ >= 900
    i32 position = unit.start / SPLIT * SPLIT + lane / 2 * BLOCK_TOKENS;  // 32 lanes: 16 blocks of keys and values
    if (position + BLOCK_TOKENS <= unit.source.low || position >= unit.source.high) return;
    u32 bytes = head_bytes_of<F>(args);
    const u8* at = kv_section(args, __ldg(unit.source.table + position / BLOCK_TOKENS), lane % 2) +
                   kv_head_at(unit.source.kv_head, 0, bytes);
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(at), "r"(BLOCK_TOKENS * bytes) : "memory");
#endif
}

// What the workers must know of a tile.
struct Note {
    Merging merging;
    SpanRows rows;
    u32 item, first, start;  // place in the work list, packed row, position
    u32 bits;                // 1: the unit's first tile, 2: its last, 4: no more tiles
};

// Shared memory: a tile's weights, its largest scores and the split's sums of each row by warp, what rows see (and factors,
// when splits are merged), barriers, notes, posts, requests, then tiles of keys and tiles of values.
enum {
    LARGEST_AT = 2048,
    SUMS_AT = LARGEST_AT + 256,
    SIGHTS_AT = SUMS_AT + 256,
    BARRIERS_AT = SIGHTS_AT + 4 * WARP * 16,
    NOTES_AT = BARRIERS_AT + (4 * MOST_PLACES + MOST_POSTS) * 8,
    POSTS_AT = NOTES_AT + NOTES * sizeof(Note),
    REQUESTS_AT = POSTS_AT + MOST_POSTS * sizeof(Merging),
    COUNTS_AT = REQUESTS_AT + MOST_REQUESTS * sizeof(Merging),
    TILES_AT = 5504,
};
static_assert(COUNTS_AT + 8 <= TILES_AT, "what lies before the tiles");
DEVICE u32 num_places(u32 tile_bytes) {
    u32 bytes;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
    return min((bytes - TILES_AT) / (2 * tile_bytes), (u32)MOST_PLACES);
}

// Barriers in shared memory, 8 bytes each.
DEVICE void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(barrier) : "memory");
}
// This lane arrives when what it copied so far is there.
DEVICE void barrier_arrive_with_copies(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
DEVICE void barrier_wait(u32 barrier, u32 parity) {
    u32 done = 0;
    while (!done)
#if __CUDA_ARCH__ >= 900
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
#else
        asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
#endif
}
// The four barriers of a place.
enum { KEYS_FULL, VALUES_FULL, KEYS_EMPTY, VALUES_EMPTY };
DEVICE u32 barrier_at(u32 barriers, u32 place, int which) { return barriers + (place * 4 + which) * 8; }

// Posts are counted by the workers, each warp for itself; how many were read, and how many requests came of them, stands
// in shared memory.
struct Counts {
    u32 posts, requests;
};

// The place a tile is in, and whether its barriers are in an odd round.
struct Turn {
    u32 place, round, num, note;
};
DEVICE void advance(Turn& turn) {
    turn.note = turn.note + 1 == NOTES ? 0 : turn.note + 1;
    turn.place++;
    if (turn.place == turn.num) turn.place = 0, turn.round ^= 1;
}

// One warp copies the keys (value = 0) or the values of a tile.
template <int D, int F>
DEVICE void copy_tile(const AttentionArgs& args, const Source& source, const u32 (&blocks)[Shape<D, F>::TOKENS / 16], i32 start,
                      int value, u32 to, int lane) {
    typedef Shape<D, F> S;
    constexpr int PIECES = S::ROW_BYTES / 16, AT_ONCE = WARP / PIECES;
    u32 head_bytes = head_bytes_of<F>(args), column = lane % PIECES, mine = lane / PIECES;
    u32 num_real = source.high - source.low, offset = kv_head_at(source.kv_head, mine, head_bytes) + column * 16;
    i32 distance = start + (i32)mine - source.low;
    if (column * 16 < head_bytes) {
#pragma unroll
        for (int block = 0; block < S::TOKENS / 16; block++) {
            const u8* from = kv_section(args, blocks[block], value) + offset;
#pragma unroll
            for (int row = 0; row < 16; row += AT_ONCE) {
                bool real = (u32)(distance + block * 16 + row) < num_real;
                copy_16(to + (block * 16 + row + mine) * S::ROW + column * 16, from + row * head_bytes, real);
            }
        }
    }
    if (F != BF16) {
#pragma unroll
        for (int half = 0; half < S::TOKENS / WARP; half++) {
            u32 token = half * WARP + lane, block = lane < 16 ? blocks[half * 2] : blocks[half * 2 + 1];
            bool real = (u32)(start + (i32)token - source.low) < num_real;
            copy_4(to + S::SCALES_AT + token * 4,
                   kv_section(args, block, value) + kv_scale_at(args, source.kv_head, token % 16), real);
        }
    }
}
template <int N> DEVICE void read_table(u32 (&out)[N], const Source& source, i32 start) {
    i32 first = source.low / BLOCK_TOKENS, last = (source.high - 1) / BLOCK_TOKENS;
#pragma unroll
    for (int i = 0; i < N; i++) out[i] = __ldg(source.table + min(max(start / BLOCK_TOKENS + i, first), last));
}

template <int D, int F> DEVICE void copy_tiles(const AttentionArgs& args, u8* memory, Turn turn, u32 group, int lane) {
    typedef Shape<D, F> S;
    u32 barriers = shared_address(memory + BARRIERS_AT), tiles = shared_address(memory + TILES_AT);
    Note* notes = (Note*)(memory + NOTES_AT);
    Units units;
    units.kv_heads = divisor_of(args.kv_heads);
    units.num = *args.num_work * args.kv_heads;
    units.number = blockIdx.x;
    bool more = units.number < units.num;
    Unit now, next;
    u32 blocks[S::TOKENS / 16], next_blocks[S::TOKENS / 16];
    if (more) {
        read_item(args, units, units.number, units.span, units.split);
        read_item(args, units, units.number + gridDim.x, units.later_span, units.later_split);
        read_span(args, units);
        next = next_unit<S::TOKENS>(args, units, group);
        read_table(next_blocks, next.source, next.start);
        if (units.num <= gridDim.x) warm_up<F>(args, next, lane);
    }
    wait_for_previous();
#pragma unroll 1
    while (more) {
        now = next;
#pragma unroll
        for (int i = 0; i < S::TOKENS / 16; i++) blocks[i] = next_blocks[i];
        next.start += S::TOKENS;
        bool last = next.start >= next.source.high;
        if (last) {
            next.first += 16;
            next.start = next.begin;
            if (next.first >= next.packed_rows) {
                more = units.number < units.num;
                next = next_unit<S::TOKENS>(args, units, group);
            }
        }
        if (more) read_table(next_blocks, next.source, next.start);
        barrier_wait(barrier_at(barriers, turn.place, KEYS_EMPTY), turn.round ^ 1);
        if (lane == 0) {
            u32 first_item = now.item - (now.begin / SPLIT - now.source.low / SPLIT);
            u32 counter = now.span * args.kv_heads + now.source.kv_head, bits = (last ? 2 : 0) + (now.start == now.begin ? 1 : 0);
            notes[turn.note] = {{counter, now.source.kv_head, first_item, (u32)now.num_splits, now.packed_rows, now.rows.first},
                                 now.rows, now.item, now.first, (u32)now.start, bits};
            barrier_arrive(barrier_at(barriers, turn.place, KEYS_FULL));
        }
        bool on_path = now.own != 0 && now.start + S::TOKENS > now.path_start;
        u32 to = tiles + turn.place * S::BYTES;
        if (on_path) copy_path_tile<D, F>(args, now.source, now.own, now.path_start, now.start, 0, to, lane);
        else copy_tile<D, F>(args, now.source, blocks, now.start, 0, to, lane);
        barrier_arrive_with_copies(barrier_at(barriers, turn.place, KEYS_FULL));
        barrier_wait(barrier_at(barriers, turn.place, VALUES_EMPTY), turn.round ^ 1);
        to += turn.num * S::BYTES;
        if (on_path) copy_path_tile<D, F>(args, now.source, now.own, now.path_start, now.start, 1, to, lane);
        else copy_tile<D, F>(args, now.source, blocks, now.start, 1, to, lane);
        barrier_arrive_with_copies(barrier_at(barriers, turn.place, VALUES_FULL));
        advance(turn);
    }
    barrier_wait(barrier_at(barriers, turn.place, KEYS_EMPTY), turn.round ^ 1);
    if (lane == 0) {
        notes[turn.note].bits = 4;
        barrier_arrive(barrier_at(barriers, turn.place, KEYS_FULL));
    }
    barrier_arrive_with_copies(barrier_at(barriers, turn.place, KEYS_FULL));
    wait_for_copies<0>();
}

// Counts splits as they are posted, until a post of none.
DEVICE void count_splits(u8* memory, int lane) {
    u32 posted = shared_address(memory + BARRIERS_AT) + 4 * MOST_PLACES * 8;
    Merging* requests = (Merging*)(memory + REQUESTS_AT);
    volatile Counts* counts = (volatile Counts*)(memory + COUNTS_AT);
    wait_for_previous();
    if (lane != 0) return;
    u32 num_requests = 0;
#pragma unroll 1
    for (u32 post = 0;; post++) {
        barrier_wait(posted + post % MOST_POSTS * 8, post / MOST_POSTS & 1);
        Merging merging = ((const Merging*)(memory + POSTS_AT))[post % MOST_POSTS];
        if (merging.num_splits == 0) break;
        if (last_to_arrive(merging.counter, merging.num_splits)) {
            requests[num_requests++ % MOST_REQUESTS] = merging;
            __threadfence_block();
            counts->requests = num_requests;
        }
        __threadfence_block();
        counts->posts = post + 1;
    }
}

// A working warp's side of it.
struct Posting {
    u32 posts, merged;
};
DEVICE void post(u8* memory, Posting& posting, const Merging& merging, int warp, int lane) {
    volatile Counts* counts = (volatile Counts*)(memory + COUNTS_AT);
    while (posting.posts - counts->posts >= MOST_POSTS) {}
    __syncwarp();
    if (warp == 0 && lane == 0) ((Merging*)(memory + POSTS_AT))[posting.posts % MOST_POSTS] = merging;
    __syncwarp();
    if (lane == 0)
        barrier_arrive(shared_address(memory + BARRIERS_AT) + (4 * MOST_PLACES + posting.posts % MOST_POSTS) * 8);
    posting.posts++;
}
// Merges this warp's rows of what was asked for so far.
template <int D>
DEVICE void merge_requests(const AttentionArgs& args, u8* memory, Posting& posting, const Divisor& group, int warp, int lane) {
    u32 requests = __shfl_sync(FULL_MASK, ((volatile Counts*)(memory + COUNTS_AT))->requests, 0);
    __threadfence_block();
#pragma unroll 1
    for (; posting.merged < requests; posting.merged++) {
        Merging merging = ((const Merging*)(memory + REQUESTS_AT))[posting.merged % MOST_REQUESTS];
        merge_rows<D>(args, group, merging, warp, (float4*)(memory + SIGHTS_AT) + warp * WARP);
    }
}

// Writes what a split came to: the output if it is the only one, else a partial result.
template <bool CODED, int UNITS>
DEVICE void write_split(const AttentionArgs& args, const Divisor& group, const Note& note, const Rows<1>& rows,
                        const float (&sums)[UNITS][2][4], int warp, int lane) {
    bool alone = note.merging.num_splits == 1;
    Rows<1> total;
    float totals[UNITS][2][4];
    clear(total, totals);
    if (alone) merge_split(total, totals, rows, sums);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        Place place = place_of(args, group, note.merging.kv_head, note.first + lane / 4 + half * 8, note.merging.packed_rows);
        if (!place.real) continue;
        float* partial = args.partial + partial_at(args, note.item, place.index, place.head);
        bf16* out = output_at(args, note.rows.first, place.index, place.head);
        float factor = finish_of(sink_of(args, place.head), total.largest[half], total.sum[half][0]);
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            int column = (u * 4 + warp) * 16;
            if (column >= args.head_dim) continue;
            if (alone) write_unit<CODED>(out + column, totals[u], half, factor, lane);
            else write_unit<CODED>(partial + column, sums[u], half, lane);
        }
        if (!alone && warp == 0 && lane % 4 == 0)
            *(float2*)(partial + args.head_dim) = make_float2(rows.largest[half], rows.sum[half][0]);
    }
}

// One tile of keys and values: scores of the warp's quarter of its tokens, then sums of the warp's quarter of the columns.
template <int D, int F, int STEPS, int UNITS>
DEVICE void work_on_tile(u8* memory, const Turn& turn, const u32 (&q)[STEPS][4], float (&sums)[UNITS][2][4], Rows<1>& rows,
                         const Scoring& scoring, const WarpSight& sight, i32 start, int warp, int lane) {
    typedef Shape<D, F> S;
    constexpr int EIGHTS = S::EIGHTS / 4;
    constexpr bool CODED = F != BF16;
    u32 barriers = shared_address(memory + BARRIERS_AT), tile = shared_address(memory + TILES_AT) + turn.place * S::BYTES;
    uint4* shared_weights = (uint4*)memory + lane;          // [16 tokens][lane]
    float* shared_largest = (float*)(memory + LARGEST_AT);  // [16 rows][warp]
    const RowSight* sights = (const RowSight*)(memory + SIGHTS_AT) + warp * WARP;
    int eighth = warp * EIGHTS;
    float s[EIGHTS][4], rescale[2];
    dot_products<D, F>(s, q, tile, eighth, lane);
    score<CODED>(s, scoring, sight, sights, start + eighth * 8, tile + S::SCALES_AT + eighth * 32, lane);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float largest = largest_of(s, half);
        if (lane % 4 == 0) shared_largest[(lane / 4 + half * 8) * 4 + warp] = largest;
    }
    workers_barrier();
    if (lane == 0) barrier_arrive(barrier_at(barriers, turn.place, KEYS_EMPTY));
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float4 four = *(const float4*)(shared_largest + (lane / 4 + half * 8) * 4);
        float largest = fmaxf(fmaxf(four.x, four.y), fmaxf(four.z, four.w));
        float origin = origin_of_tile(rows, half, scoring, largest, rescale[half]);
        rows.sum[half][0] = __fmaf_rn(rows.sum[half][0], rescale[half], weigh<0, EIGHTS>(s, half, scoring, origin));
    }
    u32 packed[EIGHTS][2], weights[S::TOKENS / 16][4];
    tile += turn.num * S::BYTES;
    if (CODED) barrier_wait(barrier_at(barriers, turn.place, VALUES_FULL), turn.round);
    pack_weights<CODED>(packed, s, tile + S::SCALES_AT + eighth * 32, lane);
#pragma unroll
    for (int n = 0; n < EIGHTS; n++)
        ((uint2*)(shared_weights + (eighth + n) / 2 * WARP))[(eighth + n) % 2] = make_uint2(packed[n][0], packed[n][1]);
    workers_barrier();
    rescale_sums(sums, rescale);
#pragma unroll
    for (int step = 0; step < S::TOKENS / 16; step++) {
        uint4 four = shared_weights[step * WARP];
        weights[step][0] = four.x, weights[step][1] = four.y, weights[step][2] = four.z, weights[step][3] = four.w;
    }
    if (!CODED) barrier_wait(barrier_at(barriers, turn.place, VALUES_FULL), turn.round);
#pragma unroll
    for (int u = 0; u < UNITS; u++) add_values<D, F, true>(sums[u], weights, tile, u * 4 + warp, lane);
    __syncwarp();
    if (lane == 0) barrier_arrive(barrier_at(barriers, turn.place, VALUES_EMPTY));
}

// Ends a split: sums of weights are gathered from all lanes and warps.
DEVICE void gather_sums(Rows<1>& rows, float* shared_sums, int warp, int lane) {  // [16 rows][warp]
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum = gathered(rows.sum[half][0]);
        if (lane % 4 == 0) shared_sums[(lane / 4 + half * 8) * 4 + warp] = sum;
    }
    workers_barrier();
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float4 four = *(const float4*)(shared_sums + (lane / 4 + half * 8) * 4);
        rows.sum[half][0] = sum_of_quarters(four.x, four.y, four.z, four.w);
    }
}

template <int D, int F>
DEVICE void work_on_tiles(const AttentionArgs& args, u8* memory, Turn turn, const Divisor& group, int warp, int lane) {
    typedef Shape<D, F> S;
    constexpr int UNITS = S::STEPS / 4;
    constexpr bool CODED = F != BF16;
    u32 barriers = shared_address(memory + BARRIERS_AT);
    RowSight* sights = (RowSight*)(memory + SIGHTS_AT) + warp * WARP;
    Scoring scoring = scoring_of(args);
    Posting posting = {0, 0};
    bool more = true;
    wait_for_previous();
#pragma unroll 1
    while (more) {
        barrier_wait(barrier_at(barriers, turn.place, KEYS_FULL), turn.round);
        const Note* note = (const Note*)(memory + NOTES_AT) + turn.note;
        more = !(note->bits & 4);
        if (more) {
            u32 q[S::STEPS][4];
            Rows<1> rows;  // sums are of this warp's quarter of each tile
            float sums[UNITS][2][4];
            load_queries<D, CODED>(q, args, group, note->rows, note->merging.kv_head, note->first, lane);
            WarpSight sight = load_sights(sights, args, group, note->rows, note->first, lane);
            clear(rows, sums);
#pragma unroll 1
            while (true) {
                work_on_tile<D, F>(memory, turn, q, sums, rows, scoring, sight, (i32)note->start, warp, lane);
                advance(turn);
                if (note->bits & 2) break;
                barrier_wait(barrier_at(barriers, turn.place, KEYS_FULL), turn.round);
                note = (const Note*)(memory + NOTES_AT) + turn.note;
            }
            gather_sums(rows, (float*)(memory + SUMS_AT), warp, lane);
            write_split<CODED>(args, group, *note, rows, sums, warp, lane);
            if (note->merging.num_splits > 1 && note->first + 16 >= note->merging.packed_rows)
                post(memory, posting, note->merging, warp, lane);
        } else {
            Merging none = {0, 0, 0, 0, 0, 0};
            u32 posts = posting.posts;
            post(memory, posting, none, warp, lane);
            while (((volatile Counts*)(memory + COUNTS_AT))->posts != posts) {}
            __syncwarp();
        }
        merge_requests<D>(args, memory, posting, group, warp, lane);
    }
}

template <int D, int F> DEVICE void decode(const AttentionArgs& args) {
    extern __shared__ __align__(16) u8 memory[];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    Turn turn = {0, 0, num_places(Shape<D, F>::BYTES), 0};
    Divisor group = divisor_of(args.heads / args.kv_heads);
    release_next();
    if (threadIdx.x < turn.num * 4) {
        int which = threadIdx.x % 4;
        barrier_init(shared_address(memory + BARRIERS_AT) + threadIdx.x * 8, which == KEYS_FULL ? WARP + 1 : which == VALUES_FULL ? WARP : 4);
    }
    if (threadIdx.x < MOST_POSTS) barrier_init(shared_address(memory + BARRIERS_AT) + (4 * MOST_PLACES + threadIdx.x) * 8, 4);
    if (threadIdx.x == 0) *(Counts*)(memory + COUNTS_AT) = {0, 0};
    clear_keys<D, F, WORKERS + 2 * WARP>(args, memory + TILES_AT, turn.num);
    __syncthreads();
    if (warp == WORKERS / WARP) copy_tiles<D, F>(args, memory, turn, group.by, lane);
    else if (warp == WORKERS / WARP + 1) count_splits(memory, lane);
    else work_on_tiles<D, F>(args, memory, turn, group, warp, lane);
}
