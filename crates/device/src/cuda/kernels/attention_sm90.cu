// Paged attention of prompt chunks for Hopper: bf16 in and out, f32 scores and sums, products by whole warpgroups.
//
// attention_chunk_bf16_{64,96,128,256}_sm90(AttentionArgs args, const __grid_constant__ CUtensorMap keys_and_values)
//
// A work item (span, query tile) is done once for every kv head. The 128 rows of a tile are the tile's tokens times the
// query heads that share the kv head: a tile has 128 / (heads / kv_heads) tokens, rounded down, and a span of n tokens
// has ceil(n / that) tiles. Keys and values of the chunk are in the cache already. An item walks through its context in
// tiles of keys at fixed positions, from the end to the start; tiles that none of its rows sees are not visited. A tile
// that a row does not see leaves its sums as they are, bit for bit: a row's result does not depend on how its prompt was
// cut, nor on the batch. (It does differ from the decode form's by rounding.) `args.partial` and `args.ancestors` are not
// used: trees are the business of the decode form.
//
// Launch:  384 threads; one block an SM, or fewer; shared bytes 99,488 (head size 64) or 197,792 (96, 128, 256).
//          The host sorts the work list by the number of keys an item sees, most first; blocks take items to and fro.
//          Padded spans (context 0) may be listed: nothing is written for them.
// Map:     the group's whole KV buffer as bf16 [bytes / (2 * head_dim) rows, head_dim], box 64 columns x 16 rows,
//          swizzle 128 bytes, no interleave, zeros beyond the edge. One map serves all layers, keys and values.
// Needs:   heads % kv_heads == 0, heads / kv_heads <= 128, scale > 0, qkv_width % 8 == 0, qkv and out 16-aligned,
//          fewer than 2^30 rows of head_dim in the KV buffer.
//
// Three warpgroups. Two hold 64 rows each: they compute the scores of the next tile of keys while the weights of this
// tile multiply its values. Left alone they drift apart, so that one's exponentials overlap with the other's products;
// making them take turns cost a tenth. The third warpgroup has one warp that copies keys and values into a ring of two
// tiles each, and three warps that bring the next item's queries.
#include "attention_sm90.cuh"

#define STAGES 2
#define CONSUMER_THREADS 256
#define CONSUMER_WARPS 8
#define LOADER_THREADS 96

// Named barrier of the two warpgroups; 0 is __syncthreads.
#define TAIL_BARRIER 1

// A row before the first of the KV buffer, for keys as for values: a copy from there brings zeros.
#define OUTSIDE (-0x40000000)

DEVICE void copy_16(u32 shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}
DEVICE void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }

template <int HEAD_, int TILE_> struct Shape {
    static constexpr int HEAD = HEAD_, TILE = TILE_;
    static constexpr int PANELS = (HEAD + 63) / 64;  // a panel is 64 columns: 128 bytes a row
    static constexpr int QUERY_STAGES = HEAD > 128 ? 1 : 2;
    static constexpr int QUERY_PANEL = QUERY_ROWS * 128, QUERY_BYTES = PANELS * QUERY_PANEL;
    static constexpr int TILE_PANEL = TILE * 128, TILE_BYTES = PANELS * TILE_PANEL;
    static constexpr int BLOCKS = TILE / BLOCK_TOKENS;
    static constexpr bool HELD = HEAD == 128;  // queries in registers; 64 did not gain, 256 has none to spare
    // Offsets into shared memory, from a multiple of 1024.
    static constexpr int KEYS = QUERY_STAGES * QUERY_BYTES;
    static constexpr int VALUES = KEYS + STAGES * TILE_BYTES;
    static constexpr int ITEMS = VALUES + STAGES * TILE_BYTES;
    static constexpr int BARRIERS = ITEMS + 64;
    static constexpr int SHARED_BYTES = BARRIERS + 96 + 1024;
    static_assert(BLOCKS * PANELS <= WARP, "every lane of the copying warp has at most one box");
};
typedef Shape<64, 128> Shape64;
typedef Shape<96, 128> Shape96;
typedef Shape<128, 128> Shape128;
typedef Shape<256, 64> Shape256;
static_assert(Shape64::SHARED_BYTES == 99488 && Shape96::SHARED_BYTES == 197792, "as stated above");
static_assert(Shape128::SHARED_BYTES == 197792 && Shape256::SHARED_BYTES == 197792, "as stated above");

