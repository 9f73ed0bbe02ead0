// Merges the partial results of attention in decode form, in ascending order of their splits, with the arithmetic of
// attention_softmax.cuh. The block that finishes a span's last split does it for one kv head: no further kernel is needed.
#pragma once
#include "attention_rows.cuh"

// Splits of a span and kv head that are done. Zeros when the module is loaded, and again after every kernel.
#define MOST_ARRIVALS 65536
__device__ u32 arrivals[MOST_ARRIVALS];

// Counts one of `num_splits` and tells how many came before; the last sets the count back to 0. What this thread has seen
// written is visible to whoever comes after, and what those before have written is visible from here on.
DEVICE u32 arrive(u32 counter, u32 num_splits) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(before) : "l"(arrivals + counter), "r"(num_splits - 1) : "memory");
    return before;
}
DEVICE bool last_to_arrive(u32 counter, u32 num_splits) { return arrive(counter, num_splits) == num_splits - 1; }

// Each lane has one split's largest score and sum of weights, in order. Its share of the result: what sums before it and its
// own are multiplied by, and its sum of weights. `largest` is that of all splits so far.
DEVICE float4 factors_of(float2 own, float& largest, int lane) {
    float upto = own.x;
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {
        float other = __shfl_up_sync(FULL_MASK, upto, step);
        if (lane >= step) upto = fmaxf(upto, other);
    }
    upto = fmaxf(upto, largest);
    float before = __shfl_up_sync(FULL_MASK, upto, 1);
    if (lane == 0) before = largest;
    Merge mine = merge_of(before, own.x);
    largest = __shfl_sync(FULL_MASK, upto, WARP - 1);
    return make_float4(mine.before, mine.next, own.y, 0.0f);
}

// One row and head by one warp; a lane has columns 4 * lane to 4 * lane + 3 and, with two parts, the same of the next 128.
// `factors` is the warp's own shared memory, 32 times four floats.
template <int PARTS>
DEVICE void merge_row(const float* partial, u64 stride, i32 num_splits, i32 head_dim, float sink, bf16* out,
                                       float4* factors) {
    constexpr int AT_ONCE = 16 / PARTS;
    int lane = threadIdx.x % WARP;
    float4 totals[PARTS];
    float largest = NOTHING_SEEN, sum = 0.0f;
#pragma unroll
    for (int part = 0; part < PARTS; part++) totals[part] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
    for (i32 first = 0; first < num_splits; first += WARP) {
        float2 own = make_float2(NOTHING_SEEN, 0.0f);
        if (first + lane < num_splits) own = __ldcg((const float2*)(partial + (first + lane) * stride + head_dim));
        float4 mine = factors_of(own, largest, lane);
        __syncwarp();
        factors[lane] = mine;
        __syncwarp();
        i32 here = min(num_splits - first, WARP);
        // Where a batch is not full, its last split is read again and counts nothing: its factor is 0.
#pragma unroll 1
        for (i32 some = 0; some < here; some += AT_ONCE) {
            float4 parts[AT_ONCE][PARTS];
            const float* at = partial + (first + some) * stride;
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
#pragma unroll
                for (int part = 0; part < PARTS; part++)
                    parts[i][part] = __ldcg((const float4*)(at + min(part * 128 + lane * 4, head_dim - 4)));
                if (some + i + 1 < here) at += stride;
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                float4 four = factors[some + i];
                Merge merge = {0.0f, four.x, four.y};
                sum = merged(merge, sum, four.z);
#pragma unroll
                for (int part = 0; part < PARTS; part++) {
                    totals[part].x = merged(merge, totals[part].x, parts[i][part].x);
                    totals[part].y = merged(merge, totals[part].y, parts[i][part].y);
                    totals[part].z = merged(merge, totals[part].z, parts[i][part].z);
                    totals[part].w = merged(merge, totals[part].w, parts[i][part].w);
                }
            }
        }
    }
    float factor = finish_of(sink, largest, sum);
#pragma unroll
    for (int part = 0; part < PARTS; part++)
        if (part * 128 + lane * 4 < head_dim)
            *(uint2*)(out + part * 128 + lane * 4) =
                make_uint2(pack_bf16(__fmul_rn(totals[part].x, factor), __fmul_rn(totals[part].y, factor)),
                           pack_bf16(__fmul_rn(totals[part].z, factor), __fmul_rn(totals[part].w, factor)));
}

// All rows of a span and kv head, from the partial results of its splits.
struct Merging {
    u32 counter, kv_head, first_item, num_splits;
    u32 packed_rows, first_row;
};
template <int D>
DEVICE void merge_rows(const AttentionArgs& args, const Divisor& group, const Merging& merging, int warp, float4* factors) {
    u64 stride = partial_at(args, 1, 0, 0);
#pragma unroll 1
    for (u32 packed = warp; packed < merging.packed_rows; packed += 4) {
        Place place = place_of(args, group, merging.kv_head, packed, merging.packed_rows);
        merge_row<(D > 128 ? 2 : 1)>(args.partial + partial_at(args, merging.first_item, place.index, place.head), stride,
                                     merging.num_splits, args.head_dim, sink_of(args, place.head),
                                     output_at(args, merging.first_row, place.index, place.head), factors);
    }
}
