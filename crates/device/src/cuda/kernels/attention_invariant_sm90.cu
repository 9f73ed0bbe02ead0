// Paged attention of prompt chunks for Hopper that gives every row the bits it gets in decode form (attention_mma.cu):
// products by whole warpgroups round as those of single warps do, and everything else is added up in the same order.
//
// attention_invariant_bf16_{64,96,128}_sm90(AttentionArgs args, const __grid_constant__ CUtensorMap keys_and_values)
//
// Work items, launch, map and needs are those of attention_sm90.cu, but for shared bytes (115,872 for a head size of 64,
// 214,176 for 96, 230,560 for 128) and the scale, which may be any. Trees are the business of attention_mma.cu.
//
// Three warpgroups, as there. An item walks through its context from the start to the end, two tiles of 64 keys at a time.
// Two warpgroups hold 64 rows each. Their sums are multiplied with a factor before each tile's values are added: between
// the two the tensor cores have the next scores to compute. Where a split ends, its sums are merged with those of the splits
// before.
#include "attention_invariant_sm90.cuh"

template <int HEAD> struct Upwards : Shape<HEAD, 128, 2, 1, true> {
    typedef Shape<HEAD, 128, 2, 1, true> Base;
    static constexpr int TOTALS = Base::SHARED_BYTES - 1024;
    static constexpr int SHARED_BYTES = Base::SHARED_BYTES + HEAD / 8 * CONSUMER_THREADS * 16;
};
typedef Upwards<64> Shape64;
typedef Upwards<96> Shape96;
typedef Upwards<128> Shape128;
static_assert(Shape64::SHARED_BYTES == 115872 && Shape96::SHARED_BYTES == 214176, "as stated above");
static_assert(Shape128::SHARED_BYTES == 230560, "as stated above");

// What the rows of a warpgroup see of an item's context.
struct Seen {
    i32 position, last, window;  // of the item's first token; of the context; 0x40000000: none
    i32 sure_low, sure_high;     // seen by all rows
    METHOD Seen(const Item& item, const AttentionArgs& args, const Group& group, int half) {
        position = item.position;
        last = item.context - 1;
        window = args.window > 0 ? args.window : 0x40000000;
        sure_high = min(position + group.token_of(half * 64), last);
        sure_low = position + group.token_of(half * 64 + 63) - window + 1;
    }
    METHOD bool all(i32 start, i32 tile) const { return start >= sure_low && start + tile - 1 <= sure_high; }
};

