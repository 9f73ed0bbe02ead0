//! Waiting for a condition, with a deadline. No test sleeps for a fixed time: on a busy machine it
//! would be too short.

use std::time::{Duration, Instant};

/// The longest that anything may take on a machine with other work to do.
pub const SOON: Duration = Duration::from_secs(60);

/// How often a condition is asked for.
pub const EVERY: Duration = Duration::from_micros(500);

/// Returns when `holds` does; a panic with `what` after [`SOON`].
pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    until_some(what, || holds().then_some(()));
}

/// The first value there is; a panic with `what` after [`SOON`].
pub fn until_some<T>(what: &str, value: impl FnMut() -> Option<T>) -> T {
    poll(SOON, value).unwrap_or_else(|| panic!("not within {SOON:?}: {what}"))
}

/// The first value there is within that time, which is asked for at least once.
pub fn poll<T>(within: Duration, mut value: impl FnMut() -> Option<T>) -> Option<T> {
    let start = Instant::now();
    loop {
        if let Some(value) = value() {
            return Some(value);
        }
        if start.elapsed() > within {
            return None;
        }
        std::thread::sleep(EVERY);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_condition_is_asked_for_until_it_holds_or_time_is_up() {
        let mut asked = 0;
        until("three", || {
            asked += 1;
            asked == 3
        });
        assert_eq!(asked, 3);
        assert_eq!(poll(Duration::ZERO, || Some(1)), Some(1));
        let start = Instant::now();
        assert_eq!(poll(Duration::from_millis(10), || None::<()>), None);
        assert!(start.elapsed() > Duration::from_millis(10));
    }
}
