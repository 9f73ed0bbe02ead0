//! Copies between memory of the host and the device, beside the device's computation.
//!
//! A copy runs after the compute stream's earlier work and before its later work, but on a stream
//! of its own, and the host waits for nothing. It owns its memory until it is done.

use super::context::Stream;
use super::device::Device;
use super::event::Event;
use super::memory::Buffer;
use crate::{Error, HostMemory};

/// A copy in flight.
pub struct Moving {
    /// The host memory of the copy; none once it was taken back.
    memory: Option<Box<dyn HostMemory>>,
    done: Event,
}

impl Moving {
    /// Waits until the copy is done. The device remembers a failure; the copy has ended then too.
    pub fn wait(mut self) -> Box<dyn HostMemory> {
        let _ = self.done.synchronize();
        self.memory.take().expect("taken back once")
    }
}

impl Drop for Moving {
    fn drop(&mut self) {
        if self.memory.is_some() {
            let _ = self.done.synchronize();
        }
    }
}

/// The memory of a copy that could not begin, and the error.
pub type NotBegun = (Box<dyn HostMemory>, Error);

impl Device {
    /// Starts to fill the memory from a buffer.
    pub fn start_download(
        &self,
        from: &Buffer,
        offset: usize,
        mut memory: Box<dyn HostMemory>,
    ) -> Result<Moving, NotBegun> {
        let (begin, done) = match self.two_events() {
            Ok(events) => events,
            Err(error) => return Err((memory, error)),
        };
        self.record(&begin, Stream::Compute);
        self.wait(Stream::Back, &begin);
        // SAFETY: `Moving` owns the memory, which does not move, until the copy is done.
        unsafe { self.download_to(Stream::Back, from, offset, &mut memory) };
        self.record(&done, Stream::Back);
        self.wait(Stream::Compute, &done);
        Ok(Moving { memory: Some(memory), done })
    }

    /// Starts to fill a part of a buffer from the memory.
    pub fn start_upload(&self, to: &Buffer, offset: usize, memory: Box<dyn HostMemory>) -> Result<Moving, NotBegun> {
        let (begin, done) = match self.two_events() {
            Ok(events) => events,
            Err(error) => return Err((memory, error)),
        };
        self.record(&begin, Stream::Compute);
        self.wait(Stream::Copy, &begin);
        // SAFETY: as above.
        unsafe { self.upload_from(Stream::Copy, to, offset, &memory) };
        self.record(&done, Stream::Copy);
        self.wait(Stream::Compute, &done);
        Ok(Moving { memory: Some(memory), done })
    }

    fn two_events(&self) -> Result<(Event, Event), Error> {
        Ok((self.event()?, self.event()?))
    }
}
