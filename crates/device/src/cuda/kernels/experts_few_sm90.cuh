// Mixture of experts for few rows: the whole block in two kernels, at the speed at which the chosen experts' weights come
// from memory. Nothing is sorted or copied: every row is a column of the matrix instruction for every expert that any row
// chose, and what a row did not choose is left out. See experts_few_sm90.cu.
//
// Each block of both kernels routes all rows by itself: that takes less time than a kernel of its own (choosing from very
// many experts takes longer: there the lists of routing.cu are read). The second kernel does so, and begins to read
// weights, while the first still runs: it reads the logits (or lists) before it has waited for the first kernel. That is
// right because the first lets it start only after its own wait: by then the kernel that wrote them has ended.
//
// Eight warps multiply; each has a ring of stages of its own, a stage being 16 rows of weights by 128 of k, which it fills
// by the copy engine. One more warp adds up what the eight found and writes it. Nobody else waits for another: so much is
// under way at any time that memory is never idle. k is permuted inside 32 values so that a lane's 16 bytes are its own
// fragments of two matrix instructions, of weights and of rows alike. Which sums are added in which order depends on the
// matrices' shape alone, so a row's bits do not depend on the rows beside it.
#pragma once
#include "hopper.cuh"
#include "linear.cuh"
#include "routing.cuh"

#define FEW_ROWS 8
// Pairs of a row and an expert, at most.
#define FEW_PAIRS 64
// Warps that multiply; one more finishes.
#define FEW_WARPS 8
#define FEW_THREADS ((FEW_WARPS + 1) * WARP)
// A stage: 16 rows of weights by so many values of k.
#define FEW_PIECE 128
#define FEW_STAGE_BYTES (16 * FEW_PIECE * 2)
// Stages of a warp's ring.
#define FEW_DEPTH 3
#define FEW_STAGES (FEW_WARPS * FEW_DEPTH)
#define NOT_CHOSEN 255
// Experts of which the kernels choose by themselves.
#define ROUTED_HERE 128

struct FewExpertsArgs {
    RoutingArgs routing; // of its lists only `experts_of` and `weights`, of more than ROUTED_HERE experts
    const bf16* x;       // [rows, hidden]; for the second kernel what the first one gave
    const float* bias;   // [experts][2 * inter]; [experts][hidden]; or null
    void* out;           // bf16 [rows * top_k, inter], a row's experts ascending; [rows, hidden]
    i32 hidden, inter;
    i32 activation;
    float alpha, limit;
    i32 out_f32; // of the second
};
static_assert(sizeof(FewExpertsArgs) == 152, "as the host has it");

// Who chose what.
struct Hits {
    u32 words[16]; // a bit an expert that any row chose
    float weights[FEW_PAIRS];
    u16 chosen[FEW_PAIRS];         // [row][top_k]
    u16 experts[FEW_PAIRS];        // those that any row chose, ascending
    u8 place[FEW_PAIRS][FEW_ROWS]; // where in a row's list such an expert stands, or NOT_CHOSEN
};

DEVICE void clear_hits(Hits& hits) {
    for (int i = threadIdx.x; i < FEW_PAIRS * FEW_ROWS / 4; i += blockDim.x)
        reinterpret_cast<u32*>(hits.place)[i] = 0xffffffffu;
    if (threadIdx.x < 16) hits.words[threadIdx.x] = 0;
    __syncthreads();
}

// Fills in what `clear_hits` cleared; returns how many experts were chosen. `staged` is room for a score an expert and warp.
DEVICE int find_hits(const RoutingArgs& args, Hits& hits, float* staged) {
    const int warp = threadIdx.x / WARP, warps = blockDim.x / WARP, top_k = args.top_k;
    auto note = [&](int pair, int expert, float weight) {
        hits.chosen[pair] = expert;
        hits.weights[pair] = weight;
        atomicOr(&hits.words[expert / 32], 1u << (expert % 32));
    };
    if (args.experts <= ROUTED_HERE) {
#pragma unroll 1
        for (int row = warp; row < args.rows; row += warps)
            choose_experts<ROUTED_HERE / WARP>(args, row, staged + warp * ROUTED_HERE,
                                               [&](int expert, int before, bool taken, float weight) {
                                                   if (taken) note(row * top_k + before, expert, weight);
                                               });
    } else {
        // A kernel before the first has done it.
#pragma unroll 1
        for (int pair = threadIdx.x; pair < args.rows * top_k; pair += blockDim.x)
            note(pair, __float_as_uint(load_fresh((const float*)args.experts_of + pair)), load_fresh(args.weights + pair));
    }
    __syncthreads();
#pragma unroll 1
    for (int pair = threadIdx.x; pair < args.rows * top_k; pair += blockDim.x) {
        int expert = hits.chosen[pair], rank = __popc(hits.words[expert / 32] & ((1u << (expert % 32)) - 1));
#pragma unroll 1
        for (int word = 0; word < expert / 32; word++) rank += __popc(hits.words[word]);
        hits.experts[rank] = expert;
        hits.place[rank][pair / top_k] = pair % top_k;
    }
    int count = 0;
#pragma unroll
    for (int word = 0; word < 16; word++) count += __popc(hits.words[word]);
    __syncthreads();
    return count;
}

