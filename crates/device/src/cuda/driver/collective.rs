//! Sums, gathers and messages between GPUs, by NCCL, on the compute streams.
//!
//! Each rank has a device and a [`Collective`]; all ranks call the same operations in the same
//! order. Ranks may be threads of one process or processes that share a [`UniqueId`]. The device
//! remembers an operation that fails.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys::CUstream;

use super::context::{Context, Stream};
use super::device::Device;
use super::error::CudaError;
use super::library::Library;
use super::memory::Buffer;
use crate::Result;

const ADVICE: &str = "several GPUs talk to each other through NCCL: install libnccl2 or the Python package \
                      nvidia-nccl-cu13, and put its folder on the loader's path";

type Comm = *mut c_void;

/// Types that NCCL adds and sends, with its numbers for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Number {
    U8 = 1,
    U32 = 3,
    F32 = 7,
    Bf16 = 9,
}

impl Number {
    pub fn bytes(self) -> usize {
        match self {
            Number::U8 => 1,
            Number::Bf16 => 2,
            Number::U32 | Number::F32 => 4,
        }
    }
}

/// NCCL's number for sums.
const SUM: c_int = 0;

/// Identifies a group of ranks: made by one of them and passed to the others by any means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct UniqueId(pub [u8; 128]);

type Reduce = unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, CUstream) -> c_int;
type Gather = unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, Comm, CUstream) -> c_int;
type Send = unsafe extern "C" fn(*const c_void, usize, c_int, c_int, Comm, CUstream) -> c_int;
type Receive = unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, Comm, CUstream) -> c_int;

/// The functions of libnccl that are used.
struct Nccl {
    unique_id: unsafe extern "C" fn(*mut UniqueId) -> c_int,
    init_rank: unsafe extern "C" fn(*mut Comm, c_int, UniqueId, c_int) -> c_int,
    destroy: unsafe extern "C" fn(Comm) -> c_int,
    abort: unsafe extern "C" fn(Comm) -> c_int,
    group_start: unsafe extern "C" fn() -> c_int,
    group_end: unsafe extern "C" fn() -> c_int,
    all_reduce: Reduce,
    reduce_scatter: Reduce,
    all_gather: Gather,
    send: Send,
    receive: Receive,
    message: unsafe extern "C" fn(c_int) -> *const c_char,
}

impl Nccl {
    fn get() -> Result<&'static Nccl> {
        static LOADED: OnceLock<Nccl> = OnceLock::new();
        if let Some(nccl) = LOADED.get() {
            return Ok(nccl);
        }
        let library = Library::open("NCCL", &["libnccl.so.2", "libnccl.so"], ADVICE)?;
        // SAFETY: the types are those of nccl.h, the same in all versions since 2.7.
        let nccl = unsafe {
            Nccl {
                unique_id: library.function("ncclGetUniqueId")?,
                init_rank: library.function("ncclCommInitRank")?,
                destroy: library.function("ncclCommDestroy")?,
                abort: library.function("ncclCommAbort")?,
                group_start: library.function("ncclGroupStart")?,
                group_end: library.function("ncclGroupEnd")?,
                all_reduce: library.function("ncclAllReduce")?,
                reduce_scatter: library.function("ncclReduceScatter")?,
                all_gather: library.function("ncclAllGather")?,
                send: library.function("ncclSend")?,
                receive: library.function("ncclRecv")?,
                message: library.function("ncclGetErrorString")?,
            }
        };
        Ok(LOADED.get_or_init(|| nccl))
    }

    fn error(&self, code: c_int, what: &'static str) -> CudaError {
        // SAFETY: returns a constant string for any code.
        let message = unsafe { CStr::from_ptr((self.message)(code)) }.to_string_lossy().into_owned();
        CudaError::Library { library: "NCCL", what, message }
    }

    fn check(&self, code: c_int, what: &'static str) -> Result<()> {
        if code == 0 { Ok(()) } else { Err(self.error(code, what).into()) }
    }
}

impl UniqueId {
    pub fn new() -> Result<UniqueId> {
        let nccl = Nccl::get()?;
        let mut id = UniqueId([0; 128]);
        // SAFETY: writes 128 bytes.
        nccl.check(unsafe { (nccl.unique_id)(&mut id) }, "ncclGetUniqueId")?;
        Ok(id)
    }
}

/// One rank's part of a group of GPUs.
pub struct Collective {
    nccl: &'static Nccl,
    comm: Comm,
    context: Arc<Context>,
    rank: usize,
    ranks: usize,
}

// SAFETY: a handle of NCCL, used by one thread at a time: all methods that queue work take it in
// order.
unsafe impl std::marker::Send for Collective {}

