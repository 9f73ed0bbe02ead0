//! Every flag, as clap reads it.
//!
//! A struct with a heading of its own passes it on to whatever clap reads behind it. So a command's own flags come first,
//! those of flattened structs without a heading next, and those with a heading last.

mod batch;
mod bench;
mod bench_serve;
mod config;
mod device;
mod engine;
mod eval;
mod generation;
mod limits;
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
    /// Ask a model: one question with -p, or a chat
    Run(RunArgs),
    /// Serve a model over HTTP, as the OpenAI API
    Serve(Box<ServeArgs>),
    /// Answer a file of requests in OpenAI's batch format, offline
    Batch(Box<BatchArgs>),
    /// Ask a running server whether it is well
    Health(HealthArgs),
    /// Say what a model is and what it needs
    Inspect(InspectArgs),
    /// Say what a model would take with these flags, and how many requests would run, without loading it
    Plan(PlanArgs),
    /// Measure how well a model predicts a text, and what a smaller form of it loses
    Eval(Box<EvalArgs>),
    /// Make a smaller copy of a model
    Quantize(Box<QuantizeArgs>),
    /// Measure speed against this machine's ceilings
    Bench(BenchArgs),
    /// Fetch a model from the Hugging Face hub
    Pull(PullArgs),
}

#[derive(Args)]
pub struct RunArgs {
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
    pub model: ModelArgs,
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

/// How answers are drawn; what is not given is the model's to say, as with `folio serve`.
#[derive(Args, Clone)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// 0 always takes the most likely token [default: the model's, or 1]
    #[arg(long)]
    pub temperature: Option<f32>,
    /// Draw from the most likely tokens that together have this probability [default: the model's, or 1]
    #[arg(long)]
    pub top_p: Option<f32>,
    /// Draw from this many most likely tokens; 0 from all [default: the model's, or 0]
    #[arg(long)]
    pub top_k: Option<u32>,
    /// Drop tokens less likely than this share of the most likely one [default: the model's, or 0]
    #[arg(long)]
    pub min_p: Option<f32>,
    /// Makes tokens that are in the text already less likely [default: the model's, or 1]
    #[arg(long)]
    pub repetition_penalty: Option<f32>,
    /// Makes a sampled answer repeatable [default: another one for each answer]
    #[arg(long)]
    pub seed: Option<u64>,
    /// Longest answer, in tokens [default: the model's, or what the context leaves]
    #[arg(long, short = 'n')]
    pub max_tokens: Option<usize>,
    #[command(flatten)]
    pub generation: GenerationArgs,
}

#[derive(Args)]
pub struct InspectArgs {
    /// A model folder, a .gguf file or ORG/NAME; without it, the built-in model
    pub model: Option<String>,
    /// What its weights take when they are encoded while they are loaded
    #[arg(long, value_name = "int8|int4|int4-g128|fp8")]
    pub quantize: Option<folio_model::AtLoad>,
}

#[derive(Args)]
pub struct PlanArgs {
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub model: ModelArgs,
}

#[derive(Args)]
pub struct PullArgs {
    /// ORG/NAME; of a repository of GGUF files also ORG/NAME:Q4_K_M or ORG/NAME/FILE.gguf [default: Q4_K_M, else Q8_0,
    /// else the first]; any of them with @REVISION
    pub model: String,
    /// Fetch every file of the repository, not only what Folio reads
    #[arg(long)]
    pub all: bool,
}

#[cfg(test)]
mod tests;
