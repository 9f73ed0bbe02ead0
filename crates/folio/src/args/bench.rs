//! Flags of `folio bench`, and the options of `folio-measure` that they stand for.

use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, Subcommand, ValueEnum};
use folio_measure::bench::{self, fairness, http, interference, prefix, rates, speculate};
use folio_session::Method;
use folio_session::random_model::Shape;

use super::{ModelArgs, ServeBench};
use crate::hooks;

#[derive(Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    pub kind: BenchKind,
}

#[derive(Subcommand)]
pub enum BenchKind {
    /// One stream: prefill and decode rates, inter-token percentiles
    Latency(BenchRun),
    /// Many concurrent streams
    Throughput(BenchRun),
    /// Prefix cache: cost without shared prompts, gain with them
    Prefix(PrefixBench),
    /// Inter-token times of running streams when a long prompt arrives, with and without a target
    Interference(InterferenceBench),
    /// Two tenants, one of which floods the queue: rate of each while both wait
    Fairness(FairnessBench),
    /// Speedup of speculative decoding, by method
    Speculate(SpeculateBench),
    /// Overhead of the HTTP server over the engine: tokens per second, CPU time, time to first
    /// token
    Http(HttpBench),
    /// Load on any OpenAI endpoint over HTTP, with the report of `vllm bench serve`
    Serve(Box<ServeBench>),
}

/// Flags of all benches.
#[derive(Args)]
pub struct BenchModel {
    /// Random bf16 weights of this shape instead of MODEL, written to the cache folder on first use
    #[arg(long, value_enum, conflicts_with = "model")]
    pub shape: Option<ShapeArg>,
    /// Print a JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub model: ModelArgs,
}

#[derive(Args)]
pub struct BenchRun {
    /// Tokens in each prompt
    #[arg(long, default_value_t = 512)]
    pub input_len: usize,
    /// Tokens in each answer
    #[arg(long, default_value_t = 64)]
    pub output_len: usize,
    /// Number of concurrent streams, several separated by commas (throughput)
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 4, 8, 16])]
    pub concurrency: Vec<usize>,
    /// Number of rounds, with peak rates measured between them; the best counts, and for the share
    /// of read bandwidth the median
    #[arg(long, default_value_t = 5)]
    pub rounds: usize,
    /// On a GPU: profile each kernel of a step afterwards, and write times and device utilization
    /// to this file
    #[arg(long, value_name = "FILE")]
    pub profile: Option<PathBuf>,
    #[command(flatten)]
    pub common: BenchModel,
}

#[derive(Args)]
pub struct PrefixBench {
    /// Tokens of the prompt that all requests share
    #[arg(long, default_value_t = 1000)]
    pub prompt_len: usize,
    /// Number of requests with that prompt, cold and cached each; the median counts
    #[arg(long, default_value_t = 9)]
    pub rounds: usize,
    /// Number of alternating pairs of runs without shared prompts, cache on and off
    #[arg(long, default_value_t = 15)]
    pub pairs: usize,
    /// Number of streams in such a run
    #[arg(long, default_value_t = 8)]
    pub streams: usize,
    /// Tokens in each prompt of such a run
    #[arg(long, default_value_t = 256)]
    pub input_len: usize,
    /// Tokens in each answer of such a run
    #[arg(long, default_value_t = 64)]
    pub output_len: usize,
    #[command(flatten)]
    pub common: BenchModel,
}

#[derive(Args)]
pub struct InterferenceBench {
    /// Number of streams that decode when the long prompt arrives
    #[arg(long, default_value_t = 8)]
    pub streams: usize,
    /// Tokens of the long prompt
    #[arg(long, default_value_t = 3500)]
    pub prompt_len: usize,
    /// Inter-token target, as a multiple of the inter-token time without a prompt
    #[arg(long, default_value_t = 2.0)]
    pub target_ratio: f64,
    /// Number of rounds, alternating with and without the target
    #[arg(long, default_value_t = 5)]
    pub rounds: usize,
    #[command(flatten)]
    pub common: BenchModel,
}

