// Attention in decode form on Hopper: bf16, fp8 or int8 keys and values, heads of 64 or 128.
//
//   attention_decode_<format>_<D>_sm90(AttentionArgs args, const __grid_constant__ TensorMap keys_and_values)
//
// Gives bit for bit what attention_decode_<format>_<D> of attention_mma.cu gives and takes the same work list; `ancestors`
// must be null. Here a team of eight warps takes a whole split at a time: each warp makes the scores of 32 tokens, all at
// once, and then sums 16 columns over the split's tiles in order. That is two barriers a split, not two a tile. Two teams
// take turns, so that one's waits are the other's work. Products are turned round, keys and values being the 16 rows and
// queries the 8 columns of an mma: a unit has 8 packed rows, and groups of more take a split more than once.
//
// Launch:  640 threads, one block a multiprocessor; shared bytes as asserted at the end.
// Map:     the group's whole KV buffer as rows of one head and token: bf16 [rows, D], box 64 columns x 16 rows, swizzle 128
//          bytes; fp8, int8: bytes [rows, D], box D x 16, swizzle D bytes.
// Needs:   head_dim = D; block stride, layer offset and value offset multiples of a row (fp8 and int8 of 128: an even number
//          of kv heads); qkv 16-aligned; fewer than 2^31 rows. One such kernel at a time.
#include "attention_decode_sm90.cuh"

// Of a lane's four values: tokens (or columns) lane / 4 and lane / 4 + 8, rows lane % 4 * 2 and the next: value 2 * t + r.
DEVICE u32 row_of(int r, int lane) { return lane % 4 * 2 + r; }

DEVICE void team_barrier(u32 team) { named_barrier(1 + team, TEAM_WARPS * WARP); }

// The unit's queries as the second operand of mma.
template <int D, bool SORTED> DEVICE void load_queries(u32 (&q)[D / 16][2], u32 rows, int lane) {
    constexpr int ROW = 2 * D + 16;
#pragma unroll
    for (int step = 0; step < D / 16; step += SORTED ? 1 : 2) {
        if (SORTED) {
            u32 x, y;
            asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                         : "=r"(x), "=r"(y) : "r"(rows + lane / 4 * ROW + step * 32 + lane % 4 * 8) : "memory");
            q[step][0] = __byte_perm(x, y, 0x5410);  // columns 0 and 2
            q[step][1] = __byte_perm(x, y, 0x7632);  // columns 1 and 3
        } else {
            u32 four[4];
            load_matrices(four, rows + lane % 8 * ROW + step * 32 + lane / 8 * 16);
            q[step][0] = four[0], q[step][1] = four[1], q[step + 1][0] = four[2], q[step + 1][1] = four[3];
        }
    }
}

// Dot products with the keys of two blocks.
template <int D, int F> DEVICE void block_products(float (&dots)[2][4], const u32 (&q)[D / 16][2], u32 blocks, int lane) {
    typedef Layout<D, F> L;
#pragma unroll
    for (int i = 0; i < 8; i++) dots[i / 4][i % 4] = 0.0f;
#pragma unroll
    for (int step = 0; step < D / 16; step++)
#pragma unroll
        for (int b = 0; b < 2; b++) {
            u32 k[4], block = blocks + b * L::BLOCK;
            if (!L::CODED) {
                load_matrices(k, block + step / 4 * L::PANEL_BYTES + swizzled<128>(lane % 16, step % 4 * 2 + lane / 16));
            } else {
                u32 upper = load_shared(block + swizzled<L::PANEL>(lane / 4, step) + lane % 4 * 4);
                u32 lower = load_shared(block + swizzled<L::PANEL>(lane / 4 + 8, step) + lane % 4 * 4);
                k[0] = widen<F>(upper), k[1] = widen<F>(lower), k[2] = widen<F>(upper >> 8), k[3] = widen<F>(lower >> 8);
            }
            multiply(dots[b], k, q[step][0], q[step][1]);
        }
}

// Dot products of a block become scores but for a late factor; what a row does not see counts nothing.
template <bool CODED>
DEVICE void score_block(float (&s)[4], const Scoring& scoring, const Note& note, const Divisor& group, i32 window,
                        i32 position, const float* scales, int lane) {
    if (CODED) {
        float upper = scales[lane / 4], lower = scales[lane / 4 + 8];
        s[0] = __fmul_rn(s[0], upper), s[1] = __fmul_rn(s[1], upper);
        s[2] = __fmul_rn(s[2], lower), s[3] = __fmul_rn(s[3], lower);
    }
    if (hidden(scoring.early) != 0.0f) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float x = __fmul_rn(s[i], scoring.early);
            s[i] = scoring.cap > 0.0f ? capped(scoring, x) : x;
        }
    }
    if (position >= note.all_from && position + 16 <= note.all_to) return;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        i32 last = note.base + (i32)quotient(min(note.first + row_of(r, lane), note.merging.packed_rows - 1), group);
        i32 first = window > 0 ? max(last - window + 1, 0) : 0;
