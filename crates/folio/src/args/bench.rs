//! Flags of `folio bench`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

use super::{Method, ModelArgs, ServeBench};

#[derive(Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    pub kind: BenchKind,
}

#[derive(Subcommand)]
pub enum BenchKind {
    /// One stream: prefill and decode rates, inter-token percentiles
    Latency(BenchRun),
    /// Many streams at once
    Throughput(BenchRun),
    /// What the prefix cache costs where nothing is shared, and what it saves where all is
    Prefix(PrefixBench),
    /// What running streams feel of a long prompt that arrives, with an inter-token target and without
    Interference(InterferenceBench),
    /// Two tenants, one of which floods: what each gets while both wait
    Fairness(FairnessBench),
    /// What methods of guessing ahead gain against none
    Speculate(SpeculateBench),
    /// What the HTTP server adds to the engine: tokens per second, CPU time, first-token time
    Http(HttpBench),
    /// Load on any OpenAI endpoint over HTTP, with the report of `vllm bench serve`
    Serve(Box<ServeBench>),
}

/// What all benches have in common.
#[derive(Args)]
pub struct BenchModel {
    /// Instead of MODEL: random bf16 weights of a known shape, made on first use in the cache folder
    #[arg(long, value_enum, conflicts_with = "model")]
    pub shape: Option<Shape>,
    /// Print one JSON object
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
    /// Streams at once, several separated by commas (throughput)
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 4, 8, 16])]
    pub concurrency: Vec<usize>,
    /// Rounds; the best counts, and the ceilings are measured between them; of the read bandwidth, the median share
    #[arg(long, default_value_t = 5)]
    pub rounds: usize,
    /// On a GPU: afterwards, write here how long each kernel of a step takes, and how busy the device was
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
    /// Requests with that prompt, of either kind; the median counts
    #[arg(long, default_value_t = 9)]
    pub rounds: usize,
    /// Pairs of runs without anything shared, cache on against off, taking turns
    #[arg(long, default_value_t = 15)]
    pub pairs: usize,
    /// Streams of such a run
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
    /// Streams that decode when the long prompt comes
    #[arg(long, default_value_t = 8)]
    pub streams: usize,
    /// Tokens of the long prompt
    #[arg(long, default_value_t = 3500)]
    pub prompt_len: usize,
    /// The target, in quiet inter-token times
    #[arg(long, default_value_t = 2.0)]
    pub target_ratio: f64,
    /// Rounds, with the target and without taking turns
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
    /// How many times the requests of the other the flooding tenant sends
    #[arg(long, default_value_t = 10)]
    pub flood: usize,
    /// Requests of the other tenant
    #[arg(long, default_value_t = 64)]
    pub requests: usize,
    /// Tokens in each prompt
    #[arg(long, default_value_t = 64)]
    pub input_len: usize,
    /// Tokens in each answer
    #[arg(long, default_value_t = 16)]
    pub output_len: usize,
    /// Requests that run at once
    #[arg(long, default_value_t = 8)]
    pub streams: usize,
    #[command(flatten)]
    pub common: BenchModel,
}

#[derive(Args)]
pub struct SpeculateBench {
    /// Methods as --speculate names them, separated by commas
    #[arg(long, value_delimiter = ',', default_values = ["ngram", "suffix", "lookahead", "auto"])]
    pub methods: Vec<Method>,
    /// A file or folder whose texts are continued [default: prompts without a pattern]
    #[arg(long, value_name = "PATH")]
    pub text: Option<PathBuf>,
    /// Each prompt shows a file and the beginning of the same with one edit: `text` is a piece of --text, `own` is what
    /// the model itself writes behind the beginning of such a piece
    #[arg(long, value_name = "FILE", requires = "text", num_args = 0..=1, default_missing_value = "text")]
    pub repeat: Option<Repeat>,
    /// How often such a prompt shows the file before it is to be repeated
    #[arg(long, value_name = "TIMES", requires = "repeat", default_value_t = 1)]
    pub shown: usize,
    /// As many rounds of prompts, instead of --prompts: in each, all methods and none answer the same, in turns
    #[arg(long, value_name = "ROUNDS", conflicts_with = "prompts")]
    pub pairs: Option<usize>,
    /// Prompts in all
    #[arg(long, default_value_t = 20)]
    pub prompts: usize,
    /// Tokens of the text in each prompt
    #[arg(long, default_value_t = 128)]
    pub input_len: usize,
    /// Tokens in each answer
    #[arg(long, default_value_t = 128)]
    pub output_len: usize,
    /// 0 always takes the likeliest token
    #[arg(long, default_value_t = 0.0)]
    pub temperature: f32,
    /// Streams at once, several separated by commas
    #[arg(long, value_delimiter = ',', default_values_t = [1])]
    pub concurrency: Vec<usize>,
    /// Count answers that run in circles too
    #[arg(long)]
    pub keep_loops: bool,
    /// Instead of methods, guesses that are right with this chance, --speculate-tokens of them a pass (4 by default),
    /// behind prompts whose answers are one token each: what verifying costs, against theory
    #[arg(long, value_name = "0..1", conflicts_with_all = ["methods", "text", "temperature"])]
    pub agreement: Option<f64>,
    #[command(flatten)]
    pub common: BenchModel,
}

/// Where a file comes from that is to be repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Repeat {
    Text,
    Own,
}

#[derive(Args)]
pub struct HttpBench {
    /// Streams at once
    #[arg(long, default_value_t = 64)]
    pub concurrency: usize,
    /// Tokens in each answer
    #[arg(long, default_value_t = 128)]
    pub tokens: usize,
    /// Tokens in each prompt
    #[arg(long, default_value_t = 32)]
    pub prompt_tokens: usize,
    /// Pairs of runs, engine alone against over HTTP, taking turns
    #[arg(long, default_value_t = 15)]
    pub pairs: usize,
    /// Requests, one at a time, of either kind, for the time to the first token
    #[arg(long, default_value_t = 101)]
    pub rounds: usize,
    #[command(flatten)]
    pub common: BenchModel,
}

#[derive(Clone, Copy, ValueEnum)]
pub enum Shape {
    /// 16 layers, hidden 2048, ffn 8192, 32 heads, 8 KV heads of 64, vocabulary 16384, tied: 1.007 B parameters
    #[value(name = "1b")]
    OneB,
    /// 28 layers, hidden 3072, ffn 8192, 24 heads, 8 KV heads of 128, vocabulary 128256, tied: 3.21 B parameters
    #[value(name = "3b")]
    ThreeB,
    /// 2 layers as wide as those of 1b, for a quick look
    #[value(name = "tiny")]
    Tiny,
    /// 32 layers, hidden 4096, ffn 14336, 32 heads, 8 KV heads of 128, vocabulary 128256: 8.03 B parameters, on a GPU
    #[value(name = "8b")]
    EightB,
    /// 48 layers, hidden 2048, 32 heads, 4 KV heads of 128, 128 experts of 768, 8 a token, vocabulary 151936, on a GPU
    #[value(name = "moe-30b")]
    Moe30B,
}
