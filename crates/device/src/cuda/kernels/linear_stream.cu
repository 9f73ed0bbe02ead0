// Products with few rows: see linear_stream.cuh. Two kernels a form of weights, for 8 and for 16 rows at a time; nibbles
// have two more, which gate.
#include "linear_stream.cuh"

#define KERNELS(NAME, FORM, AFFINE, GROUP)                                                                             \
    STREAM_KERNEL(stream_##NAME##_1, FORM, AFFINE, GROUP, 1)                                                           \
    STREAM_KERNEL(stream_##NAME##_2, FORM, AFFINE, GROUP, 2)

KERNELS(bf16, PLAIN, false, 32)
KERNELS(fp8, FLOAT8, false, 32)
KERNELS(int8, BYTES, false, 32)
KERNELS(int8_affine, BYTES, true, 32)
KERNELS(int8_by16, BYTES, false, 16)
KERNELS(int4_by128, NIBBLES, false, 128)
KERNELS(int4, NIBBLES, false, 32)
KERNELS(int4_affine_by128, NIBBLES, true, 128)
KERNELS(int4_affine, NIBBLES, true, 32)
KERNELS(int4_affine_by16, NIBBLES, true, 16)
KERNELS(table, TABLE, false, 32)
KERNELS(table_by16, TABLE, false, 16)

STREAM_KERNEL(stream_int4_by128_1_gated, NIBBLES, false, 128, 1, true)
STREAM_KERNEL(stream_int4_1_gated, NIBBLES, false, 32, 1, true)