#[derive(Args)]
pub struct FairnessBench {
    /// Weights of the flooding tenant and of the other
    #[arg(long, value_delimiter = ':', default_values_t = [1, 1])]
    pub weights: Vec<u32>,
    /// Requests of the flooding tenant, as a multiple of the other's
    #[arg(long, default_value_t = 10)]
    pub flood: usize,
    /// Number of requests of the other tenant
    #[arg(long, default_value_t = 64)]
    pub requests: usize,
    /// Tokens in each prompt
    #[arg(long, default_value_t = 64)]
    pub input_len: usize,
    /// Tokens in each answer
    #[arg(long, default_value_t = 16)]
    pub output_len: usize,
    /// Maximum number of requests that run at once
    #[arg(long, default_value_t = 8)]
    pub streams: usize,
    #[command(flatten)]
    pub common: BenchModel,
}

#[derive(Args)]
pub struct SpeculateBench {
    /// Methods in the notation of --speculate, separated by commas
    #[arg(long, value_delimiter = ',', default_values = ["ngram", "suffix", "lookahead", "auto"])]
    pub methods: Vec<Method>,
    /// File or folder of texts to continue [default: prompts without a pattern]
    #[arg(long, value_name = "PATH")]
    pub text: Option<PathBuf>,
    /// Prompts that show a file and the beginning of its copy with one edit: `text` takes pieces of
    /// --text, `own` the model's continuations of their beginnings
    #[arg(long, value_name = "FILE", requires = "text", num_args = 0..=1, default_missing_value = "text")]
    pub repeat: Option<Repeat>,
    /// Number of times that such a prompt shows the file
    #[arg(long, value_name = "TIMES", requires = "repeat", default_value_t = 1)]
    pub shown: usize,
    /// Number of rounds of prompts, instead of --prompts; in each, all methods and none answer the
    /// same prompts in turn
    #[arg(long, value_name = "ROUNDS", conflicts_with = "prompts")]
    pub pairs: Option<usize>,
    /// Number of prompts in all
    #[arg(long, default_value_t = 20)]
    pub prompts: usize,
    /// Tokens of the text in each prompt
    #[arg(long, default_value_t = 128)]
    pub input_len: usize,
    /// Tokens in each answer
    #[arg(long, default_value_t = 128)]
    pub output_len: usize,
    /// Sampling temperature; 0 is greedy
    #[arg(long, default_value_t = 0.0)]
    pub temperature: f32,
    /// Number of concurrent streams, several separated by commas
    #[arg(long, value_delimiter = ',', default_values_t = [1])]
    pub concurrency: Vec<usize>,
    /// Include answers that repeat themselves
    #[arg(long)]
    pub keep_loops: bool,
    /// Measure verification against theory: instead of methods, drafts that are accepted with this
    /// probability, --speculate-tokens of them per step (default 4), after prompts whose answers
    /// repeat one token
    #[arg(long, value_name = "0..1", conflicts_with_all = ["methods", "text", "temperature"])]
    pub agreement: Option<f64>,
    #[command(flatten)]
    pub common: BenchModel,
}

/// Source of the file that a prompt repeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Repeat {
    Text,
    Own,
}

#[derive(Args)]
pub struct HttpBench {
    /// Number of concurrent streams
    #[arg(long, default_value_t = 64)]
    pub concurrency: usize,
    /// Tokens in each answer
    #[arg(long, default_value_t = 128)]
    pub tokens: usize,
    /// Tokens in each prompt
    #[arg(long, default_value_t = 32)]
    pub prompt_tokens: usize,
    /// Number of alternating pairs of runs, engine alone and over HTTP
    #[arg(long, default_value_t = 15)]
    pub pairs: usize,
    /// Number of single requests of either kind that measure the time to first token
    #[arg(long, default_value_t = 101)]
    pub rounds: usize,
    #[command(flatten)]
    pub common: BenchModel,
}

