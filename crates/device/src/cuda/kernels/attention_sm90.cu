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

// Queries in registers: 64 did not gain, 256 has none to spare.
template <int HEAD, int TILE> struct Downwards : Shape<HEAD, TILE, 2, (HEAD > 128 ? 1 : 2), false> {
    static constexpr bool HELD = HEAD == 128;
};
typedef Downwards<64, 128> Shape64;
typedef Downwards<96, 128> Shape96;
typedef Downwards<128, 128> Shape128;
typedef Downwards<256, 64> Shape256;
static_assert(Shape64::SHARED_BYTES == 99488 && Shape96::SHARED_BYTES == 197792, "as stated above");
static_assert(Shape128::SHARED_BYTES == 197792 && Shape256::SHARED_BYTES == 197792, "as stated above");

// The 64 rows of one warpgroup, item by item.
template <typename S>
DEVICE void attend(const AttentionArgs& args, u32 shared, u8* shared_bytes, const Item* items, Barriers<S::STAGES> barriers) {
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
            __syncwarp();
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
            u32 stage = values % S::STAGES;
            barrier_wait(barriers.value_full(stage), (values / S::STAGES) & 1);
            clear_tail<S>(shared_bytes + S::VALUES + stage * S::TILE_BYTES, start, item.context);
        }

        barrier_wait(barriers.key_full(keys % S::STAGES), (keys / S::STAGES) & 1);
        rows.start_scores(queries, shared + S::KEYS + keys % S::STAGES * S::TILE_BYTES);
        group_wait<0>();
        pin(rows.scores);
        if (lane == 0) barrier_arrive(barriers.key_empty(keys % S::STAGES));
        keys++;
        rows.weigh(args, start, factor);
        if (item.tiles > 1) barrier_wait(barriers.key_full(keys % S::STAGES), (keys / S::STAGES) & 1);
        rows.pack_weights();
        for (i32 tile = item.tiles - 2; tile >= 0; tile--) {
            start -= S::TILE;
            const u32 key_stage = keys % S::STAGES, value_stage = values % S::STAGES;
            rows.start_scores(queries, shared + S::KEYS + key_stage * S::TILE_BYTES);
            barrier_wait(barriers.value_full(value_stage), (values / S::STAGES) & 1);
            rows.start_sums(shared + S::VALUES + value_stage * S::TILE_BYTES);
            group_wait<1>();
            pin(rows.scores);
            if (lane == 0) barrier_arrive(barriers.key_empty(key_stage));
            keys++;
            rows.weigh(args, start, factor);
            // Between the exponentials and the wait for the other product, so that the compiler cannot swap them.
            if (tile > 0) barrier_wait(barriers.key_full(keys % S::STAGES), (keys / S::STAGES) & 1);
            group_wait<0>();
            pin(rows.sums);
            if (lane == 0) barrier_arrive(barriers.value_empty(value_stage));
            rows.shrink_sums();
            rows.pack_weights();
            values++;
        }
        if (!S::HELD && lane == 0) barrier_arrive(barriers.query_empty(query_stage));
        const u32 value_stage = values % S::STAGES;
        barrier_wait(barriers.value_full(value_stage), (values / S::STAGES) & 1);
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
            store_row<S::HEAD>(rows.sums, exists ? out : nullptr, r, scale * reciprocal(total));
        }
    }
}

// Each thread a piece.
DEVICE void fetch_ahead(const AttentionArgs& args) {
    const i64 piece = 1024, all = (i64)gridDim.x * CONSUMER_THREADS * piece;
    for (i64 at = ((i64)blockIdx.x * CONSUMER_THREADS + threadIdx.x) * piece; at < args.ahead_bytes; at += all) {
        u32 bytes = (u32)min(piece, args.ahead_bytes - at) / 16 * 16;
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(args.ahead + at), "r"(bytes) : "memory");
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
        give_registers<56>();
        if (threadIdx.x < CONSUMER_THREADS + WARP)
            copy_tiles<S>(args, map, shared, barriers);
        else
            copy_queries<S>(args, shared, items, barriers);
    } else {
        take_registers<224>();
        fetch_ahead(args);
        wait_for_previous();
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
