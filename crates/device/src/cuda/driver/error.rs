//! Errors of a CUDA device, and messages for the driver's codes.

use std::ffi::CStr;

use cudarc::driver::sys::{self, CUresult};

use crate::Result;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    #[error(
        "no CUDA driver found: {looked_for} could not be loaded; install the NVIDIA driver, or make it visible here"
    )]
    NoDriver { looked_for: String },

    #[error("the CUDA driver is too old: it speaks CUDA {found}, and {needed} or later is needed")]
    DriverTooOld { found: String, needed: String },

    #[error("there is no CUDA device {ordinal}: {}", count_of_devices(*.count))]
    NoDevice { ordinal: usize, count: usize },

    #[error("out of GPU memory: {what} needs {bytes} bytes, and {free} bytes are free")]
    OutOfMemory { what: String, bytes: u64, free: u64 },

    #[error("out of memory: {what} needs {bytes} bytes of pinned host memory")]
    OutOfPinnedMemory { what: String, bytes: u64 },

    /// A kernel or the hardware failed. The driver then answers every call of this process with the
    /// same code, even after everything is dropped and the context is reset and opened anew (tried
    /// in seven ways with driver 580): only a new process reaches the GPU again.
    #[error("the GPU was lost: {message} ({name}), seen at: {what}; only a new process can use it again")]
    Lost { what: String, name: String, message: String },

    #[error("{what} failed: {message} ({name})")]
    Call { what: String, name: String, message: String },

    #[error("{library} could not be loaded ({looked_for}); {advice}")]
    NoLibrary { library: &'static str, looked_for: String, advice: &'static str },

    #[error("{library} has no function {symbol}: it is too old or damaged")]
    NoSymbol { library: String, symbol: &'static str },

    #[error("{file} does not compile for {architecture}:\n{log}")]
    Compile { file: String, architecture: String, log: String },

    #[error("{library} failed: {what}: {message}")]
    Library { library: &'static str, what: &'static str, message: String },
}

impl CudaError {
    /// Whether this process cannot use GPUs any more.
    pub fn is_lost(&self) -> bool {
        matches!(self, CudaError::Lost { .. })
    }

    pub(super) fn from_code(code: CUresult, what: &str) -> CudaError {
        let (name, message) = (error_name(code), error_message(code));
        let what = what.to_owned();
        if is_sticky(code) { CudaError::Lost { what, name, message } } else { CudaError::Call { what, name, message } }
    }
}

/// Turns the driver's code into an error; Ok if the call succeeded.
pub(super) fn check(code: CUresult, what: &str) -> Result<()> {
    if code == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(CudaError::from_code(code, what).into()) }
}

fn count_of_devices(count: usize) -> String {
    match count {
        0 => "this machine has none".to_owned(),
        1 => "this machine has one, number 0".to_owned(),
        _ => format!("this machine has {count}, numbers 0 to {}", count - 1),
    }
}

/// Codes that leave a context unusable: faults of kernels, of memory and of the machine.
fn is_sticky(code: CUresult) -> bool {
    matches!(code as u32, 46 | 214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=721 | 999)
}

fn error_name(code: CUresult) -> String {
    let mut text = std::ptr::null();
    // SAFETY: the driver stores a pointer to a constant string, or null for a code it does not
    // know.
    let known = unsafe { sys::cuGetErrorName(code, &mut text) } == CUresult::CUDA_SUCCESS && !text.is_null();
    // SAFETY: see above; such strings live as long as the driver.
    if known { unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned() } else { format!("code {}", code as u32) }
}

fn error_message(code: CUresult) -> String {
    let mut text = std::ptr::null();
    // SAFETY: as above.
    let known = unsafe { sys::cuGetErrorString(code, &mut text) } == CUresult::CUDA_SUCCESS && !text.is_null();
    // SAFETY: as above.
    if known { unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned() } else { "an unknown error".to_owned() }
}
