//! Estimates how long steps take, to plan the next step late enough that a request that arrives
//! during a step is in the next one, and early enough that the executor never waits for a plan.
//!
//! The time is half of the quickest recent step of about the same size: a request that arrives in a
//! step's first half waits for that step alone, and the estimate may be wrong by a factor of two
//! before the executor waits. After a short step the next one is planned at once: little can be
//! won, and a thread that wakes a little late would lose it. The end of a step wakes the engine in
//! any case, so a wrong estimate costs time and nothing else.

use std::time::Duration;

#[derive(Debug, Default)]
pub(super) struct StepDurations {
    /// Indexed by the number of bits in a step's number of rows.
    by_size: Vec<Option<Duration>>,
}

/// A longer step moves the estimate by this part of the difference, a shorter one replaces it.
const RISE: u32 = 8;

/// Steps below this are short: a few times what a busy machine takes to wake a thread.
const SHORT: Duration = Duration::from_millis(10);

fn size(rows: usize) -> usize {
    (usize::BITS - rows.leading_zeros()) as usize
}

impl StepDurations {
    pub fn note(&mut self, rows: usize, took: Duration) {
        let size = size(rows);
        self.by_size.resize(self.by_size.len().max(size + 1), None);
        let known = &mut self.by_size[size];
        *known = Some(match *known {
            Some(known) if took > known => known + (took - known) / RISE,
            _ => took,
        });
    }

    /// Least time that a step of `rows` rows is expected to take; none without a step of that size.
    pub fn expected(&self, rows: usize) -> Option<Duration> {
        self.by_size.get(size(rows)).copied().flatten()
    }

    /// Time from the beginning of a step of `rows` rows to the planning of the next one.
    pub fn plan_after(&self, rows: usize) -> Duration {
        let known = self.expected(rows);
        known.filter(|known| *known >= SHORT).map_or(Duration::ZERO, |known| known / 2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shorter_steps_count_at_once_and_longer_ones_slowly() {
        let ms = Duration::from_millis;
        let mut durations = StepDurations::default();
        assert_eq!(durations.plan_after(4), ms(0));
        durations.note(4, ms(16));
        assert_eq!((durations.plan_after(7), durations.plan_after(8), durations.plan_after(0)), (ms(8), ms(0), ms(0)));
        durations.note(5, ms(96));
        assert_eq!(durations.plan_after(4), ms(13));
        durations.note(6, ms(12));
        assert_eq!(durations.plan_after(4), ms(6));
        durations.note(6, ms(9));
        assert_eq!(durations.plan_after(4), ms(0));
        durations.note(usize::MAX, ms(20));
        assert_eq!(durations.plan_after(usize::MAX), ms(10));
    }
}