// Barriers in shared memory: full and empty of each stage of queries, keys and values.
struct Barriers {
    u32 base;
    METHOD u32 query_full(u32 stage) const { return base + stage * 8; }
    METHOD u32 query_empty(u32 stage) const { return base + 16 + stage * 8; }
    METHOD u32 key_full(u32 stage) const { return base + 32 + stage * 8; }
    METHOD u32 key_empty(u32 stage) const { return base + 48 + stage * 8; }
    METHOD u32 value_full(u32 stage) const { return base + 64 + stage * 8; }
    METHOD u32 value_empty(u32 stage) const { return base + 80 + stage * 8; }
};

// One query tile of one kv head.
struct Item {
    i32 first_row;    // of the batch
    i32 tokens;       // in this tile
    i32 position;     // of the first token
    i32 context;      // keys of the span
    i32 first_block;  // of the span, in the table
    i32 begin;        // first key visited, a multiple of TILE
    i32 tiles;        // of keys; 0: nothing to do, -1: the list has ended
    i32 kv_head;
};

// Rows divided by the heads of a group, for rows below 128.
struct Group {
    i32 heads, inverse, tokens;
    METHOD explicit Group(const AttentionArgs& args) {
        heads = args.heads / args.kv_heads;
        inverse = 65535 / heads + 1;
        tokens = QUERY_ROWS / heads;
    }
    METHOD i32 token_of(i32 row) const { return (row * inverse) >> 16; }
};

