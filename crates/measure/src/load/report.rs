//! The result as `vllm bench serve` prints and saves it: same lines, same keys.

use std::fmt::Write;
use std::time::Duration;

use serde_json::{Map, Value, json};

use super::answer::Outcome;
use super::metrics::Metrics;
use super::options::{Metric, Options};

const WIDTH: usize = 50;

/// Most different errors that are listed.
const MAX_ERRORS: usize = 10;

/// In the order of the report: metric, key, name, heading.
const SECTIONS: [(Metric, &str, &str, &str); 4] = [
    (Metric::Ttft, "ttft", "TTFT", "Time to First Token"),
    (Metric::Tpot, "tpot", "TPOT", "Time per Output Token (excl. 1st token)"),
    (Metric::Itl, "itl", "ITL", "Inter-token Latency"),
    (Metric::E2el, "e2el", "E2EL", "End-to-end Latency"),
];

/// A finished run.
#[derive(Clone, Debug)]
pub struct Report {
    pub options: Options,
    pub model: String,
    /// The end of the run, since 1970.
    pub date: Duration,
    pub metrics: Metrics,
    /// The result of each request, in the order of their times.
    pub outcomes: Vec<Outcome>,
}

impl Report {
    fn rate(&self) -> f64 {
        self.options.traffic.request_rate.unwrap_or(f64::INFINITY)
    }

    fn sections(&self) -> impl Iterator<Item = &'static (Metric, &'static str, &'static str, &'static str)> {
        SECTIONS.iter().filter(|(metric, ..)| self.options.contents.metrics.contains(metric))
    }

    /// The block for people.
    pub fn text(&self) -> String {
        let metrics = &self.metrics;
        let mut text = format!("{:=^WIDTH$}\n", " Serving Benchmark Result ");
        let mut line = |label: &str, value: String| {
            writeln!(text, "{label:<40} {value:<10}").expect("a string takes all");
        };
        let float = |value: f64| format!("{value:.2}");
        line("Successful requests:", metrics.completed.to_string());
        line("Failed requests:", metrics.failed.to_string());
        if let Some(most) = self.options.traffic.max_concurrency {
            line("Maximum request concurrency:", most.to_string());
        }
        if self.rate().is_finite() {
            line("Request rate configured (RPS):", float(self.rate()));
        }
        line("Benchmark duration (s):", float(metrics.duration));
        line("Total input tokens:", metrics.total_input.to_string());
        line("Total generated tokens:", metrics.total_output.to_string());
        line("Request throughput (req/s):", float(metrics.per_second(metrics.completed)));
        if let Some(good) = metrics.good {
            line("Request goodput (req/s):", float(metrics.per_second(good)));
        }
        line("Output token throughput (tok/s):", float(metrics.per_second(metrics.total_output)));
        line("Peak output token throughput (tok/s):", float(metrics.peak_output_per_s));
        line("Peak concurrent requests:", float(metrics.peak_concurrent as f64));
        let total = metrics.total_input + metrics.total_output;
        line("Total token throughput (tok/s):", float(metrics.per_second(total)));
        for (metric, _, name, heading) in self.sections() {
            let spread = metrics.of(*metric);
            writeln!(text, "{heading:-^WIDTH$}").expect("a string takes all");
            let mut line = |label: String, value: f64| {
                writeln!(text, "{label:<40} {value:<10.2}").expect("a string takes all");
            };
            line(format!("Mean {name} (ms):"), spread.mean);
            line(format!("Median {name} (ms):"), spread.median);
            for (p, value) in &spread.percentiles {
                line(format!("P{p} {name} (ms):"), *value);
            }
        }
        text.push_str(&"=".repeat(WIDTH));
        text.push('\n');
        text
    }

    /// The object for programs.
    pub fn json(&self) -> Value {
        let (metrics, target, contents) = (&self.metrics, &self.options.target, &self.options.contents);
        let number = |value: f64| if value.is_finite() { json!(value) } else { json!("inf") };
        let mut result = Map::new();
        let mut set = |key: &str, value: Value| result.insert(key.into(), value);
        set("date", json!(timestamp(self.date)));
        set("endpoint_type", json!(target.backend.name()));
        set("backend", json!(target.backend.name()));
        set("label", json!(contents.label));
        set("model_id", json!(self.model));
        set("tokenizer_id", Value::Null);
        set("num_prompts", json!(self.outcomes.len()));
        for (key, value) in &contents.metadata {
            set(key, json!(value));
        }
        set("request_rate", number(self.rate()));
        set("burstiness", number(self.options.traffic.burstiness));
        set("max_concurrency", json!(self.options.traffic.max_concurrency));
        set("duration", json!(metrics.duration));
        set("completed", json!(metrics.completed));
        set("failed", json!(metrics.failed));
        set("total_input_tokens", json!(metrics.total_input));
        set("total_output_tokens", json!(metrics.total_output));
        set("request_throughput", json!(metrics.per_second(metrics.completed)));
        set("request_goodput", json!(metrics.good.map(|good| metrics.per_second(good))));
        set("output_throughput", json!(metrics.per_second(metrics.total_output)));
        set("total_token_throughput", json!(metrics.per_second(metrics.total_input + metrics.total_output)));
        if contents.detailed {
            let each = |of: fn(&Outcome) -> Value| self.outcomes.iter().map(of).collect::<Value>();
            set("input_lens", each(|outcome| json!(outcome.prompt_len)));
            set("output_lens", each(|outcome| json!(outcome.output_len)));
            set("ttfts", each(|outcome| json!(outcome.ttft)));
            set("itls", each(|outcome| json!(outcome.itls)));
            set("start_times", each(|outcome| json!(outcome.start)));
            set("generated_texts", each(|outcome| json!(outcome.text)));
            set("errors", each(|outcome| json!(outcome.error.as_deref().unwrap_or_default())));
        }
        set("max_output_tokens_per_s", json!(metrics.peak_output_per_s));
        set("max_concurrent_requests", json!(metrics.peak_concurrent));
        // A figure of speech models, which this tool does not measure.
        set("rtfx", json!(0.0));
        for (metric, key, ..) in self.sections() {
            let spread = metrics.of(*metric);
            set(&format!("mean_{key}_ms"), json!(spread.mean));
            set(&format!("median_{key}_ms"), json!(spread.median));
            set(&format!("std_{key}_ms"), json!(spread.std));
            for (p, value) in &spread.percentiles {
                set(&format!("p{p}_{key}_ms"), json!(value));
            }
        }
        Value::Object(result)
    }

    /// The errors of requests, each with its number; of many different ones only the first.
    pub fn errors(&self) -> Vec<(&str, usize)> {
        let mut found: Vec<(&str, usize)> = Vec::new();
        for error in self.outcomes.iter().filter_map(|outcome| outcome.error.as_deref()) {
            match found.iter().position(|(known, _)| *known == error) {
                Some(known) => found[known].1 += 1,
                None if found.len() < MAX_ERRORS => found.push((error, 1)),
                None => {}
            }
        }
        found
    }

    /// A name for the file of the object: label, rate, model and time.
    pub fn file_name(&self) -> String {
        let label = self.options.contents.label.as_deref().unwrap_or(self.options.target.backend.name());
        let model = self.model.rsplit('/').next().unwrap_or_default();
        let concurrency = self.options.traffic.max_concurrency.map(|most| format!("-concurrency{most}"));
        let concurrency = concurrency.unwrap_or_default();
        format!("{label}-{:?}qps{concurrency}-{model}-{}.json", self.rate(), timestamp(self.date))
    }
}

