//! Metrics that are counted as events happen: counters, gauges and histograms with fixed buckets.
//!
//! All of them, with all their label values, are made at the start, and code that counts keeps a
//! handle. Counting is an atomic addition or two, without a lock or a look-up.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};
use std::time::Duration;

use super::exposition::{Exposition, Kind, labels};

/// A number that only grows.
#[derive(Clone, Debug, Default)]
pub struct Counter(Arc<AtomicU64>);

impl Counter {
    pub fn add(&self, count: u64) {
        self.0.fetch_add(count, Relaxed);
    }

    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// A number that is what it was last set to.
#[derive(Clone, Debug, Default)]
pub struct Gauge(Arc<AtomicU64>);

impl Gauge {
    pub fn set(&self, value: f64) {
        self.0.store(value.to_bits(), Relaxed);
    }

    pub fn get(&self) -> f64 {
        f64::from_bits(self.0.load(Relaxed))
    }
}

/// How often values fell between which bounds. Values are whole numbers: of things, or of
/// nanoseconds that are shown as seconds, so that the sum stays exact.
#[derive(Clone, Debug)]
pub struct Histogram(Arc<Buckets>);

#[derive(Debug)]
struct Buckets {
    /// Upper bounds of the buckets, in the unit that is shown.
    bounds: Box<[f64]>,
    /// The same in units of the values; each is included in its bucket.
    limits: Box<[u64]>,
    /// One more than there are bounds.
    counts: Box<[AtomicU64]>,
    sum: AtomicU64,
    units_per_one: f64,
}

impl Histogram {
    fn new(bounds: &[f64], units_per_one: f64) -> Self {
        assert!(bounds.is_sorted(), "bounds must rise: {bounds:?}");
        let limits = bounds.iter().map(|bound| (bound * units_per_one).round() as u64).collect();
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Self(Arc::new(Buckets { bounds: bounds.into(), limits, counts, sum: AtomicU64::new(0), units_per_one }))
    }

    /// Adds a value to a histogram of counts.
    pub fn count(&self, value: u64) {
        self.add(value, 1, value);
    }

    /// Adds a time to a histogram of times.
    pub fn time(&self, value: Duration) {
        self.times(value, 1);
    }

    /// Adds `times` equal times that took `together`.
    pub fn times(&self, together: Duration, times: u64) {
        let nanos = u64::try_from(together.as_nanos()).unwrap_or(u64::MAX);
        if let Some(each) = nanos.checked_div(times) {
            self.add(each, times, nanos);
        }
    }

    fn add(&self, each: u64, times: u64, sum: u64) {
        let index = self.0.limits.partition_point(|&limit| limit < each);
        self.0.counts[index].fetch_add(times, Relaxed);
        self.0.sum.fetch_add(sum, Relaxed);
    }

    fn write(&self, out: &mut Exposition, name: &str, labels: &str) {
        let counts: Vec<u64> = self.0.counts.iter().map(|count| count.load(Relaxed)).collect();
        let sum = self.0.sum.load(Relaxed) as f64 / self.0.units_per_one;
        out.histogram(name, labels, &self.0.bounds, &counts, sum);
    }
}

#[derive(Debug)]
enum Handle {
    Counter(Counter),
    Gauge(Gauge),
    Histogram(Histogram),
}

#[derive(Debug)]
struct Family {
    name: &'static str,
    kind: Kind,
    help: &'static str,
    /// Labels as written, and what is counted under them.
    series: Vec<(String, Handle)>,
}

/// All metrics, in the order in which they were made.
#[derive(Debug, Default)]
pub struct Registry {
    families: Vec<Family>,
}

type Pairs<'a> = &'a [(&'a str, &'a str)];

impl Registry {
    pub fn counter(&mut self, name: &'static str, help: &'static str, pairs: Pairs<'_>) -> Counter {
        let counter = Counter::default();
        self.insert(name, Kind::Counter, help, pairs, Handle::Counter(counter.clone()));
        counter
    }

    pub fn gauge(&mut self, name: &'static str, help: &'static str, pairs: Pairs<'_>) -> Gauge {
        let gauge = Gauge::default();
        self.insert(name, Kind::Gauge, help, pairs, Handle::Gauge(gauge.clone()));
        gauge
    }

    /// A histogram of whole numbers of things.
    pub fn counts(&mut self, name: &'static str, help: &'static str, pairs: Pairs<'_>, bounds: &[f64]) -> Histogram {
        self.histogram(name, help, pairs, Histogram::new(bounds, 1.0))
    }

