//! Ends requests that wait too long: each in the queue, and all of them when the engine makes no
//! progress.

use std::{collections::VecDeque, time::Instant};

use folio_scheduler::RequestId;

use super::EventLoop;
use crate::{FinishReason, TimeLimit};

/// Submitted requests, oldest first. A request leaves the list when it reaches the front and its
/// first sample has started or ended. The other samples of a request start after the first, however
/// much later: once the first runs, the request has left the queue.
#[derive(Debug)]
pub(super) struct QueueTimeouts {
    limit: Option<TimeLimit>,
    waiting: VecDeque<Waiting>,
}

#[derive(Clone, Copy, Debug)]
struct Waiting {
    since: Instant,
    first_id: RequestId,
    num_samples: usize,
}

impl QueueTimeouts {
    pub fn new(limit: Option<TimeLimit>) -> Self {
        Self { limit, waiting: VecDeque::new() }
    }

    pub fn submitted(&mut self, first_id: RequestId, num_samples: usize, since: Instant) {
        if self.limit.is_some() {
            self.waiting.push_back(Waiting { since, first_id, num_samples });
        }
    }

    /// Time at which the first request has waited too long, if `progress` remains the last
    /// progress. The others were submitted later, so their time ends later.
    fn next(&self, progress: Instant) -> Option<Instant> {
        self.limit?.ends_at(self.waiting.front()?.since, progress)
    }
}

impl EventLoop {
    /// Earliest time at which a request has waited too long, without further progress.
    pub(super) fn next_timeout(&self) -> Option<Instant> {
        let progress = self.shared.progress.last();
        let stalled = self.stall_ends(progress);
        self.queue_timeouts.next(progress).into_iter().chain(stalled).min()
    }

    /// Ends requests that have waited too long at `now`.
    pub(super) fn expire_waiting(&mut self, now: Instant) {
        let progress = self.shared.progress.last();
        while let Some(&Waiting { first_id, num_samples, .. }) = self.queue_timeouts.waiting.front() {
            let waits = self.waits(first_id);
            if waits && self.queue_timeouts.next(progress).is_none_or(|until| until > now) {
                break;
            }
            self.queue_timeouts.waiting.pop_front();
            let samples = if waits { num_samples as u64 } else { 0 };
            for id in (first_id.0..first_id.0 + samples).map(RequestId) {
                if self.waits(id) {
                    self.end(id, FinishReason::QueueTimeout);
                }
            }
        }
        if self.stall_ends(progress).is_some_and(|until| until <= now) {
            while let Some((&id, _)) = self.samples.first_key_value() {
                self.end(id, FinishReason::Deadline);
            }
        }
    }

    /// Time at which all requests end, without further progress.
    fn stall_ends(&self, progress: Instant) -> Option<Instant> {
        let limit = self.shared.config.stall_timeout.filter(|_| !self.samples.is_empty())?;
        TimeLimit::WithoutProgress(limit).ends_at(progress, progress)
    }

    fn waits(&self, id: RequestId) -> bool {
        self.samples.get(&id).is_some_and(|sample| !sample.times.has_started())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_oldest_request_expires_first() {
        let epoch = Instant::now();
        let at = |seconds: u64| epoch + Duration::from_secs(seconds);
        for limit in [TimeLimit::InAll, TimeLimit::WithoutProgress] {
            let mut timeouts = QueueTimeouts::new(Some(limit(Duration::from_secs(60))));
            assert_eq!(timeouts.next(at(0)), None);
            (0..3).for_each(|second| timeouts.submitted(RequestId(second), 1, at(second)));
            assert_eq!(timeouts.next(at(0)), Some(at(60)));
            timeouts.waiting.pop_front();
            assert_eq!(timeouts.next(at(0)), Some(at(61)));
        }
        let mut without = QueueTimeouts::new(None);
        without.submitted(RequestId(0), 1, at(0));
        assert_eq!(without.next(at(0)), None);
    }
}
