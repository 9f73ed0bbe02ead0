//! The server's memory over time: whether it stays constant.

use std::fmt::Write;
use std::time::{Duration, Instant};

use folio_measure::stats::percentile;

use crate::server::Process;
use crate::tally::Tally;

pub struct Sample {
    pub at: Duration,
    pub anonymous_kib: u64,
    pub files: usize,
    pub threads: u64,
}

#[derive(Default)]
pub struct Samples {
    by_second: Vec<Sample>,
    /// Includes the time between samples.
    peak_kib: u64,
}

/// A bound for a run of this length.
#[derive(Clone)]
pub struct Bound {
    pub what: &'static str,
    pub found_mib: f64,
    pub most_mib: f64,
}

impl Samples {
    /// Samples once a second, until the tally is over.
    pub fn watch(process: Process, tally: &Tally) -> Self {
        let start = Instant::now();
        let (mut samples, mut peak_kib) = (Vec::new(), 0);
        while !tally.is_over() {
            if let Some(anonymous_kib) = process.anonymous_kib() {
                let (files, threads) = (process.files(), process.threads());
                samples.push(Sample { at: start.elapsed(), anonymous_kib, files, threads });
            }
            let next = Duration::from_secs(samples.len() as u64);
            while start.elapsed() < next && !tally.is_over() {
                peak_kib = peak_kib.max(process.anonymous_kib().unwrap_or(0));
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        Self { by_second: samples, peak_kib }
    }

    fn end(&self) -> Duration {
        self.by_second.last().map_or(Duration::ZERO, |sample| sample.at)
    }

    /// Median of the samples of a few seconds around this moment: steps come and go, a leak stays.
    fn around(&self, at: Duration) -> f64 {
        let reach = (self.end() / 20).clamp(Duration::from_secs(3), Duration::from_secs(15));
        let near = self.by_second.iter().filter(|sample| sample.at.abs_diff(at) <= reach);
        let near: Vec<u64> = near.map(|sample| sample.anonymous_kib).collect();
        percentile(&near, 50.0).map_or(0.0, |kib| kib as f64 / 1024.0)
    }

    /// MiB from this share of the run to its end.
    pub fn growth(&self, from: f64) -> f64 {
        self.around(self.end()) - self.around(self.end().mul_f64(from))
    }

    /// MiB an hour by least squares, from this moment on.
    pub fn slope(&self, from: Duration) -> f64 {
        let points = self.by_second.iter().filter(|sample| sample.at >= from);
        let points: Vec<(f64, f64)> =
            points.map(|sample| (sample.at.as_secs_f64() / 3600.0, sample.anonymous_kib as f64 / 1024.0)).collect();
        let count = points.len().max(1) as f64;
        let mean_x = points.iter().map(|(x, _)| x).sum::<f64>() / count;
        let mean_y = points.iter().map(|(_, y)| y).sum::<f64>() / count;
        let spread = points.iter().map(|(x, _)| (x - mean_x).powi(2)).sum::<f64>();
        let common = points.iter().map(|(x, y)| (x - mean_x) * (y - mean_y)).sum::<f64>();
        if spread > 0.0 { common / spread } else { 0.0 }
    }

    /// A short run catches gross leaks only; the longer the run, the tighter the bound.
    pub fn bounds(&self) -> Vec<Bound> {
        let seconds = self.end().as_secs_f64();
        if seconds < 590.0 {
            return vec![Bound { what: "growth from 40% on", found_mib: self.growth(0.4), most_mib: 16.0 }];
        }
        let mut bounds = Vec::new();
        if seconds < 3590.0 {
            bounds.push(Bound { what: "growth from 30% on", found_mib: self.growth(0.3), most_mib: 2.0 });
        } else {
            let slope = self.slope(Duration::from_secs(600));
            bounds.push(Bound { what: "growth an hour from minute 10 on", found_mib: slope, most_mib: 1.0 });
        }
        bounds
    }

    /// The planned memory and a twentieth more is the most that may be taken.
    pub fn peak_bound(&self, planned: u64) -> Bound {
        let [found_mib, planned_mib] = [self.peak_kib as f64 / 1024.0, planned as f64 / f64::from(1 << 20)];
        Bound { what: "most at any moment, of what was planned", found_mib, most_mib: planned_mib * 1.05 }
    }

    /// At tenths of the run.
    pub fn profile(&self) -> Vec<(Duration, f64)> {
        (0..=10).map(|tenth| self.end().mul_f64(f64::from(tenth) / 10.0)).map(|at| (at, self.around(at))).collect()
    }

    pub fn most_files(&self) -> usize {
        self.by_second.iter().map(|sample| sample.files).max().unwrap_or(0)
    }

    /// One line per sample, for a plot.
    pub fn to_tsv(&self) -> String {
        let mut text = String::from("seconds\tanonymous_kib\tfiles\tthreads\n");
        for Sample { at, anonymous_kib, files, threads } in &self.by_second {
            writeln!(text, "{:.1}\t{anonymous_kib}\t{files}\t{threads}", at.as_secs_f64()).expect("a String");
        }
        text
    }
}

#[test]
fn a_leak_is_seen_and_noise_is_not() {
    let samples = |kib: &dyn Fn(u64) -> u64, seconds| {
        let sample = |at| Sample { at: Duration::from_secs(at), anonymous_kib: kib(at), files: 0, threads: 0 };
        Samples { by_second: (0..seconds).map(sample).collect(), peak_kib: 0 }
    };
    let within = |samples: &Samples| samples.bounds().iter().all(|bound| bound.found_mib < bound.most_mib);
    // Four megabytes that come and go, but are never held.
    let noise = |at: u64| 100_000 + (at * 7919) % 4096;
    // Ten kilobytes a second.
    let leak = |at: u64| noise(at) + at * 10;
    assert!(within(&samples(&noise, 600)) && within(&samples(&noise, 3600)));
    assert!(!within(&samples(&leak, 600)) && !within(&samples(&leak, 3600)));
    let slope = samples(&|at| at * 1024 / 3600, 3600).slope(Duration::from_secs(600));
    assert!((slope - 1.0).abs() < 0.01, "{slope}");
    assert!(!within(&samples(&|at| at * 500, 120)));
}
