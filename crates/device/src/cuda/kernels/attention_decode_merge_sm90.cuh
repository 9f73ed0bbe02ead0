// Counting and merging the splits of attention in decode form on Hopper, by a team of warps. To count is to wait for memory:
// a warp of its own does it, and the team looks at the answer a unit later. A warp of the team then merges 64 columns of a
// row.
#pragma once
#include "attention_merge.cuh"
#include "hopper.cuh"

// What a lane has of some splits: two columns.
template <int NUM> DEVICE void load_parts(float2 (&parts)[NUM], const float* from, u64 stride, i32 num) {
#pragma unroll
    for (int i = 0; i < NUM; i++)
        if (i < num) parts[i] = __ldcg((const float2*)(from + i * stride));
}
// 64 columns of one row and head, from `partial` and to `out` on; the split's largest score and sum of weights lie at
// `ends`. `NUM` splits are read at once, the first of them before it is known what they are multiplied by.
template <int NUM>
DEVICE void merge_columns(const float* partial, const float* ends, u64 stride, i32 num_splits, float sink, bf16* out,
                          float4* factors, int lane) {
    float2 totals = make_float2(0.0f, 0.0f);
    float largest = NOTHING_SEEN, sum = 0.0f;
    partial += lane * 2;
#pragma unroll 1
    for (i32 first = 0; first < num_splits; first += WARP) {
        i32 here = min(num_splits - first, WARP);
        const float* at = partial + first * stride;
        float2 own = make_float2(NOTHING_SEEN, 0.0f), parts[NUM];
        if (lane < here) own = __ldcg((const float2*)(ends + (first + lane) * stride));
        load_parts(parts, at, stride, here);
        float4 mine = factors_of(own, largest, lane);
        __syncwarp();
        factors[lane] = mine;
        __syncwarp();
#pragma unroll 1
        for (i32 some = 0; some < here; some += NUM) {
            if (some > 0) load_parts(parts, at + some * stride, stride, here - some);
#pragma unroll
            for (int i = 0; i < NUM; i++) {
                if (some + i >= here) break;
                float4 four = factors[some + i];
                Merge merge = {0.0f, four.x, four.y};
                sum = merged(merge, sum, four.z);
                totals.x = merged(merge, totals.x, parts[i].x);
                totals.y = merged(merge, totals.y, parts[i].y);
            }
        }
    }
    float factor = finish_of(sink, largest, sum);
    *(u32*)(out + lane * 2) = pack_bf16(__fmul_rn(totals.x, factor), __fmul_rn(totals.y, factor));
}

// A split whose results are written, and whether it was its span's last. A team has two, posted by turns; a barrier says
// that all its warps have written, another that the split is counted.
struct Post {
    Merging merging;
    u32 last;
};
struct Posts {
    Post* posts;
    u32 posted, counted;  // barriers
    u32 num, heard;
};
// By all warps of the team, each when it has written its part; all have heard of the post before.
DEVICE void post(Posts& posts, const Merging& merging, u32 warp, int lane) {
    if (warp == 0 && lane == 0) posts.posts[posts.num % 2].merging = merging;
    __syncwarp();
    if (lane == 0) barrier_arrive(posts.posted);
    posts.num++;
}
// Until a post of no splits; one lane.
DEVICE void count_splits(Posts posts) {
#pragma unroll 1
    for (;; posts.num++) {
        barrier_wait(posts.posted, posts.num & 1);
        Post* now = posts.posts + posts.num % 2;
        if (now->merging.num_splits == 0) break;
        now->last = arrive(now->merging.counter, now->merging.num_splits) == now->merging.num_splits - 1;
        barrier_arrive(posts.counted);
    }
}
// Merges the span of the post that was not heard of yet, if there is one and it was the last.
template <int D, int NUM, int WARPS>
DEVICE void hear(const AttentionArgs& args, Posts& posts, const Divisor& group, float4* factors, u32 warp, int lane) {
    if (posts.heard == posts.num) return;
    barrier_wait(posts.counted, posts.heard & 1);
    const Post* last = posts.posts + posts.heard++ % 2;
    if (!last->last) return;
    const Merging merging = last->merging;
    constexpr u32 PIECES = D / 64;
#pragma unroll 1
    for (u32 piece = warp; piece < merging.packed_rows * PIECES; piece += WARPS) {
        Place place = place_of(args, group, merging.kv_head, piece / PIECES, merging.packed_rows);
        const float* partial = args.partial + partial_at(args, merging.first_item, place.index, place.head);
        const u32 column = piece % PIECES * 64;
        merge_columns<NUM>(partial + column, partial + D, partial_at(args, 1, 0, 0), merging.num_splits,
                           sink_of(args, place.head), output_at(args, merging.first_row, place.index, place.head) + column,
                           factors + warp * WARP, lane);
    }
}