#[derive(Clone, Copy, ValueEnum)]
pub enum ShapeArg {
    /// 16 layers, hidden 2048, ffn 8192, 32 heads, 8 KV heads of 64, vocabulary 16384, tied: 1.007 B parameters
    #[value(name = "1b")]
    OneB,
    /// 28 layers, hidden 3072, ffn 8192, 24 heads, 8 KV heads of 128, vocabulary 128256, tied: 3.21 B parameters
    #[value(name = "3b")]
    ThreeB,
    /// 2 layers of the width of 1b, for a quick look
    #[value(name = "tiny")]
    Tiny,
    /// 32 layers, hidden 4096, ffn 14336, 32 heads, 8 KV heads of 128, vocabulary 128256: 8.03 B parameters, on a GPU
    #[value(name = "8b")]
    EightB,
    /// 48 layers, hidden 2048, 32 heads, 4 KV heads of 128, 128 experts of 768, 8 a token, vocabulary 151936, on a GPU
    #[value(name = "moe-30b")]
    Moe30B,
}

impl From<ShapeArg> for Shape {
    fn from(arg: ShapeArg) -> Self {
        match arg {
            ShapeArg::OneB => Self::OneB,
            ShapeArg::ThreeB => Self::ThreeB,
            ShapeArg::Tiny => Self::Tiny,
            ShapeArg::EightB => Self::EightB,
            ShapeArg::Moe30B => Self::Moe30B,
        }
    }
}

impl BenchModel {
    fn model(&self) -> Result<bench::Model> {
        Ok(bench::Model {
            name: self.model.model.clone(),
            shape: self.shape.map(Into::into),
            options: self.model.engine.options()?,
            hooks: hooks::hooks,
        })
    }
}

impl BenchRun {
    pub fn options(&self, concurrency: Vec<usize>) -> Result<rates::Options> {
        Ok(rates::Options {
            model: self.common.model()?,
            input_len: self.input_len,
            output_len: self.output_len,
            concurrency,
            rounds: self.rounds,
            profile: self.profile.is_some(),
        })
    }
}

impl PrefixBench {
    pub fn options(&self) -> Result<prefix::Options> {
        Ok(prefix::Options {
            model: self.common.model()?,
            prompt_len: self.prompt_len,
            rounds: self.rounds,
            pairs: self.pairs,
            streams: self.streams,
            input_len: self.input_len,
            output_len: self.output_len,
        })
    }
}

impl InterferenceBench {
    pub fn options(&self) -> Result<interference::Options> {
        Ok(interference::Options {
            model: self.common.model()?,
            streams: self.streams,
            prompt_len: self.prompt_len,
            target_ratio: self.target_ratio,
            rounds: self.rounds,
        })
    }
}

impl FairnessBench {
    pub fn options(&self) -> Result<fairness::Options> {
        Ok(fairness::Options {
            model: self.common.model()?,
            weights: self.weights.clone(),
            flood: self.flood,
            requests: self.requests,
            input_len: self.input_len,
            output_len: self.output_len,
            streams: self.streams,
        })
    }
}

impl SpeculateBench {
    pub fn options(&self) -> Result<speculate::Options> {
        let repeat = self.repeat.map(|source| match source {
            Repeat::Text => speculate::Repeat::Text,
            Repeat::Own => speculate::Repeat::Own,
        });
        Ok(speculate::Options {
            model: self.common.model()?,
            methods: self.methods.clone(),
            text: self.text.clone(),
            repeat,
            shown: self.shown,
            pairs: self.pairs,
            prompts: self.prompts,
            input_len: self.input_len,
            output_len: self.output_len,
            temperature: self.temperature,
            concurrency: self.concurrency.clone(),
            keep_loops: self.keep_loops,
        })
    }
}

impl HttpBench {
    pub fn options(&self) -> Result<http::Options> {
        Ok(http::Options {
            model: self.common.model()?,
            concurrency: self.concurrency,
            tokens: self.tokens,
            prompt_tokens: self.prompt_tokens,
            pairs: self.pairs,
            rounds: self.rounds,
        })
    }
}
