//! The CUDA backend: the same operations on a GPU, with activations in bf16 (or f32, to compare
//! with the CPU).
//!
//! All work goes to one stream in the order of the calls; kernels of a step start while the
//! previous one drains. Decode steps are recorded and replayed. A failure in the middle of a step
//! is remembered and reported by `check`.
#![allow(unsafe_code)]

mod attention;
mod backend;
mod blas;
mod ceilings;
mod copies;
pub mod driver;
mod experts;
mod experts_few;
pub mod gemm90;
mod graphs;
mod inputs;
mod kv;
mod linear;
mod linear_coded;
mod linear_few;
mod linear_stream;
#[cfg(test)]
mod mirrors;
mod moves;
mod parcel;
mod paths;
mod products;
mod rows;
mod sampling;
mod scratch;
mod tensor;
mod weight;
mod work;
mod working;

pub use backend::{Cuda, CudaConfig, Precision, RandomForm};
pub use ceilings::{Ceilings, Rates};
pub use experts::Experts;
pub use inputs::Inputs;
pub use kv::Kv;
pub use tensor::{Tensor, Vector};
pub use weight::{Weight, is_plain, packed_bytes, packed_experts_bytes};
pub use working::{ExpertsShape, Widened, WorkingShape, working_bytes};

use driver::{Arg, Device, Launch};

/// Queues a kernel without dynamic shared memory, which may start while the previous one drains.
fn launch(device: &Device, name: &str, grid: [u32; 3], threads: u32, args: &[Arg<'_>]) {
    device.launch(&device.kernel(name), Launch { grid, threads, shared_bytes: 0, overlap: true }, args);
}
