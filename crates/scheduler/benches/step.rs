//! The cost of planning: one `schedule` and its `commit` for many decoding requests.
//!
//! Contexts start at 512 tokens and grow by one a step. Before they have doubled, a new scheduler
//! is made, outside the measured time. The rate in elements is requests a second: it is the same
//! for every size if a step's cost grows linearly.

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use folio_scheduler::{NewRequest, RequestId, RowResult, Scheduler, SchedulerConfig, StepPlan};

const PROMPT: usize = 512;
const STEPS: usize = 384;

#[derive(Clone, Copy)]
struct Case {
    running: usize,
    waiting: usize,
    prefix_caching: bool,
}

/// A scheduler with all running requests past their prompts.
struct Bench {
    scheduler: Scheduler,
    now: u64,
    steps_left: usize,
}

impl Bench {
    fn new(case: Case) -> Self {
        let max_len = PROMPT + STEPS + 2;
        let blocks = (case.running + 1) * max_len.div_ceil(16);
        let config = SchedulerConfig {
            budget_tokens: 16_384,
            max_seqs: case.running,
            prefix_caching: case.prefix_caching,
            ..SchedulerConfig::new(vec![blocks])
        };
        let mut scheduler = Scheduler::new(config).expect("a sound configuration");
        for id in 0..(case.running + case.waiting) as u64 {
            // No two prompts share a block.
            let prompt = (0..PROMPT as u64).map(|i| (id * 40_503 + i * 7) as u32 % 32_000).collect();
            scheduler.add(NewRequest::new(RequestId(id), prompt, max_len), 0).expect("the request is sound");
        }
        let mut bench = Self { scheduler, now: 0, steps_left: STEPS };
        while bench.step().num_rows() != case.running {}
        assert_eq!(bench.scheduler.stats().running, case.running);
        bench
    }

    fn step(&mut self) -> StepPlan {
        self.now += 1_000_000;
        let plan = self.scheduler.schedule(self.now);
        let result = |a: &folio_scheduler::Assignment| RowResult {
            id: a.id,
            accepted: Vec::new(),
            token: a.samples.then_some((a.first as u32).wrapping_mul(31) % 32_000),
        };
        let results: Vec<RowResult> = plan.assignments.iter().map(result).collect();
        self.scheduler.commit(&results, 1_000_000);
        plan
    }
}

/// Runs measured steps, and makes schedulers outside the measured time.
fn run(case: Case, kept: &mut Option<Bench>, iterations: u64) -> Duration {
    let mut took = Duration::ZERO;
    let mut left = iterations;
    while left > 0 {
        let bench = match kept {
            Some(bench) if bench.steps_left > 0 => bench,
            _ => kept.insert(Bench::new(case)),
        };
        let steps = left.min(bench.steps_left as u64);
        let start = Instant::now();
        for _ in 0..steps {
            black_box(bench.step());
        }
        took += start.elapsed();
        bench.steps_left -= steps as usize;
        left -= steps;
    }
    took
}

fn step(c: &mut Criterion) {
    let mut group = c.benchmark_group("step");
    group.sample_size(20).warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2));
    let mut bench = |name: &str, case: Case| {
        group.throughput(Throughput::Elements(case.running as u64));
        let mut kept = None;
        group.bench_function(BenchmarkId::new(name, case.running), |b| {
            b.iter_custom(|iterations| run(case, &mut kept, iterations));
        });
    };
    for running in [128, 256, 512, 1024, 2048] {
        bench("decode", Case { running, waiting: 0, prefix_caching: true });
    }
    bench("decode, 4096 waiting", Case { running: 1024, waiting: 4096, prefix_caching: true });
    bench("decode, no prefix cache", Case { running: 1024, waiting: 0, prefix_caching: false });
    group.finish();
}

criterion_group!(benches, step);
criterion_main!(benches);
