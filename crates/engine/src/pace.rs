//! When to plan the next step: late, so that a request that comes while a step runs is in the next one; and early
//! enough that the executor never waits for a plan.
//!
//! Half of what the quickest recent step of about this size took is both: whatever comes in a step's first half waits
//! for that step alone, and the estimate may be wrong by two before the executor notices. Behind a short step the next
//! is planned at once: there is little to win, and a thread that is woken a little late would lose it. A step that ends
//! early is heard anyway, so a wrong estimate costs time and nothing else.

use std::time::Duration;

#[derive(Debug, Default)]
pub(crate) struct Pace {
    /// By the number of bits in a step's number of rows.
    by_size: Vec<Option<Duration>>,
}

/// A longer step moves the estimate by this part of the difference, a shorter one replaces it.
const RISE: u32 = 8;

/// Steps below this are short: a few times what a busy machine takes to wake a thread.
const SHORT: Duration = Duration::from_millis(10);

fn size(rows: usize) -> usize {
    (usize::BITS - rows.leading_zeros()) as usize
}

impl Pace {
    pub fn note(&mut self, rows: usize, took: Duration) {
        let size = size(rows);
        self.by_size.resize(self.by_size.len().max(size + 1), None);
        let known = &mut self.by_size[size];
        *known = Some(match *known {
            Some(known) if took > known => known + (took - known) / RISE,
            _ => took,
        });
    }

    /// What a step of `rows` rows will take at least, as far as it is known.
    pub fn expected(&self, rows: usize) -> Option<Duration> {
        self.by_size.get(size(rows)).copied().flatten()
    }

    /// How long after the beginning of a step of `rows` rows the next one is planned: at once, if nothing is known.
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
        let mut pace = Pace::default();
        assert_eq!(pace.plan_after(4), ms(0));
        pace.note(4, ms(16));
        assert_eq!((pace.plan_after(7), pace.plan_after(8), pace.plan_after(0)), (ms(8), ms(0), ms(0)));
        pace.note(5, ms(96));
        assert_eq!(pace.plan_after(4), ms(13));
        pace.note(6, ms(12));
        assert_eq!(pace.plan_after(4), ms(6));
        pace.note(6, ms(9));
        assert_eq!(pace.plan_after(4), ms(0));
        pace.note(usize::MAX, ms(20));
        assert_eq!(pace.plan_after(usize::MAX), ms(10));
    }
}