// Barriers of a block, one phase after the other.
struct FewBarriers {
    u64 full[FEW_STAGES];
    // Sums of a tile are there; have been read. Every lane arrives for itself.
    u64 summed[2], read[2];
};

// What all warps of a block share, and where a warp stands in its ring.
struct Few {
    int lane, warp, g, t;
    u32 ring, full, summed, read;
    int stage, filled;
    u32 parity;

    // A barrier of the block must follow. `shared` is 128-aligned.
    __device__ __forceinline__ Few(u8* shared, FewBarriers& barriers) {
        lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
        ring = shared_address(shared);
        full = shared_address(barriers.full);
        summed = shared_address(barriers.summed), read = shared_address(barriers.read);
        stage = 0, filled = 0, parity = 0;
        if (threadIdx.x == 0) {
            for (int i = 0; i < FEW_STAGES; i++) barrier_init(full + i * 8, 1);
            for (int i = 0; i < 2; i++) barrier_init(summed + i * 8, FEW_WARPS * WARP), barrier_init(read + i * 8, WARP);
            barrier_init_done();
        }
    }
    __device__ __forceinline__ bool finishes() const { return warp == FEW_WARPS; }
    __device__ __forceinline__ u32 stage_at(int stage) const { return ring + (warp * FEW_DEPTH + stage) * FEW_STAGE_BYTES; }
    __device__ __forceinline__ u32 barrier_at(int stage) const { return full + (warp * FEW_DEPTH + stage) * 8; }
    __device__ __forceinline__ u32 at() const { return stage_at(stage); }
    // The stage that was read, or is read first, is filled with box (column, row) and perhaps one `below` rows further down.
    // Every lane comes here; one asks for it.
    __device__ __forceinline__ void fetch(const TensorMap* map, int column, int row, int below, u64 policy) {
        __syncwarp();
        if (lane == 0) {
            barrier_expect(barrier_at(filled), FEW_STAGE_BYTES);
            copy_box(stage_at(filled), map, column, row, barrier_at(filled), policy);
            if (below) copy_box(stage_at(filled) + FEW_STAGE_BYTES / 2, map, column, row + below, barrier_at(filled), policy);
        }
        if (++filled == FEW_DEPTH) filled = 0;
    }
    __device__ __forceinline__ void wait() const { barrier_wait(barrier_at(stage), parity); }
    __device__ __forceinline__ void next() {
        if (++stage == FEW_DEPTH) stage = 0, parity ^= 1;
    }
    // How many of `count` things, dealt out in turn, a warp gets.
    __device__ __forceinline__ static int share(int owner, int count) { return (count - owner + FEW_WARPS - 1) / FEW_WARPS; }
    __device__ __forceinline__ static u32 word(const uint4& v, int index) {
        return index == 0 ? v.x : index == 1 ? v.y : index == 2 ? v.z : v.w;
    }
    // acc += 32 of k, number `part` of the stage, times x.
    __device__ __forceinline__ void multiply_part(float acc[4], const uint4& x, int part) const {
        u32 from = at() + g * (FEW_PIECE * 2) + part * 64 + t * 16;
        uint4 low = load_shared_16(from), high = load_shared_16(from + 8 * FEW_PIECE * 2);
#pragma unroll
        for (int s = 0; s < 2; s++) {
            u32 w[4] = {word(low, 2 * s), word(high, 2 * s), word(low, 2 * s + 1), word(high, 2 * s + 1)};
            multiply(acc, w, word(x, 2 * s), word(x, 2 * s + 1));
        }
    }
};

