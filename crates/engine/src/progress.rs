//! The time of the engine's last progress, for a monitor that must not wait for a thread that hangs
//! or has died.
//!
//! A long step may be healthy, so its executor's pulse counts too. A pulse tells that there was
//! progress, but not when: the first look after it takes its own time. A hang is therefore seen
//! later by the time between two looks, and monitors look every second.

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
    /// Time of the last progress in nanoseconds: a step or a disk task ended without error, work
    /// came to an idle engine, or its last work left. A sample that ends while others remain is no
    /// progress.
    last: AtomicU64,
    /// Samples accepted and not ended. A change to or from zero while no rows are in flight calls
    /// `note` first.
    live: AtomicUsize,
    rows_in_flight: AtomicUsize,
    /// The pulse of the executor. The lock is held only to look at it.
    pulse: Mutex<Option<Pulse>>,
}

impl Default for Progress {
    fn default() -> Self {
        let (last, live, rows_in_flight) = (AtomicU64::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
        Self { epoch: Instant::now(), last, live, rows_in_flight, pulse: Mutex::default() }
    }
}

impl Progress {
    /// Notes progress.
    pub fn note(&self) {
        self.note_at(self.epoch.elapsed());
    }

    fn note_at(&self, now: Duration) {
        self.last.fetch_max(nanos(now), Ordering::AcqRel);
    }

    /// From now on beats of this pulse count.
    pub fn follow(&self, pulse: Option<Pulse>) {
        *self.pulse.lock().unwrap_or_else(PoisonError::into_inner) = pulse;
    }

    /// Time of the last progress; before any, the time of the start.
    pub fn last(&self) -> Instant {
        self.take_beats(|| self.epoch.elapsed());
        self.epoch + Duration::from_nanos(self.last.load(Ordering::Acquire))
    }

    /// Adds `samples`, unless there would be more than `most`.
    pub fn accept(&self, samples: usize, most: usize) -> bool {
        if !self.has_work() {
            self.note();
        }
        let room = |live: usize| live.checked_add(samples).filter(|&sum| sum <= most);
        self.live.fetch_update(Ordering::AcqRel, Ordering::Acquire, room).is_ok()
    }

    /// Removes `samples`, which have ended.
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

    /// A step may outlive all samples in it, and later samples wait for it.
    fn has_work(&self) -> bool {
        self.num_live() > 0 || self.rows_in_flight() > 0
    }

    pub fn stalled_for(&self) -> Option<Duration> {
        self.stalled_at(|| self.epoch.elapsed())
    }

    /// Beats since the last look are progress at this moment.
    fn take_beats(&self, now: impl Fn() -> Duration) {
        if self.pulse.lock().unwrap_or_else(PoisonError::into_inner).as_ref().is_some_and(Pulse::take) {
            self.note_at(now());
        }
    }

    fn stalled_at(&self, now: impl Fn() -> Duration) -> Option<Duration> {
        self.take_beats(&now);
        // The order matters: work that comes in between has noted its progress.
        let has_work = self.has_work();
        let last = Duration::from_nanos(self.last.load(Ordering::Acquire));
        has_work.then(|| now().saturating_sub(last))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One look a second at a step of ten minutes, with a beat every twenty seconds for five
    /// minutes and none after.
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
        // A new executor has its own pulse. Without one, progress is known at the ends of steps
        // alone.
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
