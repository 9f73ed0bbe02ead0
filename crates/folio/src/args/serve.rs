//! Flags of `folio serve`, under vLLM's names where it has them.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;
use folio_server::observe::{Level, LogFormat};

use super::{GenerationArgs, LimitArgs, ModelArgs, TimeoutArgs, VllmArgs};

#[derive(Args)]
pub struct ServeArgs {
    /// TOML file of flags, one per line: `port = 8080`; the command line overrides it [env:
    /// FOLIO_CONFIG]
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

/// Addresses to listen on.
#[derive(Args, Clone)]
#[command(next_help_heading = "Listening")]
pub struct ListenArgs {
    /// Address to listen on; any but loopback needs API keys
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1", value_parser = host)]
    pub host: IpAddr,
    /// Port to listen on; 0 takes a free one
    #[arg(long, default_value_t = 8000)]
    pub port: u16,
    /// Unix socket to listen on instead; only its owner may connect
    #[arg(long, value_name = "PATH", conflicts_with_all = ["host", "port", "tls_cert"])]
    pub uds: Option<PathBuf>,
    /// PEM file of the certificate chain for HTTPS
    #[arg(long, value_name = "FILE", visible_alias = "ssl-certfile", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// PEM file of the certificate's private key
    #[arg(long, value_name = "FILE", visible_alias = "ssl-keyfile", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// Second address for /metrics, without API keys; loopback only, unless --insecure-no-auth
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub metrics_listen: Option<SocketAddr>,
}

/// Access control.
#[derive(Args, Clone)]
#[command(next_help_heading = "Access")]
pub struct AccessArgs {
    /// File of API keys, one per line: `KEY [name=N] [weight=W] [max-in-flight=M] [priority=P..Q]
    /// [salt=TEXT|none]`. Keys are also read from FOLIO_API_KEY or VLLM_API_KEY in the environment,
    /// separated by commas
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// Refused, because a command line is not secret.
    #[arg(long, hide = true, num_args = 0..)]
    pub api_key: Option<Vec<String>>,
    /// Accept requests without an API key
    #[arg(long)]
    pub insecure_no_auth: bool,
    /// Host names accepted beside the server's own address, separated by commas, e.g.
    /// api.example.com,*.example.com
    #[arg(long, value_name = "HOSTS")]
    pub allowed_hosts: Vec<TextList>,
    /// Origins of web pages that may use the server, separated by commas, e.g.
    /// https://app.example.com, or * [default: none]
    #[arg(long, value_name = "ORIGINS")]
    pub allowed_origins: Vec<TextList>,
}

/// The model's names, and defaults of requests.
#[derive(Args, Clone)]
#[command(next_help_heading = "Model")]
pub struct NamingArgs {
    /// Names that clients may call the model by; answers carry the first [default: its own name]
    #[arg(long, value_name = "NAME", num_args = 1..)]
    pub served_model_name: Vec<String>,
    /// Jinja file of a chat template that replaces the model's
    #[arg(long, value_name = "FILE")]
    pub chat_template: Option<PathBuf>,
    #[command(flatten)]
    pub generation: GenerationArgs,
}

#[derive(Args, Clone)]
#[command(next_help_heading = "Log and traces")]
pub struct LogArgs {
    /// Log format: text or json
    #[arg(long, value_name = "FORMAT", default_value = "text")]
    pub log_format: LogFormat,
    /// Lowest level to log: debug, info, warn or error
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    pub log_level: Level,
    /// Log no line for requests that succeed
    #[arg(long, visible_alias = "no-enable-log-requests")]
    pub disable_log_requests: bool,
    /// URL of a collector for traces, OTLP over HTTP, e.g. http://127.0.0.1:4318
    #[arg(long, value_name = "URL")]
    pub otlp_traces_endpoint: Option<String>,
}

/// Events of the prefix cache for routers, over ZeroMQ in vLLM's format.
#[derive(Args, Clone)]
#[command(next_help_heading = "KV events")]
pub struct KvEventsArgs {
    /// Endpoint to publish on which blocks the prefix cache stores and removes, e.g.
    /// tcp://127.0.0.1:5557 [default: none]
    #[arg(long, value_name = "ENDPOINT")]
    pub kv_events_endpoint: Option<String>,
    /// Topic of the published events
    #[arg(long, value_name = "TOPIC", default_value = "", requires = "kv_events_endpoint")]
    pub kv_events_topic: String,
    /// Endpoint where subscribers may request missed events again, e.g. tcp://127.0.0.1:5558
    #[arg(long, value_name = "ENDPOINT", requires = "kv_events_endpoint")]
    pub kv_events_replay_endpoint: Option<String>,
    /// Number of steps whose events are buffered for replay
    #[arg(long, value_name = "STEPS", default_value_t = 10_000, requires = "kv_events_endpoint")]
    pub kv_events_buffer_steps: usize,
}

/// One string, several separated by commas, or a JSON array as vLLM takes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextList(pub Vec<String>);

impl FromStr for TextList {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.starts_with('[') && text.ends_with(']') && text.contains(['"', ' ', ',']) || text == "[]" {
            return serde_json::from_str(text).map(Self).map_err(|_| "expected a JSON array of strings".into());
        }
        Ok(Self(text.split(',').map(|one| one.trim().to_string()).filter(|one| !one.is_empty()).collect()))
    }
}

impl TextList {
    pub fn all(lists: &[TextList]) -> Vec<String> {
        lists.iter().flat_map(|list| list.0.iter().cloned()).collect()
    }
}

/// An IP address, or `localhost`.
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
