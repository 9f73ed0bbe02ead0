//! The threads that share one operation: fork-join over `N - 1` workers and the caller.
//!
//! A forward pass forks some hundreds of times a token, so a fork must cost well under a
//! microsecond: workers wait by spinning for a short while, then yield, then sleep, so that an idle
//! process burns no core. The pool knows nothing of its tasks; splitting never changes a result,
//! since each output element is computed whole by one thread.
//!
//! Workers that are awake take parts; the caller takes the rest. It then closes the fork, so that a
//! worker that never got a core is not waited for, and waits only for workers inside.
//!
//! On machines with several memory nodes, each worker is pinned to one, so that memory it wrote
//! first is near when it has the same stretch again. The caller's thread belongs to the program and
//! is not pinned; it is moved to the first node.

mod stretches;
#[cfg(test)]
mod tests;

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::marker::PhantomData;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::topology::{self, Node};
use crate::{Error, Pulse, Result};
use stretches::Stretches;

/// Time that a worker without work spins, and then yields, before it sleeps.
const SPIN: Duration = Duration::from_micros(50);
const YIELD: Duration = Duration::from_micros(200);

/// Forks between two checks whether the caller is still on its memory node.
const FETCH_FORKS: u64 = 512;

/// The task, called with a thread's and a fork's number: a borrowed closure without its lifetime.
type Task = *const (dyn Fn(usize, u64) + Sync);

/// Keeps its content on cache lines of its own (two, as the prefetcher loads pairs).
#[repr(align(128))]
struct Padded<T>(T);

/// Messages from callers to workers.
struct Board {
    /// The current fork's number, which is odd; one more once it is closed to workers that have not
    /// entered. It only grows.
    fork: AtomicU64,
    /// Written between a join and the next fork, by the holder of `busy`; read by workers inside a
    /// fork.
    task: UnsafeCell<Option<Task>>,
}

/// Ends the workers instead of a fork; odd as forks are, and larger than any.
const STOP: u64 = u64::MAX;

/// State of one thread of the pool.
struct Seat {
    /// The fork that this worker is inside of; one more once it has left. Only this worker writes
    /// it.
    inside: AtomicU64,
    /// The last fork in which a thread took the part with this thread's number.
    claimed: AtomicU64,
}

/// A worker *enters* fork `f` by writing `f` to its seat and then still reading `f` on the board.
/// It *leaves* by writing `f + 1` to its seat, and does not try `f` again. The caller *joins* by
/// reading all seats; if one holds neither, it *closes* the fork, writing `f + 1` to the board;
/// then it waits until no seat holds `f`.
///
/// After that no worker is inside `f`, or ever will be. If all seats held `f` or `f + 1`, no other
/// worker could come. Otherwise, as entering and joining are sequentially consistent, a worker that
/// read `f` on the board did so before the close, hence wrote its seat before the caller read it
/// again, which found it inside or gone. A worker that comes later, even many forks later, reads
/// another number, and touches nothing. Seats are written with release and read with acquire, so
/// everything a worker did inside happened before the join's end. So no worker reads `task` while
/// it is written, and none follows it to a closure that is gone.
///
/// A thread that writes a word and then reads another's uses a swap, not a store: with stores the
/// tests failed on emulated aarch64 on x86-64, as if a store and the load behind it had changed
/// places, sequentially consistent or not.
struct Shared {
    board: Padded<Board>,
    seats: Box<[Padded<Seat>]>,
    /// Whether some pool handle is between a fork and its join.
    busy: AtomicBool,
    /// Number of workers that went to sleep on `wake` since it was last notified.
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    wake: Condvar,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    /// Memory nodes; empty unless there are several.
    nodes: Vec<Node>,
    /// Beats with every operation, and with every part of one that a thread takes.
    pulse: Pulse,
}

// SAFETY: `task` is the only field that is not Sync by itself; the protocol above keeps its readers
// and writers apart.
unsafe impl Sync for Shared {}
// SAFETY: the raw pointer in `task` is only followed inside a fork, while the closure it points to
// is borrowed.
unsafe impl Send for Shared {}

/// A fixed set of threads. It is not `Sync`, so a task cannot fork again on the pool that runs it.
pub struct Pool {
    workers: Arc<Workers>,
    not_sync: PhantomData<Cell<()>>,
}

/// The worker threads, which end with the last pool that uses them.
struct Workers {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Pool {
    /// A pool of `threads` threads, including the caller's; at least one.
    pub fn new(threads: usize) -> Result<Self> {
        Self::on(topology::nodes(threads), threads)
    }

    /// A pool that treats the machine's CPUs as those of two memory nodes.
    #[cfg(test)]
    pub fn on_two_nodes(threads: usize) -> Result<Self> {
        Self::on(topology::testing::two_nodes(threads), threads)
    }

