// Keys and values of single tokens from slot to slot, all layers of a group: what becomes of a draft tree's path when it
// was accepted.
//
//   move_tokens_{16,4,1}(kv, Moves, num, block_stride: i64, layer_stride: i64, section: i64, kv_heads, row_bytes, scaled)
//       by value up to 64 pairs of slots (from, to), done one after the other. A head of a token is row_bytes bytes, a
//       multiple of the number in the name, in sections [kv head][16 tokens]; with `scaled` an f32 a head and token lies
//       behind all of them. grid (ceil(units / 256), 2 * layers), threads 256, units = kv_heads * (row_bytes / number +
//       (scaled ? 1 : 0)).
//
// A thread moves one piece of a head through all pairs, so that a pair reads what those before it wrote.
#include "common.cuh"

struct Moves {
    u32 pairs[128];
};
static_assert(sizeof(Moves) == 512, "as the host has it");

template <typename Piece>
DEVICE void move_pieces(u8* kv, const Moves& moves, i32 num, i64 block_stride, i64 layer_stride, i64 section, u32 kv_heads,
                        u32 row_bytes, i32 scaled) {
    release_next();
    wait_for_previous();
    u32 pieces = row_bytes / sizeof(Piece), per_head = pieces + (scaled ? 1 : 0);
    u32 unit = blockIdx.x * 256 + threadIdx.x, head = unit / per_head, piece = unit - head * per_head;
    if (head >= kv_heads) return;
    u8* half = kv + (i64)(blockIdx.y / 2) * layer_stride + (blockIdx.y % 2) * section;
    bool is_scale = piece == pieces;
    u32 token_bytes = is_scale ? 4 : row_bytes;
    u8* first = half + (is_scale ? kv_heads * BLOCK_TOKENS * row_bytes : piece * (u32)sizeof(Piece)) +
                head * BLOCK_TOKENS * token_bytes;
    auto at = [&](u32 slot) { return first + (i64)(slot / BLOCK_TOKENS) * block_stride + slot % BLOCK_TOKENS * token_bytes; };
#pragma unroll 1
    for (i32 pair = 0; pair < num; pair++) {
        const u8* from = at(moves.pairs[2 * pair]);
        u8* to = at(moves.pairs[2 * pair + 1]);
        if (is_scale) *(u32*)to = *(const u32*)from;
        else *(Piece*)to = *(const Piece*)from;
    }
}

#define MOVE(NAME, Piece)                                                                                              \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        move_tokens_##NAME(u8* kv, const __grid_constant__ Moves moves, i32 num, i64 block_stride, i64 layer_stride,   \
                           i64 section, i32 kv_heads, i32 row_bytes, i32 scaled) {                                     \
        move_pieces<Piece>(kv, moves, num, block_stride, layer_stride, section, kv_heads, row_bytes, scaled);          \
    }
MOVE(16, uint4)
MOVE(4, u32)
MOVE(1, u8)
