//! The figures, as tables or as JSON.

use folio_session::{Session, machine};
use serde_json::{Value, json};

use super::cpu::{CpuTime, Part};
use super::{FirstTokens, Options, Pair, Run};
use crate::bench::streams::ms;
use crate::stats::{Median, median, percentile};
use crate::table;

/// Rates, CPU time and times to the first token, of the engine alone and over HTTP.
pub struct Report {
    options: Options,
    name: String,
    threads: usize,
    figures: Figures,
    firsts: First,
}

impl Report {
    pub fn new(options: &Options, session: &Session, pairs: &[Pair], firsts: &FirstTokens) -> Self {
        Self {
            options: options.clone(),
            name: session.assets.name.clone(),
            threads: session.plan.threads,
            figures: Figures::of(pairs, machine::cores()),
            firsts: First::of(firsts),
        }
    }

    pub fn text(&self) -> String {
        let Self { options, figures, firsts, .. } = self;
        let mut text = format!(
            "{}: {} threads on {} cores; {} streams, {} in / {} out, {} pairs\n",
            self.name,
            self.threads,
            figures.cores,
            options.concurrency,
            options.prompt_tokens,
            options.tokens,
            options.pairs
        );
        text += &format!(
            "over HTTP {:+.2}% tokens per second, 95% interval {:+.2}% to {:+.2}%; {:.3} events and {:.0} bytes a token\n\n",
            (figures.ratio.middle - 1.0) * 100.0,
            (figures.ratio.low - 1.0) * 100.0,
            (figures.ratio.high - 1.0) * 100.0,
            figures.events_per_token,
            figures.bytes_per_token
        );
        for rows in [figures.rate_rows(), figures.cpu_rows()] {
            text += &format!("{}\n", table::render(&rows));
        }
        text + &table::render(&firsts.rows(options))
    }

    pub fn json(&self) -> Value {
        let Self { options, figures, firsts, .. } = self;
        json!({
            "model": self.name, "threads": self.threads, "cores": figures.cores,
            "concurrency": options.concurrency, "prompt_tokens": options.prompt_tokens, "tokens": options.tokens,
            "pairs": options.pairs, "rounds": options.rounds,
            "ratio": {"median": figures.ratio.middle, "low": figures.ratio.low, "high": figures.ratio.high},
            "direct": figures.direct.to_json(figures.cores), "http": figures.http.to_json(figures.cores),
            "events_per_token": figures.events_per_token, "bytes_per_token": figures.bytes_per_token,
            "first_token_ms": firsts.to_json(),
        })
    }
}

/// One way of asking, over all pairs.
struct Side {
    best: f64,
    rate: Median,
    /// Microseconds a token, of each part.
    cpu: [f64; Part::ALL.len()],
}

impl Side {
    fn of(runs: &[Run]) -> Self {
        let rates: Vec<f64> = runs.iter().map(Run::tokens_per_s).collect();
        let tokens = runs.iter().map(|run| run.tokens).sum::<usize>().max(1) as f64;
        let mut sum = CpuTime::default();
        runs.iter().for_each(|run| sum.add(&run.cpu));
        Self {
            best: rates.iter().copied().fold(0.0, f64::max),
            rate: median(&rates),
            cpu: Part::ALL.map(|part| sum.nanoseconds(part) as f64 / 1e3 / tokens),
        }
    }

    /// The share of all cores that a part takes, at the median rate.
    fn share(&self, part: Part, cores: usize) -> f64 {
        self.cpu[part as usize] * 1e-6 * self.rate.middle / cores as f64
    }

    fn to_json(&self, cores: usize) -> Value {
        let cpu = Part::ALL.map(|part| {
            let value = json!({"us_per_token": self.cpu[part as usize], "share": self.share(part, cores)});
            (part.name().to_string(), value)
        });
        json!({
            "tokens_per_s": {"best": self.best, "median": self.rate.middle, "low": self.rate.low, "high": self.rate.high},
            "cpu": serde_json::Map::from_iter(cpu),
        })
    }
}

struct Figures {
    cores: usize,
    direct: Side,
    http: Side,
    /// Tokens per second over HTTP for each that the engine alone makes.
    ratio: Median,
    events_per_token: f64,
    bytes_per_token: f64,
}

impl Figures {
    fn of(pairs: &[Pair], cores: usize) -> Self {
        let side = |run: fn(&Pair) -> Run| Side::of(&pairs.iter().map(run).collect::<Vec<_>>());
        let ratios: Vec<f64> = pairs.iter().map(|pair| pair.http.tokens_per_s() / pair.direct.tokens_per_s()).collect();
        let per_token = |count: fn(&Pair) -> usize| {
            let tokens = pairs.iter().map(|pair| pair.http.tokens).sum::<usize>().max(1);
            pairs.iter().map(count).sum::<usize>() as f64 / tokens as f64
        };
        Self {
            cores,
            direct: side(|pair| pair.direct),
            http: side(|pair| pair.http),
            ratio: median(&ratios),
            events_per_token: per_token(|pair| pair.events),
            bytes_per_token: per_token(|pair| pair.bytes),
        }
    }