    /// A histogram of times; the bounds are seconds.
    pub fn seconds(&mut self, name: &'static str, help: &'static str, pairs: Pairs<'_>, bounds: &[f64]) -> Histogram {
        self.histogram(name, help, pairs, Histogram::new(bounds, 1e9))
    }

    fn histogram(
        &mut self,
        name: &'static str,
        help: &'static str,
        pairs: Pairs<'_>,
        histogram: Histogram,
    ) -> Histogram {
        self.insert(name, Kind::Histogram, help, pairs, Handle::Histogram(histogram.clone()));
        histogram
    }

    /// One more series, of a new family or of one that has the same name.
    fn insert(&mut self, name: &'static str, kind: Kind, help: &'static str, pairs: Pairs<'_>, handle: Handle) {
        let labels = labels(pairs);
        match self.families.iter_mut().find(|family| family.name == name) {
            Some(family) => {
                assert!(family.kind == kind, "{name} is of another kind");
                assert!(family.series.iter().all(|(known, _)| *known != labels), "{name}{{{labels}}} twice");
                family.series.push((labels, handle));
            }
            None => self.families.push(Family { name, kind, help, series: vec![(labels, handle)] }),
        }
    }

    pub fn write(&self, out: &mut Exposition) {
        for family in &self.families {
            out.family(family.name, family.kind, family.help);
            for (labels, handle) in &family.series {
                match handle {
                    Handle::Counter(counter) => out.sample(family.name, labels, counter.get()),
                    Handle::Gauge(gauge) => out.sample(family.name, labels, gauge.get()),
                    Handle::Histogram(histogram) => histogram.write(out, family.name, labels),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::exposition::tests::parse;
    use super::*;

    fn samples(registry: &Registry) -> std::collections::BTreeMap<String, f64> {
        let mut out = Exposition::default();
        registry.write(&mut out);
        parse(&out.into_text())
    }

    #[test]
    fn what_handles_count_is_what_is_shown() {
        let mut registry = Registry::default();
        let stop = registry.counter("x:ended_total", "ended", &[("reason", "stop")]);
        let open = registry.gauge("x:open", "open", &[]);
        let length = registry.counter("x:ended_total", "ended", &[("reason", "length")]);
        stop.add(2);
        stop.clone().add(1);
        length.add(7);
        open.set(-1.5);
        let samples = samples(&registry);
        assert_eq!(samples["x:ended_total{reason=\"stop\"}"], 3.0);
        assert_eq!(samples["x:ended_total{reason=\"length\"}"], 7.0);
        assert_eq!(samples["x:open"], -1.5);
        assert_eq!(samples.len(), 3);
    }

    #[test]
    fn a_bound_belongs_to_its_bucket() {
        let mut registry = Registry::default();
        let latency = registry.seconds("x:latency_seconds", "times", &[("a", "b")], &[0.001, 0.01]);
        latency.time(Duration::from_millis(1));
        latency.time(Duration::from_nanos(1_000_001));
        latency.times(Duration::from_millis(60), 3);
        latency.times(Duration::ZERO, 0);
        let sizes = registry.counts("x:sizes", "sizes", &[], &[1.0, 2.0]);
        [0, 1, 2, 3].into_iter().for_each(|size| sizes.count(size));
        let samples = samples(&registry);
        let bucket = |bound: &str| samples[&format!("x:latency_seconds_bucket{{a=\"b\",le=\"{bound}\"}}")];
        assert_eq!((bucket("0.001"), bucket("0.01"), bucket("+Inf")), (1.0, 2.0, 5.0));
        assert_eq!(samples["x:latency_seconds_sum{a=\"b\"}"], 0.062_000_001);
        assert_eq!(samples["x:latency_seconds_count{a=\"b\"}"], 5.0);
        assert_eq!((samples["x:sizes_bucket{le=\"1.0\"}"], samples["x:sizes_bucket{le=\"2.0\"}"]), (2.0, 3.0));
        assert_eq!((samples["x:sizes_sum"], samples["x:sizes_count"]), (6.0, 4.0));
    }

    #[test]
    #[should_panic(expected = "twice")]
    fn a_series_is_made_once() {
        let mut registry = Registry::default();
        registry.counter("x_total", "x", &[]);
        registry.counter("x_total", "x", &[]);
    }
}
