//! Time limits, in all or without progress.

use std::time::{Duration, Instant};

/// A bound on how long something may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimeLimit {
    /// Counted from the beginning, whatever happens.
    InAll(Duration),
    /// Counted from the engine's last progress: on a slow machine an answer may take long, and a
    /// queue that moves is worth waiting in.
    WithoutProgress(Duration),
}

impl TimeLimit {
    pub fn duration(self) -> Duration {
        match self {
            Self::InAll(duration) | Self::WithoutProgress(duration) => duration,
        }
    }

    /// End of the limit for a wait that began at `since`, if `progress` remains the last progress.
    /// None if the end is beyond what [`Instant`] holds.
    pub(crate) fn ends_at(self, since: Instant, progress: Instant) -> Option<Instant> {
        match self {
            Self::InAll(duration) => since.checked_add(duration),
            Self::WithoutProgress(duration) => since.max(progress).checked_add(duration),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_extends_one_limit_and_not_the_other() {
        let epoch = Instant::now();
        let at = |seconds: u64| epoch + Duration::from_secs(seconds);
        let minute = Duration::from_secs(60);
        let check = |limit: TimeLimit, since: u64, progress: u64, end: u64| {
            assert_eq!(limit.ends_at(at(since), at(progress)), Some(at(end)), "{limit:?} {since} {progress}");
        };
        // Submitted at 100 s to a machine that computes a step a second: two hours later the
        // request still waits, and the limit ends a minute after the last step.
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
}