    fn on(nodes: Vec<Node>, threads: usize) -> Result<Self> {
        let seat = || Padded(Seat { inside: AtomicU64::new(0), claimed: AtomicU64::new(0) });
        let shared = Arc::new(Shared {
            board: Padded(Board { fork: AtomicU64::new(0), task: UnsafeCell::new(None) }),
            seats: (0..threads.max(1)).map(|_| seat()).collect(),
            busy: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            lock: Mutex::new(()),
            wake: Condvar::new(),
            panic: Mutex::new(None),
            nodes,
            pulse: Pulse::default(),
        });
        // Workers have their owner before they start, so that a failed start stops the running
        // ones.
        let mut workers = Workers { shared, threads: Vec::new() };
        for thread in 1..threads.max(1) {
            let shared = Arc::clone(&workers.shared);
            let worker = std::thread::Builder::new()
                .name(format!("folio-cpu-{thread}"))
                .spawn(move || shared.work(thread))
                .map_err(|source| Error::Host { what: "a compute thread", source })?;
            workers.threads.push(worker);
        }
        Ok(Self { workers: Arc::new(workers), not_sync: PhantomData })
    }

    /// Another pool on the same threads. With separate threads two pools would compete for cores,
    /// because waiting workers spin; these take turns.
    pub fn beside(&self) -> Self {
        Self { workers: Arc::clone(&self.workers), not_sync: PhantomData }
    }

    pub fn num_threads(&self) -> usize {
        self.workers.threads.len() + 1
    }

    pub fn pulse(&self) -> &Pulse {
        &self.workers.shared.pulse
    }

    /// Calls `task(part, num_threads)` once for each of as many parts as threads and returns when
    /// all have returned. Thread `i` runs part `i`, so that its cache has the data of its last
    /// fork, unless it comes so late that another thread has taken the part. A panic in any of them
    /// is raised here, after all that have begun are done.
    pub fn run(&self, task: impl Fn(usize, usize) + Sync) {
        self.pulse().beat();
        let num_threads = self.num_threads();
        if num_threads == 1 {
            return task(0, 1);
        }
        let seats = &self.workers.shared.seats;
        self.share(&|thread, fork| {
            // Relaxed, as only the order of claims to one part matters: entering and leaving
            // transfer the data.
            let claim = |part: usize| {
                let claimed = &seats[part].0.claimed;
                claimed.load(Ordering::Relaxed) != fork && claimed.swap(fork, Ordering::Relaxed) != fork
            };
            for part in thread..num_threads {
                if claim(part) {
                    task(part, num_threads);
                } else if thread != 0 {
                    // Only the caller checks all seats.
                    return;
                }
            }
        });
    }

    /// Splits `0..tasks` into runs of at most `chunk` that threads take as they become free,
    /// shorter ones towards the end, so that all finish at about the same time. For parts of
    /// different duration, or for a machine that is busy with other programs.
    pub fn for_each_chunk(&self, tasks: usize, chunk: usize, body: impl Fn(Range<usize>) + Sync) {
        let chunk = chunk.max(1);
        if tasks == 0 {
            return;
        }
        self.pulse().beat();
        let num_threads = self.num_threads();
        if num_threads == 1 || tasks <= chunk {
            return body(0..tasks);
        }
        let next = Padded(AtomicUsize::new(0));
        let shared = &*self.workers.shared;
        self.share(&|_, _| {
            loop {
                let run = |start: usize| ((tasks - start) / (2 * num_threads)).clamp(1, chunk);
                let take = |start: usize| (start < tasks).then(|| start + run(start));
                let Ok(start) = next.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take) else { return };
                shared.pulse.beat();
                body(start..start + run(start));
            }
        });
    }

    /// Splits `0..tasks` like [`Pool::for_each_chunk`], for tasks that are faster when a thread
    /// does them in order, in runs of whole grains except for the last one: each thread has its own
    /// stretch, and takes from the ends of others' when that is done. `body` receives the thread's
    /// number.
    pub fn for_each_run(&self, tasks: usize, chunk: usize, grain: usize, body: impl Fn(usize, Range<usize>) + Sync) {
        self.pulse().beat();
        let num_threads = self.num_threads();
        if num_threads == 1 || tasks <= chunk {
            if tasks > 0 {
                body(0, 0..tasks);
            }
            return;
        }
        let shared = &*self.workers.shared;
        let stretches = Stretches::new(tasks.div_ceil(grain), num_threads, chunk.div_ceil(grain));
        self.share(&|thread, _| {
            while let Some(grains) = stretches.take(thread) {
                shared.pulse.beat();
                body(thread, grains.start * grain..tasks.min(grains.end * grain));
            }
        });
    }

