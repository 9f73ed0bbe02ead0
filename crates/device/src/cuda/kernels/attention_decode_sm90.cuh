// Attention in decode form on Hopper: what lies in shared memory, and the two warps that copy.
//
// They walk through the block's units (a split of a span for one kv head, 8 packed rows of it) and run ahead as far as
// shared memory holds. All tiles of keys of a unit come before its tiles of values, in one ring of places. One warp finds
// out what the units are, writes a note of each and copies queries and keys; the other follows the notes and copies values.
// Units are given out as blocks ask for them: they differ in length, and where all contexts are alike a fixed stride would
// leave the same blocks the short ones.
#pragma once
#include "attention_decode_merge_sm90.cuh"

#define TEAM_WARPS 8
#define WORKING_WARPS (2 * TEAM_WARPS)
#define ROWS 8  // packed rows of a unit
#define TILES (SPLIT / 64)
#define METHOD __device__ __forceinline__

// What the working warps must know of a unit.
struct alignas(16) Note {
    i32 rows[16];          // each block's keys as a row of the cache
    Merging merging;
    u32 item, first;       // place in the work list, packed row
    i32 start;             // position of the split
    i32 low, high;         // positions outside were not copied
    i32 base;              // position of the span's first row
    i32 all_from, all_to;  // what all rows see
    u32 first_tile, end_tile;
    u32 place, round;      // of the first tile of keys
    u32 bits;              // 1: no more units
};

// Of a team's shared memory: weights [16 tokens][lane], sums of weights [row][lane / 8][tile][quarter], factors of merges
// [warp][lane], the largest scores [row][warp], padded, and posts.
enum {
    SUMS_AT = 4096,
    FACTORS_AT = SUMS_AT + 2048,
    LARGEST_AT = FACTORS_AT + TEAM_WARPS * WARP * 16,
    LARGEST_ROW = 48,
    POSTS_AT = LARGEST_AT + ROWS * LARGEST_ROW,
    TEAM_BYTES = POSTS_AT + 64,
};
static_assert(2 * sizeof(Post) <= 64, "a team's posts");

// A tile is 64 tokens, four blocks of 16; a block has panels of rows of at most 128 bytes, swizzled. Tiles of codes have
// scales beside them: those of keys and of values come with the keys.
template <int D, int F> struct Layout {
    static constexpr bool CODED = F != BF16;
    static constexpr int ROW = CODED ? D : 2 * D, PANEL = ROW < 128 ? ROW : 128, PANELS = ROW / PANEL;
    static constexpr int PANEL_BYTES = 16 * PANEL, BLOCK = 16 * ROW, TILE = 4 * BLOCK;
    static constexpr int PLACES = TILE == 16384 ? 12 : CODED ? 22 : 24;
    // Notes and queries. All units that have one must fit the ring twice: no place is then two rounds ahead of itself.
    static constexpr int SLOTS = PLACES / 4 > 4 ? 4 : PLACES / 4;
    static_assert(SLOTS * 2 * TILES <= 2 * PLACES, "barriers know odd rounds from even ones alone");
    static constexpr int SCALES_BYTES = CODED ? 512 : 0;
    static constexpr int QUERY_ROW = 2 * D + 16;
    // Offsets into shared memory, from a multiple of 1024.
    static constexpr int SCALES = PLACES * TILE;
    static constexpr int QUERIES = SCALES + PLACES * SCALES_BYTES;
    static constexpr int NOTES = QUERIES + SLOTS * ROWS * QUERY_ROW;
    static constexpr int TEAMS = NOTES + SLOTS * sizeof(Note);
    static constexpr int BARRIERS = TEAMS + 2 * TEAM_BYTES;
    static constexpr int SHARED_BYTES = BARRIERS + (2 * PLACES + 3 * SLOTS + 4) * 8 + 1024;
};

// Where 16 bytes of a row of a panel lie.
template <int PANEL> DEVICE u32 swizzled(u32 row, u32 piece) {
    return row * PANEL + ((piece ^ (PANEL == 128 ? row & 7 : (row >> 1) & 3)) << 4);
}

