//! Every flag, as clap reads it.

use std::net::IpAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use folio_device::cpu::Isa;

/// An LLM inference and serving engine in one binary.
#[derive(Parser)]
#[command(name = "folio", version, propagate_version = true)]
pub struct Folio {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Subcommand)]
pub enum Command {
    /// Ask a model: one question with -p, or a chat
    Run(RunArgs),
    /// Serve a model over HTTP, as the OpenAI API
    Serve(ServeArgs),
    /// Say what a model is and what it needs
    Inspect(InspectArgs),
    /// Measure perplexity on a text
    Eval(EvalArgs),
    /// Measure speed against this machine's ceilings
    Bench(BenchArgs),
    /// Fetch a model from the Hugging Face hub
    Pull(PullArgs),
}

/// Which model, and how it is run.
#[derive(Args, Clone)]
pub struct ModelArgs {
    /// A model folder, a .gguf file or ORG/NAME fetched by `folio pull`; without it, the built-in model
    pub model: Option<String>,
    #[command(flatten)]
    pub engine: EngineArgs,
}

#[derive(Args, Clone)]
pub struct EngineArgs {
    /// Threads that compute [default: all cores]
    #[arg(long, env = "FOLIO_THREADS")]
    pub threads: Option<usize>,
    /// Instructions to use [default: the best this CPU has]
    #[arg(long, value_enum)]
    pub cpu_isa: Option<IsaArg>,
    /// Longest sequence, prompt and answer together [default: the model's]
    #[arg(long)]
    pub max_model_len: Option<usize>,
    /// Requests that run at once
    #[arg(long, default_value_t = 64)]
    pub max_num_seqs: usize,
    /// Tokens computed in one step
    #[arg(long, default_value_t = 512)]
    pub max_num_batched_tokens: usize,
    /// Memory for keys and values, in MiB [default: what the requests can use, at most half of what is free]
    #[arg(long)]
    pub kv_cache_mib: Option<u64>,
    /// Compute every prompt from its first token, even where its beginning was computed before
    #[arg(long)]
    pub no_enable_prefix_caching: bool,
}

#[derive(Clone, Copy, ValueEnum)]
pub enum IsaArg {
    Scalar,
    Avx2,
    Avx512,
    Neon,
}

impl From<IsaArg> for Isa {
    fn from(arg: IsaArg) -> Isa {
        match arg {
            IsaArg::Scalar => Isa::Scalar,
            IsaArg::Avx2 => Isa::Avx2,
            IsaArg::Avx512 => Isa::Avx512,
            IsaArg::Neon => Isa::Neon,
        }
    }
}

#[derive(Args)]
pub struct RunArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Answer this and exit; `-` reads standard input
    #[arg(short, long)]
    pub prompt: Option<String>,
    /// A system message to begin with
    #[arg(long)]
    pub system: Option<String>,
    /// Complete the text as it stands, without the model's chat template
    #[arg(long)]
    pub raw: bool,
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

#[derive(Args, Clone)]
pub struct SamplingArgs {
    /// 0 always takes the most likely token
    #[arg(long, default_value_t = 0.0)]
    pub temperature: f32,
    /// Draw from the most likely tokens that together have this probability
    #[arg(long, default_value_t = 1.0)]
    pub top_p: f32,
    /// Draw from this many most likely tokens
    #[arg(long)]
    pub top_k: Option<u32>,
    /// Drop tokens less likely than this share of the most likely one
    #[arg(long, default_value_t = 0.0)]
    pub min_p: f32,
    #[arg(long, default_value_t = 1.0)]
    pub repetition_penalty: f32,
    /// Makes a sampled answer repeatable
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Longest answer, in tokens [default: what the context leaves]
    #[arg(long, short = 'n')]
    pub max_tokens: Option<usize>,
}

#[derive(Args)]
pub struct ServeArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    #[arg(long, default_value = "127.0.0.1")]
    pub host: IpAddr,
    #[arg(long, default_value_t = 8000)]
    pub port: u16,
}

#[derive(Args)]
pub struct InspectArgs {
    /// A model folder, a .gguf file or ORG/NAME; without it, the built-in model
    pub model: Option<String>,
}

#[derive(Args)]
pub struct EvalArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// The text to measure on
    #[arg(long)]
    pub text: PathBuf,
    /// Tokens a window; windows do not overlap and a window's first token is not scored
    #[arg(long, default_value_t = 2048)]
    pub window: usize,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

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
}

#[derive(Args)]
pub struct BenchRun {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Instead of MODEL: random bf16 weights of a known shape, made on first use in the cache folder
    #[arg(long, value_enum, conflicts_with = "model")]
    pub shape: Option<Shape>,
    /// Tokens in each prompt
    #[arg(long, default_value_t = 512)]
    pub input_len: usize,
    /// Tokens in each answer
    #[arg(long, default_value_t = 64)]
    pub output_len: usize,
    /// Streams at once, several separated by commas (throughput)
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 4, 8, 16])]
    pub concurrency: Vec<usize>,
    /// Rounds; the best counts, and the ceilings are measured between them
    #[arg(long, default_value_t = 5)]
    pub rounds: usize,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
pub enum Shape {
    /// 16 layers, hidden 2048, ffn 8192, 32 heads, 8 KV heads of 64, vocabulary 16384, tied: 1.007 B parameters
    #[value(name = "1b")]
    OneB,
    /// 2 layers of the same width, for a quick look
    #[value(name = "tiny")]
    Tiny,
}

#[derive(Args)]
pub struct PullArgs {
    /// ORG/NAME, or ORG/NAME@REVISION
    pub model: String,
    /// Fetch every file of the repository, not only what Folio reads
    #[arg(long)]
    pub all: bool,
}
