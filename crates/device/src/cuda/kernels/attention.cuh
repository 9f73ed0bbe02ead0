// What all attention kernels share: their arguments, where keys and values lie, and which positions a row sees.
//
// Scores, sums and outputs are in f32. Keys are taken in splits of SPLIT tokens counted from position 0; a split's
// result is an unnormalized sum of values, the largest score and the sum of weights, and splits are merged in ascending
// order. A row's bits therefore depend neither on the batch nor on how its prompt was cut.
#pragma once
#include "common.cuh"

#define SPLIT 256

// By value, mirrored in Rust with repr(C): 176 bytes.
struct AttentionArgs {
    void* out;               // [rows, heads * head_dim] activations
    const void* qkv;         // q of row r and head h at r * qkv_width + h * head_dim
    const u8* kv;            // the layer group's storage
    const float* sinks;      // [heads] or null
    const u32* first_row;    // [spans]
    const u32* num_rows;     // [spans]
    const u32* context;      // [spans]; 0: a padded span, which has no work items
    const u32* first_block;  // [spans]: where the span's table starts in `blocks`
    const u32* blocks;
    const u32* work;         // [*num_work] pairs (span, item)
    const u32* num_work;
    float* partial;          // see `partial_at`
    const u64* ancestors;    // [rows] or null: causal; see `Sight` and `path_place`
    const u8* ahead;         // what the next product reads, and how much of it to fetch into the cache; the kernel of
    i64 ahead_bytes;         // tiles for Hopper does
    i64 block_stride;        // bytes from a block to the next, under 4 GiB
    i64 layer_offset;        // bytes from a block's start to the layer's keys
    i64 value_offset;        // bytes from the layer's keys to its values
    i32 heads, kv_heads, head_dim, qkv_width;
    float scale;
    float soft_cap;          // 0: none
    i32 window;              // 0: none
    i32 partial_rows;        // most rows of a span in decode form; the stride of `partial`
};
static_assert(sizeof(AttentionArgs) == 176, "as the host has it");

// Decode form: the items of a span are consecutive in the work list, ascending, and cover every split that any of its
// rows sees. The result of item w (its place in the work list) for row i of its span and one head is head_dim sums, the
// largest score, the sum of weights and two floats of padding. `partial` holds
//     work items * partial_rows * heads * (head_dim + 4) floats.
DEVICE u64 partial_at(const AttentionArgs& args, u32 item, u32 index, u32 head) {
    return (u64)((item * args.partial_rows + index) * args.heads + head) * (u32)(args.head_dim + 4);
}

// Keys (value = 0) or values (value = 1) of the 16 tokens of one block, all kv heads.
DEVICE const u8* kv_section(const AttentionArgs& args, u32 block, int value) {
    return args.kv + (u64)block * (u32)args.block_stride + args.layer_offset + (value ? args.value_offset : 0);
}
// Bytes into a section of one head of one token where a head has `bytes` bytes.
DEVICE u32 kv_head_at(u32 kv_head, u32 token, u32 bytes) {
    return (kv_head * BLOCK_TOKENS + token) * bytes;
}
// fp8 and int8: bytes into a section of one token's scale, behind all heads' codes.
DEVICE u32 kv_scale_at(const AttentionArgs& args, u32 kv_head, u32 token) {
    return args.kv_heads * BLOCK_TOKENS * args.head_dim + (kv_head * BLOCK_TOKENS + token) * 4;
}

// int4: a head of one token is its codes, group by group of 32, then an f16 pair (scale, minimum) a group. Byte j of a
// group holds code j in its low and code j + 16 in its high bits; a last group of n values has min(n, 16) bytes.
DEVICE u32 int4_code_bytes(u32 head_dim) { return head_dim / 32 * 16 + min(head_dim % 32, 16u); }
DEVICE u32 int4_head_bytes(u32 head_dim) { return int4_code_bytes(head_dim) + (head_dim + 31) / 32 * 4; }
DEVICE float int4_value(const u8* head, u32 head_dim, u32 i) {
    u32 group = i / 32, j = i % 32;
    u32 code = (head[group * 16 + j % 16] >> (j / 16 * 4)) & 15;
    const u8* pair = head + int4_code_bytes(head_dim) + group * 4;  // odd head sizes have it at odd addresses
    float scale = half_to_float((u16)(pair[0] | pair[1] << 8)), least = half_to_float((u16)(pair[2] | pair[3] << 8));
    return __fmaf_rn(scale, (float)code, least);
}