#pragma unroll
        for (int t = 0; t < 2; t++) {
            i32 at = position + lane / 4 + t * 8;
            if (at < first || at > last) s[t * 2 + r] = NOTHING_SEEN;
        }
    }
}

// Of a team's row in all lanes that have it: the largest score so far after each tile, and what earlier sums are multiplied
// by. A tile that was not copied has seen nothing, and changes nothing.
DEVICE float walk_tiles(Rows<1>& rows, int r, float (&rescale)[TILES][2], const Scoring& scoring, const u8* largest, u32 tile) {
    float four[8], origin = 0.0f;
    *(float4*)four = *(const float4*)largest;
    *(float4*)(four + 4) = *(const float4*)(largest + 16);
    rows.largest[r] = NOTHING_SEEN;
#pragma unroll
    for (u32 t = 0; t < TILES; t++) {
        float from = origin_of_tile(rows, r, scoring, fmaxf(four[2 * t], four[2 * t + 1]), rescale[t][r]);
        origin = t == tile ? from : origin;
    }
    return origin;
}

// The weights of a block: summed as a quarter of a tile, then with their values' scales as an operand of the second product.
// Lanes lane / 4 = 2 n and 2 n + 1 have the tokens that are summed together, the sum is in the former.
template <bool CODED>
DEVICE uint2 weigh_block(float (&s)[4], float (&sum)[2], const Scoring& scoring, const float (&origin)[2], const float* scales,
                         int lane) {
#pragma unroll
    for (int i = 0; i < 4; i++) s[i] = power_of_two(__fmaf_rn(s[i], scoring.late, -origin[i % 2]));
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float upper = __shfl_xor_sync(FULL_MASK, s[r], 4), lower = __shfl_xor_sync(FULL_MASK, s[2 + r], 4);
        sum[r] = __fadd_rn(__fadd_rn(__fadd_rn(s[r], upper), s[2 + r]), lower);
    }
    if (CODED) {
        float upper = scales[lane / 4], lower = scales[lane / 4 + 8];
        s[0] = __fmul_rn(s[0], upper), s[1] = __fmul_rn(s[1], upper);
        s[2] = __fmul_rn(s[2], lower), s[3] = __fmul_rn(s[3], lower);
    }
    uint2 out;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out.x) : "r"(pack_bf16(s[0], s[1])));
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out.y) : "r"(pack_bf16(s[2], s[3])));
    return out;
}

// Makes zeros of values, or of their scales, that were not written to the cache: a weight of 0 times anything else might not
// be 0. One warp has one block, at `position`.
template <typename L> DEVICE void clear_unseen(u8* block, float* scales, i32 position, i32 low, i32 high, int lane) {
    if (L::CODED) {
        if (lane < 16 && (position + lane < low || position + lane >= high)) scales[lane] = 0.0f;
    } else {
#pragma unroll 1
        for (int piece = lane; piece < L::BLOCK / 16; piece += WARP) {
            int row = piece / 8 % 16;  // a panel's row has 8 pieces
            if (position + row < low || position + row >= high) *(uint4*)(block + piece * 16) = make_uint4(0, 0, 0, 0);
        }
    }
    fence_async_shared();
    __syncwarp();
}

// sums += values . weights for 16 columns of one tile; of codes the even columns come before the odd ones.
template <typename L, int F> DEVICE void add_tile(float (&sums)[4], const uint2* weights, u32 tile, u32 warp, int lane) {
    u32 v[4][4];
    uint2 w[4];
    if (!L::CODED) {
        u32 piece = warp * 2 + lane / 8 % 2, row = lane % 8 + lane / 16 * 8;
        u32 at = tile + piece / 8 * L::PANEL_BYTES + swizzled<128>(row, piece % 8);
#pragma unroll
        for (int step = 0; step < 4; step++) load_matrices_transposed(v[step], at + step * L::BLOCK);
    } else {
        u32 at = tile + lane / 16 * L::BLOCK + swizzled<L::PANEL>(lane % 16, warp);
#pragma unroll
        for (int pair = 0; pair < 2; pair++) load_matrices_transposed(v[pair], at + pair * 2 * L::BLOCK);
    }
#pragma unroll
    for (int step = 0; step < 4; step++) w[step] = weights[step * WARP + lane];
#pragma unroll
    for (int step = 0; step < 4; step++) {
        if (!L::CODED) {
            multiply(sums, v[step], w[step].x, w[step].y);
        } else {
            u32 upper = v[step / 2][step % 2 * 2], lower = v[step / 2][step % 2 * 2 + 1];
            u32 a[4] = {widen<F>(upper), widen<F>(upper >> 8), widen<F>(lower), widen<F>(lower >> 8)};
            multiply(sums, a, w[step].x, w[step].y);
        }
    }
}

