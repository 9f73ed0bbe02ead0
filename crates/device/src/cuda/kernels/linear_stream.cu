// Products with few rows: see linear_stream.cuh. One kernel a form of weights, number of columns (8, 16 or 32 rows) and
// of tiles that a warp has at a time. Which there are is also said in weight/form.rs.
#include "linear_stream.cuh"

// 9 to 16 rows run as 32 do.
#define SELDOM(NAME, FORM, AFFINE, GROUP)                                                                              \
    STREAM_KERNEL(stream_##NAME##_1, FORM, AFFINE, GROUP, 1, 1)                                                        \
    STREAM_KERNEL(stream_##NAME##_4, FORM, AFFINE, GROUP, 4, 1)
#define OFTEN(NAME, FORM, AFFINE, GROUP)                                                                               \
    SELDOM(NAME, FORM, AFFINE, GROUP)                                                                                  \
    STREAM_KERNEL(stream_##NAME##_2, FORM, AFFINE, GROUP, 2, 1)
#define TALL(NAME, FORM, AFFINE, GROUP)                                                                                \
    OFTEN(NAME, FORM, AFFINE, GROUP)                                                                                   \
    STREAM_KERNEL(stream_##NAME##_2_tall, FORM, AFFINE, GROUP, 2, 2)

OFTEN(bf16, PLAIN, false, 32)
TALL(fp8, FLOAT8, false, 32)
TALL(int8_by128, BYTES, false, 128)
TALL(int8, BYTES, false, 32)
SELDOM(int8_affine, BYTES, true, 32)
SELDOM(int8_by16, BYTES, false, 16)
TALL(int4_by128, NIBBLES, false, 128)
TALL(int4, NIBBLES, false, 32)
TALL(int4_affine_by128, NIBBLES, true, 128)
TALL(int4_affine, NIBBLES, true, 32)
SELDOM(int4_affine_by16, NIBBLES, true, 16)
SELDOM(table, TABLE, false, 32)
SELDOM(table_by16, TABLE, false, 16)
STREAM_KERNEL(stream_fp8_4_tall, FLOAT8, false, 32, 4, 2)
STREAM_KERNEL(stream_int8_by128_4_tall, BYTES, false, 128, 4, 2)
STREAM_KERNEL(stream_int8_4_tall, BYTES, false, 32, 4, 2)
