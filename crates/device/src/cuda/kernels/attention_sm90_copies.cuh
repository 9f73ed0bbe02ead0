// What Hopper's kernels for prompt chunks share: items of work, the rings of tiles in shared memory, the warps that copy
// into them, and writing rows. Keys and values come by the copy engine, queries by ordinary copies, since their rows lie
// far apart.
#pragma once
#include "attention.cuh"
#include "hopper.cuh"

#define METHOD __device__ __forceinline__
#define QUERY_ROWS 128

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

// TILE keys at a time, rings of STAGES tiles of them and of QUERY_STAGES tiles of queries. An item's keys are visited from
// its start on if ASCENDING, else from its end.
template <int HEAD_, int TILE_, int STAGES_, int QUERY_STAGES_, bool ASCENDING_> struct Shape {
    static constexpr int HEAD = HEAD_, TILE = TILE_, STAGES = STAGES_, QUERY_STAGES = QUERY_STAGES_;
    static constexpr bool ASCENDING = ASCENDING_;
    static constexpr int PANELS = (HEAD + 63) / 64;  // a panel is 64 columns: 128 bytes a row
    static constexpr int QUERY_PANEL = QUERY_ROWS * 128, QUERY_BYTES = PANELS * QUERY_PANEL;
    static constexpr int TILE_PANEL = TILE * 128, TILE_BYTES = PANELS * TILE_PANEL;
    static constexpr int BLOCKS = TILE / BLOCK_TOKENS;
    // Offsets into shared memory, from a multiple of 1024.
    static constexpr int KEYS = QUERY_STAGES * QUERY_BYTES;
    static constexpr int VALUES = KEYS + STAGES * TILE_BYTES;
    static constexpr int ITEMS = VALUES + STAGES * TILE_BYTES;
    static constexpr int BARRIERS = ITEMS + 64;
    static constexpr int SHARED_BYTES = BARRIERS + 32 + 32 * STAGES + 1024;
    static_assert(BLOCKS * PANELS <= WARP, "every lane of the copying warp has at most one box");
};

