//! Kernels and their launches: geometry by name, arguments by value, no allocation.
//!
//! The driver knows every parameter's size: a launch with arguments that do not fit the kernel is a
//! bug and asserts. The device remembers a launch that it refused, see [`Device::check`].

use std::ffi::c_void;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::sys::{self, CUfunction, CUresult};

use super::context::{DeviceInfo, Stream};
use super::device::Device;

/// Shared memory that every block may use without a request.
const PLAIN_SHARED_BYTES: u32 = 48 << 10;

/// A kernel of a loaded module; valid while its device lives.
#[derive(Clone)]
pub struct Kernel(Arc<Inner>);

struct Inner {
    name: Box<str>,
    function: CUfunction,
    /// Bytes of each parameter; none if the driver is too old to report them.
    parameters: Option<Box<[usize]>>,
    /// Dynamic shared memory requested so far.
    shared_bytes: AtomicU32,
}

// SAFETY: a handle of the driver, which may be used from any thread.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

/// Number of blocks, and resources of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    pub grid: [u32; 3],
    pub threads: u32,
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
    /// Whether the kernel may start while the previous one drains; it must then wait for that one
    /// itself. Ignored on devices without this feature.
    pub overlap: bool,
}

impl Launch {
    /// Requests so much shared memory that a multiprocessor holds at most `blocks` blocks. If a
    /// kernel starts while the previous one drains, its blocks are placed where there is room just
    /// then, two on one multiprocessor and none on another; and blocks that run until all work is
    /// done stay there.
    pub fn at_most(self, blocks: u32, info: &DeviceInfo) -> Launch {
        // A block takes 1 KiB of the multiprocessor's memory besides its own.
        let more_than = (info.shared_bytes + 1024) / (blocks + 1);
        Launch { shared_bytes: self.shared_bytes.max(more_than), ..self }
    }
}

/// A value that kernels take.
///
/// # Safety
/// Its bytes must mean the same in Rust and in the kernels: a number, or a `repr(C)` struct of
/// numbers.
pub unsafe trait KernelArg: Copy {}
macro_rules! kernel_arg {
    ($($kind:ty),*) => {
        $(
            // SAFETY: a number of the same size on both sides.
            unsafe impl KernelArg for $kind {}
        )*
    };
}
// Pointers are u64, as returned by [`super::Buffer::ptr`].
kernel_arg!(u32, i32, u64, i64, f32);

/// One argument of a launch, borrowed; made by [`args!`](crate::cuda::driver::args).
#[derive(Clone, Copy)]
pub struct Arg<'a> {
    value: *const c_void,
    bytes: usize,
    lives: PhantomData<&'a ()>,
}

impl<'a> Arg<'a> {
    pub fn new<T: KernelArg>(value: &'a T) -> Arg<'a> {
        Arg { value: (&raw const *value).cast(), bytes: size_of::<T>(), lives: PhantomData }
    }
}

/// The arguments of a launch: `args![out.ptr(), rows as i32, eps]`.
#[macro_export]
macro_rules! cuda_args {
    ($($value:expr),* $(,)?) => { &[$($crate::cuda::driver::Arg::new(&$value)),*] };
}
pub use crate::cuda_args as args;

/// More arguments than any kernel takes.
const MAX_ARGS: usize = 48;

impl Kernel {
    pub(super) fn new(name: &str, function: CUfunction, info: &DeviceInfo) -> Kernel {
        // Both calls came with CUDA 12.4.
        let parameters = (info.driver_version >= 12_040).then(|| {
            // Loaded now: a load in the middle of a recording would fail.
            // SAFETY: a function of a loaded module, whose context is current.
            unsafe { sys::cuFuncLoad(function) };
            parameters_of(function)
        });
        let shared_bytes = AtomicU32::new(PLAIN_SHARED_BYTES);
        Kernel(Arc::new(Inner { name: name.into(), function, parameters, shared_bytes }))
    }

    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Number of blocks that fit on one multiprocessor at a time.
    pub fn blocks_per_multiprocessor(&self, device: &Device, threads: u32, shared_bytes: u32) -> u32 {
        device.context.bind_quietly();
        self.allow_shared(device, shared_bytes);
        let mut blocks = 0;
        // SAFETY: a loaded function; writes one number.
        let code = unsafe {
            sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &mut blocks,
                self.0.function,
                threads as i32,
                shared_bytes as usize,
            )
        };
        device.context.note(code, self.name());
        blocks as u32
    }

