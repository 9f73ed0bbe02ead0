//! Summary of a run's outcomes. Definitions are those of `vllm bench serve`, so that figures
//! compare.

use super::answer::Outcome;
use super::options::{Goal, Metric};
use crate::stats::interpolated;

/// Mean, spread and percentiles of one metric, in milliseconds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Spread {
    pub mean: f64,
    pub median: f64,
    /// Standard deviation of the population.
    pub std: f64,
    /// Each requested percentile, and its value.
    pub percentiles: Vec<(f64, f64)>,
}

#[derive(Clone, Debug)]
pub struct Metrics {
    /// Seconds from the first request's send time to the last answer's end.
    pub duration: f64,
    pub completed: usize,
    pub failed: usize,
    pub total_input: usize,
    pub total_output: usize,
    /// Requests that met every goal; none without goals.
    pub good: Option<usize>,
    /// Most chunks in one second of the run.
    pub peak_output_per_s: f64,
    /// Most requests in flight within one second of the run.
    pub peak_concurrent: usize,
    pub ttft: Spread,
    pub tpot: Spread,
    pub itl: Spread,
    pub e2el: Spread,
}

impl Metrics {
    pub fn new(outcomes: &[Outcome], duration: f64, percentiles: &[f64], goals: &[Goal]) -> Self {
        let good: Vec<&Outcome> = outcomes.iter().filter(|outcome| outcome.is_success()).collect();
        let over = |values: Vec<f64>| Spread::new(values, percentiles);
        let (peak_output_per_s, peak_concurrent) = peaks(&good);
        Self {
            duration,
            completed: good.len(),
            failed: outcomes.len() - good.len(),
            total_input: good.iter().map(|outcome| outcome.prompt_len).sum(),
            total_output: good.iter().map(|outcome| outcome.output_len).sum(),
            good: (!goals.is_empty()).then(|| good.iter().filter(|outcome| keeps(outcome, goals)).count()),
            peak_output_per_s,
            peak_concurrent,
            ttft: over(good.iter().map(|outcome| outcome.ttft).collect()),
            tpot: over(good.iter().filter_map(|outcome| outcome.tpot()).collect()),
            itl: over(good.iter().flat_map(|outcome| outcome.itls.iter().copied()).collect()),
            e2el: over(good.iter().map(|outcome| outcome.latency).collect()),
        }
    }

    pub fn of(&self, metric: Metric) -> &Spread {
        match metric {
            Metric::Ttft => &self.ttft,
            Metric::Tpot => &self.tpot,
            Metric::Itl => &self.itl,
            Metric::E2el => &self.e2el,
        }
    }

    pub fn per_second(&self, count: usize) -> f64 {
        count as f64 / self.duration
    }
}

impl Spread {
    /// The value of a requested percentile.
    pub fn percentile(&self, percent: f64) -> Option<f64> {
        self.percentiles.iter().find(|(asked, _)| *asked == percent).map(|(_, value)| *value)
    }

    /// Summary of times in seconds; all zero if there are none.
    fn new(mut values: Vec<f64>, percentiles: &[f64]) -> Self {
        if values.is_empty() {
            values.push(0.0);
        }
        values.iter_mut().for_each(|value| *value *= 1e3);
        values.sort_unstable_by(f64::total_cmp);
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / values.len() as f64;
        Self {
            mean,
            median: interpolated(&values, 50.0),
            std: variance.sqrt(),
            percentiles: percentiles.iter().map(|&p| (p, interpolated(&values, p))).collect(),
        }
    }
}

/// An answer of one token has no time per further token, and so meets every goal for it.
fn keeps(outcome: &Outcome, goals: &[Goal]) -> bool {
    goals.iter().all(|goal| {
        let seconds = match goal.metric {
            Metric::Ttft => outcome.ttft,
            Metric::Tpot => outcome.tpot().unwrap_or(0.0),
            Metric::E2el => outcome.latency,
            Metric::Itl => outcome.itls.iter().copied().fold(0.0, f64::max),
        };
        seconds * 1e3 <= goal.milliseconds
    })
}

