//! The time that speculation has gained and lost in fact, compared with plain steps.
//!
//! Estimates may be wrong for unknown reasons; this bounds the time lost by them. A small part of
//! all time may be lost to find out whether drafts pay, and recent gains may be lost again. A
//! method that has paused catches up before it drafts, and one that pauses keeps up for a while:
//! the time for both is borrowed. Borrowed time ends nothing, but counts before a new probe begins.

#[derive(Debug, Default)]
pub(super) struct Account {
    /// Seconds that may still be lost; none before the first step.
    left: Option<f64>,
    /// Seconds that were borrowed.
    debt: f64,
    /// Time of a plain step, in seconds.
    plain: f64,
}

impl Account {
    /// Plain steps that may be lost at the beginning.
    const AT_FIRST: f64 = 2.0;
    /// Least number of plain steps that a probe needs.
    const LEAST: f64 = 0.25;
    /// Part of all time that may be lost later.
    const PART: f64 = 0.005;
    /// Part of all time that may go to catching up and keeping up.
    const FORGIVEN: f64 = 0.006;
    /// Most plain steps that may be lost, after large gains.
    const MOST: f64 = 12.0;

    /// A step took `seconds`, and was quicker by `gained` than the plain steps that it replaced. A
    /// plain step takes `plain`.
    pub fn note(&mut self, plain: f64, seconds: f64, gained: f64) {
        self.plain = plain;
        let left = self.left.unwrap_or(Self::AT_FIRST * plain) + Self::PART * seconds.min(10.0 * plain) + gained;
        // Enough for the next steps is not paid back: steps that lose come between those that gain.
        let paid_back = (left - Self::AT_FIRST * plain).max(0.0).min(self.debt);
        self.debt = (self.debt - paid_back - Self::FORGIVEN * seconds).max(0.0);
        self.left = Some((left - paid_back).min(Self::MOST * plain));
    }

    /// Catching up took this many seconds.
    pub fn borrow(&mut self, seconds: f64) {
        self.debt += seconds;
    }

    pub fn is_overdrawn(&self) -> bool {
        self.left.is_some_and(|left| left < 0.0)
    }

    /// Whether a probe may begin: enough time is left for a result.
    pub fn may_begin(&self) -> bool {
        self.left.is_none_or(|left| left - self.debt > Self::LEAST * self.plain)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_lost_is_bounded() {
        let mut account = Account::default();
        let mut lost = 0.0;
        for _ in 0..10_000 {
            let (seconds, gained) = if account.is_overdrawn() { (1.0, 0.0) } else { (1.5, -0.5) };
            lost -= gained;
            account.note(1.0, seconds, gained);
        }
        assert!((50.0..60.0).contains(&lost), "{lost}");
    }

    #[test]
    fn what_is_borrowed_counts_before_anything_new() {
        let mut account = Account::default();
        account.note(1.0, 1.0, 0.0);
        account.borrow(1.5);
        assert!(account.may_begin());
        account.borrow(3.5);
        assert!(!account.may_begin() && !account.is_overdrawn());
        let steps = (0..).take_while(|_| (account.note(1.0, 1.0, 0.0), !account.may_begin()).1).count();
        assert!((280..310).contains(&steps), "{steps}");
        account.borrow(2.0);
        assert!(!account.may_begin());
        account.note(1.0, 1.0, 2.5);
        assert!(account.may_begin(), "what is gained pays too");
    }

    #[test]
    fn who_gains_pays_back_and_goes_on() {
        let mut account = Account::default();
        account.note(1.0, 1.0, 0.0);
        account.borrow(5.0);
        // Each step that gains is followed by one that loses less.
        for _ in 0..20 {
            account.note(1.0, 1.0, 1.5);
            account.note(1.0, 1.0, -1.0);
            assert!(!account.is_overdrawn());
        }
        assert!(account.may_begin());
    }

    #[test]
    fn what_was_gained_may_be_lost_again_within_limits() {
        let mut account = Account::default();
        (0..100).for_each(|_| account.note(1.0, 1.0, 2.0));
        (0..23).for_each(|_| account.note(1.0, 1.5, -0.5));
        assert!(!account.is_overdrawn());
        (0..3).for_each(|_| account.note(1.0, 1.5, -0.5));
        assert!(account.is_overdrawn());
    }
}
