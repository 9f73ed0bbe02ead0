//! Bounds how often an executor is rebuilt: one that fails again soon after each rebuild is not
//! worth building again and again.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use crate::{Error, Result};

/// Restarts within [`RESTART_WINDOW`], failed attempts included. A restart that a request explains,
/// because it failed alone and has ended, is not counted: such requests would use the restarts up,
/// and the executor is as good as before.
const MOST_RESTARTS: usize = 3;
const RESTART_WINDOW: Duration = Duration::from_secs(60);

/// Times of the counted restarts in the window.
#[derive(Debug, Default)]
pub(super) struct Restarts(VecDeque<Instant>);

impl Restarts {
    /// Calls `build` until it succeeds or has been called too often. `is_first_free`: the first
    /// call is not counted.
    pub fn attempt<T>(&mut self, is_first_free: bool, build: impl Fn() -> Result<T>) -> Result<T> {
        let mut result = if is_first_free { build() } else { Err(Error::TooManyRestarts) };
        while result.is_err() && self.allow(Instant::now()) {
            result = build();
        }
        result
    }

    fn allow(&mut self, now: Instant) -> bool {
        self.0.retain(|&time| now.saturating_duration_since(time) < RESTART_WINDOW);
        let allowed = self.0.len() < MOST_RESTARTS;
        if allowed {
            self.0.push_back(now);
        }
        allowed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_restarts_in_a_minute_and_no_more() {
        let start = Instant::now();
        let mut restarts = Restarts::default();
        let mut allow = |seconds| restarts.allow(start + Duration::from_secs(seconds));
        assert!(allow(0) && allow(10) && allow(20));
        assert!(!allow(59));
        assert!(allow(60) && !allow(69));
        assert!(allow(100) && allow(100) && !allow(100));
    }
}
