// out[m, n of out_stride] = x[m, k] . w[n, k]^T (+ bias) for many rows in bf16, where no matrix library is at hand.
//
// A block of eight warps takes ROWS x 128 of the output and walks through k in steps of 32, `STAGES` of them under way
// in shared memory by asynchronous copies. Pieces of 16 bytes are swizzled so that neither copies nor `ldmatrix` meet in
// a bank. A warp holds ROWS/2 x 32 sums. Every sum runs through k in ascending order, so its bits do not depend on m.
// Grid: tiles of rows first, so that neighbours share their weights in the second-level cache. k is a multiple of 8.
#include "linear.cuh"

#define THREADS 256
#define OUTPUTS 128
#define STEP 32
#define STAGES 4

// 64 bytes a row: two rows share a line of banks, so the swizzle changes every other row.
DEVICE u32 piece(int row, int part) { return row * 64 + ((part ^ ((row >> 1) & 3)) << 4); }

// `rows` rows of STEP values from k position `at`, one piece a thread and turn.
template <int ROWS> DEVICE void copy_tile(u32 to, const bf16* from, int first, int count, int k, int at) {
#pragma unroll
    for (int turn = 0; turn < ROWS * 4 / THREADS; turn++) {
        int row = threadIdx.x / 4 + turn * (THREADS / 4), part = threadIdx.x % 4, column = at + part * 8;
        bool valid = column < k;
        copy_async_16(to + piece(row, part), from + (i64)min(first + row, count - 1) * k + (valid ? column : 0), valid);
    }
}

template <int ROWS> DEVICE void tile_product(void* out, const bf16* x, const bf16* w, const float* bias, int m, int n, int k, int out_stride, int out_f32, u8* shared) {
    constexpr int HEIGHT = ROWS / 32; // of 16 rows in a warp
    constexpr u32 X_BYTES = ROWS * 64, STAGE_BYTES = X_BYTES + OUTPUTS * 64;
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int first_row = blockIdx.x * ROWS, first_output = blockIdx.y * OUTPUTS;
    int warp_row = warp / 4 * (ROWS / 2), warp_output = warp % 4 * 32;
    u32 base = shared_address(shared);
    int steps = (k + STEP - 1) / STEP;
    auto copy_w = [&](int step) { copy_tile<OUTPUTS>(base + step % STAGES * STAGE_BYTES + X_BYTES, w, first_output, n, k, step * STEP); };
    auto copy_x = [&](int step) { copy_tile<ROWS>(base + step % STAGES * STAGE_BYTES, x, first_row, m, k, step * STEP); };
#pragma unroll 1
    for (int step = 0; step < STAGES - 1; step++)
        if (step < steps) copy_w(step);
    release_next();
    wait_for_previous();
#pragma unroll 1
    for (int step = 0; step < STAGES - 1; step++) {
        if (step < steps) copy_x(step);
        commit_copies();
    }
    float sum[HEIGHT][4][4];
#pragma unroll
    for (int i = 0; i < HEIGHT * 16; i++) (&sum[0][0][0])[i] = 0.0f;
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        wait_copies<STAGES - 2>();
        __syncthreads();
        // The stage that everybody has left behind.
        if (step + STAGES - 1 < steps) copy_w(step + STAGES - 1), copy_x(step + STAGES - 1);
        commit_copies();
        u32 stage = base + step % STAGES * STAGE_BYTES;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 a[HEIGHT][4], b[2][4];
#pragma unroll
            for (int i = 0; i < HEIGHT; i++) load_matrices(a[i], stage + piece(warp_row + 16 * i + lane % 16, 2 * half + lane / 16));
#pragma unroll
            for (int j = 0; j < 2; j++)
                load_matrices(b[j], stage + X_BYTES + piece(warp_output + 16 * j + lane % 8 + lane / 16 * 8, 2 * half + lane / 8 % 2));
#pragma unroll
            for (int i = 0; i < HEIGHT; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) multiply(sum[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
    }
#pragma unroll
    for (int i = 0; i < HEIGHT; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int part = 0; part < 2; part++) {
                int row = first_row + warp_row + 16 * i + lane / 4 + 8 * part, output = first_output + warp_output + 8 * j + lane % 4 * 2;
                if (row >= m || output >= n) continue;
                bool both = output + 1 < n;
                float low = sum[i][j][2 * part], high = sum[i][j][2 * part + 1];
                if (bias) low += bias[output], high += both ? bias[output + 1] : 0.0f;
                i64 at = (i64)row * out_stride + output;
                if (out_f32) {
                    ((float*)out)[at] = low;
                    if (both) ((float*)out)[at + 1] = high;
                } else if (both && ((u64)((bf16*)out + at) & 3) == 0) {
                    *(u32*)((bf16*)out + at) = pack_bf16(low, high);
                } else {
                    ((bf16*)out)[at] = from_float<bf16>(low);
                    if (both) ((bf16*)out)[at + 1] = from_float<bf16>(high);
                }
            }
}

#define TILE_KERNEL(ROWS)                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) linear_tile_##ROWS(                                       \
        void* out, const bf16* x, const bf16* w, const float* bias, int m, int n, int k, int out_stride, int out_f32) {                \
        extern __shared__ __align__(128) u8 shared[];                                                                  \
        tile_product<ROWS>(out, x, w, bias, m, n, k, out_stride, out_f32, shared);                                                 \
    }
TILE_KERNEL(64)
TILE_KERNEL(128)
