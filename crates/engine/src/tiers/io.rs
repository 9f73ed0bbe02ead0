//! The thread that reads and writes chunks while steps run.
//!
//! Tasks wait in two short queues. Reads go first, because a request waits for each of them, while
//! a write only preserves what is in memory. Submitting never waits: a task that finds its queue
//! full fails, which costs a prefix hit. Every task is answered exactly once, except reads that
//! still wait when the thread ends; waiting writes are then finished within a bounded time.

use std::{
    collections::{HashSet, VecDeque},
    io::{self, Write},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use folio_scheduler::{DiskTask, DiskTaskKind};

use super::{DiskStore, HostTier, TierError};

/// Tasks that may wait, of each kind.
const MOST_WAITING: usize = 256;
/// Time for which waiting stores are finished when the process ends: a prompt that was just
/// computed should survive a restart.
const LAST_STORES: Duration = Duration::from_secs(2);
/// Most warnings that name a file; a disk that fails altogether is not worth more lines.
const MOST_WARNINGS: usize = 100;

/// The result of a task, for `Scheduler::disk_done` and `disk_lost`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskDone {
    pub ticket: u64,
    pub ok: bool,
    /// Chunks that were found to be missing.
    pub lost: Vec<u128>,
}

/// The disk tier's thread. Dropping it finishes waiting stores, for two seconds at most.
pub struct DiskIo {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    queue: Mutex<Queue>,
    changed: Condvar,
    done: Box<dyn Fn(DiskDone) + Send + Sync>,
}

#[derive(Default)]
struct Queue {
    fetches: VecDeque<DiskTask>,
    stores: VecDeque<DiskTask>,
    /// Set when the thread is to end: the time by which it must.
    ends_by: Option<Instant>,
}

impl DiskIo {
    /// `done` is called on the disk's thread, and on the caller's for a task that is refused.
    pub fn start(
        store: DiskStore,
        host: Arc<HostTier>,
        done: impl Fn(DiskDone) + Send + Sync + 'static,
    ) -> io::Result<Self> {
        // Standard error may be closed, which is no reason to end.
        Self::start_with(store, host, done, |warning| drop(writeln!(io::stderr(), "warning: {warning}")))
    }

    fn start_with(
        store: DiskStore,
        host: Arc<HostTier>,
        done: impl Fn(DiskDone) + Send + Sync + 'static,
        warn: impl Fn(&str) + Send + 'static,
    ) -> io::Result<Self> {
        let shared = Arc::new(Shared { queue: Mutex::default(), changed: Condvar::new(), done: Box::new(done) });
        let worker = Worker {
            shared: Arc::clone(&shared),
            store,
            host,
            warn: Box::new(warn),
            warned: HashSet::new(),
            times_paused: 0,
        };
        let thread = std::thread::Builder::new().name("folio-kv-disk".into()).spawn(move || worker.run())?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Queues a task; never waits.
    pub fn submit(&self, task: DiskTask) {
        let ticket = task.ticket;
        let mut queue = self.shared.queue();
        let waiting = match task.kind {
            DiskTaskKind::Fetch => &mut queue.fetches,
            DiskTaskKind::Store => &mut queue.stores,
        };
        if waiting.len() < MOST_WAITING {
            waiting.push_back(task);
            drop(queue);
            self.shared.changed.notify_one();
        } else {
            drop(queue);
            (self.shared.done)(DiskDone { ticket, ok: false, lost: Vec::new() });
        }
    }
}

impl Drop for DiskIo {
    fn drop(&mut self) {
        self.shared.queue().ends_by = Some(Instant::now() + LAST_STORES);
        self.shared.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has ended too.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next task, or none at the end.
    fn next(&self) -> Option<DiskTask> {
        let is_idle =
            |queue: &mut Queue| queue.ends_by.is_none() && queue.fetches.is_empty() && queue.stores.is_empty();
        let waited = self.changed.wait_while(self.queue(), is_idle);
        let mut queue = waited.unwrap_or_else(PoisonError::into_inner);
        match queue.ends_by {
            None => queue.fetches.pop_front().or_else(|| queue.stores.pop_front()),
            Some(time) if Instant::now() < time => queue.stores.pop_front(),
            Some(_) => None,
        }
    }
}

struct Worker {
    shared: Arc<Shared>,
    store: DiskStore,
    host: Arc<HostTier>,
    warn: Box<dyn Fn(&str) + Send>,
    /// Chunks named in a warning.
    warned: HashSet<u128>,
    /// Number of warnings that storing pauses.
    times_paused: usize,
}

impl Worker {
    fn run(mut self) {
        while let Some(task) = self.shared.next() {
            let mut lost = Vec::new();
            // A bug here must not leave a request waiting for an answer.
            let ok = catch_unwind(AssertUnwindSafe(|| self.work(&task, &mut lost))).unwrap_or(false);
            if !ok && task.kind == DiskTaskKind::Fetch {
                lost.push(task.chunk.key);
            }
            (self.shared.done)(DiskDone { ticket: task.ticket, ok, lost });
        }
    }

    /// Returns whether the task succeeded.
    fn work(&mut self, task: &DiskTask, lost: &mut Vec<u128>) -> bool {
        let was_storing = self.store.is_storing();
        let result = match task.kind {
            DiskTaskKind::Fetch => self.store.fetch(&task.chunk, &task.slots, &self.host),
            DiskTaskKind::Store => self.store.store(&task.chunk, &task.slots, &self.host, lost, Instant::now()),
        };
        match &result {
            Err(error) if was_storing && !self.store.is_storing() => self.note_pause(error),
            Err(error) => self.report(task, error),
            Ok(()) if !was_storing && self.store.is_storing() && self.times_paused <= MOST_WARNINGS => {
                (self.warn)("the disk tier stores again");
            }
            Ok(()) => {}
        }
        result.is_ok()
    }

    /// Warns once that storing pauses, however often it fails before it succeeds again.
    fn note_pause(&mut self, error: &TierError) {
        self.times_paused += 1;
        if self.times_paused <= MOST_WARNINGS {
            (self.warn)(&format!("{error}; the disk tier pauses storing until a later try succeeds"));
        }
    }

    /// Warns once for each file.
    fn report(&mut self, task: &DiskTask, error: &TierError) {
        if !self.store.is_storing() && task.kind == DiskTaskKind::Store {
            return;
        }
        // Another process deleted the file to make room.
        if matches!(error, TierError::Missing { .. }) {
            return;
        }
        if self.warned.len() < MOST_WARNINGS && self.warned.insert(task.chunk.key) {
            (self.warn)(&error.to_string());
        }
    }
}

#[cfg(test)]
mod tests;