impl Collective {
    /// Joins the group; returns when all ranks have joined, each in its own thread or process.
    pub fn join(device: &Device, id: &UniqueId, ranks: usize, rank: usize) -> Result<Collective> {
        assert!(rank < ranks, "rank {rank} of {ranks}");
        let nccl = Nccl::get()?;
        let context = device.context.clone();
        context.bind()?;
        let mut comm = std::ptr::null_mut();
        // SAFETY: the rank's device is current; writes one handle, destroyed in `drop`.
        let code = unsafe { (nccl.init_rank)(&mut comm, ranks as c_int, *id, rank as c_int) };
        let joined = nccl.check(code, "ncclCommInitRank");
        // NCCL uses the CUDA runtime, which may have made another context current.
        context.bind_anew()?;
        joined?;
        Ok(Collective { nccl, comm, context, rank, ranks })
    }

    pub fn rank(&self) -> usize {
        self.rank
    }

    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Replaces the numbers at the offset by their sums over all ranks.
    pub fn all_reduce(&self, buffer: &Buffer, offset: usize, count: usize, number: Number) {
        let at = buffer.at(offset, count * number.bytes());
        // SAFETY: the range is inside the buffer; in place is allowed.
        let code =
            unsafe { (self.nccl.all_reduce)(at as _, at as _, count, number as c_int, SUM, self.comm, self.stream()) };
        self.note(code, "ncclAllReduce");
    }

    /// Gathers every rank's `count` numbers, one rank behind the other, on all ranks.
    pub fn all_gather(
        &self,
        out: &Buffer,
        out_offset: usize,
        input: &Buffer,
        offset: usize,
        count: usize,
        number: Number,
    ) {
        let to = out.at(out_offset, self.ranks * count * number.bytes());
        let from = input.at(offset, count * number.bytes());
        // SAFETY: both ranges are inside their buffers.
        let code =
            unsafe { (self.nccl.all_gather)(from as _, to as _, count, number as c_int, self.comm, self.stream()) };
        self.note(code, "ncclAllGather");
    }

    /// This rank's `count` numbers of the sums over all ranks; the input has those of all ranks.
    pub fn reduce_scatter(
        &self,
        out: &Buffer,
        out_offset: usize,
        input: &Buffer,
        offset: usize,
        count: usize,
        number: Number,
    ) {
        let to = out.at(out_offset, count * number.bytes());
        let from = input.at(offset, self.ranks * count * number.bytes());
        // SAFETY: both ranges are inside their buffers.
        let code = unsafe {
            (self.nccl.reduce_scatter)(from as _, to as _, count, number as c_int, SUM, self.comm, self.stream())
        };
        self.note(code, "ncclReduceScatter");
    }

    /// Sends numbers to another rank, which receives as many.
    pub fn send(&self, buffer: &Buffer, offset: usize, count: usize, number: Number, to_rank: usize) {
        let at = buffer.at(offset, count * number.bytes());
        // SAFETY: the range is inside the buffer.
        let code =
            unsafe { (self.nccl.send)(at as _, count, number as c_int, to_rank as c_int, self.comm, self.stream()) };
        self.note(code, "ncclSend");
    }

    pub fn receive(&self, buffer: &Buffer, offset: usize, count: usize, number: Number, from_rank: usize) {
        let at = buffer.at(offset, count * number.bytes());
        // SAFETY: the range is inside the buffer.
        let code = unsafe {
            (self.nccl.receive)(at as _, count, number as c_int, from_rank as c_int, self.comm, self.stream())
        };
        self.note(code, "ncclRecv");
    }

    /// Runs the queued operations as one: sends and receives that wait for each other belong
    /// together.
    pub fn group(&self, queue: impl FnOnce(&Collective)) {
        // SAFETY: no preconditions; ended below.
        self.note(unsafe { (self.nccl.group_start)() }, "ncclGroupStart");
        queue(self);
        // SAFETY: started above.
        self.note(unsafe { (self.nccl.group_end)() }, "ncclGroupEnd");
    }

    fn stream(&self) -> CUstream {
        self.context.bind_quietly();
        self.context.stream(Stream::Compute)
    }

    fn note(&self, code: c_int, what: &'static str) {
        if code != 0 {
            self.context.remember(self.nccl.error(code, what));
        }
    }
}

impl Drop for Collective {
    fn drop(&mut self) {
        if self.context.bind().is_err() {
            return;
        }
        // After a device fault no wait would end.
        let end = if self.context.check().is_ok() { self.nccl.destroy } else { self.nccl.abort };
        // SAFETY: made in `join`, ended once.
        unsafe { end(self.comm) };
        let _ = self.context.bind_anew();
    }
}
