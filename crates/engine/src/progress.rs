//! When the engine last got anywhere, for whoever watches it: atomics alone, so that nobody waits for a thread that
//! hangs or has died.

use std::{
    sync::atomic::{AtomicU64, AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use crate::config::nanos;

#[derive(Debug)]
pub(crate) struct Progress {
    /// The zero of `last`.
    epoch: Instant,
    /// When a step or a task of the disk last ended well, work came to an idle engine, or the last of it left, in
    /// nanoseconds. Whoever leaves while others stay has achieved nothing for them.
    last: AtomicU64,
    /// Samples accepted and not ended. Whoever takes it to or from zero while no rows are in flight calls `note`
    /// before.
    live: AtomicUsize,
    rows_in_flight: AtomicUsize,
}

impl Default for Progress {
    fn default() -> Self {
        let (last, live, rows_in_flight) = (AtomicU64::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
        Self { epoch: Instant::now(), last, live, rows_in_flight }
    }
}

impl Progress {
    /// Something has been achieved.
    pub fn note(&self) {
        self.last.fetch_max(nanos(self.epoch.elapsed()), Ordering::AcqRel);
    }

    /// When that was; at the beginning, when it started.
    pub fn last(&self) -> Instant {
        self.epoch + Duration::from_nanos(self.last.load(Ordering::Acquire))
    }

    /// Takes in so many samples, unless there would be more than `most` then.
    pub fn accept(&self, samples: usize, most: usize) -> bool {
        if !self.has_work() {
            self.note();
        }
        let room = |live: usize| live.checked_add(samples).filter(|&sum| sum <= most);
        self.live.fetch_update(Ordering::AcqRel, Ordering::Acquire, room).is_ok()
    }

    /// So many samples have ended.
    pub fn ended(&self, samples: usize) {
        if self.num_live() == samples && self.rows_in_flight() == 0 {
            self.note();
        }
        self.live.fetch_sub(samples, Ordering::AcqRel);
    }

    pub fn num_live(&self) -> usize {
        self.live.load(Ordering::Acquire)
    }

    pub fn set_rows_in_flight(&self, rows: usize) {
        self.rows_in_flight.store(rows, Ordering::Release);
    }

    pub fn rows_in_flight(&self) -> usize {
        self.rows_in_flight.load(Ordering::Acquire)
    }

    /// A step may outlive everybody who was in it, and those behind it wait all the same.
    fn has_work(&self) -> bool {
        self.num_live() > 0 || self.rows_in_flight() > 0
    }

    pub fn stalled_for(&self) -> Option<Duration> {
        // In this order: work that comes in between has been noted.
        let has_work = self.has_work();
        let last = Duration::from_nanos(self.last.load(Ordering::Acquire));
        has_work.then(|| self.epoch.elapsed().saturating_sub(last))
    }
}