/// Most chunks and most requests in one second; seconds are counted from the first answered
/// request.
fn peaks(outcomes: &[&Outcome]) -> (f64, usize) {
    let first = outcomes.iter().map(|outcome| outcome.start).fold(f64::INFINITY, f64::min);
    let last = outcomes.iter().map(|outcome| outcome.start + outcome.latency).fold(first, f64::max);
    if outcomes.is_empty() {
        return (0.0, 0);
    }
    let seconds = (last - first).ceil() as usize + 1;
    let (mut chunks, mut concurrent) = (vec![0usize; seconds], vec![0usize; seconds]);
    for outcome in outcomes {
        let begin = outcome.start - first;
        let mut time = begin + outcome.ttft;
        let mut count = |time: f64| {
            if let Some(second) = chunks.get_mut(time as usize) {
                *second += 1;
            }
        };
        count(time);
        for gap in &outcome.itls {
            time += gap;
            count(time);
        }
        let under_way = begin as usize..=((begin + outcome.latency) as usize).min(seconds - 1);
        concurrent[under_way].iter_mut().for_each(|second| *second += 1);
    }
    (chunks.into_iter().max().unwrap_or(0) as f64, concurrent.into_iter().max().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(start: f64, ttft: f64, itls: &[f64], output_len: usize) -> Outcome {
        let latency = ttft + itls.iter().sum::<f64>();
        Outcome { start, prompt_len: 10, output_len, ttft, itls: itls.to_vec(), latency, ..Outcome::default() }
    }

    #[test]
    fn spreads() {
        let spread = Spread::new(vec![0.004, 0.001, 0.003, 0.002], &[75.0]);
        assert!((spread.mean - 2.5).abs() < 1e-12 && (spread.median - 2.5).abs() < 1e-12);
        assert!((spread.std - 1.25f64.sqrt()).abs() < 1e-12);
        assert!((spread.percentiles[0].1 - 3.25).abs() < 1e-12);
        assert_eq!(Spread::new(Vec::new(), &[99.0]), Spread { percentiles: vec![(99.0, 0.0)], ..Spread::default() });
    }

    #[test]
    fn a_run() {
        let failed = Outcome { error: Some("no".into()), prompt_len: 99, ..Outcome::default() };
        let outcomes =
            [outcome(1.0, 0.1, &[0.1, 0.3], 3), failed, outcome(2.5, 0.2, &[], 1), outcome(1.2, 0.5, &[0.5], 5)];
        let metrics = Metrics::new(&outcomes, 2.0, &[], &[]);
        assert_eq!((metrics.completed, metrics.failed, metrics.good), (3, 1, None));
        assert_eq!((metrics.total_input, metrics.total_output), (30, 9));
        assert!((metrics.tpot.mean - 162.5).abs() < 1e-9, "{:?}", metrics.tpot);
        assert!((metrics.itl.mean - 300.0).abs() < 1e-9);
        assert!((metrics.e2el.mean - 1700.0 / 3.0).abs() < 1e-9);
        // In the first second: three chunks of the first request and one of the third.
        assert_eq!((metrics.peak_output_per_s, metrics.peak_concurrent), (4.0, 2));
        let goal = |text: &str| text.parse::<Goal>().expect("a goal");
        let good = |goals: &[Goal]| Metrics::new(&outcomes, 2.0, &[], goals).good;
        assert_eq!(good(&[goal("ttft:200")]), Some(2));
        assert_eq!(good(&[goal("tpot:150")]), Some(2));
        assert_eq!(good(&[goal("ttft:500"), goal("e2el:600")]), Some(2));
        assert_eq!(good(&[goal("e2el:0")]), Some(0));
    }

    #[test]
    fn nothing_answered() {
        let metrics = Metrics::new(&[], 1.0, &[99.0], &[]);
        assert_eq!((metrics.completed, metrics.peak_concurrent), (0, 0));
        assert_eq!(metrics.of(Metric::Itl).percentiles, [(99.0, 0.0)]);
    }
}
