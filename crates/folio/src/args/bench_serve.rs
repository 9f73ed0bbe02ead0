//! Flags of `folio bench serve`, named as `vllm bench serve` names them, and the options of the
//! load generator that they stand for.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use folio_measure::load::{self, Goal};

#[derive(Args, Clone)]
#[command(after_help = "An API key is read from FOLIO_API_KEY, else from OPENAI_API_KEY.")]
pub struct ServeBench {
    #[command(flatten)]
    pub target: TargetArgs,
    #[command(flatten)]
    pub dataset: DatasetArgs,
    #[command(flatten)]
    pub traffic: TrafficArgs,
    #[command(flatten)]
    pub result: ResultArgs,
}

/// The server, and what all requests have in common.
#[derive(Args, Clone)]
#[command(next_help_heading = "Server")]
pub struct TargetArgs {
    /// URL of the server, e.g. http://127.0.0.1:8000; http only [default: made of --host and
    /// --port]
    #[arg(long, value_name = "URL")]
    pub base_url: Option<String>,
    /// Host of the server
    #[arg(long, default_value = "127.0.0.1")]
    pub host: String,
    /// Port of the server
    #[arg(long, default_value_t = 8000)]
    pub port: u16,
    /// API of the server
    #[arg(long, value_enum, default_value_t = Backend::Openai)]
    pub backend: Backend,
    /// Route of the requests [default: /v1/completions, or /v1/chat/completions for openai-chat]
    #[arg(long, value_name = "PATH")]
    pub endpoint: Option<String>,
    /// Name of the model [default: the first of /v1/models]
    #[arg(long)]
    pub model: Option<String>,
    /// Generate the requested length even past an end-of-sequence token; always so for random and
    /// trace
    #[arg(long)]
    pub ignore_eos: bool,
    /// Sampling temperature
    #[arg(long, default_value_t = 0.0)]
    pub temperature: f64,
    /// Seconds after which a request counts as failed
    #[arg(long, value_name = "SECONDS", default_value_t = 21_600.0, value_parser = positive)]
    pub request_timeout: f64,
}

/// The dataset of prompts.
#[derive(Args, Clone)]
#[command(next_help_heading = "Dataset")]
pub struct DatasetArgs {
    /// Kind of dataset
    #[arg(long, value_enum, default_value_t = Dataset::Random)]
    pub dataset_name: Dataset,
    /// File of the sharegpt or trace dataset
    #[arg(long, value_name = "FILE")]
    pub dataset_path: Option<PathBuf>,
    /// Number of requests; of a trace, the first ones
    #[arg(long, default_value_t = 1000)]
    pub num_prompts: usize,
    /// Seed of random prompts and arrivals
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Choose random prompt tokens with ids below this [default: tokens of common words if the
    /// server has /tokenize, else ids below 1000]
    #[arg(long, value_name = "TOKENS")]
    pub vocab_size: Option<u32>,
    /// Tokens in each random prompt, without the prefix
    #[arg(long, default_value_t = 1024)]
    pub random_input_len: usize,
    /// Tokens in each answer to a random prompt
    #[arg(long, default_value_t = 128)]
    pub random_output_len: usize,
    /// Choose both lengths from [length * (1 - ratio), length * (1 + ratio)]
    #[arg(long, value_name = "RATIO", default_value_t = 0.0)]
    pub random_range_ratio: f64,
    /// Tokens of a prefix that all random prompts share
    #[arg(long, default_value_t = 0)]
    pub random_prefix_len: usize,
    /// Tokens in each answer to sharegpt [default: the length of the dataset's answer]
    #[arg(long, value_name = "TOKENS")]
    pub sharegpt_output_len: Option<usize>,
    /// Tokens in each prefix
    #[arg(long, default_value_t = 256)]
    pub prefix_repetition_prefix_len: usize,
    /// Tokens in each prompt after its prefix
    #[arg(long, default_value_t = 256)]
    pub prefix_repetition_suffix_len: usize,
    /// Number of prefixes
    #[arg(long, default_value_t = 10)]
    pub prefix_repetition_num_prefixes: usize,
    /// Tokens in each answer to prefix_repetition
    #[arg(long, default_value_t = 128)]
    pub prefix_repetition_output_len: usize,
    /// Tokens that one of a trace's hash_ids stands for
    #[arg(long, value_name = "TOKENS", default_value_t = 512)]
    pub timed_trace_chunk_hash_size: usize,
    /// Seconds in one unit of a trace's timestamps
    #[arg(long, value_name = "SECONDS", default_value_t = 0.001, value_parser = positive)]
    pub timed_trace_sec_multiplier: f64,
}

/// The arrival of requests.
#[derive(Args, Clone)]
#[command(next_help_heading = "Traffic")]
pub struct TrafficArgs {
    /// Requests per second, or inf for all at once; replaces the timestamps of a trace [default:
    /// inf]
    #[arg(long, value_name = "RATE", value_parser = positive)]
    pub request_rate: Option<f64>,
    /// Shape of the gamma distribution of gaps between requests: 1 is Poisson, less is burstier,
    /// inf is constant
    #[arg(long, default_value_t = 1.0, value_parser = positive)]
    pub burstiness: f64,
    /// Maximum number of requests in flight; others wait on the client, and their waiting is not
    /// counted [default: no limit]
    #[arg(long, value_name = "REQUESTS")]
    pub max_concurrency: Option<usize>,
    /// Number of warm-up requests before the measurement
    #[arg(long, value_name = "REQUESTS", default_value_t = 0)]
    pub num_warmups: usize,
}

/// The report.
#[derive(Args, Clone)]
#[command(next_help_heading = "Result")]
pub struct ResultArgs {
    /// Metrics to report, separated by commas
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Metric::Ttft, Metric::Tpot, Metric::Itl])]
    pub percentile_metrics: Vec<Metric>,
    /// Percentiles of each metric, separated by commas
    #[arg(long, value_delimiter = ',', default_values_t = [99.0], value_parser = percentile)]
    pub metric_percentiles: Vec<f64>,
    /// Count requests within these limits, in milliseconds, e.g. ttft:200 tpot:50 e2el:1000
    #[arg(long, value_name = "METRIC:MS", num_args = 1..)]
    pub goodput: Vec<Goal>,
    /// Write the result as JSON
    #[arg(long)]
    pub save_result: bool,
    /// Include the figures of every request in that JSON
    #[arg(long)]
    pub save_detailed: bool,
    /// Folder for the JSON [default: the current one]
    #[arg(long, value_name = "FOLDER")]
    pub result_dir: Option<PathBuf>,
    /// File name of the JSON [default: made of label, rate, model and time]
    #[arg(long, value_name = "NAME")]
    pub result_filename: Option<String>,
    /// Label of the result [default: the backend]
    #[arg(long)]
    pub label: Option<String>,
    /// Further keys of the result
    #[arg(long, value_name = "KEY=VALUE", num_args = 1.., value_parser = key_value)]
    pub metadata: Vec<(String, String)>,
    /// Hide the progress bar
    #[arg(long)]
    pub disable_tqdm: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Backend {
    /// Completions
    Openai,
    /// Chat completions
    OpenaiChat,
    /// Completions
    Vllm,
}

