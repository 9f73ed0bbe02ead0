//! A device's context: made current wherever it is used, with its streams and the first fault that
//! happened.
//!
//! Operations of a step report nothing: the first one that fails is remembered here, and the caller
//! that runs steps calls [`Context::check`] where it waits for the device anyway.

use std::cell::Cell;
use std::ffi::CStr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use cudarc::driver::sys::{self, CUdevice, CUdevice_attribute, CUresult, CUstream};

use super::error::{CudaError, check};
use crate::Result;

/// The first with launch attributes and tensor maps.
const OLDEST_DRIVER: i32 = 12_000;

/// Streams of work: kernels and their copies on one, traffic that may run beside them on the
/// others, one to the device and one back to the host. Traffic back to the host waits for kernels,
/// and traffic to the device does not wait for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    Compute,
    Copy,
    Back,
}

/// Properties of a device, as reported by the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    pub ordinal: usize,
    pub name: String,
    /// Compute capability, e.g. (9, 0).
    pub capability: (u32, u32),
    pub multiprocessors: u32,
    pub total_bytes: u64,
    /// The most shared memory that one block may request.
    pub shared_bytes: u32,
    pub l2_bytes: u64,
    /// The newest CUDA that the driver supports, as 1000 * major + 10 * minor.
    pub driver_version: u32,
}

impl DeviceInfo {
    /// Whether kernels may start while the previous one drains, and tensor maps exist.
    pub fn is_hopper_or_later(&self) -> bool {
        self.capability.0 >= 9
    }
}

pub(crate) struct Context {
    /// Differs for every context of the process; the driver's handles do not.
    id: u64,
    device: CUdevice,
    handle: sys::CUcontext,
    compute: CUstream,
    copy: CUstream,
    back: CUstream,
    /// Set with `fault`, for a fast check in each step.
    faulted: AtomicBool,
    /// Whether something other than a kernel was queued on the compute stream since the last
    /// kernel.
    must_wait: AtomicBool,
    fault: Mutex<Option<CudaError>>,
}

// SAFETY: the driver's handles may be used from any thread that made the context current, also at
// the same time.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

thread_local! {
    /// `Context::id` of the context that is current on this thread.
    static CURRENT: Cell<u64> = const { Cell::new(0) };
}
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

impl Context {
    pub fn open(ordinal: usize) -> Result<(Context, DeviceInfo)> {
        let driver_version = start_driver()?;
        let count = device_count()?;
        if ordinal >= count {
            return Err(CudaError::NoDevice { ordinal, count }.into());
        }
        let mut device = 0;
        // SAFETY: the driver is there and initialised; it writes one handle.
        check(unsafe { sys::cuDeviceGet(&mut device, ordinal as i32) }, "cuDeviceGet")?;
        let info = describe(ordinal, device, driver_version)?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: a valid device; released in `drop`.
        check(unsafe { sys::cuDevicePrimaryCtxRetain(&mut handle, device) }, "opening the GPU")?;
        let mut context = Context {
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            device,
            handle,
            compute: std::ptr::null_mut(),
            copy: std::ptr::null_mut(),
            back: std::ptr::null_mut(),
            faulted: AtomicBool::new(false),
            must_wait: AtomicBool::new(true),
            fault: Mutex::new(None),
        };
        context.bind()?;
        for stream in [&mut context.compute, &mut context.copy, &mut context.back] {
            let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
            // SAFETY: the context is current; destroyed in `drop`.
            check(unsafe { sys::cuStreamCreate(stream, flags) }, "cuStreamCreate")?;
        }
        Ok((context, info))
    }

    /// Makes this context the current one of the calling thread. Cheap if it already is.
    pub fn bind(&self) -> Result<()> {
        if CURRENT.get() == self.id { Ok(()) } else { self.bind_anew() }
    }

    /// Like `bind`, after other code may have made another context current.
    pub fn bind_anew(&self) -> Result<()> {
        // SAFETY: the handle is valid while `self` lives.
        check(unsafe { sys::cuCtxSetCurrent(self.handle) }, "cuCtxSetCurrent")?;
        CURRENT.set(self.id);
        Ok(())
    }

    /// Like `bind`, for operations that report nothing.
    pub fn bind_quietly(&self) {
        if CURRENT.get() != self.id
            && let Err(crate::Error::Cuda(error)) = self.bind()
        {
            self.remember(error);
        }
    }

    pub fn raw(&self) -> sys::CUcontext {
        self.handle
    }

    /// The stream for operations other than kernels: the next kernel waits for them before it
    /// starts.
    pub fn stream(&self, stream: Stream) -> CUstream {
        if stream == Stream::Compute {
            self.must_wait.store(true, Ordering::Relaxed);
        }
        self.kernel_stream(stream)
    }

    /// The stream for kernels.
    pub fn kernel_stream(&self, stream: Stream) -> CUstream {
        match stream {
            Stream::Compute => self.compute,
            Stream::Copy => self.copy,
            Stream::Back => self.back,
        }
    }

    /// Whether the next kernel may start while the previous one drains: not if a copy, a fill, an
    /// event or a graph lies between them. A kernel that starts early reads its uploaded inputs
    /// before it waits for the previous kernel.
    pub fn may_overlap(&self) -> bool {
        !self.must_wait.swap(false, Ordering::Relaxed)
    }

