// Rows of draft trees in decode form: where a row's path lies, and a tile of keys or values copied along it.
//
// Such a row is a span of its own and sees `context` positions like any other. Its word in `ancestors` has a bit for each
// row of the tree on its path: with n of them the last n positions are the path's, and the tree's rows lie in the table
// from place base = context - n on. Position base + d is found at place base + (the d-th bit that is set). A tile in
// shared memory then holds positions in order, as any other tile does, and whoever works on it needs not know.
#pragma once
#include "attention_tile.cuh"

// One warp copies the keys (value = 0) or the values of a tile that begins at position `start` and may reach into the
// path of `own`, which begins at `base`. The same bytes get the same places as in a tile without a path.
template <int D, int F>
DEVICE void copy_path_tile(const AttentionArgs& args, const Source& source, u64 own, i32 base, i32 start, int value, u32 to,
                           int lane) {
    typedef Shape<D, F> S;
    constexpr int PIECES = S::ROW_BYTES / 16, AT_ONCE = WARP / PIECES, HALVES = S::TOKENS / WARP;
    u32 head_bytes = head_bytes_of<F>(args), column = lane % PIECES, mine = lane / PIECES;
    u32 num_real = source.high - source.low;
    // Each lane finds the slots of tokens `lane` and `lane + 32`.
    u32 slots[HALVES];
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
        i32 position = start + half * WARP + lane;
        bool real = (u32)(position - source.low) < num_real;
        i32 place = real ? path_place(own, base, position) : source.low;
        slots[half] = __ldg(source.table + place / BLOCK_TOKENS) * BLOCK_TOKENS + place % BLOCK_TOKENS;
        if (F != BF16) {
            const u8* from = kv_section(args, slots[half] / BLOCK_TOKENS, value);
            copy_4(to + S::SCALES_AT + (half * WARP + lane) * 4,
                   from + kv_scale_at(args, source.kv_head, slots[half] % BLOCK_TOKENS), real);
        }
    }
    // Few tiles are of a path: small code is better than fast code.
#pragma unroll 2
    for (int token = 0; token < S::TOKENS; token += AT_ONCE) {
        u32 slot = __shfl_sync(FULL_MASK, token < WARP ? slots[0] : slots[HALVES - 1], token % WARP + mine);
        bool real = (u32)(start + token + (i32)mine - source.low) < num_real;
        const u8* from = kv_section(args, slot / BLOCK_TOKENS, value) +
                         kv_head_at(source.kv_head, slot % BLOCK_TOKENS, head_bytes) + column * 16;
        if (column * 16 < head_bytes) copy_16(to + (token + mine) * S::ROW + column * 16, from, real);
    }
}
