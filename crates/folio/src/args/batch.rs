//! Flags of `folio batch` and `folio health`.

use std::path::PathBuf;

use clap::Args;

use super::{LimitArgs, ModelArgs, NamingArgs, Seconds};

#[derive(Args)]
pub struct BatchArgs {
    /// Input file: requests in OpenAI's batch format, one JSON object per line
    pub input: PathBuf,
    /// Output file; requests that it has answers to are skipped, failed ones run again [default:
    /// INPUT with .out.jsonl]
    #[arg(long, short, value_name = "FILE", visible_alias = "output-file")]
    pub output: Option<PathBuf>,
    /// Maximum number of requests in flight [default: --max-num-seqs]
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
    /// URL of the server: http://HOST:PORT, https://HOST:PORT, or HOST:PORT to detect which
    #[arg(long, default_value = "127.0.0.1:8000")]
    pub url: String,
    /// PEM file of a certificate to trust with https, or of its CA [default: public CAs; on
    /// loopback, any certificate]
    #[arg(long, value_name = "FILE", conflicts_with = "insecure")]
    pub ca: Option<PathBuf>,
    /// Accept any certificate with https
    #[arg(long)]
    pub insecure: bool,
    /// Seconds to wait for the answer
    #[arg(long, value_name = "SECONDS", default_value = "5")]
    pub timeout: Seconds,
}
