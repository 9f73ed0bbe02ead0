//! Errors of the guard's configuration, for the operator; clients see `ApiError`.

use std::path::PathBuf;

/// Origin of a key, for error messages: they never hold the key or any other word of its line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    Line(usize),
    Entry(usize),
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Line(number) => write!(f, "line {number} of the key file"),
            Self::Entry(number) => write!(f, "entry {number} of the list of API keys"),
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    #[error("cannot read the key file {}: {source}", path.display())]
    Unreadable { path: PathBuf, source: std::io::Error },
    #[error("the key file {} is not UTF-8 or has more than {most} bytes", path.display())]
    NotText { path: PathBuf, most: u64 },
    #[error("{place}: {reason}")]
    Key { place: Place, reason: &'static str },
    #[error("{place}: the name is used twice; every key needs its own name")]
    NameTaken { place: Place },
    #[error("{place}: the same key as {first}")]
    SameKey { place: Place, first: Place },
    #[error("{0} holds no API key")]
    NoKeys(&'static str),
    #[error("more than {0} API keys")]
    TooManyKeys(usize),
    #[error("expected a host name or address without port, *.DOMAIN or * in the allowed hosts, found {0:?}")]
    Host(String),
    #[error("expected SCHEME://HOST[:PORT] or * in the allowed origins, found {0:?}")]
    Origin(String),
    #[error(
        "refusing to listen on {0} without an API key: anyone who reaches it could use the model; set FOLIO_API_KEY or \
         give --api-key-file FILE, listen on 127.0.0.1, or accept the risk with --insecure-no-auth"
    )]
    Exposed(std::net::IpAddr),
}
