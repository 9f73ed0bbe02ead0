//! What several measurements say: the median and its interval. `cargo xtask bench` and `peers` read this file too.

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Median {
    pub middle: f64,
    pub low: f64,
    pub high: f64,
}

/// The middle value, and the interval that holds the true median in at least 95 of 100 cases: order statistics, so
/// nothing is assumed of the distribution. With fewer than six values the interval is all of them.
pub fn median(values: &[f64]) -> Median {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let n = sorted.len();
    let at = |rank: usize| sorted.get(rank).copied().unwrap_or(f64::NAN);
    let middle = if n % 2 == 1 { at(n / 2) } else { (at((n / 2).saturating_sub(1)) + at(n / 2)) / 2.0 };
    // The chance that at most `k` of n values lie below the true median, for as long as it is under 2.5%.
    let (mut outside, mut binomial, mut k) = (0.0, 0.5f64.powi(n as i32), 0);
    while outside + binomial <= 0.025 {
        outside += binomial;
        binomial *= (n - k) as f64 / (k + 1) as f64;
        k += 1;
    }
    let low = k.saturating_sub(1);
    Median { middle, low: at(low), high: at((n.saturating_sub(1)).saturating_sub(low)) }
}

#[cfg(test)]
mod tests {
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
}
