//! An opened GPU: its context, its properties, and the kernels that were loaded for it.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use cudarc::driver::sys::{self, CUstream};

use super::context::{Context, DeviceInfo, Stream};
use super::launch::Kernel;
use super::modules::{Kernels, Modules, Origin};
use super::profile::Profiler;
use super::steps::StepClock;
use crate::Result;

/// Options for opening a GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CudaConfig {
    pub ordinal: usize,
    /// Folder for kernels compiled on this machine; without it none are stored.
    pub cache_folder: Option<PathBuf>,
}

/// Times of the stages of opening a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenTimes {
    /// Time to start the driver and open its context.
    pub device: Duration,
    /// Finding kernels, perhaps compiling them, and loading them.
    pub kernels: Duration,
}

/// One GPU. It may be used from any thread; the order of its work is the order of the calls.
pub struct Device {
    // Dropped in this order: modules belong to the context.
    kernels: Mutex<HashMap<String, Kernel>>,
    modules: Modules,
    info: DeviceInfo,
    times: OpenTimes,
    pub(super) profiler: Profiler,
    pub(super) steps: StepClock,
    pub(super) context: Arc<Context>,
}

impl Device {
    /// Starts the driver, opens the device and loads the kernels for it.
    pub fn open(config: &CudaConfig) -> Result<Device> {
        Device::open_with(config, Kernels::Prebuilt)
    }

    /// Like [`Device::open`], but with kernels compiled on this machine (or found in its cache)
    /// even if prebuilt ones fit: for tests of this case.
    pub fn open_compiled(config: &CudaConfig) -> Result<Device> {
        Device::open_with(config, Kernels::CompiledHere)
    }

    /// Like [`Device::open`], but with the kernels that the driver of a later generation would
    /// translate: for tests of this case on devices that have prebuilt code.
    pub fn open_translated(config: &CudaConfig) -> Result<Device> {
        Device::open_with(config, Kernels::Translated)
    }

    fn open_with(config: &CudaConfig, kernels: Kernels) -> Result<Device> {
        let start = Instant::now();
        let (context, info) = Context::open(config.ordinal)?;
        let (context, device) = (Arc::new(context), start.elapsed());
        let modules = Modules::load(&context, &info, config.cache_folder.as_deref(), kernels)?;
        let times = OpenTimes { device, kernels: start.elapsed() - device };
        let (profiler, steps) = (Profiler::default(), StepClock::default());
        Ok(Device { kernels: Mutex::default(), modules, info, times, profiler, steps, context })
    }

    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// Times of the stages of opening it, for the log.
    pub fn open_times(&self) -> OpenTimes {
        self.times
    }

    /// Origin of the kernels, for the log.
    pub fn kernel_origin(&self) -> &Origin {
        self.modules.origin()
    }

    pub fn free_bytes(&self) -> Result<u64> {
        self.context.free_bytes()
    }

    /// Makes the device current on this thread, for libraries that use the current one. The calls
    /// of this module do it themselves.
    pub fn bind(&self) -> Result<()> {
        self.context.bind()
    }

    /// The first operation that failed since the device was opened, if any did. Operations of a
    /// step report nothing else; their results in memory are worthless then.
    pub fn check(&self) -> Result<()> {
        self.context.check()
    }

    /// Waits until all work on the stream is done; fails like [`Device::check`].
    pub fn synchronize(&self, stream: Stream) -> Result<()> {
        self.context.synchronize(stream)
    }

    /// The driver's handle of the stream, for libraries.
    pub fn raw_stream(&self, stream: Stream) -> CUstream {
        self.context.kernel_stream(stream)
    }

    /// The driver's handle of the context, for libraries.
    pub fn raw_context(&self) -> sys::CUcontext {
        self.context.raw()
    }

    /// A kernel by its name, looked up at start, since a recording may not load one. Names are
    /// constants of this crate: an unknown one is a bug and panics.
    pub fn kernel(&self, name: &str) -> Kernel {
        self.find_kernel(name).unwrap_or_else(|| panic!("no module has a kernel named {name}"))
    }

    /// Like [`Device::kernel`], for kernels that only some architectures have.
    pub fn find_kernel(&self, name: &str) -> Option<Kernel> {
        let mut kernels = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernel) = kernels.get(name) {
            return Some(kernel.clone());
        }
        self.context.bind_quietly();
        let function = self.modules.function(name)?;
        let kernel = Kernel::new(name, function, &self.info);
        kernels.insert(name.to_owned(), kernel.clone());
        Some(kernel)
    }
}
