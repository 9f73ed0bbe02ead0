// Rows and columns from one tensor to another, for heads that draft tokens.
//
//   copy_columns_{from}_{to}(out, x, column, out_width, width)      out[r][column + c] = x[r][c]
//       grid (ceil(width / 1024), rows), threads 256.
//   copy_rows_{from}_{to}(out, x, Runs, width)      of each run (from, to, count): out[to + i] = x[from + i]
//       by value up to 128 runs, which write different rows; grid (ceil(width / 1024), rows at a time, runs), threads 256.
//
// from and to: f32, bf16.
#include "rows.cuh"

struct Runs {
    u32 words[3 * 128];
};
static_assert(sizeof(Runs) == 1536, "as the host has it");

// The 1024 columns of a row that belong to block x.
template <typename T, typename O> DEVICE void copy_row(O* to, const T* from, int width, bool fours) {
    int at = (blockIdx.x * 256 + threadIdx.x) * 4;
    if (fours) {
        if (at < width) store4(to + at, load4(from + at));
    } else {
#pragma unroll 1
        for (int end = min(at + 4, width); at < end; at++) to[at] = from_float<O>(to_float(from[at]));
    }
}

#define COPY(NAME, T, O)                                                                                               \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        copy_columns_##NAME(O* out, const T* x, int column, int out_width, int width) {                                \
        release_next();                                                                                                \
        wait_for_previous();                                                                                           \
        bool fours = width % 4 == 0 && column % 4 == 0 && out_width % 4 == 0;                                          \
        copy_row(out + (i64)blockIdx.y * out_width + column, x + (i64)blockIdx.y * width, width, fours);               \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        copy_rows_##NAME(O* out, const T* x, const __grid_constant__ Runs runs, int width) {                           \
        release_next();                                                                                                \
        wait_for_previous();                                                                                           \
        u32 from = runs.words[3 * blockIdx.z], to = runs.words[3 * blockIdx.z + 1];                                    \
        u32 count = runs.words[3 * blockIdx.z + 2];                                                                    \
        for (u32 row = blockIdx.y; row < count; row += gridDim.y)                                                      \
            copy_row(out + (i64)(to + row) * width, x + (i64)(from + row) * width, width, width % 4 == 0);             \
    }
COPY(f32_f32, float, float)
COPY(f32_bf16, float, bf16)
COPY(bf16_f32, bf16, float)
COPY(bf16_bf16, bf16, bf16)
