//! Flags of `folio batch` and `folio health`.

use std::path::PathBuf;

use clap::Args;

use super::{LimitArgs, ModelArgs, NamingArgs, Seconds};

#[derive(Args)]
pub struct BatchArgs {
    /// Requests in OpenAI's batch format, one JSON object a line
    pub input: PathBuf,
    /// Where answers go; what has an answer there is not asked again, what failed is [default: INPUT with .out.jsonl]
    #[arg(long, short, value_name = "FILE", visible_alias = "output-file")]
    pub output: Option<PathBuf>,
    /// Requests under way at once [default: --max-num-seqs]
    #[arg(long, value_name = "N")]
    pub concurrency: Option<usize>,
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub naming: NamingArgs,
    #[command(flatten)]
    pub limits: LimitArgs,
}

#[derive(Args)]
pub struct HealthArgs {
    /// The server: http://HOST:PORT, https://HOST:PORT, or HOST:PORT for whichever it speaks
    #[arg(long, default_value = "127.0.0.1:8000")]
    pub url: String,
    /// With https: trust the certificate in this PEM file, or one that it has signed [default: those that public authorities
    /// have signed; on loopback, any]
    #[arg(long, value_name = "FILE", conflicts_with = "insecure")]
    pub ca: Option<PathBuf>,
    /// With https: trust any certificate
    #[arg(long)]
    pub insecure: bool,
    /// Seconds to wait for its answer
    #[arg(long, value_name = "SECONDS", default_value = "5")]
    pub timeout: Seconds,
}
