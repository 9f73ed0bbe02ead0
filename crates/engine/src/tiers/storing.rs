//! Pauses writing after a failure, since the disk is full or broken and trying costs time. After
//! the pause one write is tried, since disks get room again. Each failure in a row doubles the
//! pause. Time is an argument.

use std::time::{Duration, Instant};

/// The pause after the first failure, and the longest one.
pub(super) const FIRST_PAUSE: Duration = Duration::from_secs(5);
pub(super) const LONGEST_PAUSE: Duration = Duration::from_secs(300);

#[derive(Debug, Default)]
pub(super) struct Storing {
    /// Failed writes since the start.
    failures: u64,
    /// Set from a failure until a successful write: length and end of the pause.
    paused: Option<(Duration, Instant)>,
}

impl Storing {
    /// Whether a chunk may be written now.
    pub fn may_try(&self, now: Instant) -> bool {
        self.paused.is_none_or(|(_, until)| until <= now)
    }

    pub fn failed(&mut self, now: Instant) {
        self.failures += 1;
        let pause = self.paused.map_or(FIRST_PAUSE, |(pause, _)| (2 * pause).min(LONGEST_PAUSE));
        self.paused = Some((pause, now + pause));
    }

    pub fn worked(&mut self) {
        self.paused = None;
    }

    /// Whether the last write worked.
    pub fn is_working(&self) -> bool {
        self.paused.is_none()
    }

    pub fn failures(&self) -> u64 {
        self.failures
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest_and_end_with_a_success() {
        let mut storing = Storing::default();
        let mut now = Instant::now();
        assert!(storing.may_try(now) && storing.is_working());
        for seconds in [5, 10, 20, 40, 80, 160, 300, 300] {
            storing.failed(now);
            let pause = Duration::from_secs(seconds);
            assert!(!storing.is_working() && !storing.may_try(now));
            assert!(!storing.may_try(now + pause - Duration::from_nanos(1)), "{seconds} s");
            now += pause;
            assert!(storing.may_try(now), "{seconds} s");
        }
        storing.worked();
        assert!(storing.is_working() && storing.may_try(now));
        storing.failed(now);
        assert!(storing.may_try(now + FIRST_PAUSE), "as short as at first");
        assert_eq!(storing.failures(), 9);
    }
}
