//! Flags of `folio serve`, under vLLM's names where it has them.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;
use folio_server::observe::{Level, LogFormat};

use super::{GenerationArgs, LimitArgs, ModelArgs, TimeoutArgs, VllmArgs};

#[derive(Args)]
pub struct ServeArgs {
    /// Flags from a TOML file, one a line: `port = 8080`; the command line wins [env: FOLIO_CONFIG]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    #[command(flatten)]
    pub vllm: VllmArgs,
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub listen: ListenArgs,
    #[command(flatten)]
    pub access: AccessArgs,
    #[command(flatten)]
    pub naming: NamingArgs,
    #[command(flatten)]
    pub log: LogArgs,
    #[command(flatten)]
    pub limits: LimitArgs,
    #[command(flatten)]
    pub timeouts: TimeoutArgs,
    #[command(flatten)]
    pub kv_events: KvEventsArgs,
}

/// Where it listens.
#[derive(Args, Clone)]
#[command(next_help_heading = "Listening")]
pub struct ListenArgs {
    /// Address to listen on; any but loopback needs API keys
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1", value_parser = host)]
    pub host: IpAddr,
    /// 0 takes a free one
    #[arg(long, default_value_t = 8000)]
    pub port: u16,
    /// Listen on this Unix socket instead; only its owner may connect
    #[arg(long, value_name = "PATH", conflicts_with_all = ["host", "port", "tls_cert"])]
    pub uds: Option<PathBuf>,
    /// Certificate chain for HTTPS, PEM
    #[arg(long, value_name = "FILE", visible_alias = "ssl-certfile", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// Its private key, PEM
    #[arg(long, value_name = "FILE", visible_alias = "ssl-keyfile", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// Serve /metrics here as well, without a key; loopback only, unless --insecure-no-auth
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub metrics_listen: Option<SocketAddr>,
}

/// Who is let in.
#[derive(Args, Clone)]
#[command(next_help_heading = "Access")]
pub struct AccessArgs {
    /// API keys, one a line: `KEY [name=N] [weight=W] [max-in-flight=M] [priority=P..Q] [salt=TEXT|none]`; also from the
    /// environment, FOLIO_API_KEY or VLLM_API_KEY, with commas between them
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// Refused: a command line is no secret.
    #[arg(long, hide = true, num_args = 0..)]
    pub api_key: Option<Vec<String>>,
    /// Let everybody in who can reach the server
    #[arg(long)]
    pub insecure_no_auth: bool,
    /// Names that the server answers to beside its own address, e.g. api.example.com,*.example.com
    #[arg(long, value_name = "HOSTS")]
    pub allowed_hosts: Vec<TextList>,
    /// Web pages that may use it, e.g. https://app.example.com, or * [default: none]
    #[arg(long, value_name = "ORIGINS")]
    pub allowed_origins: Vec<TextList>,
}

/// What clients call the model, and what it does unless they say otherwise.
#[derive(Args, Clone)]
#[command(next_help_heading = "Model")]
pub struct NamingArgs {
    /// What clients may call the model; the first is what answers call it [default: its own name]
    #[arg(long, value_name = "NAME", num_args = 1..)]
    pub served_model_name: Vec<String>,
    /// A Jinja file instead of the model's own chat template
    #[arg(long, value_name = "FILE")]
    pub chat_template: Option<PathBuf>,
    #[command(flatten)]
    pub generation: GenerationArgs,
}

#[derive(Args, Clone)]
#[command(next_help_heading = "Log and traces")]
pub struct LogArgs {
    /// text or json
    #[arg(long, value_name = "FORMAT", default_value = "text")]
    pub log_format: LogFormat,
    /// debug, info, warn or error
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    pub log_level: Level,
    /// No line for each request that ended well
    #[arg(long, visible_alias = "no-enable-log-requests")]
    pub disable_log_requests: bool,
    /// Send traces to this collector: OTLP over HTTP, e.g. http://127.0.0.1:4318
    #[arg(long, value_name = "URL")]
    pub otlp_traces_endpoint: Option<String>,
}

/// What the prefix cache holds, told to routers over ZeroMQ as vLLM tells it.
#[derive(Args, Clone)]
#[command(next_help_heading = "KV events")]
pub struct KvEventsArgs {
    /// Publish what the prefix cache stores and removes here, e.g. tcp://127.0.0.1:5557 [default: nowhere]
    #[arg(long, value_name = "ENDPOINT")]
    pub kv_events_endpoint: Option<String>,
    /// What subscribers must ask for
    #[arg(long, value_name = "TOPIC", default_value = "", requires = "kv_events_endpoint")]
    pub kv_events_topic: String,
    /// Where subscribers that missed something may ask for it again, e.g. tcp://127.0.0.1:5558
    #[arg(long, value_name = "ENDPOINT", requires = "kv_events_endpoint")]
    pub kv_events_replay_endpoint: Option<String>,
    /// Steps whose events are kept for that
    #[arg(long, value_name = "STEPS", default_value_t = 10_000, requires = "kv_events_endpoint")]
    pub kv_events_buffer_steps: usize,
}

/// One text, several with commas between them, or a JSON list as vLLM takes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextList(pub Vec<String>);

impl FromStr for TextList {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.starts_with('[') && text.ends_with(']') && text.contains(['"', ' ', ',']) || text == "[]" {
            return serde_json::from_str(text).map(Self).map_err(|_| "not a JSON list of texts".into());
        }
        Ok(Self(text.split(',').map(|one| one.trim().to_string()).filter(|one| !one.is_empty()).collect()))
    }
}

impl TextList {
    pub fn all(lists: &[TextList]) -> Vec<String> {
        lists.iter().flat_map(|list| list.0.iter().cloned()).collect()
    }
}

/// An address, or the one name that means the same everywhere.
fn host(text: &str) -> Result<IpAddr, String> {
    match text {
        "localhost" => Ok(IpAddr::V4(Ipv4Addr::LOCALHOST)),
        _ => text.parse().map_err(|_| "expected an address such as 127.0.0.1 or 0.0.0.0, or localhost".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_texts() {
        let check = |text: &str, expect: &[&str]| {
            assert_eq!(text.parse::<TextList>().map(|list| list.0).unwrap_or_default(), expect, "{text}");
        };
        check("*", &["*"]);
        check("a.example,*.b.example", &["a.example", "*.b.example"]);
        check(r#"["*"]"#, &["*"]);
        check(r#"["https://a", "https://b"]"#, &["https://a", "https://b"]);
        check("[::1]", &["[::1]"]);
        check("[]", &[]);
        assert!(r#"["a", 1]"#.parse::<TextList>().is_err());
    }

    #[test]
    fn hosts() {
        assert_eq!(host("localhost"), Ok(IpAddr::V4(Ipv4Addr::LOCALHOST)));
        assert_eq!(host("::").map(|host| host.is_unspecified()), Ok(true));
        assert!(host("example.com").is_err());
    }
}