    /// Remembers a failed operation. The first one counts, because later failures are its
    /// consequences.
    #[inline]
    pub fn note(&self, code: CUresult, what: &str) {
        if code != CUresult::CUDA_SUCCESS {
            self.remember(CudaError::from_code(code, what));
        }
    }

    #[cold]
    pub fn remember(&self, error: CudaError) {
        let mut fault = self.fault.lock().unwrap_or_else(PoisonError::into_inner);
        // A lost device explains more than the failures before it.
        if fault.as_ref().is_none_or(|known| error.is_lost() && !known.is_lost()) {
            *fault = Some(error);
        }
        self.faulted.store(true, Ordering::Release);
    }

    /// The first operation that failed since the device was opened, if any did.
    pub fn check(&self) -> Result<()> {
        if !self.faulted.load(Ordering::Acquire) {
            return Ok(());
        }
        let fault = self.fault.lock().unwrap_or_else(PoisonError::into_inner);
        fault.clone().map_or(Ok(()), |error| Err(error.into()))
    }

    /// Clears and returns a remembered failure, unless the device is lost: for a failed recording,
    /// which ran nothing.
    pub fn forget(&self) -> Option<CudaError> {
        let mut fault = self.fault.lock().unwrap_or_else(PoisonError::into_inner);
        if fault.as_ref().is_some_and(CudaError::is_lost) {
            return fault.clone();
        }
        self.faulted.store(false, Ordering::Release);
        fault.take()
    }

    /// Waits until all work on the stream is done.
    pub fn synchronize(&self, stream: Stream) -> Result<()> {
        self.bind()?;
        // SAFETY: a stream of this context.
        self.note(unsafe { sys::cuStreamSynchronize(self.stream(stream)) }, "waiting for the GPU");
        self.check()
    }

    pub fn free_bytes(&self) -> Result<u64> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two sizes.
        check(unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) }, "cuMemGetInfo")?;
        Ok(free as u64)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.bind().is_ok() {
            for stream in [self.compute, self.copy, self.back] {
                if !stream.is_null() {
                    // SAFETY: made in `open`, destroyed once. The call fails if the device is lost,
                    // which is harmless.
                    unsafe { sys::cuStreamDestroy_v2(stream) };
                }
            }
        }
        // SAFETY: retained once in `open`.
        unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
        CURRENT.set(0);
    }
}

/// Properties and free bytes of a device, without loading anything onto it.
pub fn probe(ordinal: usize) -> Result<(DeviceInfo, u64)> {
    let (context, info) = Context::open(ordinal)?;
    let free = context.free_bytes()?;
    Ok((info, free))
}

/// Number of devices; an error says why the driver cannot be asked.
pub fn device_count() -> Result<usize> {
    start_driver()?;
    let mut count = 0;
    // SAFETY: writes one number.
    let code = unsafe { sys::cuDeviceGetCount(&mut count) };
    check(code, "cuDeviceGetCount")?;
    Ok(count as usize)
}

/// Loads and initializes the driver; returns its version.
fn start_driver() -> Result<i32> {
    // Bindings panic if the library is missing, so no call may precede this check.
    // SAFETY: loads a library by name, whose initialisers are the driver's own.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::NoDriver { looked_for: "libcuda.so.1".to_owned() }.into());
    }
    let mut version = 0;
    // SAFETY: may be called before initialisation; writes one number.
    check(unsafe { sys::cuDriverGetVersion(&mut version) }, "cuDriverGetVersion")?;
    if version < OLDEST_DRIVER {
        let needed = version_text(OLDEST_DRIVER);
        return Err(CudaError::DriverTooOld { found: version_text(version), needed }.into());
    }
    // SAFETY: no preconditions; repeated calls do nothing.
    let code = unsafe { sys::cuInit(0) };
    if code == CUresult::CUDA_ERROR_NO_DEVICE {
        return Ok(version);
    }
    check(code, "starting the CUDA driver")?;
    Ok(version)
}

fn version_text(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

fn describe(ordinal: usize, device: CUdevice, driver_version: i32) -> Result<DeviceInfo> {
    use CUdevice_attribute as A;
    let attribute = |which: CUdevice_attribute| -> Result<u32> {
        let mut value = 0;
        // SAFETY: a valid device; writes one number.
        check(unsafe { sys::cuDeviceGetAttribute(&mut value, which, device) }, "cuDeviceGetAttribute")?;
        Ok(value as u32)
    };
    let mut name = [0; 128];
    // SAFETY: the driver writes at most 128 characters, the last of them zero.
    check(unsafe { sys::cuDeviceGetName(name.as_mut_ptr(), 128, device) }, "cuDeviceGetName")?;
    // SAFETY: see above.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
    let mut total_bytes = 0;
    // SAFETY: writes one size.
    check(unsafe { sys::cuDeviceTotalMem_v2(&mut total_bytes, device) }, "cuDeviceTotalMem")?;
    Ok(DeviceInfo {
        ordinal,
        name,
        capability: (
            attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        multiprocessors: attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        total_bytes: total_bytes as u64,
        shared_bytes: attribute(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        l2_bytes: u64::from(attribute(A::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?),
        driver_version: driver_version as u32,
    })
}
