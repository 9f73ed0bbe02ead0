//! Many seeds on some threads, with counts of what they exercised and the failed seeds.

use std::{
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use crate::{
    coverage::Coverage,
    hash,
    invariants::Violation,
    perturb::Perturb,
    scenario::Scenario,
    world::{Mode, play},
};

#[derive(Clone, Debug)]
pub struct Sweep {
    pub first_seed: u64,
    pub seeds: u64,
    /// Ticks of each run; most of them are steps.
    pub steps: u64,
    pub threads: usize,
    /// Flip one table entry in this number.
    pub perturb: Option<usize>,
    pub stop_at_first: bool,
    /// No new seed begins after this time.
    pub at_most: Option<Duration>,
}

#[derive(Clone, Debug, Default)]
pub struct Report {
    pub seeds: u64,
    pub coverage: Coverage,
    /// Failed seeds with their violations, in order of seeds.
    pub failures: Vec<(u64, Violation)>,
    /// Hash of all runs' traces.
    pub trace: u64,
    pub elapsed: Duration,
    pub perturbed: Perturbed,
}

/// Runs by the effect of their flips, and whether the run failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Perturbed {
    pub flips: u64,
    pub effective_flips: u64,
    /// Runs in which a row read through a wrong entry, and those of them that were caught.
    pub effective_runs: u64,
    pub caught: u64,
    /// Number of runs with such a read that were not caught.
    pub missed: u64,
}

impl Sweep {
    pub fn mode(&self, seed: u64) -> Mode {
        Mode { spoken: false, perturb: self.perturb.map(|one_in| Perturb::chance(hash::mix(seed, 0xf11b), one_in)) }
    }

    pub fn run(&self) -> Report {
        let start = Instant::now();
        let next = AtomicU64::new(0);
        let stop = AtomicBool::new(false);
        let report = Mutex::new(Report::default());
        std::thread::scope(|scope| {
            for _ in 0..self.threads.max(1) {
                scope.spawn(|| {
                    let mut part = Report::default();
                    while !stop.load(Ordering::Relaxed) {
                        let index = next.fetch_add(1, Ordering::Relaxed);
                        if index >= self.seeds || self.at_most.is_some_and(|most| start.elapsed() > most) {
                            break;
                        }
                        let failed = self.run_seed(self.first_seed + index, &mut part);
                        if failed && self.stop_at_first {
                            stop.store(true, Ordering::Relaxed);
                        }
                    }
                    report.lock().expect("no thread panics").merge(part);
                });
            }
        });
        let mut report = report.into_inner().expect("no thread panics");
        report.failures.sort_by_key(|(seed, _)| *seed);
        report.elapsed = start.elapsed();
        report
    }

    fn run_seed(&self, seed: u64, part: &mut Report) -> bool {
        let outcome = play(&Scenario::random(seed, self.steps), self.mode(seed));
        part.seeds += 1;
        part.coverage.add(&outcome.coverage);
        // A sum, so that the order in which threads finish does not matter.
        part.trace = part.trace.wrapping_add(hash::mix(seed, outcome.trace));
        let failed = outcome.violation.is_some();
        if outcome.effective_flips > 0 {
            part.perturbed.effective_runs += 1;
            part.perturbed.caught += u64::from(failed);
            part.perturbed.missed += u64::from(!failed);
        }
        part.perturbed.flips += outcome.flips;
        part.perturbed.effective_flips += outcome.effective_flips;
        part.failures.extend(outcome.violation.map(|violation| (seed, violation)));
        failed
    }
}

impl Report {
    fn merge(&mut self, other: Report) {
        self.seeds += other.seeds;
        self.coverage.add(&other.coverage);
        self.failures.extend(other.failures);
        self.trace = self.trace.wrapping_add(other.trace);
        let (mine, theirs) = (&mut self.perturbed, other.perturbed);
        mine.flips += theirs.flips;
        mine.effective_flips += theirs.effective_flips;
        mine.effective_runs += theirs.effective_runs;
        mine.caught += theirs.caught;
        mine.missed += theirs.missed;
    }

    pub fn steps_per_second(&self) -> f64 {
        self.coverage.steps as f64 / self.elapsed.as_secs_f64()
    }

    /// The figures as text.
    pub fn table(&self) -> String {
        let rate = self.steps_per_second();
        let seconds = self.elapsed.as_secs_f64();
        let mut text = format!(
            "{} seeds, {} steps in {seconds:.1} s: {rate:.0} steps/s, {} violations, trace {:016x}\n",
            self.seeds,
            self.coverage.steps,
            self.failures.len(),
            self.trace
        );
        for row in self.coverage.rows().chunks(4) {
            let cells: Vec<String> = row.iter().map(|(name, count)| format!("{name:>19} {count:<10}")).collect();
            text.push_str(cells.concat().trim_end());
            text.push('\n');
        }
        text
    }
}
