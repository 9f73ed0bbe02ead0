//! Servers: started, asked for a first token, put under load by `folio-measure`, and ended.
//!
//! Both get the same token ids, and have room for as many requests and tokens at once.

use std::fs::File;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use folio_measure::Unwatched;
use folio_measure::load::{self, Contents, Dataset, Metrics, Options, Prompts, Target, Trace, Traffic};
use folio_testing::http::{Connection, exchange, request};
use folio_testing::wait;
use serde_json::{Value, json};

use super::measure::Engines;
use super::model::Model;
use super::number;
use super::question::{Engine, Question};
use crate::process;

/// Requests that a server runs at once.
pub const SLOTS: usize = 16;
/// Tokens that each of them has room for.
const SLOT_TOKENS: usize = 1024;
pub const PROMPT_TOKENS: usize = 128;
pub const ANSWER_TOKENS: usize = 64;
const VOCABULARY: u32 = 16_000;

/// Percentiles of latencies.
const PERCENTILES: [f64; 2] = [50.0, 99.0];

const PATIENCE: Duration = Duration::from_secs(300);

pub fn ask(
    engines: &Engines,
    engine: Engine,
    question: Question,
    model: &Model,
    rate: Option<f64>,
) -> Result<Vec<f64>> {
    if question == Question::Start {
        if engine == Engine::Folio {
            keep_packed(engines, model)?;
            packed_files(&model.path, ".packed").iter().try_for_each(|path| forget(path))?;
        }
        forget(&model.path)?;
        let cold = Server::start(engines, engine, model)?.first_token;
        let warm = Server::start(engines, engine, model)?.first_token;
        return Ok(vec![warm.as_secs_f64(), cold.as_secs_f64()]);
    }
    let server = Server::start(engines, engine, model)?;
    // Filling all slots once is enough for the peak memory.
    let requests = if question == Question::Memory { SLOTS } else { engines.requests };
    let metrics = server.load(engines, requests, rate.filter(|_| question == Question::Load))?;
    if question == Question::Memory { Ok(vec![server.peak_mib()?]) } else { figures(question, &metrics) }
}

/// The figures of a load that count: throughput, and percentiles of the times to the first token
/// and between tokens; of an open loop the percentiles alone.
fn figures(question: Question, metrics: &Metrics) -> Result<Vec<f64>> {
    let spreads = [&metrics.ttft, &metrics.itl].into_iter();
    let latencies = spreads.flat_map(|spread| PERCENTILES.map(|percent| spread.percentile(percent)));
    let latencies = latencies.map(|latency| latency.context("a percentile was not asked for"));
    let throughput = (question != Question::Load).then(|| Ok(metrics.per_second(metrics.total_output)));
    throughput.into_iter().chain(latencies).collect()
}

/// The same figures of a load that our script for OpenVINO reports.
pub fn printed_figures(question: Question, report: &Value) -> Result<Vec<f64>> {
    let keys = ["output_throughput", "p50_ttft_ms", "p99_ttft_ms", "p50_itl_ms", "p99_itl_ms"];
    let keys = if question == Question::Load { &keys[1..] } else { &keys };
    keys.iter().map(|key| number(report, key)).collect()
}

/// Requests a second at which the slowest engine (by tokens a second, 16 at once) is used to 60%.
pub fn open_loop_rate(tokens_per_s: impl Iterator<Item = f64>) -> Option<f64> {
    tokens_per_s.reduce(f64::min).map(|slowest| 0.6 * slowest / ANSWER_TOKENS as f64)
}

/// Starts Folio once and waits until it has written its packed weights, if it does: the question is
/// the duration of every later start.
fn keep_packed(engines: &Engines, model: &Model) -> Result<()> {
    let server = Server::start(engines, Engine::Folio, model)?;
    std::thread::sleep(Duration::from_millis(500));
    let kept = wait::poll(PATIENCE, || packed_files(&model.path, ".partial").is_empty().then_some(()));
    ensure!(kept.is_some(), "packed weights are not kept after {} s", PATIENCE.as_secs());
    drop(server);
    Ok(())
}

/// Files of packed weights beside a model.
fn packed_files(model: &Path, ending: &str) -> Vec<PathBuf> {
    let Ok(entries) = model.with_file_name(".folio").read_dir() else { return Vec::new() };
    let model_name = model.file_name().unwrap_or_default().to_string_lossy();
    let belongs = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with(&*model_name) && name.ends_with(ending)
    };
    entries.flatten().map(|entry| entry.path()).filter(belongs).collect()
}

/// Frees the memory pages of the file, so that it is read from the disk again.
pub fn forget(path: &Path) -> Result<()> {
    let mut of = std::ffi::OsString::from("of=");
    of.push(path);
    let mut dd = process::command("dd", &["oflag=nocache", "conv=notrunc,fdatasync", "count=0", "status=none"]);
    process::output(dd.arg(of)).map(drop)
}

/// A running server; ended when dropped.
struct Server {
    process: Child,
    port: u16,
    /// Time from the start of the process.
    first_token: Duration,
}

