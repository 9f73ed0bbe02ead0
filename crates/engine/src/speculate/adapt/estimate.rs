//! Estimates of repeatedly measured times, on a machine that has other work, too.
//!
//! A measured time depends on two unknowns: the current speed of the machine, which is the same for
//! all kinds of steps ([`Pace`]), and the time of this kind ([`Estimate`]). A deviation is split
//! between both in proportion to their uncertainty: if steps of other kinds were measured a moment
//! ago, the machine's speed is known and the deviation belongs to the kind; if the kind is well
//! known, the machine has changed.

/// The machine's slowdown compared with the beginning.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pace {
    /// Natural logarithm of a factor.
    log: f64,
    /// Variance of `log`.
    doubt: f64,
}

/// Time of one kind of step at the machine's speed of the beginning: the median of the
/// measurements. A far measurement moves it as much as a near one, so that an outlier costs little;
/// several far ones in a row on one side are no outliers, and move it quickly.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Estimate {
    /// Natural logarithm of seconds.
    log: f64,
    /// Variance of `log`.
    doubt: f64,
    seen: u32,
    /// The first few: until there are enough of them, the shortest is the estimate.
    first: [f64; Estimate::ENOUGH as usize],
    /// Number of measurements in a row that were far off on one side; negative: too short.
    far_in_a_row: i32,
}

/// Variance of one measurement.
const NOISE: f64 = 0.1 * 0.1;
/// Increase of the pace's uncertainty with every step.
const PACE_CHANGES: f64 = 0.006 * 0.006;
/// Increase of a kind's uncertainty with every step.
const KIND_CHANGES: f64 = 0.002 * 0.002;

impl Estimate {
    /// Number of measurements from which on one outlier among them does no harm.
    const ENOUGH: u32 = 3;
    /// Least deviation of a far measurement.
    const FAR: f64 = 0.25;
    const NO_HICCUP: i32 = 4;
    /// Factor over the estimate from which on a time is an outlier.
    const HICCUP: f64 = 1.25;
    /// Clocks are not finer, and zero has no logarithm.
    const SHORTEST: f64 = 1e-8;

    /// Notes a duration, which updates the pace as well. Returns the duration without an outlier,
    /// as far as can be told: if earlier ones turn out to have been outliers, the amounts returned
    /// for them are corrected.
    pub fn note(&mut self, seconds: f64, pace: &mut Pace) -> f64 {
        pace.doubt += PACE_CHANGES;
        let log = seconds.max(Self::SHORTEST).ln() - pace.log;
        if self.seen < Self::ENOUGH {
            let before = self.first_without_hiccups();
            self.first[self.seen as usize] = log;
            self.seen += 1;
            // Nothing makes a step too short, and a kind that seems expensive because of outliers
            // would never be tried again.
            let known = &self.first[..self.seen as usize];
            self.log = known.iter().copied().fold(f64::INFINITY, f64::min);
            self.doubt = NOISE;
            return (self.first_without_hiccups() - before) * pace.log.exp();
        }
        let off = log - self.log;
        self.far_in_a_row = match self.far_in_a_row {
            _ if off.abs() <= Self::FAR => 0,
            row if row * (off.signum() as i32) > 0 => row + off.signum() as i32,
            _ => off.signum() as i32,
        };
        self.seen = self.seen.saturating_add(1);
        self.doubt += KIND_CHANGES;
        if self.far_in_a_row.abs() > Self::NO_HICCUP {
            self.doubt = self.doubt.max(NOISE / 2.0);
        }
        let usual = (self.log + pace.log).exp();
        let all = NOISE + pace.doubt + self.doubt;
        let off = off.clamp(-Self::FAR, Self::FAR);
        for (log, doubt) in [(&mut pace.log, &mut pace.doubt), (&mut self.log, &mut self.doubt)] {
            let part = *doubt / all;
            *log += part * off;
            *doubt *= 1.0 - part;
        }
        seconds.min(Self::HICCUP * usual)
    }

