//! Memory of the device and pinned memory of the host, and copies between them.
//!
//! Everything is allocated at start. Copies named `_async` are ordered by their stream alone; the
//! others are done when they return. An offset and a length outside a buffer are a bug and assert.

use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUresult};

use super::context::{Context, Stream};
use super::device::Device;
use super::error::{CudaError, check};
use crate::Result;

/// Values that consist only of their bytes.
///
/// # Safety
/// No padding, no pointers, every bit pattern valid.
pub unsafe trait Plain: Copy + 'static {}
macro_rules! plain {
    ($($kind:ty),*) => {
        $(
            // SAFETY: a number.
            unsafe impl Plain for $kind {}
        )*
    };
}
plain!(u8, i8, u16, i16, u32, i32, u64, i64, f32, f64, half::bf16, half::f16);

/// Owned device memory.
pub struct Buffer {
    context: Arc<Context>,
    ptr: u64,
    bytes: usize,
}

impl Buffer {
    /// Its address on the device, aligned to 256 bytes.
    pub fn ptr(&self) -> u64 {
        self.ptr
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The address `offset` bytes from the start; asserts that `bytes` from there on are inside.
    pub(super) fn at(&self, offset: usize, bytes: usize) -> u64 {
        assert!(
            offset.checked_add(bytes).is_some_and(|end| end <= self.bytes),
            "{bytes} bytes at {offset} of a buffer of {}",
            self.bytes
        );
        self.ptr + offset as u64
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: allocated in `Device::alloc`, freed once; the driver waits for work that uses
            // it.
            unsafe { sys::cuMemFree_v2(self.ptr) };
        }
    }
}

/// Host memory that the copy engines reach directly.
pub struct Pinned {
    context: Arc<Context>,
    ptr: *mut u8,
    bytes: usize,
}

// SAFETY: plain memory with one owner; reading it through `&self` from several threads is as safe
// as for a Vec.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Its address for kernels, the same as on the host. Access goes over the bus, so use it for a
    /// few words only.
    pub fn ptr(&self) -> u64 {
        self.ptr as u64
    }

    /// The bytes; those that an asynchronous copy writes may be read only after its event.
    pub fn as_slice<T: Plain>(&self, bytes: Range<usize>) -> &[T] {
        let (offset, count) = self.span::<T>(&bytes);
        // SAFETY: inside the allocation by `span`, which also checked the alignment; any bytes are
        // a valid T.
        unsafe { std::slice::from_raw_parts(self.ptr.add(offset).cast(), count) }
    }

    pub fn as_mut_slice<T: Plain>(&mut self, bytes: Range<usize>) -> &mut [T] {
        let (offset, count) = self.span::<T>(&bytes);
        // SAFETY: as above, and `self` is borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(offset).cast(), count) }
    }

    fn span<T: Plain>(&self, bytes: &Range<usize>) -> (usize, usize) {
        assert!(bytes.start <= bytes.end && bytes.end <= self.bytes, "{bytes:?} of {} pinned bytes", self.bytes);
        assert!(bytes.start.is_multiple_of(size_of::<T>()) && bytes.len().is_multiple_of(size_of::<T>()));
        (bytes.start, bytes.len() / size_of::<T>())
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: allocated in `Device::pinned`, freed once.
            unsafe { sys::cuMemFreeHost(self.ptr.cast()) };
        }
    }
}