    /// Calls `body` once for each of `tasks`, a part of the tasks `0..total` of a later
    /// [`Pool::for_each_run`]. With several memory nodes, the call runs on the node whose threads
    /// will have the task in their stretches, because memory is near to its first writer. If no
    /// thread of a node comes, the caller runs its tasks.
    pub fn for_each_on_node(&self, tasks: Range<usize>, total: usize, body: impl Fn(usize) + Sync) {
        let nodes = &self.workers.shared.nodes;
        let Some(first) = nodes.first() else {
            return self.for_each_chunk(tasks.len(), 1, |range| range.for_each(|task| body(tasks.start + task)));
        };
        first.fetch();
        let num_threads = self.num_threads();
        // The first node starts at 0, so that every task belongs to one.
        let start = |index: usize| match nodes.get(index) {
            Some(node) => stretches::start_of(node.threads.start, num_threads, total).clamp(tasks.start, tasks.end),
            None => tasks.end,
        };
        let lot = |index: usize| Lot {
            next: AtomicUsize::new(start(index)),
            end: start(index + 1),
            begun: AtomicBool::new(false),
        };
        let lots: Vec<Lot> = (0..nodes.len()).map(lot).collect();
        self.share(&|thread, _| {
            for (lot, node) in lots.iter().zip(nodes) {
                if node.threads.contains(&thread) {
                    lot.begun.store(true, Ordering::Relaxed);
                    while let Some(task) = lot.take() {
                        body(task);
                    }
                }
            }
            if thread == 0 {
                // A thread that has begun a lot is inside the fork, and does not leave it before
                // the lot is empty.
                for lot in &lots {
                    while !lot.begun.load(Ordering::Relaxed)
                        && let Some(task) = lot.take()
                    {
                        body(task);
                    }
                }
            }
        });
    }

    /// Splits `0..tasks` evenly, one run a thread, if there are at least `min` tasks for each of
    /// two threads; else runs all of them here. For uniform work too short to share out piece by
    /// piece.
    pub fn for_each_static(&self, tasks: usize, min: usize, body: impl Fn(Range<usize>) + Sync) {
        if tasks == 0 {
            return;
        }
        if self.num_threads() == 1 || tasks < 2 * min.max(1) {
            self.pulse().beat();
            return body(0..tasks);
        }
        self.run(|part, num_parts| {
            let range = even_split(tasks, num_parts, part);
            if !range.is_empty() {
                body(range);
            }
        });
    }

    /// Calls `task` here, and on every worker that comes before this call of it has returned. So
    /// `task` must complete all work that the others have not begun.
    fn share(&self, task: &(dyn Fn(usize, u64) + Sync)) {
        let shared = &*self.workers.shared;
        let fork = self.fork(task);
        let own = catch_unwind(AssertUnwindSafe(|| {
            if let Some(node) = shared.nodes.first()
                && (fork / 2).is_multiple_of(FETCH_FORKS)
            {
                node.fetch();
            }
            task(0, fork);
        }));
        self.join(fork);
        let theirs = shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        shared.busy.store(false, Ordering::Release);
        if let Some(payload) = own.err().or(theirs) {
            resume_unwind(payload);
        }
    }

    /// Opens a fork to the workers; returns its number.
    fn fork(&self, task: &(dyn Fn(usize, u64) + Sync)) -> u64 {
        let shared = &*self.workers.shared;
        // Another pool on these threads may be active, in another thread.
        while shared.busy.swap(true, Ordering::Acquire) {
            std::thread::yield_now();
        }
        let board = &shared.board.0;
        // SAFETY: only the lifetime changes. `share` returns after `join`, when no worker follows
        // the pointer any more.
        let task = unsafe { std::mem::transmute::<&(dyn Fn(usize, u64) + Sync), Task>(task) };
        // SAFETY: the last fork has been joined, so no worker reads `task` now, and `busy` is ours,
        // so no other caller writes it.
        unsafe { *board.task.get() = Some(task) };
        // The last number is odd if all workers came to its fork, else even.
        let fork = (board.fork.load(Ordering::Relaxed) + 1) | 1;
        // Sequentially consistent with a worker's `sleepers` increment and its last read of the
        // board: either the worker sees the new fork, or this thread sees it asleep.
        board.fork.swap(fork, Ordering::SeqCst);
        if shared.sleepers.load(Ordering::SeqCst) > 0 {
            let _guard = shared.lock();
            // Workers may not get a core soon; the forks until then need not wake them again.
            shared.sleepers.store(0, Ordering::Relaxed);
            shared.wake.notify_all();
        }
        fork
    }