// Barriers: full and empty of places and of slots, slots with their note alone, posted and counted of teams.
template <int PLACES, int SLOTS> struct Barriers {
    u32 base;
    METHOD u32 full(u32 place) const { return base + place * 8; }
    METHOD u32 empty(u32 place) const { return base + (PLACES + place) * 8; }
    METHOD u32 slot_full(u32 slot) const { return base + (2 * PLACES + slot) * 8; }
    METHOD u32 slot_empty(u32 slot) const { return base + (2 * PLACES + SLOTS + slot) * 8; }
    METHOD u32 noted(u32 slot) const { return base + (2 * PLACES + 2 * SLOTS + slot) * 8; }
    METHOD u32 posted(u32 team) const { return base + (2 * PLACES + 3 * SLOTS + team) * 8; }
    METHOD u32 counted(u32 team) const { return base + (2 * PLACES + 3 * SLOTS + 2 + team) * 8; }
};
DEVICE void barrier_arrive(u32 barrier, u32 count) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// This lane arrives when what it copied by itself so far is there.
DEVICE void barrier_arrive_with_copies(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// A place in a ring, and whether its barriers are in an odd round.
template <int NUM> struct Turn {
    u32 place, round;
    METHOD Turn later(u32 by) const {
        u32 sum = place + by;
        Turn out = {sum >= NUM ? sum - NUM : sum, sum >= NUM ? round ^ 1 : round};
        return out;
    }
};

// Units given out beyond the first four of each block, and blocks that have asked for the last time. Zeros when the module
// is loaded, and again after every kernel.
__device__ u32 given_out, gone;

// A unit on its way through the copying warp: each of its parts is read one unit before the next part needs it.
struct Coming {
    u32 number, span, split, rows, context, table, first_row, block;
};
struct Units {
    u32 num;
    Divisor kv_heads;
};
DEVICE void read_item(const AttentionArgs& args, const Units& units, Coming& unit, u32 number) {
    u32 item = quotient(min(number, units.num - 1), units.kv_heads);
    unit.number = number;
    unit.span = __ldg(args.work + item * 2);
    unit.split = __ldg(args.work + item * 2 + 1);
}
DEVICE void read_span(const AttentionArgs& args, Coming& unit) {
    unit.rows = __ldg(args.num_rows + unit.span);
    unit.context = __ldg(args.context + unit.span);
    unit.table = __ldg(args.first_block + unit.span);
    unit.first_row = __ldg(args.first_row + unit.span);
}
DEVICE i32 low_of(const AttentionArgs& args, const Coming& unit) {
    return args.window > 0 ? max((i32)(unit.context - unit.rows) - args.window + 1, 0) : 0;
}
// Which block of the cache is the unit's block `index`.
DEVICE void read_block(const AttentionArgs& args, Coming& unit, u32 index) {
    i32 first = low_of(args, unit) / BLOCK_TOKENS, last = ((i32)unit.context - 1) / BLOCK_TOKENS;
    unit.block = __ldg(args.blocks + unit.table + min(max((i32)(unit.split * 16 + index), first), last));
}

// Before the kernel that writes this step's keys is done, the first unit's keys and values are fetched into the second-level
// cache. Nothing is read, so what is still to be written is not missed.
template <int BLOCK> DEVICE void warm_up(const AttentionArgs& args, const Coming& unit, u32 kv_head, u32 index, bool value) {
    i32 position = unit.split * SPLIT + index * BLOCK_TOKENS;
    if (position + BLOCK_TOKENS <= low_of(args, unit) || position >= (i32)unit.context) return;
    const u8* at = kv_section(args, unit.block, value) + kv_head * BLOCK;
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(at), "r"(BLOCK) : "memory");
}