    /// Sum of the first few, in seconds.
    fn first_without_hiccups(&self) -> f64 {
        let most = Self::HICCUP * self.log.exp();
        self.first[..self.seen as usize].iter().map(|first| first.exp().min(most)).sum()
    }

    /// Notes a duration that does not depend on the pace.
    pub fn note_alone(&mut self, seconds: f64) {
        self.doubt += PACE_CHANGES;
        self.note(seconds, &mut Pace { log: 0.0, doubt: -PACE_CHANGES });
    }

    pub fn seconds(&self, pace: &Pace) -> Option<f64> {
        (self.seen > 0).then(|| (self.log + pace.log).exp())
    }

    /// As [`Self::seconds`], for uses in which one outlier does not matter.
    pub fn settled(&self, pace: &Pace) -> Option<f64> {
        self.seconds(pace).filter(|_| self.seen >= Self::ENOUGH)
    }

    /// Number of measurements.
    pub fn seen(&self) -> u32 {
        self.seen
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(seconds: impl IntoIterator<Item = f64>) -> f64 {
        let (mut estimate, mut pace) = (Estimate::default(), Pace::default());
        seconds.into_iter().for_each(|seconds| {
            estimate.note(seconds, &mut pace);
        });
        estimate.seconds(&pace).unwrap()
    }

    #[test]
    fn hiccups_do_not_count() {
        assert_eq!(Estimate::default().seconds(&Pace::default()), None);
        assert!((after([9.0, 8.0, 1.0]) - 1.0).abs() < 1e-9);
        assert!((after([1.0, 90.0]) - 1.0).abs() < 1e-9);
        let busy = (0..400).map(|i| if i % 20 == 7 { 50.0 } else { 1.0 });
        assert!((after(busy) - 1.0).abs() < 0.06);
    }

    #[test]
    fn a_change_that_lasts_is_followed() {
        let slower = [1.0; 100].into_iter().chain([1.5; 30]);
        assert!((after(slower) - 1.5).abs() < 0.1);
        let quicker = [1.0; 100].into_iter().chain([0.3; 40]);
        assert!((after(quicker) - 0.3).abs() < 0.03);
    }

    #[test]
    fn what_is_known_well_tells_the_pace_of_all() {
        let (mut often, mut seldom, mut pace) = (Estimate::default(), Estimate::default(), Pace::default());
        for _ in 0..200 {
            often.note(1.0, &mut pace);
            seldom.note(3.0, &mut pace);
        }
        for _ in 0..100 {
            often.note(1.3, &mut pace);
        }
        let (often, seldom) = (often.seconds(&pace).unwrap(), seldom.seconds(&pace).unwrap());
        assert!((often - 1.3).abs() < 0.02 && (seldom - 3.9).abs() < 0.3, "{often} and {seldom}");
    }

    #[test]
    fn what_is_new_says_little_of_the_pace() {
        let (mut known, mut new, mut pace) = (Estimate::default(), Estimate::default(), Pace::default());
        for _ in 0..100 {
            known.note(1.0, &mut pace);
        }
        for seconds in [2.0, 2.4, 2.4, 2.4, 2.4, 2.4] {
            new.note(seconds, &mut pace);
        }
        assert!((known.seconds(&pace).unwrap() - 1.0).abs() < 0.05);
        assert!(new.seconds(&pace).unwrap() > 2.15);
    }

    #[test]
    fn a_hiccup_at_first_is_taken_back() {
        let (mut estimate, mut pace) = (Estimate::default(), Pace::default());
        let counted: Vec<f64> = [9.0, 1.0, 1.0, 1.0, 9.0].map(|seconds| estimate.note(seconds, &mut pace)).to_vec();
        assert!((counted.iter().sum::<f64>() - 5.5).abs() < 0.1, "{counted:?}");
    }
}
