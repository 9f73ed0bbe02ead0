//! How long a request waits for its turn at most, and how long everybody waits for an engine that gets nowhere.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use folio_scheduler::RequestId;

use crate::{FinishReason, core::Core};

/// How long something may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimeLimit {
    /// From its beginning, whatever happens.
    InAll(Duration),
    /// While the engine makes no progress: on a slow machine an honest answer takes long, and a line that moves is worth
    /// waiting in.
    WithoutProgress(Duration),
}

impl TimeLimit {
    pub fn duration(self) -> Duration {
        match self {
            Self::InAll(duration) | Self::WithoutProgress(duration) => duration,
        }
    }

    /// When it is over for what began at `since`, if nothing changes after `progress`. What is too far away to be told is no end.
    fn ends_at(self, since: Instant, progress: Instant) -> Option<Instant> {
        match self {
            Self::InAll(duration) => since.checked_add(duration),
            Self::WithoutProgress(duration) => since.max(progress).checked_add(duration),
        }
    }
}

/// Requests that came, oldest first; one whose first sample has begun to run or has left is forgotten when it comes to the
/// front. The other samples are started behind the first, however much later: once it runs, the request has had its turn.
#[derive(Debug)]
pub(crate) struct Patience {
    limit: Option<TimeLimit>,
    waiting: VecDeque<Waiting>,
}

#[derive(Clone, Copy, Debug)]
struct Waiting {
    since: Instant,
    first_id: RequestId,
    num_samples: usize,
}

impl Patience {
    pub fn new(limit: Option<TimeLimit>) -> Self {
        Self { limit, waiting: VecDeque::new() }
    }

    pub fn came(&mut self, first_id: RequestId, num_samples: usize, submitted: Instant) {
        if self.limit.is_some() {
            self.waiting.push_back(Waiting { since: submitted, first_id, num_samples });
        }
    }

    /// When the first of them runs out of it, if nothing changes after `progress`. The others came later, and run out of it later.
    fn next(&self, progress: Instant) -> Option<Instant> {
        self.limit?.ends_at(self.waiting.front()?.since, progress)
    }
}

impl Core {
    /// When somebody has waited too long, unless something happens before.
    pub(crate) fn patience_ends(&self) -> Option<Instant> {
        let progress = self.shared.progress.last();
        let stalled = self.stall_ends(progress);
        self.patience.next(progress).into_iter().chain(stalled).min()
    }

    /// Ends those who have waited too long at `now`.
    pub(crate) fn expire_waiting(&mut self, now: Instant) {
        let progress = self.shared.progress.last();
        while let Some(&Waiting { first_id, num_samples, .. }) = self.patience.waiting.front() {
            let waits = self.waits(first_id);
            if waits && self.patience.next(progress).is_none_or(|until| until > now) {
                break;
            }
            self.patience.waiting.pop_front();
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

    /// When everybody is told that nothing comes any more, if nothing happens before.
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
    use super::*;

    #[test]
    fn a_line_that_moves_is_waited_in_and_a_limit_in_all_is_kept() {
        let epoch = Instant::now();
        let at = |seconds: u64| epoch + Duration::from_secs(seconds);
        let minute = Duration::from_secs(60);
        let check = |limit: TimeLimit, since: u64, progress: u64, end: u64| {
            assert_eq!(limit.ends_at(at(since), at(progress)), Some(at(end)), "{limit:?} {since} {progress}");
        };
        // Came at 100 to a machine that makes a step a second: two hours later it still waits, and a minute after the last one ends.
        check(TimeLimit::WithoutProgress(minute), 100, 20, 160);
        check(TimeLimit::WithoutProgress(minute), 100, 101, 161);
        check(TimeLimit::WithoutProgress(minute), 100, 7300, 7360);
        for progress in [20, 101, 7300] {
            check(TimeLimit::InAll(minute), 100, progress, 160);
        }
        for limit in [TimeLimit::InAll, TimeLimit::WithoutProgress] {
            assert_eq!(limit(Duration::MAX).ends_at(at(0), at(0)), None);
        }
    }

    #[test]
    fn the_first_in_line_is_the_first_to_go() {
        let epoch = Instant::now();
        let at = |seconds: u64| epoch + Duration::from_secs(seconds);
        for limit in [TimeLimit::InAll, TimeLimit::WithoutProgress] {
            let mut patience = Patience::new(Some(limit(Duration::from_secs(60))));
            assert_eq!(patience.next(at(0)), None);
            (0..3).for_each(|second| patience.came(RequestId(second), 1, at(second)));
            assert_eq!(patience.next(at(0)), Some(at(60)));
            patience.waiting.pop_front();
            assert_eq!(patience.next(at(0)), Some(at(61)));
        }
        let mut without = Patience::new(None);
        without.came(RequestId(0), 1, at(0));
        assert_eq!(without.next(at(0)), None);
    }
}