// The sums of weights of a lane's two rows, from those of each quarter of each tile.
DEVICE void gather_sums(Rows<1>& rows, const float* sums, const float (&rescale)[TILES][2], u32 first_tile, u32 end_tile,
                        int lane) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float quarters[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (u32 tile = 0; tile < TILES; tile++) {
            if (tile < first_tile || tile >= end_tile) continue;
            float4 four = *(const float4*)(sums + ((row_of(r, lane) * 4 + lane / 8) * TILES + tile) * 4);
            quarters[0] = __fmaf_rn(quarters[0], rescale[tile][r], four.x);
            quarters[1] = __fmaf_rn(quarters[1], rescale[tile][r], four.y);
            quarters[2] = __fmaf_rn(quarters[2], rescale[tile][r], four.z);
            quarters[3] = __fmaf_rn(quarters[3], rescale[tile][r], four.w);
        }
#pragma unroll
        for (int quarter = 0; quarter < 4; quarter++) {
            float sum = quarters[quarter];
            sum = __fadd_rn(sum, __shfl_xor_sync(FULL_MASK, sum, 8));
            quarters[quarter] = __fadd_rn(sum, __shfl_xor_sync(FULL_MASK, sum, 16));
        }
        rows.sum[r][0] = sum_of_quarters(quarters[0], quarters[1], quarters[2], quarters[3]);
    }
}

// Writes a warp's 16 columns of a split: of the output if it is the only one, else of a partial result.
template <bool CODED>
DEVICE void write_columns(const AttentionArgs& args, const Divisor& group, const Note& note, const Rows<1>& rows,
                          const float (&sums)[4], u32 warp, int lane) {
    const u32 column = warp * 16 + (CODED ? lane / 4 * 2 : lane / 4);
    constexpr int NEXT = CODED ? 1 : 8;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        Place place = place_of(args, group, note.merging.kv_head, note.first + row_of(r, lane), note.merging.packed_rows);
        if (!place.real) continue;
        float first = sums[r], second = sums[2 + r];
        if (note.merging.num_splits == 1) {
            // As if it were merged into nothing.
            float largest = NOTHING_SEEN, sum = 0.0f;
            if (rows.sum[r][0] != 0.0f) {
                Merge merge = merge_of(NOTHING_SEEN, rows.largest[r]);
                largest = merge.largest;
                sum = merged(merge, 0.0f, rows.sum[r][0]);
                first = merged(merge, 0.0f, first);
                second = merged(merge, 0.0f, second);
            } else {
                first = second = 0.0f;
            }
            float factor = finish_of(sink_of(args, place.head), largest, sum);
            bf16* out = output_at(args, note.merging.first_row, place.index, place.head) + column;
            out[0] = from_float<bf16>(__fmul_rn(first, factor));
            out[NEXT] = from_float<bf16>(__fmul_rn(second, factor));
        } else {
            float* partial = args.partial + partial_at(args, note.item, place.index, place.head);
            partial[column] = first;
            partial[column + NEXT] = second;
            if (warp == 0 && lane < 4) *(float2*)(partial + args.head_dim) = make_float2(rows.largest[r], rows.sum[r][0]);
        }
    }
}

// Until a tile is there. What its place held before may be the other team's and still on its way, and a barrier would take
// the round before that for this one: so that must have been given back first.
template <typename L> DEVICE void wait_for_tile(const Barriers<L::PLACES, L::SLOTS>& barriers, const Turn<L::PLACES>& at) {
    barrier_wait(barriers.empty(at.place), at.round ^ 1);
    barrier_wait(barriers.full(at.place), at.round);
}