// Which positions one row sees. Rows of a span stand at `base`, `base + 1`, ... in storage. With `ancestors` a span of 2
// to 64 rows is a tree: bit j of a row's word says that it sees the span's row j (its own bit is set), and windows
// count along the path, not through storage. Longer spans are causal.
struct Sight {
    i32 first;  // earliest position before the span, or of a causal row at all
    i32 last;   // the row itself
    i32 base;   // position of the span's first row
    u64 own;    // the span's rows that a row of a tree sees
    bool tree;
};
DEVICE Sight sight_at(const AttentionArgs& args, u32 first_row, u32 rows, i32 base, u32 index) {
    Sight sight;
    sight.base = base;
    sight.last = base + (i32)index;
    sight.tree = args.ancestors != nullptr && rows > 1 && rows <= 64;
    sight.own = 0;
    i32 position = sight.last;
    if (sight.tree) {
        sight.own = args.ancestors[first_row + index] & (~0ull >> (63 - index));
        position = base + __popcll(sight.own) - 1;
        if (args.window > 0)
            while (__popcll(sight.own) > args.window) sight.own &= sight.own - 1;
    }
    sight.first = args.window > 0 ? max(position - args.window + 1, 0) : 0;
    return sight;
}
DEVICE Sight sight_of(const AttentionArgs& args, u32 span, u32 index) {
    u32 rows = args.num_rows[span];
    return sight_at(args, args.first_row[span], rows, (i32)(args.context[span] - rows), index);
}
DEVICE bool sees(const Sight& sight, i32 position) {
    if (!sight.tree) return position >= sight.first && position <= sight.last;
    if (position < sight.base) return position >= sight.first;
    return position <= sight.last && ((sight.own >> (position - sight.base)) & 1);
}
// The same of 64 positions from `start` on, one bit each.
DEVICE u64 seen_from(const Sight& sight, i32 start) {
    i32 from = max(sight.first - start, 0), to = min((sight.tree ? sight.base - 1 : sight.last) - start, 63);
    u64 seen = from > to ? 0 : (~0ull << from) & (~0ull >> (63 - to));
    i32 shift = sight.base - start;
    if (sight.tree && shift < 64 && shift > -64) seen |= shift >= 0 ? sight.own << shift : sight.own >> -shift;
    return seen;
}
// A span of one row with a word that is not 0 is a row of a tree by itself: it sees `context` positions as any row does,
// but the last of them, as many as bits are set, are its path, and lie in the table where the rows of the tree do, which
// begins at `path_base`. Read so, in the order of positions, they give the bits that a chain would give.
DEVICE u64 path_of(const AttentionArgs& args, u32 row, u32 num_rows) {
    return args.ancestors != nullptr && num_rows == 1 ? __ldg(args.ancestors + row) : 0;
}
DEVICE i32 path_base(u64 own, u32 context) { return (i32)context - __popcll(own); }
// The place in the table of a position.
DEVICE i32 path_place(u64 own, i32 base, i32 position) {
    if (position < base) return position;
    for (i32 depth = position - base; depth > 0; depth--) own &= own - 1;
    return base + __ffsll(own) - 1;
}
// Earliest position that any row of a span sees: blocks before it may belong to another sequence by now.
DEVICE i32 earliest(const AttentionArgs& args, u32 span) {
    return args.window > 0 ? max((i32)(args.context[span] - args.num_rows[span]) - args.window + 1, 0) : 0;
}