impl Server {
    fn start(engines: &Engines, engine: Engine, model: &Model) -> Result<Self> {
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let [threads, port_text, slots] = [engines.threads, port.into(), SLOTS].map(|number| number.to_string());
        let [slot_tokens, all_tokens] = [SLOT_TOKENS, SLOTS * SLOT_TOKENS].map(|number| number.to_string());
        let mut command = match engine {
            // Without copies of old prompts, which cost time and memory here and are never used.
            Engine::LlamaCpp => process::command(
                &engines.llama_cpp.server,
                &["--cache-ram", "0", "--threads-batch", &threads, "-np", &slots, "-c", &all_tokens, "--model"],
            ),
            // No request is refused, however long the queue: the other engine has no such limit.
            _ => process::command(
                &engines.folio,
                &[
                    "serve",
                    "--disable-log-requests",
                    "--queue-timeout",
                    "3600",
                    "--max-num-seqs",
                    &slots,
                    "--max-model-len",
                    &slot_tokens,
                ],
            ),
        };
        command.arg(&model.path);
        let log_path = engines.folder.join("server.log");
        let log = File::create(&log_path)?;
        command.args(["--host", "127.0.0.1", "--port", &port_text, "--threads", &threads]);
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let began = Instant::now();
        let process = command.spawn().with_context(|| format!("could not start {}", engine.name()))?;
        let mut server = Self { process, port, first_token: Duration::ZERO };
        server.wait(began).with_context(|| format!("{} as a server; see {}", engine.name(), log_path.display()))?;
        Ok(server)
    }

    fn wait(&mut self, began: Instant) -> Result<()> {
        let port = self.port;
        let is_ready = || exchange(port, "GET", "/health", "", b"").is_ok_and(|reply| reply.status == 200);
        let ready = wait::poll(PATIENCE, || match self.process.try_wait() {
            Ok(None) => is_ready().then_some(Ok(())),
            Ok(Some(status)) => Some(Err(anyhow!("it ended ({status})"))),
            Err(error) => Some(Err(error.into())),
        });
        ready.unwrap_or_else(|| bail!("not ready after {} s", PATIENCE.as_secs()))?;
        let prompt: Vec<usize> = (100..116).collect();
        let body = json!({"prompt": prompt, "max_tokens": 2, "temperature": 0, "stream": true, "ignore_eos": true});
        let mut connection = Connection::open(port)?;
        connection.send(&request("POST", "/v1/completions", "", body.to_string().as_bytes()))?;
        connection.until(b"\"text\":").context("its answer held no token")?;
        self.first_token = began.elapsed();
        Ok(())
    }

    /// Answers that many requests: 16 at a time, or as they come at that rate.
    fn load(&self, engines: &Engines, requests: usize, rate: Option<f64>) -> Result<Metrics> {
        let trace = engines.folder.join("trace.jsonl");
        let row = json!({"timestamp": 0, "input_length": PROMPT_TOKENS, "output_length": ANSWER_TOKENS});
        std::fs::write(&trace, format!("{row}\n").repeat(requests))?;
        let options = Options {
            target: Target { base_url: format!("http://127.0.0.1:{}", self.port), ..Target::default() },
            prompts: Prompts {
                dataset: Dataset::Trace(Trace::new(trace)),
                count: requests,
                vocab_size: Some(VOCABULARY),
                ..Prompts::default()
            },
            traffic: Traffic {
                request_rate: Some(rate.unwrap_or(f64::INFINITY)),
                max_concurrency: if rate.is_none() { Some(SLOTS) } else { None },
                num_warmups: 2,
                ..Traffic::default()
            },
            contents: Contents { percentiles: PERCENTILES.to_vec(), ..Contents::default() },
        };
        let report = load::run(&options, Arc::new(Unwatched))?;
        let answered = (report.metrics.failed, report.metrics.total_output);
        ensure!(answered == (0, requests * ANSWER_TOKENS), "failures and tokens: {answered:?}, {:?}", report.errors());
        Ok(report.metrics)
    }

    /// The peak of resident memory, pages of the mapped file included.
    fn peak_mib(&self) -> Result<f64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.id()))?;
        peak_kib(&status).map(|kib| kib / 1024.0).context("the system tells no VmHWM")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn peak_kib(status: &str) -> Option<f64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix(" kB")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_and_the_script_give_the_same_figures() {
        let outcome = load::Outcome { output_len: 4, ttft: 0.5, itls: vec![0.1; 3], ..Default::default() };
        let metrics = Metrics::new(&[outcome], 2.0, &PERCENTILES, &[]);
        let printed = json!({
            "output_throughput": 2.0, "p50_ttft_ms": 500.0, "p99_ttft_ms": 500.0, "p50_itl_ms": 100.0, "p99_itl_ms": 100.0,
        });
        for (question, count) in [(Question::Http, 5), (Question::Load, 4)] {
            let figures = figures(question, &metrics).unwrap();
            assert_eq!((figures.len(), &figures), (count, &printed_figures(question, &printed).unwrap()));
        }
        assert!(super::figures(Question::Http, &Metrics::new(&[], 2.0, &[99.0], &[])).is_err());
    }

    #[test]
    fn memory_is_read_off_the_high_water_mark() {
        assert_eq!(peak_kib("Name:\tfolio\nVmHWM:\t  2048 kB\nVmRSS:\t  1024 kB\n"), Some(2048.0));
        assert_eq!(peak_kib("VmRSS:\t 1024 kB\n"), None);
        assert_eq!(open_loop_rate([128.0, 64.0].into_iter()), Some(0.6));
    }
}