    fn rate_rows(&self) -> Vec<Vec<String>> {
        let row = |name: &str, side: &Side| {
            let range = format!("{:.0} to {:.0}", side.rate.low, side.rate.high);
            vec![name.into(), format!("{:.0}", side.rate.middle), range, format!("{:.0}", side.best)]
        };
        vec![
            ["tokens per second", "median", "95% interval", "best"].map(String::from).to_vec(),
            row("engine alone", &self.direct),
            row("over HTTP", &self.http),
        ]
    }

    fn cpu_rows(&self) -> Vec<Vec<String>> {
        let head = ["CPU time a token", "engine alone", "over HTTP", "of all cores"];
        let mut rows = vec![head.map(String::from).to_vec()];
        for part in Part::ALL {
            let (direct, http) = (self.direct.cpu[part as usize], self.http.cpu[part as usize]);
            let name = match part {
                Part::Reader => "reader (over HTTP: the client)",
                Part::Compute => "compute (and waiting awake)",
                _ => part.name(),
            };
            let share = format!("{:.2}%", self.http.share(part, self.cores) * 100.0);
            rows.push(vec![name.into(), format!("{direct:.2} us"), format!("{http:.2} us"), share]);
        }
        rows
    }
}

/// Milliseconds to the first token.
struct First {
    direct: [f64; 2],
    http: [f64; 2],
    /// Differences between the two ways for the same prompt.
    difference: Median,
}

impl First {
    fn of(firsts: &FirstTokens) -> Self {
        let both = |times: &[_]| [50.0, 99.0].map(|percent| ms(percentile(times, percent).unwrap_or_default()));
        let differences: Vec<f64> =
            firsts.direct.iter().zip(&firsts.http).map(|(direct, http)| ms(*http) - ms(*direct)).collect();
        Self { direct: both(&firsts.direct), http: both(&firsts.http), difference: median(&differences) }
    }

    fn added(&self) -> [f64; 2] {
        [0, 1].map(|which| self.http[which] - self.direct[which])
    }

    fn rows(&self, args: &Options) -> Vec<Vec<String>> {
        let row = |name: &str, [p50, p99]: [f64; 2]| vec![name.into(), format!("{p50:.3} ms"), format!("{p99:.3} ms")];
        let pairs = self.difference;
        let range = format!("{:+.3} to {:+.3} ms", pairs.low, pairs.high);
        vec![
            vec![format!("first token, of {}", args.rounds), "median".into(), "p99".into()],
            row("engine alone", self.direct),
            row("over HTTP", self.http),
            row("difference", self.added()),
            vec!["... of pairs, its interval".into(), format!("{:+.3} ms", pairs.middle), range],
        ]
    }

    fn to_json(&self) -> Value {
        let both = |[p50, p99]: [f64; 2]| json!({"median": p50, "p99": p99});
        json!({
            "direct": both(self.direct), "http": both(self.http), "difference": both(self.added()),
            "of_pairs": {"median": self.difference.middle, "low": self.difference.low, "high": self.difference.high},
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn ratios_are_of_pairs_and_shares_of_all_cores() {
        let run = |took: u64| Run { tokens: 1000, took: Duration::from_millis(took), cpu: CpuTime::of([5_000_000; 6]) };
        let pair = |direct, http| Pair { direct: run(direct), http: run(http), events: 990, bytes: 250_000 };
        // The machine was slower in the second pair: rates differ, their ratios do not.
        let figures = Figures::of(&[pair(980, 1000), pair(1960, 2000), pair(490, 500)], 2);
        assert!((figures.ratio.middle - 0.98).abs() < 1e-9 && (figures.ratio.low - 0.98).abs() < 1e-9);
        assert!((figures.http.rate.middle - 1000.0).abs() < 1e-6 && (figures.http.best - 2000.0).abs() < 1e-6);
        // 5 us a token at 1000 tokens a second: 5 ms of a second, of two cores.
        assert!((figures.http.cpu[Part::Server as usize] - 5.0).abs() < 1e-9);
        assert!((figures.http.share(Part::Server, 2) - 0.0025).abs() < 1e-12);
        assert!((figures.events_per_token - 0.99).abs() < 1e-9 && (figures.bytes_per_token - 250.0).abs() < 1e-9);
    }

    #[test]
    fn first_tokens_and_what_is_added() {
        let times = |base: u64| (0..101).map(|round| Duration::from_micros(base + round)).collect();
        let first = First::of(&FirstTokens { direct: times(3000), http: times(3200) });
        assert!((first.direct[0] - 3.05).abs() < 1e-9 && (first.http[1] - 3.299).abs() < 1e-9);
        assert!(first.added().iter().all(|added| (added - 0.2).abs() < 1e-9));
        assert!((first.difference.low - 0.2).abs() < 1e-9 && (first.difference.high - 0.2).abs() < 1e-9);
    }
}
