use std::sync::Barrier;

use super::*;

/// Pools with this machine's own memory nodes, and with two.
const MAKE: [fn(usize) -> Result<Pool>; 2] = [Pool::new, Pool::on_two_nodes];

#[test]
fn every_task_runs_exactly_once() {
    for (threads, make) in [1, 2, 3, 5].into_iter().flat_map(|threads| MAKE.map(|make| (threads, make))) {
        let pool = make(threads).unwrap();
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
                pool.for_each_run(tasks, chunk, 3, |_, range| {
                    assert!(range.start.is_multiple_of(3), "{range:?} of {tasks}");
                    assert!(range.len().is_multiple_of(3) || range.end == tasks, "{range:?} of {tasks}");
                    count(range);
                });
                pool.for_each_on_node(0..tasks, tasks, |task| count(task..task + 1));
                assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 4));
            }
        }
    }
}

#[test]
fn every_operation_beats_and_so_does_every_part_of_a_long_one() {
    for (threads, make) in [1, 3].into_iter().flat_map(|threads| MAKE.map(|make| (threads, make))) {
        let pool = make(threads).unwrap();
        let operations: [&dyn Fn(); 5] = [
            &|| pool.run(|_, _| ()),
            &|| pool.for_each_chunk(9, 1, |_| ()),
            &|| pool.for_each_static(9, 1, |_| ()),
            &|| pool.for_each_static(9, 100, |_| ()),
            &|| pool.for_each_run(9, 1, 1, |_, _| ()),
        ];
        for (number, operation) in operations.into_iter().enumerate() {
            assert!(!pool.pulse().take());
            operation();
            assert!(pool.pulse().take(), "operation {number} of {threads} threads");
        }
        if threads > 1 {
            // A thread that is done with a part beats again before it begins the next.
            let beats = [const { AtomicUsize::new(0) }; 2];
            let pulse = pool.pulse().clone();
            let ask = |beats: &AtomicUsize| _ = beats.fetch_add(usize::from(pulse.take()), Ordering::Relaxed);
            pool.for_each_chunk(9, 1, |_| ask(&beats[0]));
            pool.for_each_run(9, 1, 1, |_, _| ask(&beats[1]));
            assert!(beats.iter().all(|beats| beats.load(Ordering::Relaxed) >= 3), "{beats:?}");
        }
    }
}

#[test]
fn a_range_of_tasks_runs_exactly_once_on_memory_nodes() {
    for threads in [2, 3, 20] {
        let pool = Pool::on_two_nodes(threads).unwrap();
        for (tasks, total) in [(0..50, 50), (7..7, 50), (0..3, 50), (10..40, 50), (49..50, 50), (1..3, 3), (0..0, 0)] {
            let counts: Vec<AtomicUsize> = (0..total).map(|_| AtomicUsize::new(0)).collect();
            pool.for_each_on_node(tasks.clone(), total, |task| _ = counts[task].fetch_add(1, Ordering::Relaxed));
            for (task, count) in counts.iter().enumerate() {
                assert_eq!(count.load(Ordering::Relaxed), usize::from(tasks.contains(&task)), "{task} of {tasks:?}");
            }
        }
    }
}

#[test]
fn tasks_run_on_the_node_that_will_have_them_in_a_stretch() {
    let pool = Pool::on_two_nodes(2).unwrap();
    for (tasks, total) in [(0..2, 2), (1..3, 4), (49..51, 100)] {
        // Neither thread ends its task before the other has begun, so neither can take both.
        let both = Barrier::new(2);
        pool.for_each_on_node(tasks.clone(), total, |task| {
            both.wait();
            let by_worker = std::thread::current().name() == Some("folio-cpu-1");
            assert_eq!(by_worker, task != tasks.start, "{task} of {tasks:?}");
        });
    }
}

#[test]
fn workers_keep_to_their_memory_node() {
    let pool = Pool::on_two_nodes(5).unwrap();
    let nodes = &pool.workers.shared.nodes;
    assert_eq!(nodes.iter().map(|node| node.threads.clone()).collect::<Vec<_>>(), [0..3, 3..5]);
    run_on_all(&pool, |part| {
        let node = nodes.iter().find(|node| node.threads.contains(&part)).unwrap();
        assert!(part == 0 || topology::testing::is_held(node) != Some(false), "thread {part}");
    });
}

#[test]
fn threads_begin_where_their_stretch_does_and_neighbours_with_neighbours() {
    for num_threads in [1, 2, 5, 16, 17, 24, 40, 64] {
        for tasks in [1000, 1003] {
            let first = |thread: usize| Stretches::new(tasks, num_threads, 1).take(thread).unwrap().start;
            let starts: Vec<usize> = (0..num_threads).map(first).collect();
            let told = |thread: usize| stretches::start_of(thread, num_threads, tasks);
            assert_eq!(starts, (0..num_threads).map(told).collect::<Vec<_>>());
            assert!(starts[0] == 0 && starts.is_sorted(), "{num_threads} threads: {starts:?}");
        }
    }
}

/// Runs each part on the thread of its number: none of them ends before all have begun.
fn run_on_all(pool: &Pool, task: impl Fn(usize) + Sync) {
    let all = Barrier::new(pool.num_threads());
    pool.run(|part, _| {
        all.wait();
        task(part);
    });
}

