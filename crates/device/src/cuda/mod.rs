//! The CUDA backend.

pub mod driver;
pub mod gemm90;