template <int D, int F>
DEVICE void work_on_splits(const AttentionArgs& args, u8* memory, const Divisor& group, u32 team, u32 warp, int lane) {
    typedef Layout<D, F> L;
    const u32 shared = shared_address(memory), tile = warp / 2;
    const Barriers<L::PLACES, L::SLOTS> barriers = {shared + L::BARRIERS};
    const Scoring scoring = scoring_of(args);
    u8* mine = memory + L::TEAMS + team * TEAM_BYTES;
    uint2* weights = (uint2*)mine;
    float* lane_sums = (float*)(mine + SUMS_AT);
    float4* factors = (float4*)(mine + FACTORS_AT);
    Turn<L::SLOTS> slot = {team, 0};
    Posts posts = {(Post*)(mine + POSTS_AT), barriers.posted(team), barriers.counted(team), 0, 0};
#pragma unroll 1
    while (true) {
        // The same of notes.
        barrier_wait(barriers.slot_empty(slot.place), slot.round ^ 1);
        barrier_wait(barriers.slot_full(slot.place), slot.round);
        const Note& note = *((const Note*)(memory + L::NOTES) + slot.place);
        if (note.bits & 1) break;
        const u32 first_tile = note.first_tile, end_tile = note.end_tile, num_tiles = end_tile - first_tile;
        const Turn<L::PLACES> turn = {note.place, note.round};
        const bool present = tile >= first_tile && tile < end_tile;
        const i32 position = note.start + (i32)warp * 32;
        const Turn<L::PLACES> keys = turn.later(present ? tile - first_tile : 0);
        float* scales = (float*)(memory + L::SCALES + keys.place * L::SCALES_BYTES + warp % 2 * 128);
        float s[2][4], largest[2] = {NOTHING_SEEN, NOTHING_SEEN};
        if (present) {
            u32 q[D / 16][2];
            load_queries<D, L::CODED>(q, shared + L::QUERIES + slot.place * ROWS * L::QUERY_ROW, lane);
            wait_for_tile<L>(barriers, keys);
            block_products<D, F>(s, q, shared + keys.place * L::TILE + warp % 2 * 2 * L::BLOCK, lane);
            __syncwarp();
            if (!L::CODED && lane == 0) barrier_arrive(barriers.empty(keys.place), TEAM_WARPS / 2);
#pragma unroll
            for (int b = 0; b < 2; b++)
                score_block<L::CODED>(s[b], scoring, note, group, args.window, position + b * 16, scales + b * 16, lane);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                largest[r] = fmaxf(fmaxf(s[0][r], s[0][2 + r]), fmaxf(s[1][r], s[1][2 + r]));
#pragma unroll
                for (int step = 4; step < WARP; step *= 2)
                    largest[r] = fmaxf(largest[r], __shfl_xor_sync(FULL_MASK, largest[r], step));
            }
        }
        if (lane < 4) {
            *(float*)(mine + LARGEST_AT + row_of(0, lane) * LARGEST_ROW + warp * 4) = largest[0];
            *(float*)(mine + LARGEST_AT + row_of(1, lane) * LARGEST_ROW + warp * 4) = largest[1];
        }
        team_barrier(team);
        Rows<1> rows;
        float rescale[TILES][2], origin[2];
#pragma unroll
        for (int r = 0; r < 2; r++)
            origin[r] = walk_tiles(rows, r, rescale, scoring, mine + LARGEST_AT + row_of(r, lane) * LARGEST_ROW, tile);
        if (present) {
#pragma unroll
            for (int b = 0; b < 2; b++) {
                const i32 at = position + b * 16;
                const u32 block = warp % 2 * 2 + b;
                if (at < note.low || at + 16 > note.high) {
                    const Turn<L::PLACES> values = keys.later(num_tiles);
                    if (!L::CODED) wait_for_tile<L>(barriers, values);
                    clear_unseen<L>(memory + values.place * L::TILE + block * L::BLOCK, scales + 64 + b * 16, at, note.low,
                                    note.high, lane);
                }
                float sum[2];
                weights[(warp * 2 + b) * WARP + lane] =
                    weigh_block<L::CODED>(s[b], sum, scoring, origin, scales + 64 + b * 16, lane);
                if (lane / 4 % 2 == 0) {
                    lane_sums[((row_of(0, lane) * 4 + lane / 8) * TILES + tile) * 4 + block] = sum[0];
                    lane_sums[((row_of(1, lane) * 4 + lane / 8) * TILES + tile) * 4 + block] = sum[1];
                }
            }
            __syncwarp();
            if (L::CODED && lane == 0) barrier_arrive(barriers.empty(keys.place), TEAM_WARPS / 2);
        }
        team_barrier(team);
        if (warp < D / 16) {
            if (warp == 0 || note.merging.num_splits == 1) gather_sums(rows, lane_sums, rescale, first_tile, end_tile, lane);
            float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            Turn<L::PLACES> at = turn.later(num_tiles);
#pragma unroll
            for (u32 t = 0; t < TILES; t++) {
                if (t < first_tile || t >= end_tile) continue;
                wait_for_tile<L>(barriers, at);
#pragma unroll
                for (int i = 0; i < 4; i++) sums[i] = __fmul_rn(sums[i], rescale[t][i % 2]);
                add_tile<L, F>(sums, weights + t * 4 * WARP, shared + at.place * L::TILE, warp, lane);
                __syncwarp();
                if (lane == 0) barrier_arrive(barriers.empty(at.place), 128 / D);
                at = at.later(1);
            }
            write_columns<L::CODED>(args, group, note, rows, sums, warp, lane);
        }
        const Merging merging = note.merging;
        const bool written = merging.num_splits > 1 && note.first + ROWS >= merging.packed_rows;
        __syncwarp();
        if (lane == 0) barrier_arrive(barriers.slot_empty(slot.place));
        slot = slot.later(2);
        hear<D, 8, TEAM_WARPS>(args, posts, group, factors, warp, lane);
        // When all rows of a split are written it is counted.
        if (written) post(posts, merging, warp, lane);
    }
    hear<D, 16, TEAM_WARPS>(args, posts, group, factors, warp, lane);
    Merging none = {0, 0, 0, 0, 0, 0};
    post(posts, none, warp, lane);
}

