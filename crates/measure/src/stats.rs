//! Medians and percentiles of measurements: the one place in the tree that defines them.

/// The median of several measurements and its 95% interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Median {
    pub middle: f64,
    pub low: f64,
    pub high: f64,
}

/// The middle value, and the interval that holds the true median in at least 95 of 100 cases: order
/// statistics, so nothing is assumed of the distribution. With fewer than six values the interval
/// is all of them.
pub fn median(values: &[f64]) -> Median {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let n = sorted.len();
    let at = |rank: usize| sorted.get(rank).copied().unwrap_or(f64::NAN);
    let middle = if n % 2 == 1 { at(n / 2) } else { (at((n / 2).saturating_sub(1)) + at(n / 2)) / 2.0 };
    // The chance that at most `k` of n values lie below the true median, for as long as it is
    // under 2.5%.
    let (mut outside, mut binomial, mut k) = (0.0, 0.5f64.powi(n as i32), 0);
    while outside + binomial <= 0.025 {
        outside += binomial;
        binomial *= (n - k) as f64 / (k + 1) as f64;
        k += 1;
    }
    let low = k.saturating_sub(1);
    Median { middle, low: at(low), high: at((n.saturating_sub(1)).saturating_sub(low)) }
}

/// The nearest-rank percentile: the least value that `percent` of all values do not exceed. It is
/// one of the values, whatever their type; none of no values.
pub fn percentile<T: Copy + PartialOrd>(values: &[T], percent: f64) -> Option<T> {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(|a, b| a.partial_cmp(b).expect("measurements can be compared"));
    let rank = (percent / 100.0 * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied()
}

/// The percentile of ascending values as numpy defines it: interpolated between the two values
/// around the rank `percent / 100 * (n - 1)`. `vllm bench serve` reports these.
pub fn interpolated(sorted: &[f64], percent: f64) -> f64 {
    let rank = percent / 100.0 * (sorted.len() - 1) as f64;
    let below = sorted[rank.floor() as usize];
    let above = sorted[rank.ceil() as usize];
    below + (above - below) * rank.fract()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn medians_and_their_intervals() {
        let values: Vec<f64> = (1..=15).rev().map(f64::from).collect();
        // The known ranks for 15 values: the 4th and the 12th.
        assert_eq!(median(&values), Median { middle: 8.0, low: 4.0, high: 12.0 });
        assert_eq!(median(&[3.0, 1.0]), Median { middle: 2.0, low: 1.0, high: 3.0 });
        assert_eq!(median(&[5.0]), Median { middle: 5.0, low: 5.0, high: 5.0 });
        assert!(median(&[]).middle.is_nan());
    }

    #[test]
    fn percentiles_are_values_at_the_nearest_rank() {
        let values: Vec<Duration> = (1..=100).rev().map(Duration::from_millis).collect();
        let at = |percent| percentile(&values, percent).expect("values");
        assert_eq!([0.0, 50.0, 99.0, 99.1, 100.0].map(at), [1, 50, 99, 100, 100].map(Duration::from_millis));
        assert_eq!(percentile(&[3.0f32, 1.0, 2.0], 50.0), Some(2.0));
        assert_eq!(percentile::<Duration>(&[], 50.0), None);
    }

    /// Values from numpy 2.4.6.
    #[test]
    fn interpolated_percentiles_are_numpys() {
        let check = |values: &[f64], p: f64, expect: f64| {
            let found = interpolated(values, p);
            assert!((found - expect).abs() < 1e-12, "{p}: {found}");
        };
        check(&[1.0, 2.0, 3.0, 4.0], 50.0, 2.5);
        check(&[1.0, 2.0, 3.0, 4.0], 99.0, 3.97);
        check(&[1.0, 2.0, 3.0, 4.0], 0.0, 1.0);
        check(&[1.0, 2.0, 3.0, 4.0], 100.0, 4.0);
        check(&[1.0, 10.0, 100.0], 25.0, 5.5);
        check(&[1.0, 10.0, 100.0], 99.9, 99.82);
        check(&[5.0], 99.0, 5.0);
    }
}
