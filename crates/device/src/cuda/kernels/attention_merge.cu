// Merges the partial results of attention in decode form, in ascending order of their splits.
//
//   attention_merge_bf16   128 threads, no dynamic shared memory, any grid: blocks stride over *num_work * partial_rows *
//                          ceil(heads / 4) jobs, best 4 blocks a multiprocessor. The work list is the decode kernel's.
//                          head_dim is any multiple of 4 up to 256.
//
// A job is four heads of one row; items that are not their span's first, and spans with one split, whose output is
// written already, have none. With few splits each warp has a head and a lane four columns; with many each lane has one
// column, so that a warp has 32 splits under way at a time.
#include "attention_softmax.cuh"

#define FEW 8

// One lane knows one split: its largest score, then by what earlier sums and its own are multiplied.
struct Factors {
    float before, next, sum;
    u32 live;  // which of the 32 splits saw anything
};
// Reads 32 splits from `first` on; `largest` is that of the splits before them and is brought up to date.
DEVICE Factors factors_of(const float* partial, i64 stride, i32 first, i32 num, float& largest, int lane) {
    Factors out;
    float2 own = make_float2(NOTHING_SEEN, 0.0f);
    if (first + lane < num) own = *(const float2*)(partial + (first + lane) * stride);
    out.sum = own.y;
    out.live = __ballot_sync(FULL_MASK, own.y != 0.0f);
    float upto = own.x;
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {
        float other = __shfl_up_sync(FULL_MASK, upto, step);
        if (lane >= step) upto = fmaxf(upto, other);
    }
    upto = fmaxf(upto, largest);
    float before = __shfl_up_sync(FULL_MASK, upto, 1);
    if (lane == 0) before = largest;
    Merge merge = merge_of(before, own.x);
    out.before = merge.before;
    out.next = merge.next;
    largest = __shfl_sync(FULL_MASK, upto, WARP - 1);
    return out;
}
DEVICE Merge factors_at(const Factors& factors, int split) {
    Merge out;
    out.largest = 0.0f;
    out.before = __shfl_sync(FULL_MASK, factors.before, split);
    out.next = __shfl_sync(FULL_MASK, factors.next, split);
    return out;
}

// Up to eight splits, a lane having columns 4 * lane and 128 + 4 * lane.
DEVICE void merge_few(const AttentionArgs& args, const float* partial, i64 stride, i32 num, u32 head, bf16* out, int lane) {
    float4 parts[FEW][2], totals[2];
#pragma unroll
    for (int split = 0; split < FEW; split++)
#pragma unroll
        for (int part = 0; part < 2; part++)
            if (split < num && part * 128 + lane * 4 < args.head_dim)
                parts[split][part] = *(const float4*)(partial + split * stride + part * 128 + lane * 4);
    float largest = NOTHING_SEEN, sum = 0.0f;
    totals[0] = totals[1] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    Factors factors = factors_of(partial + args.head_dim, stride, 0, num, largest, lane);
#pragma unroll
    for (int split = 0; split < FEW; split++) {
        if (!(factors.live >> split & 1)) continue;
        Merge merge = factors_at(factors, split);
        sum = merged(merge, sum, __shfl_sync(FULL_MASK, factors.sum, split));
#pragma unroll
        for (int part = 0; part < 2; part++) {
            totals[part].x = merged(merge, totals[part].x, parts[split][part].x);
            totals[part].y = merged(merge, totals[part].y, parts[split][part].y);
            totals[part].z = merged(merge, totals[part].z, parts[split][part].z);
            totals[part].w = merged(merge, totals[part].w, parts[split][part].w);
        }
    }
    float factor = finish_of(args, head, largest, sum);
#pragma unroll
    for (int part = 0; part < 2; part++)
        if (part * 128 + lane * 4 < args.head_dim)
            *(uint2*)(out + part * 128 + lane * 4) =
                make_uint2(pack_bf16(__fmul_rn(totals[part].x, factor), __fmul_rn(totals[part].y, factor)),
                           pack_bf16(__fmul_rn(totals[part].z, factor), __fmul_rn(totals[part].w, factor)));
}

// Any number of splits, one column a lane.
DEVICE void merge_column(const AttentionArgs& args, const float* partial, i64 stride, i32 num, u32 head, bf16* out,
                         i32 column, int lane) {
    float largest = NOTHING_SEEN, sum = 0.0f, total = 0.0f;
#pragma unroll 1
    for (i32 first = 0; first < num; first += WARP) {
        float parts[WARP];
#pragma unroll
        for (int split = 0; split < WARP; split++)
            parts[split] = first + split < num && column < args.head_dim ? partial[(first + split) * stride + column] : 0.0f;
        Factors factors = factors_of(partial + args.head_dim, stride, first, num, largest, lane);
#pragma unroll
        for (int split = 0; split < WARP; split++) {
            if (!(factors.live >> split & 1)) continue;
            Merge merge = factors_at(factors, split);
            sum = merged(merge, sum, __shfl_sync(FULL_MASK, factors.sum, split));
            total = merged(merge, total, parts[split]);
        }
    }
    float factor = finish_of(args, head, largest, sum);
    if (column < args.head_dim) out[column] = from_float<bf16>(__fmul_rn(total, factor));
}

extern "C" __global__ void __launch_bounds__(128) attention_merge_bf16(AttentionArgs args) {
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    u32 quads = (args.heads + 3) / 4, num_jobs = *args.num_work * args.partial_rows * quads;
    release_next();
    bool waited = false;
#pragma unroll 1
    for (u32 job = blockIdx.x; job < num_jobs; job += gridDim.x) {
        u32 item = job / quads / args.partial_rows, index = job / quads % args.partial_rows;
        u32 span = args.work[item * 2];
        Splits splits = splits_of(args, span);
        i32 num = splits.end - splits.first;
        if (num <= 1 || index >= args.num_rows[span] || args.work[item * 2 + 1] != splits.first) continue;
        if (!waited) wait_for_previous();
        waited = true;
        u32 first_head = job % quads * 4;
        i64 stride = partial_at(args, 1, 0, 0);
        const float* partial = args.partial + partial_at(args, item, index, first_head);
        bf16* out = (bf16*)args.out + ((i64)(args.first_row[span] + index) * args.heads + first_head) * args.head_dim;
        i32 heads = min(4, args.heads - (i32)first_head);
        if (num <= FEW) {
            if (warp < heads)
                merge_few(args, partial + warp * (args.head_dim + 4), stride, num, first_head + warp,
                          out + warp * args.head_dim, lane);
        } else {
#pragma unroll 1
            for (i32 head = 0; head < heads; head++)
#pragma unroll 1
                for (i32 column = warp * WARP; column < args.head_dim; column += 4 * WARP)
                    merge_column(args, partial + head * (args.head_dim + 4), stride, num, first_head + head,
                                 out + head * args.head_dim, column + lane, lane);
        }
    }
    if (!waited) wait_for_previous();
}
