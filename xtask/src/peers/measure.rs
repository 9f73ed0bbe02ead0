//! One process, one figure: `folio bench` or a tool of llama.cpp on the same file, and what it printed.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::Value;

use super::model::{self, Model};
use super::setup::Peer;
use crate::process;

/// Tokens of the streams' prompts and answers.
const STREAM_PROMPT: usize = 16;
const STREAM_TOKENS: usize = 32;

/// Tokens for which a single stream decodes.
const DECODE_TOKENS: usize = 64;

/// Repetitions inside one process; the best counts. llama.cpp's tools run once more before, to warm up.
const REPEATS: usize = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Workload {
    /// One stream from an empty context.
    Decode,
    /// A prompt of 512 tokens, computed at once.
    Prefill,
    /// Sixteen streams decoding together.
    Streams,
}

impl Workload {
    pub const ALL: [Self; 3] = [Self::Decode, Self::Prefill, Self::Streams];
    const PROMPT: usize = 512;
    const STREAMS: usize = 16;

    pub fn name(self) -> &'static str {
        match self {
            Self::Decode => "decode",
            Self::Prefill => "prefill 512",
            Self::Streams => "16 streams",
        }
    }

    /// The share of what the machine could do at best that this rate is, and of what.
    pub fn share(self, model: &Model, tokens_per_s: f64, ceilings: &Ceilings) -> (f64, &'static str) {
        let (peak, of_peak) = match model.is_quantized() {
            true => (ceilings.int8_ops, "int8 peak"),
            false => (ceilings.bf16_flops, "bf16 peak"),
        };
        match self {
            Self::Decode => (tokens_per_s * model.weight_bytes as f64 / ceilings.read_bytes_per_s, "read"),
            Self::Prefill => {
                (tokens_per_s / Self::PROMPT as f64 * model::prompt_operations(Self::PROMPT) / peak, of_peak)
            }
            Self::Streams => {
                let context = STREAM_PROMPT + STREAM_TOKENS / 2;
                (tokens_per_s * model::decode_operations(context) / peak, of_peak)
            }
        }
    }
}

/// The machine's best so far, as Folio's benches measure it before, between and after their rounds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ceilings {
    pub read_bytes_per_s: f64,
    pub bf16_flops: f64,
    pub int8_ops: f64,
    /// The lowest of the processes' best reads: how far the bandwidth moved.
    pub read_lowest: f64,
}

impl Ceilings {
    pub fn none() -> Self {
        Self { read_bytes_per_s: 0.0, bf16_flops: 0.0, int8_ops: 0.0, read_lowest: f64::INFINITY }
    }

    fn take(&mut self, report: &Value) -> Result<()> {
        let found = |name: &str| number(&report["ceilings"], name);
        self.read_bytes_per_s = self.read_bytes_per_s.max(found("read_bytes_per_s")?);
        self.read_lowest = self.read_lowest.min(found("read_bytes_per_s")?);
        self.bf16_flops = self.bf16_flops.max(found("bf16_flops")?);
        self.int8_ops = self.int8_ops.max(found("int8_ops")?);
        Ok(())
    }
}

/// Both engines, ready to be measured.
pub struct Engines {
    pub folio: PathBuf,
    pub peer: Peer,
    pub threads: usize,
    pub ceilings: Ceilings,
}

impl Engines {
    /// Tokens per second.
    pub fn folio(&mut self, workload: Workload, model: &Model) -> Result<f64> {
        let (kind, streams, input, output, rate) = match workload {
            // The first token is that of the prompt; rates are of those after it.
            Workload::Decode => ("latency", 1, 1, DECODE_TOKENS + 1, "decode_tokens_per_s"),
            Workload::Prefill => ("latency", 1, Workload::PROMPT, 2, "prefill_tokens_per_s"),
            Workload::Streams => {
                ("throughput", Workload::STREAMS, STREAM_PROMPT, STREAM_TOKENS + 1, "decode_tokens_per_s")
            }
        };
        let mut bench = self.folio_bench(kind, &model.path, (input, output));
        if streams > 1 {
            bench.args(["--concurrency", &streams.to_string(), "--inter-token-target", "off"]);
        }
        self.report(&mut bench, rate)
    }

    /// Tokens per second of one stream behind that many tokens of context, keys and values kept in that format.
    pub fn folio_behind(&mut self, context: usize, kv_format: &str, model: &Model) -> Result<f64> {
        let mut bench = self.folio_bench("latency", &model.path, (context, DECODE_TOKENS + 1));
        bench.args(["--kv-cache-dtype", kv_format]);
        self.report(&mut bench, "decode_tokens_per_s")
    }

