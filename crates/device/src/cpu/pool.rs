//! The threads that share one operation: fork-join over `N - 1` workers and the caller.
//!
//! A forward pass forks some hundreds of times a token, so a fork must cost well under a microsecond: workers wait by
//! spinning for a short while, then yield, then sleep, so that an idle process burns no core. The pool knows nothing
//! of what it runs; splitting never changes a result, since each output element is computed whole by one thread.

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::marker::PhantomData;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::{Error, Result};

/// How long a worker without work spins, and then how long it yields, before it sleeps.
const SPIN: Duration = Duration::from_micros(50);
const YIELD: Duration = Duration::from_micros(200);

/// What all threads of one fork run, as a borrowed closure without its lifetime.
type Task = *const (dyn Fn(usize) + Sync);

/// Keeps a counter on cache lines of its own (two, as the prefetcher fetches pairs).
#[repr(align(128))]
struct Padded<T>(T);

struct Shared {
    /// Number of forks so far; a worker runs the task once for each increment.
    epoch: Padded<AtomicUsize>,
    /// Workers that have not finished the current task.
    running: Padded<AtomicUsize>,
    /// Whether some handle is between a fork and its join.
    busy: AtomicBool,
    /// Written by the caller while `running` is zero, read by workers after they see `epoch` move.
    task: UnsafeCell<Option<Task>>,
    stop: AtomicBool,
    /// Workers asleep or about to sleep on `wake`.
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    wake: Condvar,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: `task` is the only field that is not Sync by itself; the epoch/running protocol orders its one writer and
// its readers: written while no worker runs, published by the release store of `epoch`, not read after `running`
// falls to zero.
unsafe impl Sync for Shared {}
// SAFETY: the raw pointer in `task` is only followed inside a fork, while the closure it points to is borrowed.
unsafe impl Send for Shared {}

/// A fixed set of threads. It is not `Sync`, so a task cannot fork again on the pool that runs it.
pub struct Pool {
    workers: Arc<Workers>,
    not_sync: PhantomData<Cell<()>>,
}

/// They end with the last pool that uses them.
struct Workers {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Pool {
    /// A pool of `threads` threads, the caller's own counted; at least one.
    pub fn new(threads: usize) -> Result<Self> {
        let shared = Arc::new(Shared {
            epoch: Padded(AtomicUsize::new(0)),
            running: Padded(AtomicUsize::new(0)),
            busy: AtomicBool::new(false),
            task: UnsafeCell::new(None),
            stop: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            lock: Mutex::new(()),
            wake: Condvar::new(),
            panic: Mutex::new(None),
        });
        // They have their owner before they start, so that a failed start stops those already running.
        let mut workers = Workers { shared, threads: Vec::new() };
        for thread in 1..threads.max(1) {
            let shared = Arc::clone(&workers.shared);
            let worker = std::thread::Builder::new()
                .name(format!("folio-cpu-{thread}"))
                .spawn(move || work(&shared, thread))
                .map_err(|source| Error::Host { what: "a compute thread", source })?;
            workers.threads.push(worker);
        }
        Ok(Self { workers: Arc::new(workers), not_sync: PhantomData })
    }

    /// Another pool of the same threads. Two pools of their own would fight for cores, as workers that wait spin; these
    /// take turns.
    pub fn beside(&self) -> Self {
        Self { workers: Arc::clone(&self.workers), not_sync: PhantomData }
    }

    pub fn num_threads(&self) -> usize {
        self.workers.threads.len() + 1
    }

    /// Calls `task(thread, num_threads)` once on every thread and returns when all have returned. A panic in any of
    /// them is raised here, after the others are done.
    pub fn run(&self, task: impl Fn(usize, usize) + Sync) {
        let num_threads = self.num_threads();
        if num_threads == 1 {
            return task(0, 1);
        }
        let task = |thread: usize| task(thread, num_threads);
        self.fork(&task);
        let own = catch_unwind(AssertUnwindSafe(|| task(0)));
        self.join();
        let shared = &self.workers.shared;
        let theirs = shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        shared.busy.store(false, Ordering::Release);
        if let Some(payload) = own.err().or(theirs) {
            resume_unwind(payload);
        }
    }

