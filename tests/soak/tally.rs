//! Results of all clients together.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// After this number of failures the rest would show nothing new.
const MOST_FAILURES: usize = 10;

#[derive(Default)]
pub struct Tally {
    seen: Mutex<Seen>,
    failures: AtomicUsize,
    is_over: AtomicBool,
}

#[derive(Default)]
pub struct Seen {
    pub counts: BTreeMap<String, u64>,
    /// Compared answers to prompts that begin like others.
    pub shared_prefixes: u64,
    pub failures: Vec<String>,
    /// Latencies of requests sent and read at full speed.
    pub latencies: Vec<Duration>,
    pub health: Vec<Duration>,
}

impl Tally {
    pub fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn count(&self, what: &str) {
        *self.seen().counts.entry(what.into()).or_default() += 1;
    }

    pub fn shared_prefix(&self) {
        self.seen().shared_prefixes += 1;
    }

    pub fn took(&self, time: Duration) {
        self.seen().latencies.push(time);
    }

    pub fn health_took(&self, time: Duration) {
        self.seen().health.push(time);
    }

    /// Printed at once: a long run should not hide it.
    pub fn fail(&self, what: String) {
        eprintln!("FAILED: {what}");
        self.failures.fetch_add(1, Ordering::Relaxed);
        self.seen().failures.push(what);
    }

    pub fn has_failed_too_often(&self) -> bool {
        self.failures.load(Ordering::Relaxed) >= MOST_FAILURES
    }

    /// The clients are done; the watching threads may stop.
    pub fn end(&self) {
        self.is_over.store(true, Ordering::Relaxed);
    }

    pub fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }
}