impl From<Backend> for load::Backend {
    fn from(backend: Backend) -> Self {
        match backend {
            Backend::Openai => Self::Openai,
            Backend::OpenaiChat => Self::OpenaiChat,
            Backend::Vllm => Self::Vllm,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Dataset {
    /// Random prompts of known lengths
    Random,
    /// Conversations in ShareGPT's JSON: the first question of each
    Sharegpt,
    /// A few prefixes, each with many endings
    #[value(name = "prefix_repetition")]
    PrefixRepetition,
    /// Recorded traffic in Mooncake's JSON lines: timestamp, input_length, output_length, hash_ids
    #[value(alias = "timed_trace")]
    Trace,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Metric {
    /// Time to first token
    Ttft,
    /// Time per output token after the first
    Tpot,
    /// Time between two chunks of an answer
    Itl,
    /// Time from sending a request to its last token
    E2el,
}

impl From<Metric> for load::Metric {
    fn from(metric: Metric) -> Self {
        match metric {
            Metric::Ttft => Self::Ttft,
            Metric::Tpot => Self::Tpot,
            Metric::Itl => Self::Itl,
            Metric::E2el => Self::E2el,
        }
    }
}

impl ServeBench {
    pub fn options(&self, api_key: Option<String>) -> Result<load::Options> {
        Ok(load::Options {
            target: self.target.options(api_key),
            prompts: self.dataset.options()?,
            traffic: self.traffic.options(),
            contents: self.result.options(),
        })
    }
}

impl TargetArgs {
    fn options(&self, api_key: Option<String>) -> load::Target {
        let base_url = match &self.base_url {
            Some(url) => url.clone(),
            None if self.host.contains(':') => format!("http://[{}]:{}", self.host, self.port),
            None => format!("http://{}:{}", self.host, self.port),
        };
        load::Target {
            base_url,
            api_key,
            backend: self.backend.into(),
            endpoint: self.endpoint.clone(),
            model: self.model.clone(),
            ignore_eos: self.ignore_eos,
            temperature: self.temperature,
            request_timeout: Duration::try_from_secs_f64(self.request_timeout).unwrap_or(Duration::MAX),
        }
    }
}

impl DatasetArgs {
    fn options(&self) -> Result<load::Prompts> {
        let dataset = match self.dataset_name {
            Dataset::Random => load::Dataset::Random(load::Random {
                input_len: self.random_input_len,
                output_len: self.random_output_len,
                range_ratio: self.random_range_ratio,
                prefix_len: self.random_prefix_len,
            }),
            Dataset::PrefixRepetition => load::Dataset::PrefixRepetition(load::PrefixRepetition {
                prefix_len: self.prefix_repetition_prefix_len,
                suffix_len: self.prefix_repetition_suffix_len,
                num_prefixes: self.prefix_repetition_num_prefixes,
                output_len: self.prefix_repetition_output_len,
            }),
            Dataset::Sharegpt => {
                load::Dataset::ShareGpt(load::ShareGpt { path: self.file()?, output_len: self.sharegpt_output_len })
            }
            Dataset::Trace => load::Dataset::Trace(load::Trace {
                path: self.file()?,
                hash_tokens: self.timed_trace_chunk_hash_size,
                unit_seconds: self.timed_trace_sec_multiplier,
            }),
        };
        let is_drawn = matches!(self.dataset_name, Dataset::Random | Dataset::PrefixRepetition);
        if let Some(path) = self.dataset_path.as_ref().filter(|_| is_drawn) {
            bail!("--dataset-path {}: prompts of this dataset are drawn, not read", path.display());
        }
        Ok(load::Prompts { dataset, count: self.num_prompts, seed: self.seed, vocab_size: self.vocab_size })
    }

    fn file(&self) -> Result<PathBuf> {
        let Some(path) = &self.dataset_path else { bail!("this dataset is read from a file: give --dataset-path") };
        Ok(path.clone())
    }
}

impl TrafficArgs {
    fn options(&self) -> load::Traffic {
        load::Traffic {
            request_rate: self.request_rate,
            burstiness: self.burstiness,
            max_concurrency: self.max_concurrency,
            num_warmups: self.num_warmups,
        }
    }
}

impl ResultArgs {
    fn options(&self) -> load::Contents {
        load::Contents {
            metrics: self.percentile_metrics.iter().copied().map(Into::into).collect(),
            percentiles: self.metric_percentiles.clone(),
            goals: self.goodput.clone(),
            detailed: self.save_result && self.save_detailed,
            label: self.label.clone(),
            metadata: self.metadata.clone(),
        }
    }
}

/// Above zero; `inf` is allowed.
fn positive(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| *number > 0.0);
    number.ok_or_else(|| "expected a number above zero".into())
}

fn percentile(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| (0.0..=100.0).contains(number));
    number.ok_or_else(|| "expected a number from 0 to 100".into())
}

fn key_value(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("expected KEY=VALUE")?;
    Ok((key.trim().into(), value.trim().into()))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        bench: ServeBench,
    }

    fn parse(flags: &str) -> Option<ServeBench> {
        Command::try_parse_from(std::iter::once("bench").chain(flags.split_whitespace())).ok().map(|c| c.bench)
    }

    #[test]
    fn flags_as_vllm_writes_them() {
        let flags = "--backend openai-chat --dataset-name prefix_repetition --request-rate inf --goodput ttft:200 \
                     tpot:50 --metadata version=1 tp=2 --percentile-metrics ttft,e2el --metric-percentiles 50,99.9";
        let bench = parse(flags).expect("valid flags");
        let load::Options { target, prompts, traffic, contents } = bench.options(None).expect("valid options");
        assert_eq!(target.backend, load::Backend::OpenaiChat);
        assert_eq!(prompts.dataset, load::Dataset::PrefixRepetition(load::PrefixRepetition::default()));
        assert_eq!(traffic.request_rate, Some(f64::INFINITY));
        assert_eq!(contents.goals[1], Goal { metric: load::Metric::Tpot, milliseconds: 50.0 });
        assert_eq!(contents.metadata[1], ("tp".into(), "2".into()));
        assert_eq!(contents.metrics, [load::Metric::Ttft, load::Metric::E2el]);
        assert_eq!(contents.percentiles, [50.0, 99.9]);
    }

    #[test]
    fn flags_and_the_library_have_the_same_defaults() {
        let options = |flags: &str| parse(flags).expect("valid flags").options(None).expect("valid options");
        assert_eq!(options(""), load::Options::default());
        let trace = options("--dataset-name trace --dataset-path x").prompts.dataset;
        assert_eq!(trace, load::Dataset::Trace(load::Trace::new("x")));
        assert_eq!(options("--host ::1 --port 9").target.base_url, "http://[::1]:9");
    }

    #[test]
    fn a_dataset_has_a_file_or_none() {
        for flags in ["--dataset-name sharegpt", "--dataset-name trace", "--dataset-path x"] {
            let error = parse(flags).expect("valid flags").options(None).expect_err(flags);
            assert!(error.to_string().contains("--dataset-path"), "{flags}: {error}");
        }
    }

    #[test]
    fn values_that_mean_nothing_are_refused() {
        for flags in [
            "--request-rate 0",
            "--request-rate nan",
            "--burstiness -1",
            "--goodput itl:5",
            "--goodput ttft:-1",
            "--goodput ttft",
            "--metric-percentiles 101",
            "--metadata version",
            "--dataset-name trace2",
            "--request-timeout 0",
        ] {
            assert!(parse(flags).is_none(), "{flags}");
        }
    }
}
