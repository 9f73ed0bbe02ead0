//! One process, one answer: runs `folio bench`, a tool of llama.cpp or our script for OpenVINO on
//! the same file, and reads its output.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use folio_measure::rates::{Rates, Streams};
use serde_json::Value;

use super::cost::Ceilings;
use super::model::Model;
use super::number;
use super::question::{DECODE_TOKENS, Engine, Question, STREAM_PROMPT, STREAM_TOKENS};
use super::serve::{self, ANSWER_TOKENS, PROMPT_TOKENS, SLOTS};
use super::setup::{self, LlamaCpp};
use crate::process;

const KV_CONTEXT: usize = 3500;

/// All engines, ready to be measured.
pub struct Engines {
    pub folio: PathBuf,
    pub llama_cpp: LlamaCpp,
    /// A Python with OpenVINO.
    pub openvino: Option<PathBuf>,
    pub threads: usize,
    /// Repetitions inside one process; the best counts. llama-bench runs once more before, to warm
    /// up.
    pub repeats: usize,
    /// Requests of a load.
    pub requests: usize,
    pub ceilings: Ceilings,
    /// Pairs of the last answer, if it was Folio's: for each case, tokens decoded per byte of the
    /// reads beside a round.
    pub pairs: Vec<Vec<f64>>,
    /// Folder of servers' logs and loads.
    pub folder: PathBuf,
}

impl Engines {
    /// A figure for each case; `rate` is the requests a second of an open-loop load.
    pub fn ask(&mut self, engine: Engine, question: Question, model: &Model, rate: Option<f64>) -> Result<Vec<f64>> {
        self.pairs.clear();
        match (question, engine) {
            (Question::Decode | Question::Prefill | Question::Streams | Question::Context, Engine::Folio) => {
                self.folio(question, model)
            }
            (Question::Decode | Question::Prefill, Engine::LlamaCpp) => self.llama_bench(question, model),
            (Question::Streams, Engine::LlamaCpp) => self.batched_bench(question, model),
            (Question::Kv, Engine::Folio) => self.folio_kv(model),
            (Question::Context | Question::Kv, _) => bail!("only Folio is asked"),
            (_, Engine::OpenVino) => self.openvino(question, model, rate),
            _ => serve::ask(self, engine, question, model, rate),
        }
    }

    /// Tokens per second.
    fn folio(&mut self, question: Question, model: &Model) -> Result<Vec<f64>> {
        let sizes = question.sizes();
        if question == Question::Streams {
            // The first token belongs to the prompt; rates are of those after it.
            let mut bench = self.folio_bench("throughput", &model.path, (STREAM_PROMPT, STREAM_TOKENS + 1));
            bench.args(["--inter-token-target", "off", "--concurrency", &list(sizes)]);
            let report = self.report(&mut bench)?;
            ensure!(report.results.len() == sizes.len(), "folio bench printed {} results", report.results.len());
            self.pairs = report.results.iter().map(pairs).collect();
            return report.results.iter().map(decode_rate).collect();
        }
        let rate = |&size: &usize| {
            let lengths = match question {
                Question::Prefill => (size, 2),
                _ => (size.max(1), DECODE_TOKENS + 1),
            };
            let mut bench = self.folio_bench("latency", &model.path, lengths);
            let report = self.report(&mut bench)?;
            let result = first(&report)?;
            self.pairs.push(pairs(result));
            match question {
                Question::Prefill => result.prefill_tokens_per_s.context("folio bench printed no rate of the prompt"),
                _ => decode_rate(result),
            }
        };
        // Contexts beyond the model's are left out.
        let most = model.positions - DECODE_TOKENS;
        sizes.iter().filter(|size| **size < most).map(rate).collect()
    }

    /// Tokens per second of one stream, with keys and values in each format.
    fn folio_kv(&mut self, model: &Model) -> Result<Vec<f64>> {
        let rate = |format: &&str| {
            let mut bench = self.folio_bench("latency", &model.path, (KV_CONTEXT, DECODE_TOKENS + 1));
            let report = self.report(bench.args(["--kv-cache-dtype", format]))?;
            decode_rate(first(&report)?)
        };
        Question::Kv.cases().iter().map(rate).collect()
    }

    fn folio_bench(&self, kind: &str, model: &Path, (input, output): (usize, usize)) -> Command {
        let mut bench = process::command(&self.folio, &["bench", kind, "--json"]);
        let numbers =
            [("--threads", self.threads), ("--rounds", self.repeats), ("--input-len", input), ("--output-len", output)];
        for (flag, value) in numbers {
            bench.args([flag, &value.to_string()]);
        }
        bench.arg(model);
        bench
    }

    fn report(&mut self, bench: &mut Command) -> Result<Rates> {
        let report = Rates::parse(&process::output(bench)?)?;
        self.ceilings.take(&report.ceilings);
        Ok(report)
    }

    fn llama_bench(&self, question: Question, model: &Model) -> Result<Vec<f64>> {
        let (sizes, tokens) = (list(question.sizes()), DECODE_TOKENS.to_string());
        let (key, flags) = match question {
            Question::Prefill => ("n_prompt", ["--n-gen", "0", "--n-depth", "0", "--n-prompt", &sizes]),
            _ => ("n_depth", ["--n-prompt", "0", "--n-gen", &tokens, "--n-depth", &sizes]),
        };
        let mut bench = process::command(&self.llama_cpp.bench, &["--output", "json", "--model"]);
        bench.arg(&model.path).args(flags).args(["--threads", &self.threads.to_string()]);
        let printed = process::output(bench.args(["--repetitions", &self.repeats.to_string()]))?;
        let tests: Vec<Value> = serde_json::from_str(&printed).context("llama-bench printed no JSON")?;
        best_of(tests.iter(), key, "samples_ts", question.sizes())
    }

