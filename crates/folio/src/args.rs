//! Every flag, as clap reads it.
//!
//! A struct with a heading of its own passes it on to all flags that clap reads after it. So a
//! command's own flags come first, then those of flattened structs without a heading, then those
//! with a heading.
//!
//! `help.txt` holds the help of every command, so that the texts can be read as one list.

mod batch;
mod bench;
mod bench_serve;
mod config;
mod device;
mod engine;
mod eval;
mod generation;
mod limits;
mod options;
mod quantize;
mod serve;
mod size;
mod speculate;
mod vllm;

use clap::{Args, Parser, Subcommand};

pub use batch::*;
pub use bench::*;
pub use bench_serve::*;
pub use config::command_line;
pub use device::*;
pub use engine::*;
pub use eval::*;
pub use generation::*;
pub use limits::*;
pub use quantize::*;
pub use serve::*;
pub use speculate::*;
pub use vllm::VllmArgs;

/// An LLM inference and serving engine in one binary.
#[derive(Parser)]
#[command(name = "folio", version, propagate_version = true)]
pub struct Folio {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Subcommand)]
pub enum Command {
    /// Answer one prompt with -p, or chat with a model
    Run(RunArgs),
    /// Serve a model over an OpenAI-compatible HTTP API
    Serve(Box<ServeArgs>),
    /// Answer a file of requests in OpenAI's batch format, offline
    Batch(Box<BatchArgs>),
    /// Check the health of a running server
    Health(HealthArgs),
    /// Print a model's architecture, weights and memory needs
    Inspect(InspectArgs),
    /// Print the memory plan of a model with the given flags, without loading it
    Plan(PlanArgs),
    /// Measure a model's perplexity, and its divergence from another model
    Eval(Box<EvalArgs>),
    /// Quantize a model
    Quantize(Box<QuantizeArgs>),
    /// Measure speed in relation to this machine's peak rates
    Bench(BenchArgs),
    /// Download a model from the Hugging Face hub
    Pull(PullArgs),
}

#[derive(Args)]
pub struct RunArgs {
    /// Prompt to answer before exiting, instead of a chat; `-` reads standard input
    #[arg(short, long)]
    pub prompt: Option<String>,
    /// System message at the start of the conversation
    #[arg(long)]
    pub system: Option<String>,
    /// Complete the prompt without the model's chat template
    #[arg(long)]
    pub raw: bool,
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

/// Sampling parameters. Absent ones take the model's defaults, as with `folio serve`.
#[derive(Args, Clone)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// Sampling temperature; 0 is greedy [default: the model's, or 1]
    #[arg(long)]
    pub temperature: Option<f32>,
    /// Sample from the most likely tokens whose probabilities add up to this [default: the model's,
    /// or 1]
    #[arg(long)]
    pub top_p: Option<f32>,
    /// Sample from this many most likely tokens; 0 means all [default: the model's, or 0]
    #[arg(long)]
    pub top_k: Option<u32>,
    /// Minimum probability of a token, relative to that of the most likely one [default: the
    /// model's, or 0]
    #[arg(long)]
    pub min_p: Option<f32>,
    /// Penalty on tokens that the prompt or the answer already contains; 1 is none [default: the
    /// model's, or 1]
    #[arg(long)]
    pub repetition_penalty: Option<f32>,
    /// Seed of the sampler; the same seed repeats an answer [default: another one for each answer]
    #[arg(long)]
    pub seed: Option<u64>,
    /// Maximum tokens in an answer [default: the model's, or the rest of the context]
    #[arg(long, short = 'n')]
    pub max_tokens: Option<usize>,
    #[command(flatten)]
    pub generation: GenerationArgs,
}

#[derive(Args)]
pub struct InspectArgs {
    /// Model folder, .gguf file or ORG/NAME [default: the built-in model]
    pub model: Option<String>,
    /// Show the size of the weights when quantized to this format at load time
    #[arg(long, value_name = "int8|int4|int4-g128|fp8")]
    pub quantize: Option<folio_model::AtLoad>,
}

#[derive(Args)]
pub struct PlanArgs {
    /// Print a JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub model: ModelArgs,
}

#[derive(Args)]
pub struct PullArgs {
    /// ORG/NAME; in a repository of GGUF files also ORG/NAME:Q4_K_M or ORG/NAME/FILE.gguf [default:
    /// Q4_K_M, else Q8_0, else the first]; each with an optional @REVISION
    pub model: String,
    /// Download every file of the repository, not only those that Folio reads
    #[arg(long)]
    pub all: bool,
}

#[cfg(test)]
mod tests;
