//! What the engine says of itself: figures, cache events, warnings, and why a request gave way.

use std::{fmt::Arguments, sync::MutexGuard, time::Duration};

use folio_scheduler::{KvEvent, Preempted};

use crate::{EngineStats, core::Core, sample::Sample};

impl Core {
    pub fn warn(&self, line: Arguments<'_>) {
        if let Some(warn) = self.shared.config.warn {
            warn(line);
        }
    }

    /// Sets what the scheduler says of itself; the figures stay locked for those that the caller has to add.
    pub fn publish(&self) -> MutexGuard<'_, EngineStats> {
        let mut scheduler = self.scheduler.stats();
        let mut expected_wait = Duration::from_nanos(self.scheduler.expected_wait());
        let mut stats = self.shared.stats();
        if let Some(trials) = &self.trials {
            // Most of them wait outside the scheduler, which knows nothing of how long they will.
            let outside = || self.samples.iter().filter(|(id, _)| !trials.is_inside(**id)).map(|(_, sample)| sample);
            scheduler.waiting += outside().count();
            scheduler.waiting_tokens += outside().map(Sample::num_tokens).sum::<usize>();
            expected_wait = expected_wait.max(stats.expected_wait);
        }
        stats.scheduler = scheduler;
        stats.expected_wait = expected_wait;
        stats
    }

    /// Nobody is waited for: a listener that is slow loses what does not fit, and is told to forget everything before
    /// it hears more, since what it missed may have been the end of blocks that it believes in.
    pub fn publish_events(&mut self) {
        let Some(listener) = &self.shared.config.kv_events else { return };
        let mut events = self.scheduler.take_events();
        if events.is_empty() {
            return;
        }
        if self.has_lost_events {
            events.insert(0, KvEvent::Cleared);
        }
        self.has_lost_events = listener.try_send(events).is_err();
        if self.has_lost_events {
            self.shared.stats().kv_event_batches_lost += 1;
        }
    }
}

/// Why a request's blocks are thrown away or kept: what bringing them back would cost, either way.
pub(crate) fn explain(debug: fn(Arguments<'_>), preempted: &Preempted) {
    let Preempted { id, computing, copying } = *preempted;
    let computing = Duration::from_nanos(computing);
    match copying.map(Duration::from_nanos) {
        Some(copying) => debug(format_args!(
            "request {} gives way: computing its tokens again would take {computing:.1?}, \
             copying its blocks {copying:.1?}",
            id.0
        )),
        None => debug(format_args!("request {} gives way and will be computed again in {computing:.1?}", id.0)),
    }
}
