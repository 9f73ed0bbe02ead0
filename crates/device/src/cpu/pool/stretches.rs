//! Ordered work, divided so that each thread continues where it stopped.

use std::array;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Padded, even_split};

/// More threads than this share stretches.
const MAX_STRETCHES: usize = 16;

/// The rest of each thread's stretch, in one word: its start in the high half, its end in the low
/// half.
pub struct Stretches {
    left: [Padded<AtomicU64>; MAX_STRETCHES],
    num_stretches: usize,
    num_threads: usize,
    most: usize,
}

impl Stretches {
    /// `0..tasks` for `num_threads` threads, which take at most `most` tasks at a time.
    pub fn new(tasks: usize, num_threads: usize, most: usize) -> Self {
        assert!(u32::try_from(tasks).is_ok(), "{tasks} tasks");
        let num_stretches = num_threads.min(MAX_STRETCHES);
        let stretch = |index| if index < num_stretches { even_split(tasks, num_stretches, index) } else { 0..0 };
        Self {
            left: array::from_fn(|index| Padded(AtomicU64::new(word(stretch(index))))),
            num_stretches,
            num_threads,
            most: most.max(1),
        }
    }

    /// A thread's next tasks: the first half of its own stretch, or the last half of another's.
    /// None if no tasks are left.
    pub fn take(&self, thread: usize) -> Option<Range<usize>> {
        let own = stretch_of(thread, self.num_threads);
        let first = |range: Range<usize>, share| (range.start..range.start + share, range.start + share..range.end);
        let last = |range: Range<usize>, share| (range.end - share..range.end, range.start..range.end - share);
        let others = (own + 1..self.num_stretches).chain(0..own);
        self.take_from(own, first).or_else(|| others.into_iter().find_map(|other| self.take_from(other, last)))
    }

    /// `cut` returns a share of the given length and the rest.
    fn take_from(
        &self,
        stretch: usize,
        cut: impl Fn(Range<usize>, usize) -> (Range<usize>, Range<usize>),
    ) -> Option<Range<usize>> {
        let taken = |left: u64| {
            let left = range(left);
            (!left.is_empty()).then(|| cut(left.clone(), left.len().div_ceil(2).min(self.most)))
        };
        // Relaxed, as the words guard no other data.
        let update = |left| taken(left).map(|(_, rest)| word(rest));
        let left = self.left[stretch].0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, update).ok()?;
        taken(left).map(|(share, _)| share)
    }
}

/// Threads that share a stretch are neighbours, like those of a memory node.
fn stretch_of(thread: usize, num_threads: usize) -> usize {
    thread * num_threads.min(MAX_STRETCHES) / num_threads
}

/// Start of a thread's stretch in `0..tasks`.
pub fn start_of(thread: usize, num_threads: usize, tasks: usize) -> usize {
    even_split(tasks, num_threads.min(MAX_STRETCHES), stretch_of(thread, num_threads)).start
}

fn word(range: Range<usize>) -> u64 {
    (range.start as u64) << 32 | range.end as u64
}

fn range(word: u64) -> Range<usize> {
    (word >> 32) as usize..(word & u64::from(u32::MAX)) as usize
}