template <int D, int F> DEVICE void decode_splits(const AttentionArgs& args, const TensorMap* map) {
    typedef Layout<D, F> L;
    extern __shared__ u8 dynamic[];
    u8* memory = dynamic + (1024 - shared_address(dynamic) % 1024) % 1024;
    const Barriers<L::PLACES, L::SLOTS> barriers = {shared_address(memory) + L::BARRIERS};
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const Divisor group = divisor_of(args.heads / args.kv_heads);
    release_next();
    if (threadIdx.x < L::PLACES) {
        barrier_init(barriers.full(threadIdx.x), L::CODED ? WARP + 1 : 1);
        barrier_init(barriers.empty(threadIdx.x), TEAM_WARPS);
    } else if (threadIdx.x < L::PLACES + L::SLOTS) {
        barrier_init(barriers.slot_full(threadIdx.x - L::PLACES), 1);
        barrier_init(barriers.slot_empty(threadIdx.x - L::PLACES), TEAM_WARPS + 1);
        barrier_init(barriers.noted(threadIdx.x - L::PLACES), WARP);
    } else if (threadIdx.x < L::PLACES + L::SLOTS + 2) {
        barrier_init(barriers.posted(threadIdx.x - L::PLACES - L::SLOTS), TEAM_WARPS);
        barrier_init(barriers.counted(threadIdx.x - L::PLACES - L::SLOTS), 1);
    }
    barrier_init_done();
    __syncthreads();
    if (warp == WORKING_WARPS) {
        copy_keys<D, F>(args, map, memory, group, lane);
        return;
    }
    wait_for_previous();
    if (warp == WORKING_WARPS + 1) {
        copy_values<D, F>(args, map, memory, lane);
    } else if (warp > WORKING_WARPS) {
        const u32 team = warp - WORKING_WARPS - 2;
        Posts posts = {(Post*)(memory + L::TEAMS + team * TEAM_BYTES + POSTS_AT), barriers.posted(team), barriers.counted(team), 0, 0};
        if (lane == 0) count_splits(posts);
    } else work_on_splits<D, F>(args, memory, group, warp / TEAM_WARPS, warp % TEAM_WARPS, lane);
}

#define DECODE(name, format, D, bytes)                                                                   \
    static_assert(Layout<D, format>::SHARED_BYTES == bytes && bytes <= 232448, "as the host asks for");  \
    extern "C" __global__ void __launch_bounds__((WORKING_WARPS + 4) * WARP, 1)                          \
        attention_decode_##name##_##D##_sm90(const __grid_constant__ AttentionArgs args,                 \
                                             const __grid_constant__ TensorMap keys_and_values) {        \
        decode_splits<D, format>(args, &keys_and_values);                                                \
    }
DECODE(bf16, BF16, 128, 226264)
DECODE(bf16, BF16, 64, 224704)
DECODE(fp8, FP8, 128, 223648)
DECODE(int8, INT8, 128, 223648)
DECODE(fp8, FP8, 64, 129440)
DECODE(int8, INT8, 64, 129440)