// The item of this block's n-th round. Blocks go to and fro over the list: none gets the longest of every round.
template <int TILE> DEVICE Item item_at(const AttentionArgs& args, i32 group_tokens, u32 total, u32 round) {
    Item item = {};
    u32 work = round * gridDim.x + (round & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    item.tiles = -1;
    if (work >= total) return item;
    u32 pair = work / args.kv_heads, span = args.work[2 * pair];
    i32 first = args.work[2 * pair + 1] * group_tokens, rows = args.num_rows[span];
    item.kv_head = work - pair * args.kv_heads;
    item.context = args.context[span];
    item.first_row = args.first_row[span] + first;
    item.first_block = args.first_block[span];
    item.tokens = item.context == 0 ? 0 : max(min(group_tokens, rows - first), 0);
    item.position = item.context - rows + first;
    item.begin = args.window > 0 ? max(item.position - args.window + 1, 0) / TILE * TILE : 0;
    item.tiles = item.tokens == 0 ? 0 : (item.position + item.tokens - item.begin + TILE - 1) / TILE;
    return item;
}

// A warp looks up 32 items at once, so that the wait for a chain of loads is seldom.
template <int TILE> struct Lookup {
    const AttentionArgs& args;
    Item mine;
    u32 total, round;
    i32 group_tokens;
    int owner;  // lane that has the current item
    METHOD explicit Lookup(const AttentionArgs& args)
        : args(args), total(*args.num_work * args.kv_heads), round(0), group_tokens(Group(args).tokens) {}
    METHOD void next() {
        owner = round % WARP;
        if (owner == 0) mine = item_at<TILE>(args, group_tokens, total, round + threadIdx.x % WARP);
        round++;
    }
    METHOD i32 of_current(i32 field) const { return __shfl_sync(FULL_MASK, field, owner); }
};

// Tile copies of keys and values, by one warp: lane i has the box of block i % BLOCKS and panel i / BLOCKS.
template <typename S>
DEVICE void copy_tiles(const AttentionArgs& args, const TensorMap* map, u32 shared, Barriers barriers) {
    const int lane = threadIdx.x % WARP;
    const bool copies = lane < S::BLOCKS * S::PANELS;
    const i32 block_of_lane = lane % S::BLOCKS, column = lane / S::BLOCKS * 64;
    const u32 place = lane / S::BLOCKS * S::TILE_PANEL + block_of_lane * (BLOCK_TOKENS * 128);
    const i32 block_rows = (i32)(args.block_stride / (S::HEAD * 2));
    const i32 value_rows = (i32)(args.value_offset / (S::HEAD * 2));
    const i32 layer_row = (i32)(args.layer_offset / (S::HEAD * 2));
    u32 keys = 0, values = 0;  // tiles copied
    auto copy = [&](u32& count, u32 base, u32 full, u32 empty, i32 row) {
        u32 stage = count % STAGES;
        barrier_wait(empty + stage * 8, (count / STAGES + 1) & 1);
        if (lane == 0) barrier_expect(full + stage * 8, S::TILE_BYTES);
        __syncwarp();
        if (copies) copy_box(shared + base + stage * S::TILE_BYTES + place, map, column, row, full + stage * 8);
        count++;
    };
    Lookup<S::TILE> lookup(args);
    for (;;) {
        lookup.next();
        const i32 tiles = lookup.of_current(lookup.mine.tiles);
        if (tiles < 0) break;
        if (tiles == 0) continue;
        const u32* table = args.blocks + lookup.of_current(lookup.mine.first_block);
        const i32 position = lookup.of_current(lookup.mine.position), tokens = lookup.of_current(lookup.mine.tokens);
        // Blocks that no row of the tile sees may be anybody's by now: zeros come in their place.
        const i32 first = args.window > 0 ? max(position - args.window + 1, 0) / BLOCK_TOKENS : 0;
        const i32 last = (position + tokens - 1) / BLOCK_TOKENS;
        const i32 head_row = layer_row + lookup.of_current(lookup.mine.kv_head) * BLOCK_TOKENS;
        auto row_of = [&](i32 index) {
            return index >= first && index <= last ? (i32)table[index] * block_rows + head_row : OUTSIDE;
        };
        i32 index = lookup.of_current(lookup.mine.begin) / BLOCK_TOKENS + (tiles - 1) * S::BLOCKS + block_of_lane;
        i32 row = row_of(index), previous = 0;
        for (i32 tile = tiles - 1; tile >= 0; tile--) {
            index -= S::BLOCKS;
            i32 next = row_of(index);
            copy(keys, S::KEYS, barriers.key_full(0), barriers.key_empty(0), row);
            if (tile < tiles - 1)
                copy(values, S::VALUES, barriers.value_full(0), barriers.value_empty(0), previous + value_rows);
            previous = row;
            row = next;
        }
        copy(values, S::VALUES, barriers.value_full(0), barriers.value_empty(0), previous + value_rows);
    }
}

// Queries of the next item, by three warps; the item itself goes along. A thread has one 16-byte column of every
// few rows. Rows that do not exist keep what was there: no other row sees them.
template <typename S> DEVICE void copy_queries(const AttentionArgs& args, u32 shared, Item* items, Barriers barriers) {
    constexpr int COLUMNS = S::HEAD / 8, ROWS_AT_ONCE = LOADER_THREADS / COLUMNS;
    static_assert(LOADER_THREADS % COLUMNS == 0, "whole rows at once");
    const int thread = threadIdx.x - CONSUMER_THREADS - WARP, column = thread % COLUMNS;
    const Group group(args);
    const u32 to_column = shared + column / 8 * S::QUERY_PANEL;
    Lookup<S::TILE> lookup(args);
    for (u32 count = 0;; count++) {
        lookup.next();
        const i32 rows = lookup.of_current(lookup.mine.tokens) * group.heads;
        const u32 stage = count % S::QUERY_STAGES;
        barrier_wait(barriers.query_empty(stage), (count / S::QUERY_STAGES + 1) & 1);
        if (thread == lookup.owner) items[stage] = lookup.mine;  // of the first of the three warps
        const bf16* from = (const bf16*)args.qkv + (i64)lookup.of_current(lookup.mine.first_row) * args.qkv_width +
                           lookup.of_current(lookup.mine.kv_head) * group.heads * S::HEAD + column * 8;
        const u32 to = to_column + stage * S::QUERY_BYTES;
#pragma unroll 2
        for (int row = thread / COLUMNS; row < rows; row += ROWS_AT_ONCE) {
            int token = group.token_of(row), head = row - token * group.heads;
            copy_16(to + row * 128 + ((column ^ row) % 8) * 16, from + (i64)token * args.qkv_width + head * S::HEAD);
        }
        copies_done();
        fence_async_shared();
        barrier_arrive(barriers.query_full(stage));
        if (lookup.of_current(lookup.mine.tiles) < 0) break;
    }
}

// The 64 rows of one warpgroup, item by item.
template <typename S>
DEVICE void attend(const AttentionArgs& args, u32 shared, u8* shared_bytes, const Item* items, Barriers barriers) {
    const int half = threadIdx.x / 128, lane = threadIdx.x % WARP;
    const int first = half * 64 + threadIdx.x % 128 / WARP * 16 + lane / 4;  // row of the tile; the other is 8 further
    const Group group(args);
    const float factor = args.soft_cap > 0.0f ? LOG2_E : args.scale * LOG2_E;
    u32 keys = 0, values = 0;  // tiles done
    for (u32 count = 0;; count++) {
        const u32 query_stage = count % S::QUERY_STAGES;
        barrier_wait(barriers.query_full(query_stage), (count / S::QUERY_STAGES) & 1);
        const Item item = items[query_stage];
        if (item.tiles < 0) break;
        if (item.tiles == 0) {
            if (lane == 0) barrier_arrive(barriers.query_empty(query_stage));
            continue;
        }
        const u32 queries = shared + query_stage * S::QUERY_BYTES + half * (64 * 128);
        Rows<S::HEAD, S::TILE, S::HELD> rows;
        rows.begin();
        const i32 window = args.window > 0 ? args.window : 0x40000000;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            i32 position = item.position + group.token_of(first + 8 * r);
            rows.high[r] = min(position, item.context - 1);
            rows.low[r] = position - window + 1;
        }
        rows.sure_high = min(item.position + group.token_of(half * 64), item.context - 1);
        rows.sure_low = item.position + group.token_of(half * 64 + 63) - window + 1;

        if constexpr (S::HELD) {
            rows.hold_queries(queries);
            __syncwarp();
            if (lane == 0) barrier_arrive(barriers.query_empty(query_stage));
        }

        i32 start = item.begin + (item.tiles - 1) * S::TILE;
        if (start + S::TILE > item.context && item.context % BLOCK_TOKENS != 0) {
            // Nothing was written to the rest of the last block: a weight of zero times what lies there may be NaN.
            u32 stage = values % STAGES;
            barrier_wait(barriers.value_full(stage), (values / STAGES) & 1);
            i32 end = (item.context - start) * 128, rest = 128 * BLOCK_TOKENS - end % (128 * BLOCK_TOKENS);
            for (int panel = 0; panel < S::PANELS; panel++) {
                u8* bytes = shared_bytes + S::VALUES + stage * S::TILE_BYTES + panel * S::TILE_PANEL;
                if (threadIdx.x * 16 < rest) *(uint4*)(bytes + end + threadIdx.x * 16) = make_uint4(0, 0, 0, 0);
            }
            fence_async_shared();
            named_barrier(TAIL_BARRIER, CONSUMER_THREADS);
        }

        barrier_wait(barriers.key_full(keys % STAGES), (keys / STAGES) & 1);
        rows.start_scores(queries, shared + S::KEYS + keys % STAGES * S::TILE_BYTES);
        group_wait<0>();
        pin(rows.scores);
        if (lane == 0) barrier_arrive(barriers.key_empty(keys % STAGES));
        keys++;
        rows.weigh(args, start, factor);
        if (item.tiles > 1) barrier_wait(barriers.key_full(keys % STAGES), (keys / STAGES) & 1);
        rows.pack_weights();
        for (i32 tile = item.tiles - 2; tile >= 0; tile--) {
            start -= S::TILE;
            const u32 key_stage = keys % STAGES, value_stage = values % STAGES;
            rows.start_scores(queries, shared + S::KEYS + key_stage * S::TILE_BYTES);
            barrier_wait(barriers.value_full(value_stage), (values / STAGES) & 1);
            rows.start_sums(shared + S::VALUES + value_stage * S::TILE_BYTES);
            group_wait<1>();
            pin(rows.scores);
            if (lane == 0) barrier_arrive(barriers.key_empty(key_stage));
            keys++;
            rows.weigh(args, start, factor);
            // Between the exponentials and the wait for the other product, so that the compiler cannot swap them.
            if (tile > 0) barrier_wait(barriers.key_full(keys % STAGES), (keys / STAGES) & 1);
            group_wait<0>();
            pin(rows.sums);
            if (lane == 0) barrier_arrive(barriers.value_empty(value_stage));
            rows.shrink_sums();
            rows.pack_weights();
            values++;
        }
        if (!S::HELD && lane == 0) barrier_arrive(barriers.query_empty(query_stage));
        const u32 value_stage = values % STAGES;
        barrier_wait(barriers.value_full(value_stage), (values / STAGES) & 1);
        rows.start_sums(shared + S::VALUES + value_stage * S::TILE_BYTES);
        group_wait<0>();
        pin(rows.sums);
        if (lane == 0) barrier_arrive(barriers.value_empty(value_stage));
        values++;

#pragma unroll
        for (int r = 0; r < 2; r++) {
            i32 row = first + 8 * r, token = group.token_of(row);
            i32 head = item.kv_head * group.heads + row - token * group.heads;
            bool exists = token < item.tokens;
            float total = quad_sum(rows.total[r]), scale = 1.0f;
            if (args.sinks != nullptr && exists) {
                float largest = rows.largest[r] * factor, sink = args.sinks[head] * LOG2_E, base = fmaxf(largest, sink);
                scale = power_of_two(largest - base);
                total = total * scale + power_of_two(sink - base);
            }
            bf16* out = (bf16*)args.out + ((i64)(item.first_row + token) * args.heads + head) * S::HEAD;
            rows.store(exists ? out : nullptr, r, scale * reciprocal(total));
        }
    }
}

