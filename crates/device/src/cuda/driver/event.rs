//! Points in a stream that can be waited for and timed.

use std::sync::Arc;

use cudarc::driver::sys::{self, CUevent, CUevent_flags, CUresult};

use super::context::{Context, Stream};
use super::device::Device;
use super::error::check;
use crate::Result;

pub struct Event {
    context: Arc<Context>,
    handle: CUevent,
}

// SAFETY: a handle of the driver, which may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// Waits on the host until the device has passed the point last recorded; fails like
    /// [`Device::check`].
    pub fn synchronize(&self) -> Result<()> {
        self.context.bind()?;
        // SAFETY: an event of this context.
        self.context.note(unsafe { sys::cuEventSynchronize(self.handle) }, "waiting for the GPU");
        self.context.check()
    }

    /// Whether the device has passed it. True if the device is lost, so that no caller waits for
    /// ever.
    pub fn is_done(&self) -> bool {
        self.context.bind_quietly();
        // SAFETY: an event of this context.
        let code = unsafe { sys::cuEventQuery(self.handle) };
        if code == CUresult::CUDA_ERROR_NOT_READY {
            return false;
        }
        self.context.note(code, "asking the GPU");
        true
    }

    /// Milliseconds on the device from this event to a later one; both were made for timing, and
    /// both have passed.
    pub fn elapsed_ms(&self, later: &Event) -> Result<f32> {
        self.context.bind()?;
        let mut milliseconds = 0.0;
        // SAFETY: two events of this context; writes one number.
        check(unsafe { sys::cuEventElapsedTime_v2(&mut milliseconds, self.handle, later.handle) }, "timing the GPU")?;
        Ok(milliseconds)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: made in `Device`, destroyed once.
            unsafe { sys::cuEventDestroy_v2(self.handle) };
        }
    }
}

impl Device {
    /// An event for ordering, without a time stamp, which costs less.
    pub fn event(&self) -> Result<Event> {
        self.event_with(CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    pub fn timing_event(&self) -> Result<Event> {
        self.event_with(CUevent_flags::CU_EVENT_DEFAULT)
    }

    fn event_with(&self, flags: CUevent_flags) -> Result<Event> {
        self.context.bind()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes one handle, destroyed in `drop`.
        self.checked(unsafe { sys::cuEventCreate(&mut handle, flags as u32) }, "cuEventCreate")?;
        Ok(Event { context: self.context.clone(), handle })
    }

    /// Queues the event behind the stream's current work.
    pub fn record(&self, event: &Event, stream: Stream) {
        self.context.bind_quietly();
        // SAFETY: an event and a stream of this context.
        let code = unsafe { sys::cuEventRecord(event.handle, self.context.stream(stream)) };
        self.context.note(code, "recording an event");
    }

    /// Later work on the stream waits until the event has passed; the host does not.
    pub fn wait(&self, stream: Stream, event: &Event) {
        self.context.bind_quietly();
        // SAFETY: an event and a stream of this context.
        let code = unsafe { sys::cuStreamWaitEvent(self.context.stream(stream), event.handle, 0) };
        self.context.note(code, "waiting for an event");
    }
}
