//! Every storage format, as one table row: block length, block bytes, decoder.

use crate::{Error, Result};

/// How values lie in a file. `decode` is the reference: plain loops, bit-equal to the `gguf` package's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types)]
pub enum Format {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
    /// Plain integers: index and flag tensors, and checkpoint packings that a later stage unpacks.
    I8,
    U8,
    I16,
    I32,
    I64,
    F64,
}
