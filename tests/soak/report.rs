//! The table at the end of a soak, and its bounds.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use folio_measure::stats::percentile;

use crate::memory::{Bound, Samples};
use crate::server::Metrics;
use crate::tally::Tally;

pub struct Report {
    counts: Vec<(String, u64)>,
    shared_prefixes: u64,
    failures: Vec<String>,
    latencies: Vec<Duration>,
    health: Vec<Duration>,
    took: Duration,
    idle_after: Duration,
    preemptions: u64,
    tokens: u64,
    cached: f64,
    profile: Vec<(Duration, f64)>,
    slope: f64,
    most_files: usize,
    bounds: Vec<Bound>,
    samples: String,
}

impl Report {
    pub fn new(
        tally: &Tally,
        samples: &Samples,
        bounds: Vec<Bound>,
        metrics: &Metrics,
        took: Duration,
        idle_after: Duration,
    ) -> Self {
        let mut seen = tally.seen();
        Self {
            counts: std::mem::take(&mut seen.counts).into_iter().collect(),
            shared_prefixes: seen.shared_prefixes,
            failures: std::mem::take(&mut seen.failures),
            latencies: std::mem::take(&mut seen.latencies),
            health: std::mem::take(&mut seen.health),
            took,
            idle_after,
            preemptions: metrics.get("vllm:num_preemptions_total") as u64,
            tokens: metrics.get("vllm:generation_tokens_total") as u64,
            cached: metrics.get("vllm:prompt_tokens_cached_total") / metrics.get("vllm:prompt_tokens_total").max(1.0),
            profile: samples.profile(),
            slope: samples.slope(took.mul_f64(1.0 / 6.0)),
            most_files: samples.most_files(),
            bounds,
            samples: samples.to_tsv(),
        }
    }

    fn of(&self, start: &str) -> u64 {
        self.counts.iter().filter(|(name, _)| name.starts_with(start)).map(|(_, count)| count).sum()
    }

    /// Stores the memory samples in a file for plotting.
    pub fn keep(&self) {
        let name = format!("soak-{}s-{}.tsv", self.took.as_secs(), std::process::id());
        let file = std::env::var_os("FOLIO_SOAK_SAMPLES")
            .map_or_else(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name), PathBuf::from);
        match std::fs::write(&file, &self.samples) {
            Ok(()) => eprintln!("memory, files and threads by the second: {}", file.display()),
            Err(error) => eprintln!("the samples could not be kept in {}: {error}", file.display()),
        }
    }

    pub fn check(&self) {
        assert!(self.failures.is_empty(), "{} failures, the first: {}", self.failures.len(), self.failures[0]);
        assert!(self.preemptions > 0, "the pool was never short: nothing of what this is about was tried");
        for kind in
            ["left in the answer", "malformed", "slow reader", "large body, refused", "large body, whole", "/v1/"]
        {
            assert!(self.of(kind) > 0, "there was none of: {kind}");
        }
        for Bound { what, found_mib, most_mib } in &self.bounds {
            assert!(found_mib < most_mib, "memory: {what} is {found_mib:.2} MiB, and at most {most_mib} are allowed");
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.took.as_secs_f64();
        let total = self.of("");
        let share = |count: u64| 100.0 * count as f64 / total.max(1) as f64;
        writeln!(f, "\nrequests{:>44}", "number   share")?;
        for (name, count) in &self.counts {
            writeln!(f, "  {name:<40}{count:>8}{:>7.1}%", share(*count))?;
        }
        let compared =
            self.of("/v1/") + self.of("slow reader,") + self.of("large body, whole") + self.of("large body, stream");
        writeln!(f, "  {:<40}{total:>8}{:>7.1}/s", "all", total as f64 / seconds)?;
        writeln!(f, "  {:<40}{compared:>8}", "whole and as recorded")?;
        let of_compared = 100.0 * self.shared_prefixes as f64 / compared.max(1) as f64;
        writeln!(f, "  {:<40}{:>8}{of_compared:>7.1}%", "of those, with a shared prefix", self.shared_prefixes)?;
        writeln!(f, "  {:<40}{:>8}{:>7.1}%", "disconnects", self.of("left"), share(self.of("left")))?;
        writeln!(f, "  {:<40}{:>8}", "failures", self.failures.len())?;
        writeln!(f, "preemptions{:>39}", self.preemptions)?;
        writeln!(f, "tokens{:>44}{:>7.0}/s", self.tokens, self.tokens as f64 / seconds)?;
        writeln!(f, "prompt tokens found in the cache{:>19.1}%", 100.0 * self.cached)?;
        for (name, times) in [("answer, plain clients", &self.latencies), ("/health", &self.health)] {
            let ms = |percent| percentile(times, percent).unwrap_or_default().as_secs_f64() * 1e3;
            writeln!(
                f,
                "{name:<24}p50 {:.1} ms, p99 {:.1} ms, most {:.1} ms ({})",
                ms(50.0),
                ms(99.0),
                ms(100.0),
                times.len()
            )?;
        }
        writeln!(
            f,
            "idle after the last request in {:.2} s; at most {} files open",
            self.idle_after.as_secs_f64(),
            self.most_files
        )?;
        writeln!(f, "RssAnon+VmSwap")?;
        for (at, mib) in &self.profile {
            writeln!(f, "  at {:>5.0} s{mib:>12.2} MiB", at.as_secs_f64())?;
        }
        writeln!(f, "  slope from a sixth of the run on: {:.2} MiB/h", self.slope)?;
        for Bound { what, found_mib, most_mib } in &self.bounds {
            writeln!(f, "  {what}: {found_mib:.2} MiB (must be below {most_mib})")?;
        }
        Ok(())
    }
}
