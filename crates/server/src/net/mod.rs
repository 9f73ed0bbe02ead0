//! Connections: accepted, bounded, timed, encrypted, drained.
//!
//! `serve` takes a listener and a router and gives every connection its own task. This module does
//! what hyper leaves open: the number of connections and which one is evicted, the time that each
//! may be silent, and the drain that lets answers finish. Nothing here knows a route. A route reads
//! its request's body under its own time limit; a rest that it leaves is read off here, a little
//! and briefly, to keep the connection usable.

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

/// Limits of connections.
#[derive(Clone, Debug)]
pub struct NetConfig {
    /// Open at once. When all are taken, the one that has been without a request for longest gives
    /// way; then the one whose request's body has been coming for longest; then the one whose
    /// reader has taken nothing for longest. While all are being answered, the next waits.
    pub connections: usize,
    /// A request's line and header together; beyond it the answer is 431.
    pub header_bytes: usize,
    /// Fields of a header; beyond it the answer is 431.
    pub header_fields: usize,
    /// From the opening, or a request's first byte, to the end of its header; and for a TLS
    /// handshake.
    pub header_timeout: Duration,
    /// Time that a connection may be idle between requests.
    pub idle_timeout: Duration,
    /// Time after which a client that takes nothing of its answer is given up.
    pub write_stall: Duration,
    /// Time for the rest of a body that its route has not read. The answer waits for it; after
    /// that it says that the connection ends.
    pub unread_timeout: Duration,
    /// Certificate and key for HTTPS; none for plain HTTP.
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
