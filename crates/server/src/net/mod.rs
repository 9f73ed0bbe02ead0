//! Connections: accepted, bounded, timed, encrypted, drained.
//!
//! `serve` takes a listener and a router and gives every connection a task of its own. What hyper leaves open is here:
//! how many connections there may be and which one gives way, how long each may be silent, and how a server that is
//! told to end lets its answers finish. Nothing here knows a route; bodies are read, under their own time limit, by
//! whoever is asked. What a route leaves of one is read off here, a little and briefly, for the sake of the connection.

mod activity;
mod body;
mod channel;
mod connection;
mod listener;
mod patrol;
mod places;
mod requests;
mod serve;
mod shutdown;
mod socket;
mod stats;
mod streams;
mod tls;

use std::sync::Arc;
use std::time::Duration;

pub use listener::Listener;
pub use requests::Peer;
pub use serve::serve;
pub use shutdown::{Shutdown, ShutdownHandle};
pub use stats::{ConnectionCounts, ConnectionStats};
pub use tls::{Tls, TlsError};

use crate::config::{Limits, Timeouts};

/// Enough for a body that was sent right behind its head; a refusal should not take much longer.
const UNREAD_TIMEOUT: Duration = Duration::from_secs(1);

/// What connections may cost.
#[derive(Clone, Debug)]
pub struct NetConfig {
    /// Open at once. When all are taken, the one that has been without a request for longest gives way; then the one
    /// whose request's body has been coming for longest; then the one whose reader has taken nothing for longest. While
    /// all are being answered, the next waits.
    pub connections: usize,
    /// A request's line and header together; beyond it the answer is 431.
    pub header_bytes: usize,
    /// Fields of a header; beyond it the answer is 431.
    pub header_fields: usize,
    /// From the opening, or a request's first byte, to the end of its header; and for a TLS handshake.
    pub header_timeout: Duration,
    /// Between requests.
    pub idle_timeout: Duration,
    /// A client that takes nothing of its answer for so long is given up.
    pub write_stall: Duration,
    /// The rest of a body that its route has not read is waited for so long, and its answer with it; then the answer
    /// says that the connection ends.
    pub unread_timeout: Duration,
    /// `None`: plain HTTP.
    pub tls: Option<Tls>,
    /// Counted here; keep a clone to read it.
    pub stats: Arc<ConnectionStats>,
}

impl From<(&Limits, &Timeouts)> for NetConfig {
    fn from((limits, timeouts): (&Limits, &Timeouts)) -> Self {
        Self {
            connections: limits.connections,
            header_bytes: limits.header_bytes,
            header_fields: limits.header_fields,
            header_timeout: timeouts.header,
            idle_timeout: timeouts.idle,
            write_stall: timeouts.write_stall,
            unread_timeout: UNREAD_TIMEOUT,
            tls: None,
            stats: Arc::default(),
        }
    }
}

impl Default for NetConfig {
    fn default() -> Self {
        Self::from((&Limits::default(), &Timeouts::default()))
    }
}