    /// Splits `0..tasks` into runs of at most `chunk` that threads take as they become free, shorter ones towards the
    /// end, so that all finish at about the same time. For work whose parts may take different times, or on a machine
    /// that is busy with other things.
    pub fn for_each_chunk(&self, tasks: usize, chunk: usize, body: impl Fn(Range<usize>) + Sync) {
        let chunk = chunk.max(1);
        if tasks == 0 {
            return;
        }
        if self.num_threads() == 1 || tasks <= chunk {
            return body(0..tasks);
        }
        let next = Padded(AtomicUsize::new(0));
        self.run(|_, num_threads| {
            loop {
                let run = |start: usize| ((tasks - start) / (2 * num_threads)).clamp(1, chunk);
                let take = |start: usize| (start < tasks).then(|| start + run(start));
                let Ok(start) = next.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take) else { return };
                body(start..start + run(start));
            }
        });
    }

    /// Splits `0..tasks` evenly, one run a thread, when there are at least `min` tasks for each of two threads; else
    /// runs all of them here. For uniform work too short to share out piece by piece.
    pub fn for_each_static(&self, tasks: usize, min: usize, body: impl Fn(Range<usize>) + Sync) {
        if tasks == 0 {
            return;
        }
        if self.num_threads() == 1 || tasks < 2 * min.max(1) {
            return body(0..tasks);
        }
        self.run(|thread, num_threads| {
            let range = even_split(tasks, num_threads, thread);
            if !range.is_empty() {
                body(range);
            }
        });
    }

    fn fork(&self, task: &(dyn Fn(usize) + Sync)) {
        let shared = &*self.workers.shared;
        // Another pool of these threads may be at work, on another thread.
        while shared.busy.swap(true, Ordering::Acquire) {
            std::thread::yield_now();
        }
        // SAFETY: only the lifetime changes. `run` does not return before `join` has seen every worker finish, so no
        // worker follows the pointer after the closure is gone.
        let task = unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), Task>(task) };
        // SAFETY: `running` is zero between forks, so no worker reads `task` now, and `busy` is ours, so no other caller
        // writes it.
        unsafe { *shared.task.get() = Some(task) };
        shared.running.0.store(self.workers.threads.len(), Ordering::Relaxed);
        // Sequentially consistent with a worker's `sleepers` increment and its last look at `epoch`: either it sees
        // the new epoch or we see it asleep.
        shared.epoch.0.fetch_add(1, Ordering::SeqCst);
        if shared.sleepers.load(Ordering::SeqCst) > 0 {
            let _guard = shared.lock.lock().unwrap_or_else(PoisonError::into_inner);
            shared.wake.notify_all();
        }
    }

    fn join(&self) {
        let running = &self.workers.shared.running.0;
        let mut spins = 0u32;
        while running.load(Ordering::Acquire) != 0 {
            spins += 1;
            // Workers are computing; yield only when one may have lost its core to another process.
            if spins < 20_000 {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.epoch.0.fetch_add(1, Ordering::SeqCst);
        {
            let _guard = self.shared.lock.lock().unwrap_or_else(PoisonError::into_inner);
            self.shared.wake.notify_all();
        }
        for worker in self.threads.drain(..) {
            // A worker catches its task's panics, so it ends by returning.
            let _ = worker.join();
        }
    }
}

/// A worker's life: wait for the next fork, run it, say so.
fn work(shared: &Shared, thread: usize) {
    let mut seen = 0;
    loop {
        wait_for_change(shared, seen);
        seen += 1;
        if shared.stop.load(Ordering::SeqCst) {
            return;
        }
        // SAFETY: the epoch moved (acquire), so the caller's write of `task` is visible, and it will not be written
        // again before this worker decrements `running`.
        let task = unsafe { (*shared.task.get()).expect("a fork has a task") };
        // SAFETY: the caller waits in `join` until `running` is zero, so the closure is alive.
        let task = unsafe { &*task };
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| task(thread))) {
            *shared.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(payload);
        }
        shared.running.0.fetch_sub(1, Ordering::Release);
    }
}