// The 64 rows of one warpgroup, item by item.
template <typename S>
DEVICE void attend(const AttentionArgs& args, u32 shared, u8* shared_bytes, const Item* items, Barriers<S::STAGES> barriers) {
    const int half = threadIdx.x / 128, lane = threadIdx.x % WARP;
    const int first = half * 64 + threadIdx.x % 128 / WARP * 16 + lane / 4;  // row of the tile; the other is 8 further
    const Group group(args);
    const Scoring scoring = scoring_of(args);
    u32 keys = 0, values = 0;  // copied tiles that are done with: each is two of 64 keys
    for (u32 count = 0;; count++) {
        const u32 query_stage = count % S::QUERY_STAGES;
        barrier_wait(barriers.query_full(query_stage), (count / S::QUERY_STAGES) & 1);
        const Item item = items[query_stage];
        if (item.tiles < 0) break;
        if (item.tiles == 0) {
            __syncwarp();
            if (lane == 0) barrier_arrive(barriers.query_empty(query_stage));
            continue;
        }
        const u32 queries = shared + query_stage * S::QUERY_BYTES + half * (64 * 128);
        const Seen seen(item, args, group, half);
        SplitRows<S::HEAD> rows;
        u8* totals = shared_bytes + S::TOTALS;
        rows.begin();
        rows.hold_queries(queries);
        __syncwarp();
        if (lane == 0) barrier_arrive(barriers.query_empty(query_stage));

        auto weigh = [&](i32 start) {
            rows.score(scoring);
            if (!seen.all(start, S::TILE)) {
                i32 low[2], high[2];
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    i32 position = seen.position + group.token_of(first + 8 * r);
                    high[r] = min(position, seen.last) - start;
                    low[r] = position - seen.window + 1 - start;
                }
                rows.hide(low, high);
            }
            rows.weigh_tile(scoring);
        };
        i32 start = item.begin;
        const i32 first_end = (start / SPLIT + 1) * SPLIT;  // of the first split
        barrier_wait(barriers.key_full(keys % S::STAGES), (keys / S::STAGES) & 1);
        rows.start_scores(shared + S::KEYS + keys % S::STAGES * S::TILE_BYTES);
        group_wait<0>();
        pin(rows.scores);
        if (lane == 0) barrier_arrive(barriers.key_empty(keys % S::STAGES));
        keys++;
        weigh(start);
        if (item.tiles > 1) barrier_wait(barriers.key_full(keys % S::STAGES), (keys / S::STAGES) & 1);
        rows.pack_weights();
        for (i32 tile = 1; tile < item.tiles; tile++) {
            start += S::TILE;
            const u32 key_stage = keys % S::STAGES, value_stage = values % S::STAGES;
            const u32 value_tile = shared + S::VALUES + value_stage * S::TILE_BYTES;
            barrier_wait(barriers.value_full(value_stage), (values / S::STAGES) & 1);
            rows.template start_sums<0>(value_tile);
            rows.start_scores(shared + S::KEYS + key_stage * S::TILE_BYTES);
            group_wait<1>();
            pin(rows.sums);
            rescale_sums(rows.units(), rows.rescale[1]);
            rows.template start_sums<1>(value_tile);
            group_wait<1>();
            pin(rows.scores);
            if (lane == 0) barrier_arrive(barriers.key_empty(key_stage));
            keys++;
            const bool new_split = start % SPLIT == 0;
            if (new_split) rows.end_split();
            weigh(start);
            // The compiler puts part of the exponentials behind this wait and the next one. Tying the wait to their sums would
            // keep them before it; what that gains has not been measured.
            if (tile + 1 < item.tiles) barrier_wait(barriers.key_full(keys % S::STAGES), (keys / S::STAGES) & 1);
            group_wait<0>();
            pin(rows.sums);
            if (lane == 0) barrier_arrive(barriers.value_empty(value_stage));
            if (new_split) rows.merge_ended(totals, start <= first_end, false);
            rescale_sums(rows.units(), rows.rescale[0]);
            rows.pack_weights();
            values++;
        }
        const u32 value_stage = values % S::STAGES, value_tile = shared + S::VALUES + value_stage * S::TILE_BYTES;
        barrier_wait(barriers.value_full(value_stage), (values / S::STAGES) & 1);
        if (start + S::TILE > item.context && item.context % BLOCK_TOKENS != 0)
            clear_tail<S>(shared_bytes + S::VALUES + value_stage * S::TILE_BYTES, start, item.context);
        rows.template start_sums<0>(value_tile);
        rows.end_split();
        group_wait<0>();
        pin(rows.sums);
        rescale_sums(rows.units(), rows.rescale[1]);
        rows.template start_sums<1>(value_tile);
        group_wait<0>();
        pin(rows.sums);
        if (lane == 0) barrier_arrive(barriers.value_empty(value_stage));
        values++;
        rows.merge_ended(totals, start < first_end, true);

#pragma unroll
        for (int r = 0; r < 2; r++) {
            i32 row = first + 8 * r, token = group.token_of(row);
            i32 head = item.kv_head * group.heads + row - token * group.heads;
            bool exists = token < item.tokens;
            float sink = exists ? sink_of(args, head) : NOTHING_SEEN;
            bf16* out = (bf16*)args.out + ((i64)(item.first_row + token) * args.heads + head) * S::HEAD;
            store_row<S::HEAD>(rows.sums, exists ? out : nullptr, r,
                               finish_of(sink, rows.total.largest[r], rows.total.sum[r][0]));
        }
    }
}

template <typename S> DEVICE void attention_chunk(const AttentionArgs& args, const TensorMap* map) {
    extern __shared__ u8 dynamic[];
    u8* aligned = dynamic + (1024 - shared_address(dynamic) % 1024) % 1024;
    const u32 shared = shared_address(aligned);
    Item* items = (Item*)(aligned + S::ITEMS);
    const Barriers<S::STAGES> barriers = {shared + S::BARRIERS};
    release_next();
    if (threadIdx.x == 0) init_barriers<S>(barriers);
    __syncthreads();
    if (threadIdx.x >= CONSUMER_THREADS) {
        // The block has 3 x 168 registers a thread of a warpgroup: what two take, the third must have given.
        give_registers<40>();
        if (threadIdx.x < CONSUMER_THREADS + WARP)
            copy_tiles<S>(args, map, shared, barriers);
        else
            copy_queries<S>(args, shared, items, barriers);
    } else {
        take_registers<232>();
        wait_for_previous();
        attend<S>(args, shared, aligned, items, barriers);
    }
}

#define ATTENTION_CHUNK(HEAD)                                                                                     \
    extern "C" __global__ void __launch_bounds__(384, 1) attention_invariant_bf16_##HEAD##_sm90(                  \
        const __grid_constant__ AttentionArgs args, const __grid_constant__ TensorMap keys_and_values) {          \
        attention_chunk<Shape##HEAD>(args, &keys_and_values);                                                     \
    }
ATTENTION_CHUNK(64)
ATTENTION_CHUNK(96)
ATTENTION_CHUNK(128)
