//! A time that is measured again and again on a machine that has other things to do, too.

/// Follows the middle of what is noted. What is far off moves it as much as what is a little off, so that a hiccup
/// costs little; several in a row on one side are no hiccups, and move it quickly.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Estimate {
    /// Natural logarithm of seconds.
    log: f64,
    seen: u32,
    /// The first few: until there are enough of them, the shortest is the estimate.
    first: [f64; Estimate::ENOUGH as usize],
    /// How many in a row were far off on one side; negative: too short.
    far_in_a_row: i32,
}

impl Estimate {
    /// Notes from which on one of them may be a hiccup without harm.
    const ENOUGH: u32 = 3;
    /// Part of a difference that counts once much was noted.
    const SLOWEST: f64 = 1.0 / 16.0;
    const QUICK: f64 = 1.0 / 3.0;
    /// Further off than this is far.
    const FAR: f64 = 0.25;
    const NO_HICCUP: i32 = 4;
    /// Clocks are not finer, and zero has no logarithm.
    const SHORTEST: f64 = 1e-8;

    /// Notes a duration, and says by how much the logarithm moved, where that is news of the world: not while the
    /// estimate itself is young.
    pub fn note(&mut self, seconds: f64) -> f64 {
        let log = seconds.max(Self::SHORTEST).ln();
        if self.seen < Self::ENOUGH {
            self.first[self.seen as usize] = log;
            self.seen += 1;
            // Nothing makes a step too short, and one that seems dear by hiccups is never tried again.
            let known = &self.first[..self.seen as usize];
            self.log = known.iter().copied().fold(f64::INFINITY, f64::min);
            return 0.0;
        }
        let off = log - self.log;
        self.far_in_a_row = match self.far_in_a_row {
            _ if off.abs() <= Self::FAR => 0,
            row if row * (off.signum() as i32) > 0 => row + off.signum() as i32,
            _ => off.signum() as i32,
        };
        self.seen = self.seen.saturating_add(1);
        let part = if self.far_in_a_row.abs() > Self::NO_HICCUP {
            Self::QUICK
        } else {
            Self::SLOWEST.max(1.0 / f64::from(self.seen - 1))
        };
        let moved = part * off.clamp(-Self::FAR, Self::FAR);
        self.log += moved;
        if self.seen > 16 { moved } else { 0.0 }
    }

    /// The world has become slower or quicker by a factor, which was seen elsewhere.
    pub fn shift(&mut self, log: f64) {
        self.log += log;
        self.first.iter_mut().for_each(|first| *first += log);
    }

    pub fn seconds(&self) -> Option<f64> {
        (self.seen > 0).then(|| self.log.exp())
    }

    /// As [`Self::seconds`], where one hiccup more or less does not matter.
    pub fn settled(&self) -> Option<f64> {
        self.seconds().filter(|_| self.seen >= Self::ENOUGH)
    }

    /// How often it was noted.
    pub fn seen(&self) -> u32 {
        self.seen
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(seconds: impl IntoIterator<Item = f64>) -> f64 {
        let mut estimate = Estimate::default();
        seconds.into_iter().for_each(|seconds| {
            estimate.note(seconds);
        });
        estimate.seconds().unwrap()
    }

    #[test]
    fn hiccups_do_not_count() {
        assert_eq!(Estimate::default().seconds(), None);
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
}
