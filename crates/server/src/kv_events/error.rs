//! Errors of a publisher's start; the operator of the server reads them, never a client.

use std::io;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("a kv event endpoint is tcp://host:port, not {0:?}")]
    NotTcp(String),
    #[error("a kv event endpoint ends in a port number, unlike {0:?}")]
    Port(String),
    #[error("could not publish kv events at {endpoint}")]
    Listen { endpoint: String, source: io::Error },
    #[error("could not start the thread that publishes kv events")]
    Thread(#[from] io::Error),
}
