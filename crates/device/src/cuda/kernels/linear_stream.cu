// Products with few rows: see linear_stream.cuh. One kernel a form of weights and number of columns (8, 16 or 32 rows).
#include "linear_stream.cuh"

STREAM_KERNELS(stream_bf16, PLAIN, false, false)
STREAM_KERNELS(stream_fp8, FLOAT8, false, false)
STREAM_KERNELS(stream_int8, BYTES, false, false)
STREAM_KERNELS(stream_int8_affine, BYTES, true, false)
STREAM_KERNELS(stream_int8_by16, BYTES, false, true)
STREAM_KERNELS(stream_int4, NIBBLES, false, false)
STREAM_KERNELS(stream_int4_affine, NIBBLES, true, false)
STREAM_KERNELS(stream_int4_affine_by16, NIBBLES, true, true)
STREAM_KERNELS(stream_table, TABLE, false, false)
STREAM_KERNELS(stream_table_by16, TABLE, false, true)