impl Device {
    /// Device memory of unknown content; `what` names it in the error.
    pub fn alloc(&self, what: &str, bytes: usize) -> Result<Buffer> {
        self.context.bind()?;
        let mut ptr = 0;
        // SAFETY: writes one address. A request for no bytes would fail, so one is requested.
        let code = unsafe { sys::cuMemAlloc_v2(&mut ptr, bytes.max(1)) };
        if code == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            let free = self.context.free_bytes().unwrap_or(0);
            return Err(CudaError::OutOfMemory { what: what.to_owned(), bytes: bytes as u64, free }.into());
        }
        self.checked(code, what)?;
        Ok(Buffer { context: self.context.clone(), ptr, bytes })
    }

    pub fn alloc_zeroed(&self, what: &str, bytes: usize) -> Result<Buffer> {
        let buffer = self.alloc(what, bytes)?;
        self.fill(&buffer, 0, bytes, 0);
        self.check()?;
        Ok(buffer)
    }

    /// A buffer that holds these values.
    pub fn alloc_from<T: Plain>(&self, what: &str, values: &[T]) -> Result<Buffer> {
        let buffer = self.alloc(what, size_of_val(values))?;
        self.upload(&buffer, 0, values)?;
        Ok(buffer)
    }

    /// Pinned host memory, zeroed.
    pub fn pinned(&self, what: &str, bytes: usize) -> Result<Pinned> {
        self.context.bind()?;
        let mut ptr: *mut c_void = std::ptr::null_mut();
        // SAFETY: writes one address.
        let code = unsafe { sys::cuMemHostAlloc(&mut ptr, bytes.max(1), sys::CU_MEMHOSTALLOC_PORTABLE) };
        if code == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            return Err(CudaError::OutOfPinnedMemory { what: what.to_owned(), bytes: bytes as u64 }.into());
        }
        self.checked(code, what)?;
        // SAFETY: just allocated, this many bytes.
        unsafe { std::ptr::write_bytes(ptr.cast::<u8>(), 0, bytes.max(1)) };
        Ok(Pinned { context: self.context.clone(), ptr: ptr.cast(), bytes })
    }

    /// Copies values to the device, after the compute stream's current work; done when it returns.
    pub fn upload<T: Plain>(&self, to: &Buffer, offset: usize, values: &[T]) -> Result<()> {
        self.context.bind()?;
        let (bytes, stream) = (size_of_val(values), self.context.stream(Stream::Compute));
        let address = to.at(offset, bytes);
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: both ranges are inside their memory, and the source is borrowed until the wait
        // for the stream ends.
        let code = unsafe { sys::cuMemcpyHtoDAsync_v2(address, values.as_ptr().cast(), bytes, stream) };
        self.context.note(code, "copying to the GPU");
        self.synchronize(Stream::Compute)
    }

    /// Copies values from the device, after the compute stream's current work; done when it
    /// returns.
    pub fn download<T: Plain>(&self, from: &Buffer, offset: usize, out: &mut [T]) -> Result<()> {
        self.context.bind()?;
        let (bytes, stream) = (size_of_val(out), self.context.stream(Stream::Compute));
        let address = from.at(offset, bytes);
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: both ranges are inside their memory; `out` takes any bytes and is borrowed until
        // the wait for the stream ends.
        let code = unsafe { sys::cuMemcpyDtoHAsync_v2(out.as_mut_ptr().cast(), address, bytes, stream) };
        self.context.note(code, "copying from the GPU");
        self.synchronize(Stream::Compute)
    }

    /// Queues a copy from pinned memory. Its bytes may not change until the stream has passed this
    /// point.
    pub fn upload_async(&self, stream: Stream, to: &Buffer, offset: usize, from: &Pinned, bytes: Range<usize>) {
        self.context.bind_quietly();
        let (source, count) = from.span::<u8>(&bytes);
        let address = to.at(offset, count);
        if count == 0 {
            return;
        }
        // SAFETY: both ranges are inside their memory. Pinned memory is freed by a call that waits
        // for the device.
        let code = unsafe {
            sys::cuMemcpyHtoDAsync_v2(address, from.ptr.add(source).cast(), count, self.context.stream(stream))
        };
        self.context.note(code, "copying to the GPU");
    }

    /// Queues a copy to pinned memory. Its bytes may not be read until the stream has passed this
    /// point.
    pub fn download_async(&self, stream: Stream, from: &Buffer, offset: usize, to: &mut Pinned, bytes: Range<usize>) {
        self.context.bind_quietly();
        let (target, count) = to.span::<u8>(&bytes);
        let address = from.at(offset, count);
        if count == 0 {
            return;
        }
        // SAFETY: as above.
        let code = unsafe {
            sys::cuMemcpyDtoHAsync_v2(to.ptr.add(target).cast(), address, count, self.context.stream(stream))
        };
        self.context.note(code, "copying from the GPU");
    }

    /// Queues a copy to any memory of the host. If that is not page-locked, the copy may be done
    /// when this returns.
    ///
    /// # Safety
    /// The memory is neither read, written nor freed until the stream has passed this point.
    pub(super) unsafe fn download_to(&self, stream: Stream, from: &Buffer, offset: usize, to: &mut [u8]) {
        self.context.bind_quietly();
        let address = from.at(offset, to.len());
        if !to.is_empty() {
            // SAFETY: both ranges are inside their memory, and the caller keeps it.
            let code = unsafe {
                sys::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), address, to.len(), self.context.stream(stream))
            };
            self.context.note(code, "copying from the GPU");
        }
    }

    /// Queues a copy from any memory of the host.
    ///
    /// # Safety
    /// The memory does not change, and is not freed, until the stream has passed this point.
    pub(super) unsafe fn upload_from(&self, stream: Stream, to: &Buffer, offset: usize, from: &[u8]) {
        self.context.bind_quietly();
        let address = to.at(offset, from.len());
        if !from.is_empty() {
            // SAFETY: as above.
            let code = unsafe {
                sys::cuMemcpyHtoDAsync_v2(address, from.as_ptr().cast(), from.len(), self.context.stream(stream))
            };
            self.context.note(code, "copying to the GPU");
        }
    }

    /// Queues a copy on the device, on the compute stream.
    pub fn copy(&self, to: &Buffer, to_offset: usize, from: &Buffer, from_offset: usize, bytes: usize) {
        self.context.bind_quietly();
        let (target, source) = (to.at(to_offset, bytes), from.at(from_offset, bytes));
        if bytes == 0 {
            return;
        }
        // SAFETY: both ranges are inside their buffers.
        let code = unsafe { sys::cuMemcpyDtoDAsync_v2(target, source, bytes, self.context.stream(Stream::Compute)) };
        self.context.note(code, "copying on the GPU");
    }

    /// Queues the filling of bytes, on the compute stream.
    pub fn fill(&self, buffer: &Buffer, offset: usize, bytes: usize, value: u8) {
        self.context.bind_quietly();
        let address = buffer.at(offset, bytes);
        if bytes == 0 {
            return;
        }
        // SAFETY: the range is inside the buffer.
        let code = unsafe { sys::cuMemsetD8Async(address, value, bytes, self.context.stream(Stream::Compute)) };
        self.context.note(code, "filling memory of the GPU");
    }

    /// Turns a code into an error for a call that reports; a lost device is remembered as well.
    pub(super) fn checked(&self, code: CUresult, what: &str) -> Result<()> {
        if code == CUresult::CUDA_SUCCESS {
            return Ok(());
        }
        let error = CudaError::from_code(code, what);
        if error.is_lost() {
            self.context.remember(error);
        }
        check(code, what)
    }
}
