//! The engine's reports: figures, cache events, warnings, and the reason of each preemption.

use std::{fmt::Arguments, sync::MutexGuard, time::Duration};

use folio_scheduler::{KvEvent, Preempted};

use super::{EventLoop, sample::Sample};
use crate::EngineStats;

impl EventLoop {
    pub(super) fn warn(&self, line: Arguments<'_>) {
        if let Some(warn) = self.shared.config.warn {
            warn(line);
        }
    }

    pub(super) fn publish_rows_in_flight(&self) {
        self.shared.progress.set_rows_in_flight(self.in_flight.num_rows());
    }

    /// Publishes the scheduler's figures. The figures stay locked for those that the caller adds.
    pub(super) fn publish_stats(&self) -> MutexGuard<'_, EngineStats> {
        let mut scheduler = self.scheduler.stats();
        let mut expected_wait = Duration::from_nanos(self.scheduler.expected_wait());
        let mut stats = self.shared.stats();
        if let Some(blame) = &self.blame {
            // Most samples wait outside the scheduler, which cannot know for how long.
            let outside = || self.samples.iter().filter(|(id, _)| !blame.is_current(**id)).map(|(_, sample)| sample);
            scheduler.waiting += outside().count();
            scheduler.waiting_tokens += outside().map(Sample::num_tokens).sum::<usize>();
            expected_wait = expected_wait.max(stats.expected_wait);
        }
        stats.scheduler = scheduler;
        stats.expected_wait = expected_wait;
        stats
    }

    /// Sends cache events to the listener without waiting for it. A slow listener loses the events
    /// that its queue cannot hold. The next batch then begins with [`KvEvent::Cleared`], because a
    /// lost event may have removed blocks that the listener still counts on.
    pub(super) fn publish_events(&mut self) {
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

/// Logs the estimated cost of a preemption: computing the tokens again, or copying the blocks.
pub(super) fn explain(debug: fn(Arguments<'_>), preempted: &Preempted) {
    let Preempted { id, computing, copying } = *preempted;
    let computing = Duration::from_nanos(computing);
    match copying.map(Duration::from_nanos) {
        Some(copying) => debug(format_args!(
            "request {} is preempted: computing its tokens again would take {computing:.1?}, \
             copying its blocks {copying:.1?}",
            id.0
        )),
        None => debug(format_args!("request {} is preempted; computing it again will take {computing:.1?}", id.0)),
    }
}