#[test]
fn threads_prefer_the_part_of_their_number_also_after_sleep() {
    let pool = Pool::new(3).unwrap();
    for round in 0..50 {
        if round % 10 == 9 {
            // Long enough for the workers to fall asleep; nothing depends on whether they do.
            std::thread::sleep(SPIN + YIELD * 4);
        }
        run_on_all(&pool, |part| {
            let thread = std::thread::current();
            assert!(part == 0 || thread.name() == Some(&format!("folio-cpu-{part}")), "part {part} on {thread:?}");
        });
    }
}

/// The pool with its workers asleep and not woken by forks: to its caller the same as workers that
/// get no core.
fn stranded(pool: Pool) -> Pool {
    let shared = &pool.workers.shared;
    while shared.sleepers.load(Ordering::Relaxed) < pool.num_threads() - 1 {
        std::thread::yield_now();
    }
    drop(shared.lock());
    shared.sleepers.store(0, Ordering::Relaxed);
    pool
}

#[test]
fn workers_that_do_not_come_hold_nobody_up() {
    for make in MAKE {
        let pool = stranded(make(3).unwrap());
        let count = AtomicUsize::new(0);
        let body = |range: Range<usize>| _ = count.fetch_add(range.len(), Ordering::Relaxed);
        for _ in 0..20 {
            pool.for_each_chunk(10, 1, body);
            pool.for_each_static(10, 1, body);
            pool.for_each_on_node(5..15, 20, |task| body(task..task + 1));
        }
        assert_eq!(count.load(Ordering::Relaxed), 600);
        // The workers return many forks later.
        pool.workers.shared.sleepers.store(1, Ordering::Relaxed);
        run_on_all(&pool, |_| ());
    }
}

#[test]
fn a_fork_is_closed_to_the_late_once_it_is_joined() {
    let pool = stranded(Pool::new(2).unwrap());
    let shared = &pool.workers.shared;
    // Worker 1 sleeps, and this test plays its part.
    let leave = |fork: u64| shared.seats[1].0.inside.store(fork + 1, Ordering::Release);
    let mut over = Vec::new();
    for comes in [true, false, false, true] {
        let fork = pool.fork(&|_, _| ());
        if comes {
            assert!(shared.enter(1, fork));
            leave(fork);
        } else {
            // A worker that has left does not come again; this one does.
            over.push(fork);
        }
        pool.join(fork);
        shared.busy.store(false, Ordering::Release);
        for late in &over {
            assert!(!shared.enter(1, *late));
            leave(*late);
        }
    }
}

#[test]
fn a_panic_reaches_the_caller_after_all_who_have_begun_and_the_pool_survives() {
    let pool = Pool::new(3).unwrap();
    for culprit in 0..4 {
        let done = AtomicUsize::new(0);
        let result = catch_unwind(AssertUnwindSafe(|| {
            run_on_all(&pool, |part| {
                assert_ne!(part, culprit, "planted");
                std::thread::sleep(Duration::from_millis(2 * part as u64));
                done.fetch_add(1, Ordering::Relaxed);
            });
        }));
        assert_eq!(result.is_err(), culprit < 3);
        assert_eq!(done.load(Ordering::Relaxed), if culprit < 3 { 2 } else { 3 });
    }
}

/// Yields or sleeps at points that differ from fork to fork.
fn dawdle(seed: usize) {
    let mixed = (seed as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    if mixed.is_multiple_of(400) {
        std::thread::sleep(SPIN + YIELD * 2);
    } else if mixed.is_multiple_of(5) {
        std::thread::yield_now();
    }
}

#[test]
fn pools_of_the_same_threads_take_turns_and_nobody_touches_a_fork_that_is_over() {
    const PARTS: usize = 6;
    let inside = AtomicUsize::new(0);
    for threads in [2, 4] {
        let pool = Pool::new(threads).unwrap();
        std::thread::scope(|scope| {
            for caller in 0..3 {
                let (pool, inside) = (pool.beside(), &inside);
                scope.spawn(move || {
                    // It outlives all forks, so that a late read of it is a failed assertion and
                    // nothing worse.
                    let current = AtomicUsize::new(0);
                    let counts = [const { AtomicUsize::new(0) }; PARTS];
                    for number in 1..=150 {
                        current.store(number, Ordering::Relaxed);
                        let visit = |seed: usize| {
                            let own = 1 << (16 * caller);
                            let others = inside.fetch_add(own, Ordering::SeqCst) & !(own * 0xffff);
                            assert_eq!((current.load(Ordering::Relaxed), others), (number, 0));
                            dawdle(number * 100 + seed * 10 + caller);
                            inside.fetch_sub(own, Ordering::SeqCst);
                            assert_eq!(current.load(Ordering::Relaxed), number);
                        };
                        let body = |range: Range<usize>| {
                            visit(range.start);
                            for part in range {
                                counts[part].fetch_add(1, Ordering::Relaxed);
                            }
                        };
                        pool.for_each_static(PARTS, 1, body);
                        pool.for_each_chunk(PARTS, 1, body);
                        pool.share(&|thread, _| visit(thread));
                        current.store(0, Ordering::Relaxed);
                        assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 2 * number), "{counts:?}");
                        dawdle(number * 10 + caller);
                    }
                });
            }
        });
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
        run_on_all(&pool, |part| *times[part].lock().unwrap() = cpu_time());
        *times[1].lock().unwrap()
    };
    let before = sample();
    std::thread::sleep(Duration::from_millis(200));
    let used = sample() - before;
    assert!(used < Duration::from_millis(50), "an idle worker used {used:?} of 200 ms");
}
