// Products with few rows: see linear_stream.cuh. One kernel a form of weights, number of columns (8 or 16 rows) and of
// tiles that a warp has at a time. Which there are is also said in weight/form.rs.
#include "linear_stream.cuh"

#define SHORT(NAME, FORM, AFFINE, GROUP)                                                                               \
    STREAM_KERNEL(stream_##NAME##_1, FORM, AFFINE, GROUP, 1, 1)                                                        \
    STREAM_KERNEL(stream_##NAME##_2, FORM, AFFINE, GROUP, 2, 1)
#define TALL(NAME, FORM, AFFINE, GROUP)                                                                                \
    SHORT(NAME, FORM, AFFINE, GROUP)                                                                                   \
    STREAM_KERNEL(stream_##NAME##_2_tall, FORM, AFFINE, GROUP, 2, 2)

SHORT(bf16, PLAIN, false, 32)
TALL(fp8, FLOAT8, false, 32)
TALL(int8, BYTES, false, 32)
SHORT(int8_affine, BYTES, true, 32)
SHORT(int8_by16, BYTES, false, 16)
TALL(int4_by128, NIBBLES, false, 128)
SHORT(int4, NIBBLES, false, 32)
TALL(int4_affine_by128, NIBBLES, true, 128)
SHORT(int4_affine, NIBBLES, true, 32)
SHORT(int4_affine_by16, NIBBLES, true, 16)
SHORT(table, TABLE, false, 32)
SHORT(table_by16, TABLE, false, 16)