// A tile: eight values of `inter` of one expert, their gate rows above their up rows, so that both meet in a lane. A warp
// has the slices w, w + 8, ... of k, at most SLICES, and holds what it needs of x all the time.
template <int SLICES> DEVICE void few_gate_up(const TensorMap* map, const FewExpertsArgs& a, u8* shared) {
    __shared__ Hits hits;
    __shared__ FewBarriers barriers;
    __shared__ float sums[2][FEW_WARPS][16][10]; // of a tile: row of weights, token, and a gap
    Few few(shared, barriers);
    const int rows = a.routing.rows, top_k = a.routing.top_k, tiles = a.inter / 8;
    const int slices = (a.hidden + FEW_PIECE - 1) / FEW_PIECE;
    clear_hits(hits);
    wait_for_previous();
    // Not earlier: the next kernel reads the logits before it waits.
    release_next();
    uint4 x[SLICES][FEW_PIECE / 32];
#pragma unroll
    for (int s = 0; s < SLICES; s++)
#pragma unroll
        for (int part = 0; part < FEW_PIECE / 32; part++) {
            int at = (few.warp + s * FEW_WARPS) * FEW_PIECE + part * 32 + few.t * 8;
            x[s][part] = make_uint4(0, 0, 0, 0);
            load_16(x[s][part], a.x + (i64)few.g * a.hidden + at, few.warp < FEW_WARPS && few.g < rows && at < a.hidden);
        }
    const int items = find_hits(a.routing, hits, reinterpret_cast<float*>(shared)) * tiles;
    // Scores of routing lay where the rings are.
    fence_async_shared();
    __syncthreads();

    if (few.finishes()) {
        u32 turn = 0;
#pragma unroll 1
        for (int item = blockIdx.x; item < items; item += gridDim.x, turn++) {
            const int hit = item / tiles, row = few.lane % 8, column = item % tiles * 8 + row;
            barrier_wait(few.summed + turn % 2 * 8, turn / 2 % 2);
#pragma unroll
            for (int token = few.lane / 8; token < FEW_ROWS; token += 4) {
                int place = hits.place[hit][token];
                if (place == NOT_CHOSEN) continue;
                float gate = 0.0f, up = 0.0f;
#pragma unroll
                for (int warp = 0; warp < FEW_WARPS; warp++)
                    gate += sums[turn % 2][warp][row][token], up += sums[turn % 2][warp][row + 8][token];
                if (a.bias) {
                    const float* bias = a.bias + (i64)hits.experts[hit] * 2 * a.inter + column;
                    gate += bias[0], up += bias[a.inter];
                }
                float value = gated<false, true>(a.activation, a.alpha, a.limit, gate, up);
                static_cast<bf16*>(a.out)[(i64)(token * top_k + place) * a.inter + column] = from_float<bf16>(value);
            }
            barrier_arrive(few.read + turn % 2 * 8);
        }
    } else {
        const int own = Few::share(few.warp, slices);
        const u64 policy = evict_first();
        int fetch_item = own > 0 ? blockIdx.x : items, fetch_slice = few.warp, fetch_row = 0;
        auto fetch = [&]() {
            if (fetch_item >= items) return;
            if (fetch_slice == few.warp) fetch_row = hits.experts[fetch_item / tiles] * 2 * a.inter + fetch_item % tiles * 8;
            few.fetch(map, fetch_slice * FEW_PIECE, fetch_row, a.inter, policy);
            fetch_slice += FEW_WARPS;
            if (fetch_slice >= slices) fetch_slice = few.warp, fetch_item += gridDim.x;
        };
#pragma unroll 1
        for (int i = 0; i < FEW_DEPTH; i++) fetch();
        u32 turn = 0;
#pragma unroll 1
        for (int item = blockIdx.x; item < items; item += gridDim.x, turn++) {
            // Two, so that an instruction need not wait for the one before it.
            float acc[2][4] = {};
#pragma unroll
            for (int s = 0; s < SLICES; s++) {
                if (s >= own) continue;
                few.wait();
#pragma unroll
                for (int part = 0; part < FEW_PIECE / 32; part++) few.multiply_part(acc[part % 2], x[s][part], part);
                fetch();
                few.next();
            }
            barrier_wait(few.read + turn % 2 * 8, turn / 2 % 2 ^ 1);
            float* to = &sums[turn % 2][few.warp][few.g][2 * few.t];
            *reinterpret_cast<float2*>(to) = make_float2(acc[0][0] + acc[1][0], acc[0][1] + acc[1][1]);
            *reinterpret_cast<float2*>(to + 8 * 10) = make_float2(acc[0][2] + acc[1][2], acc[0][3] + acc[1][3]);
            barrier_arrive(few.summed + turn % 2 * 8);
        }
    }
}