    /// Permits blocks this much dynamic shared memory. A launch does it too, but it should happen
    /// before a recording.
    pub fn allow_shared(&self, device: &Device, shared_bytes: u32) {
        if shared_bytes <= self.0.shared_bytes.load(Ordering::Relaxed) {
            return;
        }
        let which = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: a loaded function.
        let code = unsafe { sys::cuFuncSetAttribute(self.0.function, which, shared_bytes as i32) };
        device.context.note(code, self.name());
        self.0.shared_bytes.store(shared_bytes, Ordering::Relaxed);
    }

    fn check_args(&self, args: &[Arg<'_>]) {
        assert!(args.len() <= MAX_ARGS, "{}: {} arguments", self.name(), args.len());
        let Some(parameters) = &self.0.parameters else { return };
        let fits =
            args.len() == parameters.len() && args.iter().zip(parameters).all(|(arg, bytes)| arg.bytes == *bytes);
        assert!(
            fits,
            "{} takes parameters of {parameters:?} bytes, but was given {:?}",
            self.name(),
            args.iter().map(|arg| arg.bytes).collect::<Vec<_>>()
        );
    }
}

fn parameters_of(function: CUfunction) -> Box<[usize]> {
    let mut sizes = Vec::new();
    loop {
        let (mut offset, mut size) = (0, 0);
        // SAFETY: a loaded function; past the last parameter the call fails.
        let code = unsafe { sys::cuFuncGetParamInfo(function, sizes.len(), &mut offset, &mut size) };
        if code != CUresult::CUDA_SUCCESS {
            return sizes.into();
        }
        sizes.push(size);
    }
}

impl Device {
    /// Queues a kernel on the compute stream. No kernel runs if a side of the grid is zero.
    pub fn launch(&self, kernel: &Kernel, launch: Launch, args: &[Arg<'_>]) {
        self.launch_in_clusters(kernel, launch, 1, args);
    }

    /// Like [`Device::launch`], in clusters of `cluster` blocks along x (Hopper and later; 1:
    /// none).
    pub fn launch_in_clusters(&self, kernel: &Kernel, launch: Launch, cluster: u32, args: &[Arg<'_>]) {
        kernel.check_args(args);
        if launch.grid.contains(&0) {
            return;
        }
        self.context.bind_quietly();
        kernel.allow_shared(self, launch.shared_bytes);
        if self.profiler.is_running() {
            return self
                .profiled(kernel.name(), || self.queue(kernel, Launch { overlap: false, ..launch }, cluster, args));
        }
        self.queue(kernel, launch, cluster, args);
    }

    #[inline]
    fn queue(&self, kernel: &Kernel, launch: Launch, cluster: u32, args: &[Arg<'_>]) {
        let mut values = [std::ptr::null_mut(); MAX_ARGS];
        for (value, arg) in values.iter_mut().zip(args) {
            *value = arg.value.cast_mut();
        }
        let attribute = |id, value| sys::CUlaunchAttribute { id, pad: [0; 4], value };
        let overlapping = attribute(
            sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        );
        let mut dimension = sys::CUlaunchAttributeValue { pad: [0; 64] };
        dimension.clusterDim = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: cluster, y: 1, z: 1 };
        let clusters = attribute(sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, dimension);
        let overlap = self.context.may_overlap() && launch.overlap && self.info().is_hopper_or_later();
        let (mut attributes, mut count) = ([clusters; 2], 0);
        for (wanted, attribute) in [(overlap, overlapping), (cluster > 1, clusters)] {
            if wanted {
                attributes[count] = attribute;
                count += 1;
            }
        }
        let config = sys::CUlaunchConfig {
            gridDimX: launch.grid[0],
            gridDimY: launch.grid[1],
            gridDimZ: launch.grid[2],
            blockDimX: launch.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: launch.shared_bytes,
            hStream: self.context.kernel_stream(Stream::Compute),
            attrs: attributes.as_mut_ptr(),
            numAttrs: count as u32,
        };
        // SAFETY: a loaded function and its arguments by number and size (`check_args`), all alive
        // until the call returns, which has copied them. Memory behind their pointers is the
        // caller's contract with the kernel.
        let code =
            unsafe { sys::cuLaunchKernelEx(&config, kernel.0.function, values.as_mut_ptr(), std::ptr::null_mut()) };
        self.context.note(code, kernel.name());
    }
}
