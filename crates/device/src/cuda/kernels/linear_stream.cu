// Products with few rows: see linear_stream.cuh. One kernel a form of weights and number of columns (8, 16 or 32 rows).
#include "linear_stream.cuh"

#define OFTEN(NAME, FORM, AFFINE, GROUP)                                                                               \
    STREAM_KERNEL(NAME, FORM, AFFINE, GROUP, 1)                                                                        \
    STREAM_KERNEL(NAME, FORM, AFFINE, GROUP, 2)                                                                        \
    STREAM_KERNEL(NAME, FORM, AFFINE, GROUP, 4)
// 9 to 16 rows run as 32 do.
#define SELDOM(NAME, FORM, AFFINE, GROUP)                                                                              \
    STREAM_KERNEL(NAME, FORM, AFFINE, GROUP, 1)                                                                        \
    STREAM_KERNEL(NAME, FORM, AFFINE, GROUP, 4)

OFTEN(stream_bf16, PLAIN, false, 32)
OFTEN(stream_fp8, FLOAT8, false, 32)
OFTEN(stream_int8_by128, BYTES, false, 128)
OFTEN(stream_int8, BYTES, false, 32)
SELDOM(stream_int8_affine, BYTES, true, 32)
SELDOM(stream_int8_by16, BYTES, false, 16)
OFTEN(stream_int4_by128, NIBBLES, false, 128)
OFTEN(stream_int4, NIBBLES, false, 32)
OFTEN(stream_int4_affine_by128, NIBBLES, true, 128)
OFTEN(stream_int4_affine, NIBBLES, true, 32)
SELDOM(stream_int4_affine_by16, NIBBLES, true, 16)
SELDOM(stream_table, TABLE, false, 32)
SELDOM(stream_table_by16, TABLE, false, 16)
