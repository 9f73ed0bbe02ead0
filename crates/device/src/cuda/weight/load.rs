//! From files to device memory: threads fill a pinned buffer while the copy engine empties the
//! other one.
//!
//! A load consists of equal units (a row, a tile of packed codes), each filled by itself; a unit
//! may have its bytes at several device addresses. The host waits for nothing at the end: the
//! compute stream waits for the copies.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::super::driver::{Buffer, Device, Event, Pinned, Stream};
use crate::Result;

/// Bytes of each of the two buffers, unless one unit is larger.
const STAGING_BYTES: usize = 64 << 20;

/// Fewer bytes are not worth a thread.
const BYTES_A_THREAD: usize = 256 << 10;

/// Target of one kind of a unit's bytes: unit `i` goes to `offset + i * unit_bytes`.
pub struct Target<'b> {
    pub buffer: &'b Buffer,
    pub offset: usize,
    pub unit_bytes: usize,
}

pub struct Loader {
    device: Arc<Device>,
    slots: [Option<Slot>; 2],
    next: usize,
    threads: usize,
}

struct Slot {
    pinned: Pinned,
    /// Passed after its last copy.
    copied: Event,
}

impl Loader {
    pub fn new(device: &Arc<Device>) -> Self {
        let threads = std::thread::available_parallelism().map_or(1, |count| count.get());
        Self { device: device.clone(), slots: [None, None], next: 0, threads }
    }

    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Loads `units` units. `fill` gets a unit's number and its zeroed bytes for each target, and
    /// fills them in; many threads fill units.
    pub fn load<const N: usize>(
        &mut self,
        units: usize,
        targets: [Target<'_>; N],
        fill: impl Fn(usize, [&mut [u8]; N]) + Sync,
    ) -> Result<()> {
        let unit_bytes: usize = targets.iter().map(|target| target.unit_bytes).sum();
        if units == 0 || unit_bytes == 0 {
            return Ok(());
        }
        let at_a_time = (STAGING_BYTES / unit_bytes).clamp(1, units);
        for first in (0..units).step_by(at_a_time) {
            let count = at_a_time.min(units - first);
            let bytes = count * unit_bytes;
            let threads = self.threads.min(bytes / BYTES_A_THREAD + 1);
            let slot = self.slot(bytes)?;
            let mut left = slot.pinned.as_mut_slice::<u8>(0..bytes);
            let mut kinds = Vec::with_capacity(N);
            for target in &targets {
                let (own, rest) = left.split_at_mut(count * target.unit_bytes);
                kinds.push(own);
                left = rest;
            }
            let widths = targets.each_ref().map(|target| target.unit_bytes);
            fill_all(threads, count, kinds, widths, |index, places| fill(first + index, places));
            self.copy(first, count, &targets);
        }
        Ok(())
    }

    /// The next buffer, of at least `bytes` bytes, once its last copy is done.
    fn slot(&mut self, bytes: usize) -> Result<&mut Slot> {
        let place = &mut self.slots[self.next];
        if let Some(slot) = place {
            slot.copied.synchronize()?;
        }
        if place.as_ref().is_none_or(|slot| slot.pinned.bytes() < bytes) {
            let pinned = self.device.pinned("loading weights", bytes.max(STAGING_BYTES))?;
            let copied = self.device.event()?;
            *place = Some(Slot { pinned, copied });
        }
        Ok(place.as_mut().expect("just made"))
    }

    /// Queues the copies of the filled buffer, and switches to the other.
    fn copy(&mut self, first: usize, count: usize, targets: &[Target<'_>]) {
        let slot = self.slots[self.next].as_ref().expect("was filled");
        let mut start = 0;
        for target in targets {
            let bytes = count * target.unit_bytes;
            let offset = target.offset + first * target.unit_bytes;
            self.device.upload_async(Stream::Copy, target.buffer, offset, &slot.pinned, start..start + bytes);
            start += bytes;
        }
        self.device.record(&slot.copied, Stream::Copy);
        self.device.wait(Stream::Compute, &slot.copied);
        self.next = 1 - self.next;
    }
}

/// Zeroes and fills `count` units on `threads` threads, which take a few at a time as they become
/// free.
fn fill_all<const N: usize>(
    threads: usize,
    count: usize,
    kinds: Vec<&mut [u8]>,
    widths: [usize; N],
    fill: impl Fn(usize, [&mut [u8]; N]) + Sync,
) {
    let pieces = count.min(threads * 8);
    let a_piece = count.div_ceil(pieces.max(1));
    // A piece: its first unit, and its bytes of each kind. The thread that fills it takes it out.
    let mut work: Vec<std::sync::Mutex<Option<[&mut [u8]; N]>>> = Vec::new();
    let mut kinds: [&mut [u8]; N] = kinds.try_into().unwrap_or_else(|_| unreachable!("one a target"));
    for first in (0..count).step_by(a_piece) {
        let units = a_piece.min(count - first);
        let mut index = 0;
        let piece = kinds.each_mut().map(|kind| {
            let (own, rest) = std::mem::take(kind).split_at_mut(units * widths[index]);
            *kind = rest;
            index += 1;
            own
        });
        work.push(std::sync::Mutex::new(Some(piece)));
    }
    let next = AtomicUsize::new(0);
    let run = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(piece) = work.get(at) else { return };
            let Some(mut piece) = piece.lock().ok().and_then(|mut piece| piece.take()) else { continue };
            let units = a_piece.min(count - at * a_piece);
            for unit in 0..units {
                let mut index = 0;
                let places = piece.each_mut().map(|kind| {
                    let (own, rest) = std::mem::take(kind).split_at_mut(widths[index]);
                    *kind = rest;
                    index += 1;
                    own.fill(0);
                    own
                });
                fill(at * a_piece + unit, places);
            }
        }
    };
    if threads < 2 || count < 2 {
        return run();
    }
    std::thread::scope(|scope| {
        for _ in 1..threads.min(work.len()) {
            scope.spawn(run);
        }
        run();
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_unit_is_filled_once_in_its_place() {
        for (threads, count) in [(1, 5), (4, 1), (4, 1000), (3, 65)] {
            let (mut codes, mut scales) = (vec![9u8; count * 3], vec![9u8; count * 2]);
            fill_all(threads, count, vec![&mut codes, &mut scales], [3, 2], |unit, [codes, scales]| {
                assert_eq!((&codes[..], &scales[..]), (&[0u8; 3][..], &[0u8; 2][..]));
                codes[0] = unit as u8;
                scales[1] = !(unit as u8);
            });
            for unit in 0..count {
                assert_eq!(codes[3 * unit..3 * unit + 3], [unit as u8, 0, 0]);
                assert_eq!(scales[2 * unit..2 * unit + 2], [0, !(unit as u8)]);
            }
        }
    }
}