    fn folio_bench(&self, kind: &str, model: &Path, (input, output): (usize, usize)) -> Command {
        let mut bench = process::command(&self.folio, &["bench", kind, "--json"]);
        let numbers =
            [("--threads", self.threads), ("--rounds", REPEATS), ("--input-len", input), ("--output-len", output)];
        for (flag, value) in numbers {
            bench.args([flag, &value.to_string()]);
        }
        bench.arg(model);
        bench
    }

    fn report(&mut self, bench: &mut Command, rate: &str) -> Result<f64> {
        let text = process::output(bench)?;
        let report: Value = serde_json::from_str(&text).context("folio bench printed no JSON")?;
        self.ceilings.take(&report)?;
        number(&report["results"][0], rate)
    }

    /// Tokens per second.
    pub fn peer(&self, workload: Workload, model: &Model) -> Result<f64> {
        let threads = self.threads.to_string();
        let single = |prompt: usize, tokens: usize| {
            let mut bench = process::command(&self.peer.bench, &["--output", "json", "--threads", &threads]);
            let numbers = [("--n-prompt", prompt), ("--n-gen", tokens), ("--repetitions", REPEATS)];
            for (flag, value) in numbers {
                bench.args([flag, &value.to_string()]);
            }
            process::output(bench.arg("--model").arg(&model.path))
        };
        match workload {
            Workload::Decode => best_sample(&single(0, DECODE_TOKENS)?),
            Workload::Prefill => best_sample(&single(Workload::PROMPT, 0)?),
            Workload::Streams => {
                let mut bench = process::command(&self.peer.batched_bench, &["--output-format", "jsonl"]);
                bench.args(["--threads", &threads, "--threads-batch", &threads, "-c", "4096"]);
                bench.args(["-npp", &STREAM_PROMPT.to_string(), "-ntg", &STREAM_TOKENS.to_string()]);
                bench.args(["-npl", &vec![Workload::STREAMS.to_string(); REPEATS].join(",")]);
                best_line(&process::output(bench.arg("--model").arg(&model.path))?)
            }
        }
    }
}

/// What llama-bench prints: a list of tests, each with its repetitions.
fn best_sample(printed: &str) -> Result<f64> {
    let tests: Value = serde_json::from_str(printed).context("llama-bench printed no JSON")?;
    let samples = tests[0]["samples_ts"].as_array().into_iter().flatten().filter_map(Value::as_f64);
    samples.reduce(f64::max).context("llama-bench printed no samples_ts")
}

/// What llama-batched-bench prints: an object a line for every run, among other lines.
fn best_line(printed: &str) -> Result<f64> {
    let lines = printed.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let rates = lines.filter_map(|run| run["speed_tg"].as_f64());
    rates.reduce(f64::max).context("llama-batched-bench printed no speed_tg")
}

fn number(value: &Value, name: &str) -> Result<f64> {
    value[name].as_f64().with_context(|| format!("folio bench printed no {name}"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_best_repetition_counts() {
        assert_eq!(best_sample(r#"[{"avg_ts": 2.0, "samples_ts": [1.5, 2.5]}]"#).unwrap(), 2.5);
        assert!(best_sample("[]").is_err() && best_sample("").is_err());
        let lines = "main: n_kv_max = 4096\n\n{\"pl\": 16, \"speed_tg\": 60.5}\n{\"pl\": 16, \"speed_tg\": 61.5}\n";
        assert_eq!(best_line(lines).unwrap(), 61.5);
        assert!(best_line("failed\n").is_err());
    }

    #[test]
    fn shares_are_of_the_ceiling_that_binds() {
        let mut ceilings = Ceilings::none();
        let found = json!({"ceilings": {"read_bytes_per_s": 30e9, "bf16_flops": 400e9, "int8_ops": 900e9}});
        ceilings.take(&found).unwrap();
        assert!(ceilings.take(&json!({})).is_err());
        let model = Model { format: "q8_0".into(), path: PathBuf::new(), weight_bytes: 1_000_000_000 };
        assert_eq!(Workload::Decode.share(&model, 24.0, &ceilings), (0.8, "read"));
        let (share, of) = Workload::Prefill.share(&model, 200.0, &ceilings);
        // About 2 GOP a token.
        assert!((0.42..0.45).contains(&share) && of == "int8 peak", "{share} of {of}");
    }
}
