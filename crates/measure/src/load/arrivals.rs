//! Send times of requests: at a rate with a chosen burstiness, or from a trace.

use std::time::Duration;

use super::rng::Rng;

/// Distribution of the gaps between requests.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Requests a second; infinite sends all at once.
    pub rate: f64,
    /// Shape of the gamma distribution of the gaps; infinite makes them equal.
    pub burstiness: f64,
}

/// Send times of `count` requests, from the start of the run. Random gaps are stretched so that the
/// last request comes at `count / rate`: the rate is then exact for every seed, and only the order
/// of short and long gaps is random.
pub fn drawn(pace: Pace, count: usize, rng: &mut Rng) -> Vec<Duration> {
    if pace.rate.is_infinite() {
        return vec![Duration::ZERO; count];
    }
    let mut total = 0.0;
    let mut times: Vec<f64> = Vec::with_capacity(count);
    for _ in 0..count {
        // A very high shape means equal gaps, too.
        total += if pace.burstiness > 1e12 { 1.0 } else { rng.gamma(pace.burstiness) };
        times.push(total);
    }
    let span = count as f64 / pace.rate;
    let stretch = if total > 0.0 { span / total } else { 0.0 };
    times.into_iter().map(|time| seconds(time * stretch)).collect()
}

/// Send times of a trace's requests: at the recorded distances from the first, in seconds.
pub fn recorded(timestamps: &[f64]) -> Vec<Duration> {
    let first = timestamps.iter().copied().fold(f64::INFINITY, f64::min);
    timestamps.iter().map(|timestamp| seconds(timestamp - first)).collect()
}

/// A time too long for a duration counts as never.
fn seconds(time: f64) -> Duration {
    const NEVER: Duration = Duration::from_secs(100 * 365 * 86_400);
    Duration::try_from_secs_f64(time).unwrap_or(NEVER).min(NEVER)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_is_exact_and_gaps_have_the_shape_asked_for() {
        let spread = |burstiness: f64| {
            let times = drawn(Pace { rate: 20.0, burstiness }, 20_000, &mut Rng::new(5));
            assert!((times.last().expect("arrivals").as_secs_f64() - 1000.0).abs() < 1e-6);
            assert!(times.is_sorted());
            let gaps: Vec<f64> = times.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64()).collect();
            let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
            assert!((mean - 0.05).abs() < 1e-4, "{mean}");
            let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
            variance.sqrt() / mean
        };
        // The coefficient of variation of a gamma distribution is 1 / sqrt(shape).
        for burstiness in [0.25, 1.0, 4.0] {
            let expect = 1.0 / f64::sqrt(burstiness);
            assert!((spread(burstiness) / expect - 1.0).abs() < 0.05, "{burstiness}");
        }
        assert!(spread(f64::INFINITY) < 1e-6);
    }

    #[test]
    fn all_at_once() {
        let times = drawn(Pace { rate: f64::INFINITY, burstiness: 1.0 }, 3, &mut Rng::new(0));
        assert_eq!(times, [Duration::ZERO; 3]);
        assert!(drawn(Pace { rate: 1.0, burstiness: 1.0 }, 0, &mut Rng::new(0)).is_empty());
    }

    #[test]
    fn a_trace_begins_at_its_first_request() {
        let times = recorded(&[27.5, 27.0, 30.0]);
        assert_eq!(times, [500, 0, 3000].map(Duration::from_millis));
        assert!(recorded(&[0.0, 1e300])[1] > Duration::from_secs(86_400));
    }
}
