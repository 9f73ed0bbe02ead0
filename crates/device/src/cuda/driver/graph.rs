//! Recorded work: a sequence queued once on the compute stream and launched again as a whole.

use std::sync::Arc;

use cudarc::driver::sys::{self, CUgraph, CUgraphExec, CUresult, CUstreamCaptureMode};

use super::context::{Context, Stream};
use super::device::Device;
use super::error::{CudaError, check};
use crate::Result;

/// Recorded work, ready to run. Its owner ensures that the memory it uses outlives it.
pub struct Graph {
    context: Arc<Context>,
    handle: CUgraphExec,
    nodes: usize,
}

// SAFETY: a handle of the driver, used by one thread at a time through `Device`.
unsafe impl Send for Graph {}
// SAFETY: as above.
unsafe impl Sync for Graph {}

impl Graph {
    /// Number of operations in the graph.
    pub fn nodes(&self) -> usize {
        self.nodes
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: made in `instantiate`, destroyed once; the driver keeps it while it runs.
            unsafe { sys::cuGraphExecDestroy(self.handle) };
        }
    }
}

impl Device {
    /// Starts a recording: until [`Device::end_capture`] this thread's work on the compute stream
    /// is recorded, not run. Only launches, copies on the device and from pinned memory, and fills
    /// can be recorded.
    pub fn begin_capture(&self) -> Result<()> {
        self.context.bind()?;
        self.check()?;
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: a stream of this context.
        let code = unsafe { sys::cuStreamBeginCapture_v2(self.context.stream(Stream::Compute), mode) };
        self.checked(code, "starting to record a graph")
    }

    /// Ends a recording. If it fails, nothing has run, and the stream is as before.
    pub fn end_capture(&self) -> Result<Graph> {
        self.context.bind()?;
        let mut graph = std::ptr::null_mut();
        // SAFETY: a stream of this context; writes one handle, or null.
        let code = unsafe { sys::cuStreamEndCapture(self.context.stream(Stream::Compute), &mut graph) };
        let recorded = Recorded(graph);
        // The failure inside is reported rather than the failed end that it caused.
        if let Some(error) = self.context.forget() {
            return Err(error.into());
        }
        self.checked(code, "recording a graph")?;
        if recorded.0.is_null() {
            let what = "recording a graph".to_owned();
            return Err(
                CudaError::Call { what, name: "no graph".into(), message: "nothing was recorded".into() }.into()
            );
        }
        self.instantiate(&recorded)
    }

    /// Records the closure's work. A panic inside ends the recording.
    pub fn capture(&self, record: impl FnOnce()) -> Result<Graph> {
        struct EndOnPanic<'a>(&'a Device);
        impl Drop for EndOnPanic<'_> {
            fn drop(&mut self) {
                if std::thread::panicking() {
                    let _ = self.0.end_capture();
                }
            }
        }
        self.begin_capture()?;
        let guard = EndOnPanic(self);
        record();
        drop(guard);
        self.end_capture()
    }

    fn instantiate(&self, graph: &Recorded) -> Result<Graph> {
        let mut nodes = 0;
        // SAFETY: a recorded graph; without an array only their number is written.
        check(unsafe { sys::cuGraphGetNodes(graph.0, std::ptr::null_mut(), &mut nodes) }, "cuGraphGetNodes")?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: a recorded graph; writes one handle, destroyed with `Graph`.
        let code = unsafe { sys::cuGraphInstantiateWithFlags(&mut handle, graph.0, 0) };
        if code == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            let free = self.free_bytes().unwrap_or(0);
            let what = format!("a graph of {nodes} operations");
            return Err(CudaError::OutOfMemory { what, bytes: 0, free }.into());
        }
        self.checked(code, "preparing a graph")?;
        let graph = Graph { context: self.context.clone(), handle, nodes };
        // Uploaded to the device now, so that the first launch costs no more than others.
        // SAFETY: a graph and a stream of this context.
        let code = unsafe { sys::cuGraphUpload(graph.handle, self.context.stream(Stream::Compute)) };
        self.checked(code, "sending a graph to the GPU")?;
        Ok(graph)
    }

    /// Queues all recorded work of the graph on the compute stream.
    pub fn launch_graph(&self, graph: &Graph) {
        self.context.bind_quietly();
        // SAFETY: a graph and a stream of this context.
        let code = unsafe { sys::cuGraphLaunch(graph.handle, self.context.stream(Stream::Compute)) };
        self.context.note(code, "launching a graph");
    }
}

/// A recording, destroyed once it has been instantiated.
struct Recorded(CUgraph);

impl Drop for Recorded {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: given by the end of a recording, destroyed once.
            unsafe { sys::cuGraphDestroy(self.0) };
        }
    }
}
