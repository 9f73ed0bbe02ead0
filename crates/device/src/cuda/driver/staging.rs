//! Large uploads at the bus's speed: through two pinned halves, one filled while the other is being
//! copied.

use super::context::Stream;
use super::device::Device;
use super::event::Event;
use super::memory::{Buffer, Pinned};
use crate::Result;

/// Above this size, a copy on the host is worth several threads.
const BYTES_PER_THREAD: usize = 4 << 20;
const MAX_THREADS: usize = 8;

/// Pinned memory that weights pass through. Copies run on the copy stream; work queued on the
/// compute stream after [`Staging::finish`] sees them.
pub struct Staging {
    halves: [Half; 2],
    next: usize,
    threads: usize,
}

struct Half {
    memory: Pinned,
    /// Passed when the device has read the half.
    read: Event,
}

impl Staging {
    /// `bytes` of pinned memory in each half.
    pub fn new(device: &Device, bytes: usize) -> Result<Staging> {
        let half = || -> Result<Half> { Ok(Half { memory: device.pinned("staging", bytes)?, read: device.event()? }) };
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS);
        Ok(Staging { halves: [half()?, half()?], next: 0, threads })
    }

    /// Copies bytes to the device. They may be freed when it returns, though the copy may still be
    /// in flight.
    pub fn upload(&mut self, device: &Device, to: &Buffer, offset: usize, bytes: &[u8]) -> Result<()> {
        let threads = self.threads;
        self.upload_with(device, to, offset, bytes.len(), |start, part| {
            copy_in_parallel(part, &bytes[start..][..part.len()], threads);
        })
    }

    /// Like `upload`, with bytes that are generated on the way: the closure gets a part's offset,
    /// and the part to fill. Parts are as large as a half, the last one smaller.
    pub fn upload_with(
        &mut self,
        device: &Device,
        to: &Buffer,
        offset: usize,
        bytes: usize,
        mut fill: impl FnMut(usize, &mut [u8]),
    ) -> Result<()> {
        let mut start = 0;
        while start < bytes {
            let half = &mut self.halves[self.next];
            let count = half.memory.bytes().min(bytes - start);
            half.read.synchronize()?;
            fill(start, half.memory.as_mut_slice(0..count));
            device.upload_async(Stream::Copy, to, offset + start, &half.memory, 0..count);
            device.record(&half.read, Stream::Copy);
            self.next = 1 - self.next;
            start += count;
        }
        device.check()
    }

    /// Orders all uploads before the compute stream's later work.
    pub fn finish(&self, device: &Device) {
        for half in &self.halves {
            device.wait(Stream::Compute, &half.read);
        }
    }
}

fn copy_in_parallel(to: &mut [u8], from: &[u8], threads: usize) {
    let threads = threads.min(to.len() / BYTES_PER_THREAD);
    if threads < 2 {
        return to.copy_from_slice(from);
    }
    let part = to.len().div_ceil(threads);
    std::thread::scope(|scope| {
        for (to, from) in to.chunks_mut(part).zip(from.chunks(part)) {
            scope.spawn(move || to.copy_from_slice(from));
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_copy_every_byte() {
        for len in [0, 1, BYTES_PER_THREAD * 2 - 1, BYTES_PER_THREAD * 3 + 5] {
            let from: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
            let mut to = vec![255; len];
            copy_in_parallel(&mut to, &from, 4);
            assert!(to == from, "{len}");
        }
    }
}