fn wait_for_change(shared: &Shared, seen: usize) {
    let changed = || shared.epoch.0.load(Ordering::Acquire) != seen;
    let start = Instant::now();
    loop {
        for _ in 0..64 {
            if changed() {
                return;
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
    let mut guard = shared.lock.lock().unwrap_or_else(PoisonError::into_inner);
    shared.sleepers.fetch_add(1, Ordering::SeqCst);
    while shared.epoch.0.load(Ordering::SeqCst) == seen {
        guard = shared.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
    }
    shared.sleepers.fetch_sub(1, Ordering::SeqCst);
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

// SAFETY: access goes through `part`, whose callers promise that no two live parts overlap; that is sending disjoint
// `&mut [T]` to other threads.
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
        // SAFETY: the range lies inside the slice borrowed by `new`, and the caller keeps parts apart.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(range.start), range.len()) }
    }

    /// The start of the slice, for kernels that write strided tiles. Writing keeps to the rule of [`Disjoint::part`].
    pub fn as_ptr(&self) -> *mut T {
        self.ptr
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_exactly_once() {
        for threads in [1, 2, 3, 5] {
            let pool = Pool::new(threads).unwrap();
            for tasks in [0, 1, 2, 3, 17, 100] {
                for chunk in [1, 2, 7, 1000] {
                    let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                    let count = |range: Range<usize>| {
                        for task in range {
                            counts[task].fetch_add(1, Ordering::Relaxed);
                        }
                    };
                    pool.for_each_chunk(tasks, chunk, count);
                    pool.for_each_static(tasks, chunk, count);
                    assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 2));
                }
            }
        }
    }

    #[test]
    fn every_thread_takes_part_also_after_sleep() {
        let pool = Pool::new(3).unwrap();
        for round in 0..50 {
            if round % 10 == 9 {
                // Long enough for the workers to fall asleep; nothing depends on whether they do.
                std::thread::sleep(SPIN + YIELD * 4);
            }
            let seen: Vec<AtomicBool> = (0..3).map(|_| AtomicBool::new(false)).collect();
            pool.run(|thread, num_threads| {
                assert_eq!(num_threads, 3);
                assert!(!seen[thread].swap(true, Ordering::Relaxed));
            });
            assert!(seen.iter().all(|seen| seen.load(Ordering::Relaxed)));
        }
    }

    #[test]
    fn pools_of_the_same_threads_take_turns() {
        let first = Pool::new(3).unwrap();
        let second = first.beside();
        let (counts, inside) = ([AtomicUsize::new(0), AtomicUsize::new(0)], AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for (number, pool) in [first, second].into_iter().enumerate() {
                let (counts, inside) = (&counts, &inside);
                scope.spawn(move || {
                    for _ in 0..200 {
                        pool.run(|_, num_threads| {
                            // All who are inside belong to one of the two.
                            let who = if number == 0 { 1 } else { 1 << 16 };
                            let before = inside.fetch_add(who, Ordering::SeqCst);
                            assert!(if number == 0 { before >> 16 == 0 } else { before & 0xffff == 0 });
                            counts[number].fetch_add(1, Ordering::Relaxed);
                            inside.fetch_sub(who, Ordering::SeqCst);
                            assert_eq!(num_threads, 3);
                        });
                    }
                });
            }
        });
        assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 600));
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_survives() {
        let pool = Pool::new(2).unwrap();
        for culprit in [0, 1] {
            let result = catch_unwind(AssertUnwindSafe(|| {
                pool.run(|thread, _| assert_ne!(thread, culprit, "planted"));
            }));
            let payload = result.unwrap_err();
            assert!(payload.downcast_ref::<String>().unwrap().contains("planted"));
            let count = AtomicUsize::new(0);
            pool.run(|_, _| {
                count.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(count.load(Ordering::Relaxed), 2);
        }
    }

    #[test]
    fn even_split_covers_everything_once() {
        for total in 0..20 {
            for parts in 1..6 {
                let all: Vec<usize> = (0..parts).flat_map(|part| even_split(total, parts, part)).collect();
                assert_eq!(all, (0..total).collect::<Vec<_>>());
            }
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn an_idle_pool_uses_no_processor_time() {
        let cpu_time = || {
            let mut usage = libc::timespec { tv_sec: 0, tv_nsec: 0 };
            // SAFETY: the clock id is valid and the pointer is to a live timespec.
            unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut usage) };
            Duration::new(usage.tv_sec as u64, usage.tv_nsec as u32)
        };
        let pool = Pool::new(2).unwrap();
        let times: Vec<Mutex<Duration>> = (0..2).map(|_| Mutex::new(Duration::ZERO)).collect();
        let sample = || {
            pool.run(|thread, _| *times[thread].lock().unwrap() = cpu_time());
            *times[1].lock().unwrap()
        };
        let before = sample();
        std::thread::sleep(Duration::from_millis(200));
        let used = sample() - before;
        assert!(used < Duration::from_millis(50), "an idle worker used {used:?} of 200 ms");
    }
}