// A tile: sixteen outputs. Of all experts that any row chose a warp has one in eight; what each gives each row waits in
// shared memory until all can be added. x lies behind the rings, [pair][inter] with a gap of 64 bytes.
DEVICE void few_down(const TensorMap* map, const FewExpertsArgs& a, u8* shared) {
    __shared__ Hits hits;
    __shared__ FewBarriers barriers;
    __shared__ float results[2][FEW_PAIRS][16];
    Few few(shared, barriers);
    const int rows = a.routing.rows, top_k = a.routing.top_k, tiles = (a.hidden + 15) / 16;
    const int slices = (a.inter + FEW_PIECE - 1) / FEW_PIECE;
    release_next();
    clear_hits(hits);
    const int count = find_hits(a.routing, hits, reinterpret_cast<float*>(shared));
    fence_async_shared();
    __syncthreads();

    if (few.finishes()) {
        wait_for_previous();
        u32 turn = 0;
#pragma unroll 1
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, turn++) {
            barrier_wait(few.summed + turn % 2 * 8, turn / 2 % 2);
            const int row = few.lane % 16, output = tile * 16 + row;
#pragma unroll 1
            for (int token = few.lane / 16; token < rows; token += 2) {
                if (output >= a.hidden) continue;
                float sum = 0.0f;
#pragma unroll 4
                for (int pair = token * top_k; pair < (token + 1) * top_k; pair++) {
                    float value = results[turn % 2][pair][row];
                    if (a.bias) value += a.bias[(i64)hits.chosen[pair] * a.hidden + output];
                    sum = fmaf(hits.weights[pair], value, sum);
                }
                i64 at = (i64)token * a.hidden + output;
                if (a.out_f32) static_cast<float*>(a.out)[at] = sum;
                else static_cast<bf16*>(a.out)[at] = from_float<bf16>(sum);
            }
            barrier_arrive(few.read + turn % 2 * 8);
        }
    } else {
        const u64 policy = evict_first();
        int fetch_tile = few.warp < count ? blockIdx.x : tiles, fetch_hit = few.warp, fetch_slice = 0;
        auto fetch = [&]() {
            if (fetch_tile >= tiles) return;
            few.fetch(map, fetch_slice * FEW_PIECE, hits.experts[fetch_hit] * a.hidden + fetch_tile * 16, 0, policy);
            if (++fetch_slice < slices) return;
            fetch_slice = 0, fetch_hit += FEW_WARPS;
            if (fetch_hit >= count) fetch_hit = few.warp, fetch_tile += gridDim.x;
        };
#pragma unroll 1
        for (int i = 0; i < FEW_DEPTH; i++) fetch();
        wait_for_previous();
        const int width = slices * FEW_PIECE, stride = width + 32, units = width / 8;
        bf16* held = reinterpret_cast<bf16*>(shared + FEW_STAGES * FEW_STAGE_BYTES);
        // The remainder of the last slice is zeros, as that of the weights.
#pragma unroll 4
        for (int i = threadIdx.x; i < rows * top_k * units; i += FEW_WARPS * WARP) {
            int pair = i / units, at = i % units * 8;
            uint4 value = make_uint4(0, 0, 0, 0);
            load_16(value, a.x + (i64)pair * a.inter + at, at < a.inter);
            *reinterpret_cast<uint4*>(held + pair * stride + at) = value;
        }
        named_barrier(1, FEW_WARPS * WARP);
        u32 turn = 0;
#pragma unroll 1
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, turn++) {
            barrier_wait(few.read + turn % 2 * 8, turn / 2 % 2 ^ 1);
#pragma unroll 1
            for (int hit = few.warp; hit < count; hit += FEW_WARPS) {
                int place = hits.place[hit][few.g];
                u32 from = shared_address(held + ((place == NOT_CHOSEN ? 0 : few.g * top_k + place) * stride + few.t * 8));
                float acc[2][4] = {};
#pragma unroll 1
                for (int slice = 0; slice < slices; slice++) {
                    few.wait();
#pragma unroll
                    for (int part = 0; part < FEW_PIECE / 32; part++)
                        few.multiply_part(acc[part % 2], load_shared_16(from + slice * FEW_PIECE * 2 + part * 64), part);
                    fetch();
                    few.next();
                }
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    int token = 2 * few.t + i, at = hits.place[hit][token];
                    if (at == NOT_CHOSEN) continue;
                    float* to = &results[turn % 2][token * top_k + at][few.g];
                    to[0] = acc[0][i] + acc[1][i], to[8] = acc[0][2 + i] + acc[1][2 + i];
                }
            }
            barrier_arrive(few.summed + turn % 2 * 8);
        }
    }
}