/// `20261115-104500`, in UTC.
fn timestamp(since_epoch: Duration) -> String {
    let seconds = since_epoch.as_secs();
    let (mut days, clock) = (seconds / 86_400, seconds % 86_400);
    let is_leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let mut year = 1970;
    while days >= 365 + u64::from(is_leap(year)) {
        days -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let lengths = [31, 28 + u64::from(is_leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 0;
    while days >= lengths[month] {
        days -= lengths[month];
        month += 1;
    }
    let (hour, minute, second) = (clock / 3600, clock / 60 % 60, clock % 60);
    format!("{year:04}{:02}{:02}-{hour:02}{minute:02}{second:02}", month + 1, days + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::options::{Contents, Goal, Traffic};

    fn outcomes() -> Vec<Outcome> {
        let answered = Outcome {
            start: 0.5,
            prompt_len: 1024,
            output_len: 3,
            ttft: 0.0125,
            itls: vec![0.004, 0.006],
            latency: 0.0225,
            text: "abc".into(),
            error: None,
        };
        vec![answered, Outcome { prompt_len: 7, error: Some("refused".into()), ..Outcome::default() }]
    }

    fn report(traffic: Traffic, contents: Contents) -> Report {
        let outcomes = outcomes();
        let metrics = Metrics::new(&outcomes, 2.0, &contents.percentiles, &contents.goals);
        let options = Options { traffic, contents, ..Options::default() };
        let date = Duration::from_secs(1_794_739_530);
        Report { options, model: "org/name".into(), date, metrics, outcomes }
    }

    fn goals(text: &str) -> Vec<Goal> {
        vec![text.parse().expect("a goal")]
    }

    #[test]
    fn the_block_of_lines() {
        let text = report(Traffic::default(), Contents::default()).text();
        let expect = "\
============ Serving Benchmark Result ============
Successful requests:                     1
Failed requests:                         1
Benchmark duration (s):                  2.00
Total input tokens:                      1024
Total generated tokens:                  3
Request throughput (req/s):              0.50
Output token throughput (tok/s):         1.50
Peak output token throughput (tok/s):    3.00
Peak concurrent requests:                1.00
Total token throughput (tok/s):          513.50
---------------Time to First Token----------------
Mean TTFT (ms):                          12.50
Median TTFT (ms):                        12.50
P99 TTFT (ms):                           12.50
-----Time per Output Token (excl. 1st token)------
Mean TPOT (ms):                          5.00
Median TPOT (ms):                        5.00
P99 TPOT (ms):                           5.00
---------------Inter-token Latency----------------
Mean ITL (ms):                           5.00
Median ITL (ms):                         5.00
P99 ITL (ms):                            5.98
==================================================
";
        let trimmed: Vec<&str> = text.lines().map(str::trim_end).collect();
        assert_eq!(trimmed, expect.lines().collect::<Vec<_>>());
        assert!(text.ends_with("=\n") && text.lines().all(|line| line.len() >= 50), "padded as Python pads");
        let traffic = Traffic { request_rate: Some(2.0), max_concurrency: Some(8), ..Traffic::default() };
        let (metrics, percentiles, goals) = (vec![Metric::E2el], vec![50.0, 99.9], goals("e2el:20"));
        let text = report(traffic, Contents { metrics, percentiles, goals, ..Contents::default() }).text();
        for line in [
            "Maximum request concurrency:             8",
            "Request rate configured (RPS):           2.00",
            "Request goodput (req/s):                 0.00",
            "----------------End-to-end Latency----------------",
            "P50 E2EL (ms):                           22.50",
            "P99.9 E2EL (ms):                         22.50",
        ] {
            assert!(text.lines().any(|found| found.trim_end() == line), "{line}\n{text}");
        }
        assert!(!text.contains("TTFT"));
    }

    #[test]
    fn the_keys_of_the_object() {
        let metadata = vec![("tp".into(), "1".into())];
        let contents = Contents { metadata, goals: goals("ttft:100"), ..Contents::default() };
        let object = report(Traffic::default(), contents).json();
        let keys: Vec<&str> = object.as_object().expect("an object").keys().map(String::as_str).collect();
        let expect = "date endpoint_type backend label model_id tokenizer_id num_prompts tp request_rate burstiness \
                      max_concurrency duration completed failed total_input_tokens total_output_tokens \
                      request_throughput request_goodput output_throughput total_token_throughput \
                      max_output_tokens_per_s max_concurrent_requests rtfx mean_ttft_ms median_ttft_ms std_ttft_ms \
                      p99_ttft_ms mean_tpot_ms median_tpot_ms std_tpot_ms p99_tpot_ms mean_itl_ms median_itl_ms \
                      std_itl_ms p99_itl_ms";
        assert_eq!(keys, expect.split_whitespace().collect::<Vec<_>>());
        assert_eq!((&object["request_rate"], &object["request_goodput"]), (&json!("inf"), &json!(0.5)));
        assert_eq!((&object["model_id"], &object["num_prompts"]), (&json!("org/name"), &json!(2)));
        assert_eq!(object["date"], "20261115-104530");
        let detailed = report(Traffic::default(), Contents { detailed: true, ..Contents::default() }).json();
        assert_eq!(detailed["errors"], json!(["", "refused"]));
        assert_eq!(detailed["itls"], json!([[0.004, 0.006], []]));
        assert_eq!((&detailed["input_lens"], &detailed["output_lens"]), (&json!([1024, 7]), &json!([3, 0])));
        assert_eq!(detailed["generated_texts"], json!(["abc", ""]));
        assert!(detailed["request_goodput"].is_null());
    }

    #[test]
    fn the_name_of_the_file() {
        let name = report(Traffic::default(), Contents::default()).file_name();
        assert_eq!(name, "openai-infqps-name-20261115-104530.json");
        let traffic = Traffic { request_rate: Some(2.5), max_concurrency: Some(4), ..Traffic::default() };
        let name = report(traffic, Contents { label: Some("mine".into()), ..Contents::default() }).file_name();
        assert_eq!(name, "mine-2.5qps-concurrency4-name-20261115-104530.json");
    }

    #[test]
    fn dates() {
        let check = |seconds, expect: &str| assert_eq!(timestamp(Duration::from_secs(seconds)), expect);
        check(0, "19700101-000000");
        check(951_782_400, "20000229-000000");
        check(1_735_689_599, "20241231-235959");
        check(4_107_542_400, "21000301-000000");
    }
}
