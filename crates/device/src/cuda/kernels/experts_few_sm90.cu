// Mixture of experts for few rows on Hopper (experts_few_sm90.cuh), as the two kernels behind the one that gave the router's
// logits:
//
//   few_gate_up_{1,2}(map, FewExpertsArgs) out[row's choice] = act(gate . x) * (up . x)
//       grid: any, best one block a multiprocessor; shared: 98304 bytes; hidden <= 2048 * {1,2}
//   few_down(map, FewExpertsArgs)        out[row] = sum over its experts, ascending, of weight * (down . x + bias)
//       grid: any, best a block for each 16 outputs; shared: 98304 + rows * top_k * (256 * (inter / 128 rounded up) + 64) bytes
// threads: 288. 1 to 8 rows, rows * top_k <= 64, top_k <= 32; hidden and inter are multiples of 8. Of more than 128 experts,
// route_512 comes before. Maps: bf16, not swizzled, boxes 128 columns wide; gate and up [experts * 2 * inter, hidden] by 8
// rows, down [experts * hidden, inter] by 16.
#include "experts_few_sm90.cuh"

#define FEW_KERNEL(NAME, CALL)                                                                                         \
    extern "C" __global__ void __launch_bounds__(FEW_THREADS, 1)                                                       \
        NAME(const __grid_constant__ TensorMap map, const __grid_constant__ FewExpertsArgs args) {                     \
        extern __shared__ __align__(128) u8 shared[];                                                                  \
        CALL(&map, args, shared);                                                                                      \
    }

FEW_KERNEL(few_gate_up_1, few_gate_up<2048 / FEW_WARPS / FEW_PIECE>)
FEW_KERNEL(few_gate_up_2, few_gate_up<4096 / FEW_WARPS / FEW_PIECE>)
FEW_KERNEL(few_down, few_down)
