// Products with few rows: see linear_few.cuh. A kernel a form of weights, and one more that gates.
#include "linear_few.cuh"

FEW_KERNEL(few_bf16, PLAIN, false, 4)
FEW_KERNEL(few_bf16_gated, PLAIN, true, 4)
FEW_KERNEL(few_fp8, FLOAT8, false, 2)
FEW_KERNEL(few_fp8_gated, FLOAT8, true, 2)
