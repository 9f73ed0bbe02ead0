//! CPU time by what threads are for, told apart by their names, as the kernel counts it.

use std::collections::HashMap;
use std::path::Path;

use anyhow::{Context, Result};

use super::SERVER_THREAD;

/// The purpose of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The server's: connections, requests, events, prompts.
    Server,
    Log,
    /// The main thread, which reads the engine's streams or the sockets.
    Reader,
    Engine,
    /// Also counts waiting for the next operation, where that is done without sleeping.
    Compute,
    Other,
}

impl Part {
    pub const ALL: [Self; 6] = [Self::Server, Self::Log, Self::Reader, Self::Engine, Self::Compute, Self::Other];

    pub fn name(self) -> &'static str {
        match self {
            Self::Server => "server",
            Self::Log => "log",
            Self::Reader => "reader",
            Self::Engine => "engine",
            Self::Compute => "compute",
            Self::Other => "other",
        }
    }

    fn of(thread: u32, name: &str) -> Self {
        match name {
            _ if thread == std::process::id() => Self::Reader,
            SERVER_THREAD => Self::Server,
            "folio-log" => Self::Log,
            "folio-engine" => Self::Engine,
            "folio-executor" => Self::Compute,
            name if name.starts_with("folio-cpu") => Self::Compute,
            _ => Self::Other,
        }
    }
}

/// Nanoseconds of each part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuTime([u64; Part::ALL.len()]);

impl CpuTime {
    #[cfg(test)]
    pub fn of(nanoseconds: [u64; Part::ALL.len()]) -> Self {
        Self(nanoseconds)
    }

    pub fn nanoseconds(&self, part: Part) -> u64 {
        self.0[part as usize]
    }

    pub fn add(&mut self, other: &Self) {
        self.0.iter_mut().zip(other.0).for_each(|(sum, part)| *sum += part);
    }
}

/// CPU time of every thread up to one moment.
pub struct Snapshot(HashMap<u32, (Part, u64)>);

impl Snapshot {
    pub fn take() -> Result<Self> {
        let tasks = std::fs::read_dir("/proc/self/task").context("this system does not tell of threads' CPU time")?;
        let mut threads = HashMap::new();
        for task in tasks {
            let task = task?;
            let Some(thread) = task.file_name().to_str().and_then(|id| id.parse().ok()) else { continue };
            // A thread may end between being listed and being read.
            if let Some((part, time)) = read(thread, &task.path()) {
                threads.insert(thread, (part, time));
            }
        }
        anyhow::ensure!(!threads.is_empty(), "this system does not tell of threads' CPU time");
        Ok(Self(threads))
    }

    /// CPU time since then, without threads that have ended.
    pub fn since(&self, earlier: &Self) -> CpuTime {
        let mut sum = CpuTime::default();
        for (thread, (part, time)) in &self.0 {
            let before = earlier.0.get(thread).map_or(0, |(_, time)| *time);
            sum.0[*part as usize] += time.saturating_sub(before);
        }
        sum
    }
}

fn read(thread: u32, task: &Path) -> Option<(Part, u64)> {
    let name = std::fs::read_to_string(task.join("comm")).ok()?;
    // Running, waiting to run, and how often: the first two in nanoseconds.
    let times = std::fs::read_to_string(task.join("schedstat")).ok()?;
    Some((Part::of(thread, name.trim_end()), times.split_whitespace().next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_by_name() {
        for (name, part) in [
            ("http-server", Part::Server),
            ("folio-log", Part::Log),
            ("folio-engine", Part::Engine),
            ("folio-executor", Part::Compute),
            ("folio-cpu-13", Part::Compute),
            ("else", Part::Other),
        ] {
            assert_eq!(Part::of(0, name), part, "{name}");
        }
        assert_eq!(Part::of(std::process::id(), "folio"), Part::Reader);
        assert!(Part::ALL.iter().enumerate().all(|(index, part)| *part as usize == index));
        // The kernel keeps so much of a name.
        assert!(SERVER_THREAD.len() <= 15);
    }

    #[test]
    fn differences_count_new_threads_whole() {
        let snapshot = |threads: &[(u32, Part, u64)]| {
            Snapshot(threads.iter().map(|&(thread, part, time)| (thread, (part, time))).collect())
        };
        let before = snapshot(&[(1, Part::Reader, 10), (2, Part::Server, 20), (9, Part::Other, 5)]);
        let after = snapshot(&[(1, Part::Reader, 14), (2, Part::Server, 25), (3, Part::Server, 7)]);
        let mut sum = after.since(&before);
        assert_eq!(Part::ALL.map(|part| sum.nanoseconds(part)), [12, 0, 4, 0, 0, 0]);
        sum.add(&sum.clone());
        assert_eq!(sum.nanoseconds(Part::Server), 24);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_thread_s_work_is_seen_under_its_name() {
        let (go, start) = std::sync::mpsc::channel::<()>();
        let (done, finished) = std::sync::mpsc::channel::<u64>();
        let thread = std::thread::Builder::new().name(SERVER_THREAD.into()).spawn(move || {
            start.recv().expect("told to start");
            let sum = (0..3_000_000u64).fold(0, |sum, value| std::hint::black_box(sum ^ value));
            done.send(sum).expect("somebody waits");
            // Lives until its time has been read.
            start.recv().expect_err("told to end by hanging up");
        });
        let before = Snapshot::take().expect("threads are told of");
        go.send(()).expect("it waits");
        finished.recv().expect("it works");
        let took = Snapshot::take().expect("threads are told of").since(&before);
        drop(go);
        thread.expect("a thread").join().expect("it ends");
        assert!(took.nanoseconds(Part::Server) > 100_000, "{took:?}");
    }
}