// Which blocks of a split hold what is seen.
struct Extent {
    u32 first, end;
};
DEVICE Extent extent_of(i32 start, i32 low, i32 high) {
    Extent out = {(u32)(max(start, low) - start) / BLOCK_TOKENS, (u32)(high - start + BLOCK_TOKENS - 1) / BLOCK_TOKENS};
    return out;
}
// Copies a tile's blocks into the place at `turn` once that is empty. One lane does it: others would only take turns.
template <typename L>
DEVICE void copy_tile(const Barriers<L::PLACES, L::SLOTS>& barriers, const TensorMap* map, u32 shared,
                      const Turn<L::PLACES>& turn, u32 tile, const Extent& extent, const Note* note, i32 row, u64 policy,
                      int lane) {
    const u32 full = barriers.full(turn.place), to = shared + turn.place * L::TILE;
    barrier_wait(barriers.empty(turn.place), turn.round ^ 1);
    if (lane == 0) {
        const u32 first = max(extent.first, tile * 4) - tile * 4, end = min(extent.end, tile * 4 + 4) - tile * 4;
        const int4 four = *(const int4*)(note->rows + tile * 4);
        const i32 rows[4] = {four.x, four.y, four.z, four.w};
        barrier_expect(full, (end - first) * L::BLOCK);
#pragma unroll
        for (u32 block = 0; block < 4; block++) {
            if (block < first || block >= end) continue;
#pragma unroll
            for (int panel = 0; panel < L::PANELS; panel++)
                copy_box(to + block * L::BLOCK + panel * L::PANEL_BYTES, map, panel * 64, rows[block] + row, full, policy);
        }
    }
    __syncwarp();
}

template <int D, int F>
DEVICE void copy_keys(const AttentionArgs& args, const TensorMap* map, u8* memory, const Divisor& group, int lane) {
    typedef Layout<D, F> L;
    const u32 shared = shared_address(memory), grid = gridDim.x, index = lane / 2;
    const Barriers<L::PLACES, L::SLOTS> barriers = {shared + L::BARRIERS};
    Units units;
    units.kv_heads = divisor_of(args.kv_heads);
    units.num = *args.num_work * args.kv_heads;
    Coming now, next, after;
    if (lane == 0) prefetch_map(map);
    if (units.num > 0) {
        read_item(args, units, now, blockIdx.x);
        read_item(args, units, next, blockIdx.x + grid);
        read_item(args, units, after, blockIdx.x + 2 * grid);
        read_span(args, now);
        read_span(args, next);
        read_block(args, now, index);
        u32 item = quotient(now.number, units.kv_heads);
        if (now.number < units.num) warm_up<L::BLOCK>(args, now, now.number - item * units.kv_heads.by, index, lane % 2);
    }
    // The first unit's note may be written before the kernel before is done.
    bool waiting = true;
    const bool asking = units.num > 4 * grid;
    const u64 policy = evict_first();
    u32 later = blockIdx.x + 3 * grid, answer = 0;
    Turn<L::PLACES> turn = {0, 0};
    Turn<L::SLOTS> slot = {0, 0};
#pragma unroll 1
    while (units.num > 0 && now.number < units.num) {
        const Coming unit = now;
        now = next;
        read_block(args, now, index);
        next = after;
        read_span(args, next);
        if (asking && !waiting) later = 4 * grid + __shfl_sync(FULL_MASK, answer, 0);
        read_item(args, units, after, later);
        later += grid;

        const u32 item = quotient(unit.number, units.kv_heads), kv_head = unit.number - item * units.kv_heads.by;
        const u32 packed_rows = unit.rows * group.by;
        const i32 low = low_of(args, unit), base = (i32)(unit.context - unit.rows), start = unit.split * SPLIT;
        const i32 high = min(start + SPLIT, (i32)unit.context);
        const Extent extent = extent_of(start, low, high);
        const u32 first_tile = extent.first / 4, end_tile = (extent.end + 3) / 4;
        const i32 row = (i32)(unit.block * (u32)((u64)args.block_stride / L::ROW) + (u32)((u64)args.layer_offset / L::ROW) +
                              kv_head * BLOCK_TOKENS);
#pragma unroll 1
        for (u32 first = 0; first < packed_rows; first += ROWS) {
            barrier_wait(barriers.slot_empty(slot.place), slot.round ^ 1);
            Note* note = (Note*)(memory + L::NOTES) + slot.place;
            const u32 rows_here = min(packed_rows - first, (u32)ROWS), slot_full = barriers.slot_full(slot.place);
            if (lane % 2 == 0) note->rows[index] = row;
            if (lane == 0) {
                const u32 before = unit.split - low / SPLIT, num_splits = (unit.context + SPLIT - 1) / SPLIT - low / SPLIT;
                note->merging = {unit.span * args.kv_heads + kv_head, kv_head, item - before, num_splits, packed_rows,
                                 unit.first_row};
                note->item = item, note->first = first;
                note->start = start, note->low = low, note->high = high, note->base = base;
                const i32 last = base + (i32)quotient(first + rows_here - 1, group);
                note->all_from = args.window > 0 ? last - args.window + 1 : 0;
                note->all_to = base + (i32)quotient(first, group) + 1;
                note->first_tile = first_tile, note->end_tile = end_tile;
                note->place = turn.place, note->round = turn.round;
                note->bits = 0;
            }
            // Every lane for what it has noted.
            barrier_arrive(barriers.noted(slot.place));
            __syncwarp();
            if (waiting) {
                wait_for_previous();
                asm volatile("fence.proxy.async.global;" ::: "memory");
            }
            waiting = false;
            if (asking && first == 0 && lane == 0) answer = atomicAdd(&given_out, 1);
            if (lane == 0) barrier_expect(slot_full, rows_here * 2 * D);
            __syncwarp();
            if (lane < rows_here) {
                const u32 row_index = quotient(first + lane, group), head = kv_head * group.by + first + lane - row_index * group.by;
                copy_bytes(shared + L::QUERIES + (slot.place * ROWS + lane) * L::QUERY_ROW,
                           (const bf16*)args.qkv + (u64)(unit.first_row + row_index) * (u32)args.qkv_width + head * D, 2 * D,
                           slot_full);
            }
            slot = slot.later(1);
#pragma unroll 1
            for (u32 tile = first_tile; tile < end_tile; tile++) {
                copy_tile<L>(barriers, map, shared, turn, tile, extent, note, 0, policy, lane);
                if (L::CODED) {
                    // A lane has a quarter of a block's scales, of keys or of values.
                    const u32 here = tile * 4 + lane / 4 % 4, block = __shfl_sync(FULL_MASK, unit.block, here * 2);
                    copy_16(shared + L::SCALES + turn.place * L::SCALES_BYTES + lane * 16,
                            kv_section(args, block, lane / 16) + kv_scale_at(args, kv_head, lane % 4 * 4),
                            here >= extent.first && here < extent.end);
                    barrier_arrive_with_copies(barriers.full(turn.place));
                }
                turn = turn.later(1);
            }
            turn = turn.later(end_tile - first_tile);
        }
    }
    if (waiting) wait_for_previous();
    // One for each team.
#pragma unroll 1
    for (int team = 0; team < 2; team++) {
        barrier_wait(barriers.slot_empty(slot.place), slot.round ^ 1);
        if (lane == 0) {
            ((Note*)(memory + L::NOTES) + slot.place)->bits = 1;
            barrier_arrive(barriers.slot_full(slot.place));
        }
        barrier_arrive(barriers.noted(slot.place));
        slot = slot.later(1);
    }
    if (asking && lane == 0) {
        __threadfence();  // the last answer came before this block counts itself gone
        if (atomicInc(&gone, grid - 1) == grid - 1) given_out = 0;
    }
}

