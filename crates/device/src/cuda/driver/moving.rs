//! Memory of the host on its way to the device or filled from there, beside what the device computes.
//!
//! A copy comes after what the compute stream was asked for before it, and before what it is asked for afterwards, but
//! runs on a stream of its own, and the host waits for nothing. It owns its memory until it is done.

use super::context::Stream;
use super::device::Device;
use super::event::Event;
use super::memory::Buffer;
use crate::{Error, HostMemory};

/// A copy that was begun.
pub struct Moving {
    /// None once it was taken back.
    memory: Option<Box<dyn HostMemory>>,
    done: Event,
}

impl Moving {
    /// Waits until the copy is done. What went wrong is remembered by the device; its copies have ended then too.
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

/// Nothing was begun: the memory, and why.
pub type NotBegun = (Box<dyn HostMemory>, Error);

impl Device {
    /// Begins to fill the memory from a buffer.
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

    /// Begins to fill a part of a buffer from the memory.
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