    /// Returns when no worker is inside the fork, and none can enter it any more.
    fn join(&self, fork: u64) {
        let shared = &*self.workers.shared;
        let workers = || shared.seats[1..].iter().map(|seat| &seat.0.inside);
        // If all have come, the board stays in the caches of the workers that watch it for the next
        // fork.
        if workers().any(|inside| !(fork..=fork + 1).contains(&inside.load(Ordering::SeqCst))) {
            shared.board.0.fork.swap(fork + 1, Ordering::SeqCst);
        }
        let mut spins = 0u32;
        for inside in workers() {
            while inside.load(Ordering::SeqCst) == fork {
                spins += 1;
                // The worker is computing. Yield only once it may have lost its core to another
                // process, or may wait for this one.
                if spins < 20_000 {
                    std::hint::spin_loop();
                } else {
                    std::thread::yield_now();
                }
            }
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.shared.board.0.fork.store(STOP, Ordering::SeqCst);
        {
            let _guard = self.shared.lock();
            self.shared.wake.notify_all();
        }
        for worker in self.threads.drain(..) {
            // A worker catches its task's panics, so it ends by returning.
            let _ = worker.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, ()> {
        self.lock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A worker's life: wait for the next fork, enter it, run its task, leave.
    fn work(&self, thread: usize) {
        if let Some(node) = self.nodes.iter().find(|node| node.threads.contains(&thread)) {
            node.hold();
        }
        let mut last = 0;
        loop {
            let fork = self.wait_for_fork(last);
            if fork == STOP {
                return;
            }
            if self.enter(thread, fork) {
                // SAFETY: inside a fork `task` is not written, and the writes before the fork are
                // visible.
                let task = unsafe { (*self.board.0.task.get()).expect("a fork has a task") };
                // SAFETY: the caller does not return from `join` while this worker is inside, so
                // the closure is alive.
                let task = unsafe { &*task };
                if let Err(payload) = catch_unwind(AssertUnwindSafe(|| task(thread, fork))) {
                    *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(payload);
                }
            }
            self.seats[thread].0.inside.store(fork + 1, Ordering::Release);
            last = fork;
        }
    }

    /// Whether the worker came in time. It has to leave in any case.
    fn enter(&self, thread: usize, fork: u64) -> bool {
        self.seats[thread].0.inside.swap(fork, Ordering::SeqCst);
        self.board.0.fork.load(Ordering::SeqCst) == fork
    }

    /// The next open fork after `last`, or `STOP`.
    fn wait_for_fork(&self, last: u64) -> u64 {
        let look = |order: Ordering| {
            let fork = self.board.0.fork.load(order);
            (fork % 2 == 1 && fork != last).then_some(fork)
        };
        loop {
            let start = Instant::now();
            loop {
                for _ in 0..64 {
                    if let Some(fork) = look(Ordering::Relaxed) {
                        return fork;
                    }
                    std::hint::spin_loop();
                }
                let waited = start.elapsed();
                if waited > SPIN + YIELD {
                    break;
                }
                if waited > SPIN {
                    std::thread::yield_now();
                }
            }
            let guard = self.lock();
            self.sleepers.fetch_add(1, Ordering::SeqCst);
            if let Some(fork) = look(Ordering::SeqCst) {
                return fork;
            }
            // The fork that woke it may be over by now, but more will follow.
            drop(self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner));
        }
    }
}

/// The remaining tasks of one memory node's threads.
struct Lot {
    next: AtomicUsize,
    end: usize,
    /// Whether one of these threads has begun.
    begun: AtomicBool,
}

impl Lot {
    fn take(&self) -> Option<usize> {
        // Relaxed, as each task belongs to one thread, and the fork transfers the data.
        let task = self.next.fetch_add(1, Ordering::Relaxed);
        (task < self.end).then_some(task)
    }
}

/// Part `index` of `parts` nearly equal runs of `0..total`.
pub fn even_split(total: usize, parts: usize, index: usize) -> Range<usize> {
    let at = |part: usize| total / parts * part + (total % parts).min(part);
    at(index)..at(index + 1)
}

/// A slice that several threads write to, each its own part.
pub struct Disjoint<'a, T> {
    ptr: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: access goes through `part`, and its callers promise that no two live parts overlap; that
// is sending disjoint `&mut [T]` to other threads.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    pub fn new(slice: &'a mut [T]) -> Self {
        Self { ptr: slice.as_mut_ptr(), len: slice.len(), slice: PhantomData }
    }

    /// # Safety
    /// No two parts alive at the same time may overlap.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "part {range:?} of {}", self.len);
        // SAFETY: the range is inside the slice borrowed by `new`, and the caller keeps parts
        // apart.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(range.start), range.len()) }
    }

    /// The start of the slice, for kernels that write strided tiles. Writes follow the rule of
    /// [`Disjoint::part`].
    pub fn as_ptr(&self) -> *mut T {
        self.ptr
    }
}