    fn batched_bench(&self, question: Question, model: &Model) -> Result<Vec<f64>> {
        let threads = self.threads.to_string();
        let mut bench = process::command(&self.llama_cpp.batched_bench, &["--output-format", "jsonl", "--model"]);
        bench.arg(&model.path).args(["--threads", &threads, "--threads-batch", &threads, "-c", "4096"]);
        bench.args(["-npp", &STREAM_PROMPT.to_string(), "-ntg", &STREAM_TOKENS.to_string()]);
        bench.args(["-npl", &list(&question.sizes().repeat(self.repeats))]);
        // One object per line for every run, among other lines.
        let printed = process::output(&mut bench)?;
        let runs: Vec<Value> = printed.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        best_of(runs.iter(), "pl", "speed_tg", question.sizes())
    }

    /// OpenVINO has no server: loads are those of its pipeline.
    fn openvino(&self, question: Question, model: &Model, rate: Option<f64>) -> Result<Vec<f64>> {
        let python = self.openvino.as_ref().context("OpenVINO is not set up")?;
        let load = format!("{SLOTS}:{PROMPT_TOKENS}:{ANSWER_TOKENS}");
        let case = |&size: &usize| match question {
            Question::Decode => format!("1:{}:{}", size.max(1), DECODE_TOKENS + 1),
            Question::Prefill => format!("1:{size}:2"),
            _ => format!("{size}:{STREAM_PROMPT}:{}", STREAM_TOKENS + 1),
        };
        let cases = match question {
            Question::Http => vec![format!("{load}:{}", self.requests)],
            Question::Load => vec![format!("{load}:{}:{}", self.requests, rate.context("no rate is given")?)],
            Question::Start => vec![format!("1:{STREAM_PROMPT}:2")],
            Question::Memory => vec![load],
            _ => question.sizes().iter().map(case).collect(),
        };
        let run = |repeats: usize| -> Result<Value> {
            let mut script = process::command(python, &["xtask/src/peers/genai.py"]);
            script.arg(&model.path_for_openvino).args([self.threads.to_string(), repeats.to_string()]);
            let printed = process::output(script.envs(setup::openvino_settings()).args(&cases))?;
            serde_json::from_str(printed.lines().last().unwrap_or_default()).context("the script printed no JSON")
        };
        let start = || -> Result<f64> {
            let began = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs_f64();
            Ok(number(&run(1)?, "first_token_at")? - began)
        };
        match question {
            Question::Start => {
                serve::forget(&model.path_for_openvino)?;
                let cold = start()?;
                Ok(vec![start()?, cold])
            }
            Question::Memory => Ok(vec![number(&run(1)?, "peak_bytes")? / f64::from(1 << 20)]),
            Question::Http | Question::Load => serve::printed_figures(question, &run(1)?["results"][0]),
            _ => {
                let report = run(self.repeats)?;
                let key = if question == Question::Prefill { "prefill_tokens_per_s" } else { "decode_tokens_per_s" };
                (0..cases.len()).map(|at| number(&report["results"][at], key)).collect()
            }
        }
    }
}

fn first(report: &Rates) -> Result<&Streams> {
    report.results.first().context("folio bench printed no result")
}

fn decode_rate(result: &Streams) -> Result<f64> {
    result.decode_tokens_per_s.context("folio bench printed no rate of decoding")
}

/// Tokens decoded for each byte read, of each round; none from a binary that is older than this
/// figure.
fn pairs(result: &Streams) -> Vec<f64> {
    result.decode_tokens_per_byte_read.as_ref().map(|per_byte| per_byte.pairs.clone()).unwrap_or_default()
}

fn list(sizes: &[usize]) -> String {
    sizes.iter().map(usize::to_string).collect::<Vec<_>>().join(",")
}

/// For each size the best of the runs with that size under `key`: their `rate`, a number or a list
/// of repetitions.
fn best_of<'a>(
    runs: impl Iterator<Item = &'a Value> + Clone,
    key: &str,
    rate: &str,
    sizes: &[usize],
) -> Result<Vec<f64>> {
    let best = |&size: &usize| {
        let of_size = runs.clone().filter(|run| run[key] == size).map(|run| &run[rate]);
        let rates = of_size.flat_map(|rate| match rate {
            Value::Array(samples) => samples.iter().filter_map(Value::as_f64).collect(),
            single => Vec::from_iter(single.as_f64()),
        });
        rates.reduce(f64::max).with_context(|| format!("llama.cpp printed no {rate} for {key} {size}"))
    };
    sizes.iter().map(best).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_best_repetition_of_each_size_counts() {
        let tests =
            [json!({"n_depth": 1024, "samples_ts": [1.5, 1.0]}), json!({"n_depth": 0, "samples_ts": [2.0, 2.5]})];
        assert_eq!(best_of(tests.iter(), "n_depth", "samples_ts", &[0, 1024]).unwrap(), [2.5, 1.5]);
        assert!(best_of(tests.iter(), "n_depth", "samples_ts", &[7]).is_err());
        let runs = [json!({"pl": 1, "speed_tg": 60.5}), json!({"pl": 1, "speed_tg": 61.5}), json!({"pl": 2})];
        assert_eq!(best_of(runs.iter(), "pl", "speed_tg", &[1]).unwrap(), [61.5]);
    }
}
