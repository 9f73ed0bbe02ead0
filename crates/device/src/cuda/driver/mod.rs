//! The CUDA driver as this backend uses it: a device, its memory, kernels, events and graphs.
//!
//! The driver is found at run time; no toolkit is needed to build this or, on architectures with
//! prebuilt kernels, to run it. Operations at start return errors; failures in a step are
//! remembered, and [`Device::check`] reports them. Handles may move between threads: every call
//! makes the device current first.
#![allow(unsafe_code)]

mod archive;
mod collective;
mod context;
mod device;
mod error;
mod event;
mod graph;
mod host_block;
mod launch;
mod library;
mod memory;
mod modules;
mod moving;
mod nvrtc;
mod profile;
mod sources;
mod staging;
mod steps;
mod tensor_map;

pub use collective::{Collective, Number, UniqueId};
pub use context::{DeviceInfo, Stream, device_count, probe};
pub use device::{CudaConfig, Device, OpenTimes};
pub use error::CudaError;
pub use event::Event;
pub use graph::Graph;
pub use host_block::HostBlock;
pub use launch::{Arg, Kernel, KernelArg, Launch, args};
pub(crate) use library::Library;
pub use memory::{Buffer, Pinned, Plain};
pub use modules::Origin;
pub use moving::{Moving, NotBegun};
pub use profile::KernelTime;
pub use staging::Staging;
pub use steps::StepTime;
pub use tensor_map::{Element, Matrix2d, Swizzle, TensorMap};

/// Distinguishes the kernels of this build from those of others, in names of numerics.
pub fn kernels_hash() -> String {
    sources::hash()[..6].iter().map(|byte| format!("{byte:02x}")).collect()
}