template <typename S> DEVICE void attention_chunk(const AttentionArgs& args, const TensorMap* map) {
    extern __shared__ u8 dynamic[];
    u8* aligned = dynamic + (1024 - shared_address(dynamic) % 1024) % 1024;
    const u32 shared = shared_address(aligned);
    Item* items = (Item*)(aligned + S::ITEMS);
    const Barriers barriers = {shared + S::BARRIERS};
    release_next();
    if (threadIdx.x == 0) {
        for (u32 stage = 0; stage < 2; stage++) {
            barrier_init(barriers.query_full(stage), LOADER_THREADS);
            barrier_init(barriers.query_empty(stage), CONSUMER_WARPS);
            barrier_init(barriers.key_full(stage), 1);
            barrier_init(barriers.key_empty(stage), CONSUMER_WARPS);
            barrier_init(barriers.value_full(stage), 1);
            barrier_init(barriers.value_empty(stage), CONSUMER_WARPS);
        }
        barrier_init_done();
    }
    __syncthreads();
    wait_for_previous();
    if (threadIdx.x >= CONSUMER_THREADS) {
        // The block has 3 x 168 registers a thread of a warpgroup: what two take, the third must have given.
        give_registers<56>();
        if (threadIdx.x < CONSUMER_THREADS + WARP)
            copy_tiles<S>(args, map, shared, barriers);
        else
            copy_queries<S>(args, shared, items, barriers);
    } else {
        take_registers<224>();
        attend<S>(args, shared, aligned, items, barriers);
    }
}

#define ATTENTION_CHUNK(HEAD)                                                                                     \
    extern "C" __global__ void __launch_bounds__(384, 1) attention_chunk_bf16_##HEAD##_sm90(                      \
        const __grid_constant__ AttentionArgs args, const __grid_constant__ TensorMap keys_and_values) {            \
        attention_chunk<Shape##HEAD>(args, &keys_and_values);                                                     \
    }
ATTENTION_CHUNK(64)
ATTENTION_CHUNK(96)
ATTENTION_CHUNK(128)
ATTENTION_CHUNK(256)
