//! A step's inputs on their way to the device: packed one part behind the other in pinned memory,
//! copied while the previous step runs, and written to their addresses by a kernel between the two
//! steps. Nothing waits for the copy: it is long done when the kernel runs, and the kernel reads
//! the device's own memory. If no step is running, the kernel reads the pinned memory directly,
//! which takes less time than a copy and its driver calls.

use super::driver::{Buffer, Device, Event, Pinned, Stream, args};
use super::launch;
use crate::Result;

/// Words that describe a part: its target, its source offset, and its length.
const ENTRY: usize = 3;
/// Most blocks that write a part, and threads of each.
const MOST_BLOCKS: usize = 32;
const THREADS: u32 = 256;

/// Words of all parts together, their descriptions included.
pub(super) fn words(most_parts: usize, words: usize) -> usize {
    words.saturating_add(ENTRY * most_parts)
}

/// One step's inputs in flight. Two of them take turns.
pub(super) struct Parcel {
    memory: Pinned,
    copy: Buffer,
    /// Events: `memory` was read, and `copy` was.
    copied: Event,
    taken: Event,
}

impl Parcel {
    pub fn new(device: &Device, most_parts: usize, most_words: usize) -> Result<Self> {
        let bytes = words(most_parts, most_words).saturating_mul(4);
        Ok(Self {
            memory: device.pinned("a step's inputs on their way", bytes)?,
            copy: device.alloc("a step's inputs on their way", bytes)?,
            copied: device.event()?,
            taken: device.event()?,
        })
    }

    /// Starts a new parcel once the last copy is done.
    pub fn packer(&mut self, most_parts: usize) -> Result<Packer<'_>> {
        self.copied.synchronize()?;
        let bytes = self.memory.bytes();
        Ok(Packer::new(self.memory.as_mut_slice(0..bytes), most_parts))
    }

    /// Sends the packed parts. Work queued on the compute stream from now on finds them in `to`.
    /// Words of the first part that refer to a drawn token are replaced by it, from the tokens at
    /// `drawn`. `awaited`: the device has no other work.
    pub fn send(&self, device: &Device, packed: Packed, to: &Buffer, drawn: u64, awaited: bool) {
        let (from, read) = if awaited {
            (self.memory.ptr(), &self.copied)
        } else {
            device.wait(Stream::Copy, &self.taken);
            device.upload_async(Stream::Copy, &self.copy, 0, &self.memory, 0..4 * packed.words);
            device.record(&self.copied, Stream::Copy);
            device.wait(Stream::Compute, &self.copied);
            (self.copy.ptr(), &self.taken)
        };
        let blocks = packed.longest.div_ceil(THREADS as usize).clamp(1, MOST_BLOCKS);
        let grid = [blocks as u32, packed.parts as u32, 1];
        launch(device, "put_inputs", grid, THREADS, args![to.ptr(), from, drawn]);
        // The event keeps the next kernel from starting early: it may read the words that this one
        // writes.
        device.record(read, Stream::Compute);
    }
}

/// Size of a packer's output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Packed {
    pub words: usize,
    pub parts: usize,
    longest: usize,
}

/// Writes parts: first their descriptions, then their words.
pub(super) struct Packer<'a> {
    words: &'a mut [u32],
    most_parts: usize,
    packed: Packed,
}

impl<'a> Packer<'a> {
    pub fn new(words: &'a mut [u32], most_parts: usize) -> Self {
        Self { words, most_parts, packed: Packed { words: ENTRY * most_parts, parts: 0, longest: 0 } }
    }

    /// Adds words for the address `to`; returns their number. An empty part is dropped unless it is
    /// the first.
    pub fn put(&mut self, to: usize, values: impl Iterator<Item = u32>) -> usize {
        let from = self.packed.words;
        let mut end = from;
        for value in values {
            self.words[end] = value;
            end += 1;
        }
        let Packed { words, parts, longest } = &mut self.packed;
        let count = end - from;
        if count > 0 || *parts == 0 {
            assert!(*parts < self.most_parts, "more than {} parts of a step", self.most_parts);
            self.words[ENTRY * *parts..][..ENTRY].copy_from_slice(&[to as u32, from as u32, count as u32]);
            *parts += 1;
        }
        (*words, *longest) = (end, count.max(*longest));
        count
    }

    pub fn finish(self) -> Packed {
        self.packed
    }

    /// Every part: its target, and its words.
    pub fn parts(&self) -> impl Iterator<Item = (usize, &[u32])> {
        self.words.chunks_exact(ENTRY).take(self.packed.parts).map(|entry| {
            let [to, from, count] = [entry[0], entry[1], entry[2]].map(|word| word as usize);
            (to, &self.words[from..from + count])
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_lie_one_behind_the_other() {
        let mut words = vec![9; words(4, 6)];
        let mut packer = Packer::new(&mut words, 4);
        assert_eq!(packer.put(100, std::iter::empty()), 0);
        assert_eq!(packer.put(70, [1, 2, 3].into_iter()), 3);
        assert_eq!(packer.put(7, std::iter::empty()), 0);
        assert_eq!(packer.put(40, [4, 5].into_iter()), 2);
        let parts: Vec<(usize, &[u32])> = packer.parts().collect();
        assert_eq!(parts, [(100, &[][..]), (70, &[1, 2, 3][..]), (40, &[4, 5][..])]);
        assert_eq!(packer.finish(), Packed { words: 17, parts: 3, longest: 3 });
        assert_eq!(words[..9], [100, 12, 0, 70, 12, 3, 40, 15, 2]);
        assert_eq!(words[12..], [1, 2, 3, 4, 5, 9]);
    }
}
