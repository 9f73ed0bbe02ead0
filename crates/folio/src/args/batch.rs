//! Flags of `folio batch` and `folio health`.

use std::path::PathBuf;

use clap::Args;

use super::{LimitArgs, ModelArgs, NamingArgs, Seconds};

#[derive(Args)]
pub struct BatchArgs {
    /// Requests in OpenAI's batch format, one JSON object a line
    pub input: PathBuf,
    #[command(flatten)]
    pub model: ModelArgs,
    /// Where answers go; lines that are there already are not asked again [default: INPUT with .out.jsonl]
    #[arg(long, short, value_name = "FILE", visible_alias = "output-file")]
    pub output: Option<PathBuf>,
    /// Requests under way at once [default: --max-num-seqs]
    #[arg(long, value_name = "N")]
    pub concurrency: Option<usize>,
    #[command(flatten)]
    pub naming: NamingArgs,
    #[command(flatten)]
    pub limits: LimitArgs,
}

#[derive(Args)]
pub struct HealthArgs {
    /// The server; http only
    #[arg(long, default_value = "http://127.0.0.1:8000")]
    pub url: String,
    /// Seconds to wait for its answer
    #[arg(long, value_name = "SECONDS", default_value = "5")]
    pub timeout: Seconds,
}
