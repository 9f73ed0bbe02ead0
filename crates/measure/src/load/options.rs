//! Options of a load. An error names an option as the flag of `folio bench serve` that sets it.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Options {
    pub target: Target,
    pub prompts: Prompts,
    pub traffic: Traffic,
    pub contents: Contents,
}

/// The server, and the fields that all requests share.
#[derive(Clone, Debug, PartialEq)]
pub struct Target {
    /// `http://HOST:PORT`, or that with a path.
    pub base_url: String,
    pub api_key: Option<String>,
    pub backend: Backend,
    /// Route of the requests; by default the backend's.
    pub endpoint: Option<String>,
    /// By default the first of `/v1/models`.
    pub model: Option<String>,
    /// Always so for random prompts and traces.
    pub ignore_eos: bool,
    pub temperature: f64,
    /// A request that takes longer counts as failed.
    pub request_timeout: Duration,
}

impl Default for Target {
    fn default() -> Self {
        Self {
            base_url: "http://127.0.0.1:8000".into(),
            api_key: None,
            backend: Backend::Openai,
            endpoint: None,
            model: None,
            ignore_eos: false,
            temperature: 0.0,
            request_timeout: Duration::from_secs(6 * 3600),
        }
    }
}

/// An API of the server. The names are those of `vllm bench serve`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// Completions.
    Openai,
    OpenaiChat,
    /// Completions.
    Vllm,
}

impl Backend {
    pub fn name(self) -> &'static str {
        match self {
            Self::Openai => "openai",
            Self::OpenaiChat => "openai-chat",
            Self::Vllm => "vllm",
        }
    }

    pub fn is_chat(self) -> bool {
        self == Self::OpenaiChat
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Prompts {
    pub dataset: Dataset,
    /// Number of requests; of a trace, the first ones.
    pub count: usize,
    /// Seed of random prompts and arrivals.
    pub seed: u64,
    /// Random prompts have token ids below this; by default the tokens of common words if the
    /// server has `/tokenize`, else ids below 1000.
    pub vocab_size: Option<u32>,
}

impl Default for Prompts {
    fn default() -> Self {
        Self { dataset: Dataset::Random(Random::default()), count: 1000, seed: 0, vocab_size: None }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum Dataset {
    Random(Random),
    PrefixRepetition(PrefixRepetition),
    ShareGpt(ShareGpt),
    Trace(Trace),
}

/// Random prompts of known lengths.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Random {
    /// Tokens in each prompt, without the prefix.
    pub input_len: usize,
    pub output_len: usize,
    /// Lengths are uniform in `[length * (1 - ratio), length * (1 + ratio)]`.
    pub range_ratio: f64,
    /// Tokens of a prefix that all prompts share.
    pub prefix_len: usize,
}

impl Default for Random {
    fn default() -> Self {
        Self { input_len: 1024, output_len: 128, range_ratio: 0.0, prefix_len: 0 }
    }
}

/// A few prefixes, each with many endings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefixRepetition {
    pub prefix_len: usize,
    pub suffix_len: usize,
    pub num_prefixes: usize,
    pub output_len: usize,
}

impl Default for PrefixRepetition {
    fn default() -> Self {
        Self { prefix_len: 256, suffix_len: 256, num_prefixes: 10, output_len: 128 }
    }
}

/// Conversations in ShareGPT's JSON: the first question of each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShareGpt {
    pub path: PathBuf,
    /// Tokens in each answer; by default the length of the dataset's answer.
    pub output_len: Option<usize>,
}

/// Recorded traffic in Mooncake's JSON lines.
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    pub path: PathBuf,
    /// Tokens that one of `hash_ids` stands for.
    pub hash_tokens: usize,
    /// Seconds in one unit of timestamps.
    pub unit_seconds: f64,
}

impl Trace {
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), hash_tokens: 512, unit_seconds: 0.001 }
    }
}

/// The arrival of requests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Traffic {
    /// Requests per second, infinite for all at once. It replaces the timestamps of a trace, which
    /// count if there is none; without either all requests are sent at once.
    pub request_rate: Option<f64>,
    /// Shape of the gamma distribution of gaps between requests: 1 is Poisson, infinite constant.
    pub burstiness: f64,
    /// Requests in flight; others wait on the client, and their waiting is not counted.
    pub max_concurrency: Option<usize>,
    /// Requests before the measurement.
    pub num_warmups: usize,
}

impl Default for Traffic {
    fn default() -> Self {
        Self { request_rate: None, burstiness: 1.0, max_concurrency: None, num_warmups: 0 }
    }
}

/// The contents of the report.
#[derive(Clone, Debug, PartialEq)]
pub struct Contents {
    pub metrics: Vec<Metric>,
    /// Percentiles of each metric.
    pub percentiles: Vec<f64>,
    /// Requests that keep all of these limits are counted as good.
    pub goals: Vec<Goal>,
    /// Include the figures and the text of every request.
    pub detailed: bool,
    /// By default the backend's name.
    pub label: Option<String>,
    /// Further keys of the JSON object.
    pub metadata: Vec<(String, String)>,
}

impl Default for Contents {
    fn default() -> Self {
        Self {
            metrics: vec![Metric::Ttft, Metric::Tpot, Metric::Itl],
            percentiles: vec![99.0],
            goals: Vec::new(),
            detailed: false,
            label: None,
            metadata: Vec::new(),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Metric {
    /// Time to first token.
    Ttft,
    /// Time per output token after the first.
    Tpot,
    /// Time between two chunks of an answer.
    Itl,
    /// Time from sending a request to its last token.
    E2el,
}

/// A limit that a request must keep to be counted as good.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Goal {
    pub metric: Metric,
    pub milliseconds: f64,
}

impl FromStr for Goal {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("expected ttft, tpot or e2el, a colon and milliseconds, found `{text}`");
        let (name, limit) = text.split_once(':').ok_or_else(wrong)?;
        let metric = match name {
            "ttft" => Metric::Ttft,
            "tpot" => Metric::Tpot,
            "e2el" => Metric::E2el,
            _ => return Err(wrong()),
        };
        let milliseconds = limit.parse().ok().filter(|limit: &f64| *limit >= 0.0).ok_or_else(wrong)?;
        Ok(Self { metric, milliseconds })
    }
}
