//! When the engine last got anywhere, for whoever watches it: nobody waits for a thread that hangs or has died.
//!
//! A step may take long and be well all the same, so its executor's pulse counts too. It says that something was done, and not
//! when: whoever looks first takes that moment for it. A hang is seen later by what lies between two looks, and those who watch
//! an engine look every second.

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use folio_device::Pulse;

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
    /// The executor's. It is locked for no longer than a look at it takes.
    pulse: Mutex<Option<Pulse>>,
}

impl Default for Progress {
    fn default() -> Self {
        let (last, live, rows_in_flight) = (AtomicU64::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
        Self { epoch: Instant::now(), last, live, rows_in_flight, pulse: Mutex::default() }
    }
}

impl Progress {
    /// Something has been achieved.
    pub fn note(&self) {
        self.note_at(self.epoch.elapsed());
    }

    fn note_at(&self, now: Duration) {
        self.last.fetch_max(nanos(now), Ordering::AcqRel);
    }

    /// From now on this executor's steps count while they run.
    pub fn follow(&self, pulse: Option<Pulse>) {
        *self.pulse.lock().unwrap_or_else(PoisonError::into_inner) = pulse;
    }

    /// When that was; at the beginning, when it started.
    pub fn last(&self) -> Instant {
        self.take_beats(|| self.epoch.elapsed());
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
        self.stalled_at(|| self.epoch.elapsed())
    }

    /// Beats since the last look are progress of this moment.
    fn take_beats(&self, now: impl Fn() -> Duration) {
        if self.pulse.lock().unwrap_or_else(PoisonError::into_inner).as_ref().is_some_and(Pulse::take) {
            self.note_at(now());
        }
    }

    fn stalled_at(&self, now: impl Fn() -> Duration) -> Option<Duration> {
        self.take_beats(&now);
        // In this order: work that comes in between has been noted.
        let has_work = self.has_work();
        let last = Duration::from_nanos(self.last.load(Ordering::Acquire));
        has_work.then(|| now().saturating_sub(last))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One look a second, at a step of ten minutes that does something every twenty seconds, and from its fifth minute on nothing.
    #[test]
    fn a_step_that_gets_on_is_not_stalled_however_long_it_takes() {
        let progress = Progress::default();
        let pulse = Pulse::default();
        progress.follow(Some(pulse.clone()));
        assert!(progress.accept(1, 1));
        let seconds = Duration::from_secs;
        for second in 1..600 {
            if second % 20 == 0 && second <= 300 {
                pulse.beat();
            }
            let stalled = progress.stalled_at(|| seconds(second)).expect("there is work");
            let since = if second <= 300 { second % 20 } else { second - 300 };
            assert_eq!(stalled.as_secs_f64().round() as u64, since, "after {second} s");
        }
        // A new executor has a pulse of its own, and one without is heard of at the ends of its steps alone.
        for other in [Some(Pulse::default()), None] {
            progress.follow(other);
            pulse.beat();
            assert!(progress.stalled_at(|| seconds(601)) > Some(seconds(300)));
        }
        progress.note_at(seconds(601));
        assert_eq!(progress.stalled_at(|| seconds(602)), Some(seconds(1)));
        progress.ended(1);
        assert_eq!(progress.stalled_at(|| seconds(700)), None);
    }
}