// Barriers in shared memory: full and empty of each stage of queries, keys and values.
template <int STAGES> struct Barriers {
    u32 base;
    METHOD u32 query_full(u32 stage) const { return base + stage * 8; }
    METHOD u32 query_empty(u32 stage) const { return base + 16 + stage * 8; }
    METHOD u32 key_full(u32 stage) const { return base + 32 + stage * 8; }
    METHOD u32 key_empty(u32 stage) const { return base + 32 + (STAGES + stage) * 8; }
    METHOD u32 value_full(u32 stage) const { return base + 32 + (2 * STAGES + stage) * 8; }
    METHOD u32 value_empty(u32 stage) const { return base + 32 + (3 * STAGES + stage) * 8; }
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
DEVICE void copy_tiles(const AttentionArgs& args, const TensorMap* map, u32 shared, Barriers<S::STAGES> barriers) {
    const int lane = threadIdx.x % WARP;
    const bool copies = lane < S::BLOCKS * S::PANELS;
    const i32 block_of_lane = lane % S::BLOCKS, column = lane / S::BLOCKS * 64;
    const u32 place = lane / S::BLOCKS * S::TILE_PANEL + block_of_lane * (BLOCK_TOKENS * 128);
    const i32 block_rows = (i32)(args.block_stride / (S::HEAD * 2));
    const i32 value_rows = (i32)(args.value_offset / (S::HEAD * 2));
    const i32 layer_row = (i32)(args.layer_offset / (S::HEAD * 2));
    u32 keys = 0, values = 0;  // tiles copied
    auto copy = [&](u32& count, u32 base, u32 full, u32 empty, i32 row) {
        u32 stage = count % S::STAGES;
        barrier_wait(empty + stage * 8, (count / S::STAGES + 1) & 1);
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
        i32 index = lookup.of_current(lookup.mine.begin) / BLOCK_TOKENS + block_of_lane;
        if (!S::ASCENDING) index += (tiles - 1) * S::BLOCKS;
        i32 row = row_of(index), previous = 0;
        // The step's own lists were there before its first kernel.
        if (keys == 0) wait_for_previous();
        for (i32 tile = 0; tile < tiles; tile++) {
            index += S::ASCENDING ? S::BLOCKS : -S::BLOCKS;
            i32 next = row_of(index);
            copy(keys, S::KEYS, barriers.key_full(0), barriers.key_empty(0), row);
            if (tile > 0)
                copy(values, S::VALUES, barriers.value_full(0), barriers.value_empty(0), previous + value_rows);
            previous = row;
            row = next;
        }
        copy(values, S::VALUES, barriers.value_full(0), barriers.value_empty(0), previous + value_rows);
    }
}

// Queries of the next item, by three warps; the item itself goes along. A thread has one 16-byte column of every
// few rows. Rows that do not exist keep what was there: no other row sees them.
template <typename S> DEVICE void copy_queries(const AttentionArgs& args, u32 shared, Item* items,
                                                Barriers<S::STAGES> barriers) {
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
        if (count == 0) wait_for_previous();
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

template <typename S> DEVICE void init_barriers(Barriers<S::STAGES> barriers) {
    for (u32 stage = 0; stage < 2; stage++) {
        barrier_init(barriers.query_full(stage), LOADER_THREADS);
        barrier_init(barriers.query_empty(stage), CONSUMER_WARPS);
    }
    for (u32 stage = 0; stage < S::STAGES; stage++) {
        barrier_init(barriers.key_full(stage), 1);
        barrier_init(barriers.key_empty(stage), CONSUMER_WARPS);
        barrier_init(barriers.value_full(stage), 1);
        barrier_init(barriers.value_empty(stage), CONSUMER_WARPS);
    }
    barrier_init_done();
}

// Nothing was written to the rest of a span's last block: a weight of zero times what lies there may be NaN. `values` is
// the tile that begins at `start`; both warpgroups take part.
template <typename S> DEVICE void clear_tail(u8* values, i32 start, i32 context) {
    i32 end = (context - start) * 128, rest = 128 * BLOCK_TOKENS - end % (128 * BLOCK_TOKENS);
    for (int panel = 0; panel < S::PANELS; panel++)
        if (threadIdx.x * 16 < rest)
            *(uint4*)(values + panel * S::TILE_PANEL + end + threadIdx.x * 16) = make_uint4(0, 0, 0, 0);
    fence_async_shared();
    named_barrier(TAIL_BARRIER, CONSUMER_THREADS);
}

// Row r of the two that a thread has parts of, times `scale`, where `out` is not null. Of every 8 columns a thread has two:
// entry 4 * j + 2 * r + e is column 8 * j + 2 * (lane % 4) + e. All lanes of a warp must call it.
template <int HEAD> DEVICE void store_row(const float (&sums)[HEAD / 2], bf16* out, int r, float scale) {
    const int quarter = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < HEAD / 8; j += 4) {
        // Four lanes have 2 columns each of 4 groups of 8; afterwards each has one whole group.
        u32 x[4];
#pragma unroll
        for (int g = 0; g < 4; g++)
            x[g] = pack_bf16(__fmul_rn(sums[(j + g) * 4 + 2 * r], scale), __fmul_rn(sums[(j + g) * 4 + 2 * r + 1], scale));
#pragma unroll
        for (int bit = 1; bit <= 2; bit *= 2)
#pragma unroll
            for (int g = 0; g < 4; g++) {
                if (g & bit) continue;
                bool upper = quarter & bit;
                u32 other = __shfl_xor_sync(FULL_MASK, upper ? x[g] : x[g + bit], bit);
                if (upper) x[g] = other;
                else x[g + bit] = other;
            }
        if (out != nullptr) *(uint4*)(out + (j + quarter) * 8) = make_uint4(x[0], x[1], x[2], x[3]);
    }
}
