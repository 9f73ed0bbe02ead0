//! Counts of connections and of their ends, for the metrics.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counted by `serve` as it goes. Listeners may share one.
#[derive(Debug, Default)]
pub struct ConnectionStats {
    pub(super) open: AtomicU64,
    pub(super) accepted: AtomicU64,
    pub(super) evicted: AtomicU64,
    pub(super) header_timeouts: AtomicU64,
    pub(super) idle_timeouts: AtomicU64,
    pub(super) write_stalls: AtomicU64,
    pub(super) tls_failures: AtomicU64,
    pub(super) accept_errors: AtomicU64,
}

/// `ConnectionStats` at one moment. All but `open` only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConnectionCounts {
    pub open: u64,
    pub accepted: u64,
    /// Closed to make room for another.
    pub evicted: u64,
    pub header_timeouts: u64,
    pub idle_timeouts: u64,
    /// Clients given up because they took nothing of their answer: connections, and single streams
    /// of HTTP/2.
    pub write_stalls: u64,
    pub tls_failures: u64,
    pub accept_errors: u64,
}

impl ConnectionStats {
    pub fn counts(&self) -> ConnectionCounts {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ConnectionCounts {
            open: read(&self.open),
            accepted: read(&self.accepted),
            evicted: read(&self.evicted),
            header_timeouts: read(&self.header_timeouts),
            idle_timeouts: read(&self.idle_timeouts),
            write_stalls: read(&self.write_stalls),
            tls_failures: read(&self.tls_failures),
            accept_errors: read(&self.accept_errors),
        }
    }
}

pub(super) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}