template <int D, int F> DEVICE void copy_values(const AttentionArgs& args, const TensorMap* map, u8* memory, int lane) {
    typedef Layout<D, F> L;
    const u32 shared = shared_address(memory), value_rows = (u32)((u64)args.value_offset / L::ROW);
    const Barriers<L::PLACES, L::SLOTS> barriers = {shared + L::BARRIERS};
    const u64 policy = evict_first();
    Turn<L::SLOTS> slot = {0, 0};
#pragma unroll 1
    while (true) {
        barrier_wait(barriers.noted(slot.place), slot.round);
        const Note* note = (const Note*)(memory + L::NOTES) + slot.place;
        if (note->bits & 1) break;
        const u32 first_tile = note->first_tile, end_tile = note->end_tile;
        const Extent extent = extent_of(note->start, note->low, note->high);
        Turn<L::PLACES> turn = {note->place, note->round};
        turn = turn.later(end_tile - first_tile);
#pragma unroll 1
        for (u32 tile = first_tile; tile < end_tile; tile++) {
            copy_tile<L>(barriers, map, shared, turn, tile, extent, note, (i32)value_rows, policy, lane);
            if (L::CODED) barrier_arrive(barriers.full(turn.place));
            turn = turn.later(1);
        }
        if (lane == 0) barrier_arrive(barriers.slot_empty(slot.place));
        slot = slot.later(1);
    }
}
