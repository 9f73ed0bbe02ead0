//! The tasks of an HTTP/2 connection's streams, and giving up on those whose client takes nothing.
//!
//! A socket that moves says nothing about one stream of many: each has a window of its own, and
//! hyper waits for it without a limit. A proxy's slow user must not end the connection that others
//! share, so it is the stream that is reset.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hyper::rt::Executor;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::stats::{ConnectionStats, count};

/// Since when a stream's last piece has been waiting for its client.
#[derive(Debug, Default)]
pub(super) struct Blocked(Mutex<Option<Instant>>);

impl Blocked {
    pub fn set(&self, blocked: bool) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = blocked.then(Instant::now);
    }

    /// Returns when it has lasted for `limit`.
    async fn for_long(&self, limit: Duration) {
        loop {
            let now = Instant::now();
            let since = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
            // A stream that blocks later is checked in time too: its own limit ends after this
            // sleep.
            let until = since.unwrap_or(now) + limit;
            if until <= now {
                return;
            }
            tokio::time::sleep_until(until).await;
        }
    }
}

/// hyper's executor of one connection.
#[derive(Clone)]
pub(super) struct Streams(Arc<Inner>);

struct Inner {
    tasks: Mutex<JoinSet<()>>,
    /// The request whose task is about to be made: hyper calls the service and then the executor,
    /// in one go.
    next: Mutex<Option<Arc<Blocked>>>,
    write_stall: Duration,
    stats: Arc<ConnectionStats>,
}

impl Streams {
    pub fn new(write_stall: Duration, stats: Arc<ConnectionStats>) -> Self {
        Self(Arc::new(Inner { tasks: Mutex::default(), next: Mutex::default(), write_stall, stats }))
    }

    fn tasks(&self) -> MutexGuard<'_, JoinSet<()>> {
        self.0.tasks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn announce(&self, blocked: Arc<Blocked>) {
        *self.0.next.lock().unwrap_or_else(PoisonError::into_inner) = Some(blocked);
    }

    pub fn abort_all(&self) {
        self.tasks().abort_all();
    }
}

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for Streams {
    fn execute(&self, stream: F) {
        let blocked = self.0.next.lock().unwrap_or_else(PoisonError::into_inner).take();
        let (write_stall, stats) = (self.0.write_stall, self.0.stats.clone());
        let mut tasks = self.tasks();
        // A stream that panicked has ended as far as its client is concerned, and the others go on.
        while tasks.try_join_next().is_some() {}
        tasks.spawn(async move {
            let Some(blocked) = blocked else { return stream.await };
            tokio::select! {
                biased;
                () = stream => {}
                () = blocked.for_long(write_stall) => count(&stats.write_stalls),
            }
        });
    }
}
