//! A request's tokens and logprobs are the same, bit for bit, however it is run: alone, in a batch,
//! in chunks, after preemption, from the prefix cache or the host tier, with steps that overlap or
//! not, with any number of threads.

mod cuda;
mod embeddings;
mod harness;
mod holes;
mod load;
mod lost;
mod restart;
mod sharing;
mod tiny;

use std::{
    path::Path,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use folio_device::{Backend, KvFormat};
use folio_engine::{Engine, EngineConfig, Event, FinishReason, SamplingParams};
use folio_model::OpenModel;
use harness::{Answer, Bench, Tamper, read, submit};

/// The compared requests: greedy and sampled, short and long, around the end of a block.
struct Probes {
    lengths: &'static [usize],
    num_tokens: usize,
}

const TINY: Probes = Probes { lengths: &[1, 16, 17, 70], num_tokens: 12 };
const TRAINED: Probes = Probes { lengths: &[33, 70], num_tokens: 8 };

impl Probes {
    fn params(&self, index: usize) -> SamplingParams {
        let base = SamplingParams {
            max_tokens: self.num_tokens,
            temperature: 0.0,
            logprobs: Some(4),
            prompt_logprobs: Some(2),
            ignore_eos: true,
            ..SamplingParams::default()
        };
        if index.is_multiple_of(2) {
            return base;
        }
        // The sampler's state must survive preemption too.
        let (temperature, top_p, seed) = (0.9, 0.95, index as u64);
        let (repetition_penalty, frequency_penalty, presence_penalty) = (1.1, 0.2, 0.1);
        SamplingParams { temperature, top_p, seed, repetition_penalty, frequency_penalty, presence_penalty, ..base }
    }

    /// Each alone, one after the other.
    fn alone<B: Backend>(&self, bench: &Bench<B>) -> Vec<Answer> {
        let engine = bench.start(bench.config());
        let run =
            |(index, &len): (usize, &usize)| read(submit(&engine, bench.prompt(index as u64, len), self.params(index)));
        let answers = self.lengths.iter().enumerate().map(run).collect();
        engine.shutdown();
        answers
    }

    /// All at once, among as many others as may run.
    fn together<B: Backend>(&self, bench: &Bench<B>, config: EngineConfig, num_others: usize) -> (Vec<Answer>, u64) {
        self.on(bench, &bench.start(config), num_others)
    }

    fn on<B: Backend>(&self, bench: &Bench<B>, engine: &Engine, num_others: usize) -> (Vec<Answer>, u64) {
        let other = |i: usize| {
            let params = SamplingParams { prompt_logprobs: None, ..self.params(i) };
            submit(engine, bench.prompt(100 + i as u64, 3 + i % 21), params)
        };
        let before: Vec<_> = (0..num_others / 2).map(other).collect();
        let probe =
            |(index, &len): (usize, &usize)| submit(engine, bench.prompt(index as u64, len), self.params(index));
        let probes: Vec<_> = self.lengths.iter().enumerate().map(probe).collect();
        let after: Vec<_> = (num_others / 2..num_others).map(other).collect();
        let answers = probes.into_iter().map(read).collect();
        before.into_iter().chain(after).for_each(|stream| drop(read(stream)));
        (answers, engine.stats().scheduler.preemptions)
    }
}

/// Thread pools that spin side by side slow each other down.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn take_turn() -> MutexGuard<'static, ()> {
    ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner)
}

fn check(name: &str, model: &OpenModel, probes: &Probes) {
    check_in(KvFormat::BF16, name, model, probes);
}

fn check_in(format: KvFormat, name: &str, model: &OpenModel, probes: &Probes) {
    let _turn = take_turn();
    let expected = probes.alone(&Bench::in_format(model, 1, format));
    for threads in 1..=3 {
        let bench = Bench::in_format(model, threads, format);
        check_ways(&format!("{name} on {threads} threads"), &bench, probes, &expected);
    }
}

/// Compares every way to run the probes with the answers alone.
fn check_ways<B: Backend>(name: &str, bench: &Bench<B>, probes: &Probes, expected: &[Answer]) {
    assert!(expected.iter().all(|a| a.tokens.len() == probes.num_tokens && a.logprobs.len() == probes.num_tokens));
    assert!(expected.iter().zip(probes.lengths).all(|(a, len)| a.prompt_logprobs.len() == len - 1));
    let same = |found: &[Answer], how: &str| {
        assert!(found == expected, "{name}: {how} gives another answer than alone");
    };
    same(&probes.alone(bench), "alone");
    let others = bench.max_seqs() - probes.lengths.len();
    same(&probes.together(bench, bench.config(), others).0, &format!("in a batch of {}", bench.max_seqs()));
    let config = EngineConfig { overlap: false, ..bench.config() };
    same(&probes.together(bench, config, others).0, "without overlap");
    for chunk in [1, 7, 64, 512] {
        let config = EngineConfig { max_chunk: Some(chunk), ..bench.config() };
        same(&probes.together(bench, config, 0).0, &format!("in chunks of {chunk}"));
    }
    for prefix_caching in [false, true] {
        let config = EngineConfig { force_preempt_every: Some(3), prefix_caching, ..bench.config() };
        let (found, preemptions) = probes.together(bench, config, 3);
        assert!(preemptions >= 2, "{preemptions} preemptions");
        // A preempted request finds its own blocks, which is no hit of its first run.
        same(&found, "after forced preemption");
    }
    sharing::check_host_swap(name, bench);
    sharing::check_prefix_hits(name, bench, probes.num_tokens / 2);
    sharing::check_samples(name, bench, probes.num_tokens / 2);
}

#[test]
fn tiny_model_with_two_block_tables() {
    check("tiny alternating", &tiny::alternating(), &TINY);
}

/// Codes and scales stay with their blocks: through prefix hits, preemption, samples, the host
/// tier.
#[test]
fn coded_keys_and_values() {
    for format in [KvFormat::Int8, KvFormat::Int4] {
        check_in(format, &format!("tiny alternating in {}", format.name()), &tiny::alternating(), &TINY);
    }
}

#[test]
fn tiny_model_with_experts() {
    check("tiny experts", &tiny::experts(), &TINY);
}

/// Steps of a CPU signal progress while they run, and an engine at rest does not. The engine takes
/// signals too, at moments of its own, so this test looks all the time, at one engine after another
/// until it has seen one.
#[test]
fn steps_on_a_cpu_tell_that_they_get_on() {
    let bench = Bench::new(&tiny::alternating(), 2);
    let pulse = bench.pulse().expect("a CPU has one");
    pulse.take();
    assert!(!pulse.take());
    let (running, seen) = (AtomicBool::new(true), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while running.load(Ordering::Acquire) {
                seen.fetch_or(pulse.take(), Ordering::AcqRel);
                std::thread::yield_now();
            }
        });
        let begin = Instant::now();
        while !seen.load(Ordering::Acquire) && begin.elapsed() < Duration::from_secs(60) {
            TINY.alone(&bench);
        }
        running.store(false, Ordering::Release);
    });
    assert!(seen.into_inner());
}

fn check_trained(name: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/models").join(name);
    if !path.exists() {
        return folio_testing::skip!(Shared, "models/{name} is not there");
    }
    check(name, &folio_model::open(&path).expect("a sound model"), &TRAINED);
}

#[test]
fn trained_7m() {
    check_trained("folio-rust-7m");
}

#[test]
fn trained_42m() {
    check_trained("folio-rust-42m");
}

#[test]
fn trained_moe_47m() {
    check_trained("folio-rust-moe-47m");
}

/// The inverse: the comparison finds one wrong block of one group in one step.
#[test]
fn a_wrong_table_entry_shows() {
    let model = tiny::alternating();
    let bench = Bench::new(&model, 2);
    let params = SamplingParams { max_tokens: 12, temperature: 0.0, logprobs: Some(4), ..SamplingParams::default() };
    let run = |tamper| {
        let engine = bench.start_tampered(bench.config(), tamper);
        let answer = read(submit(&engine, bench.prompt(3, 40), params.clone()));
        engine.shutdown();
        answer
    };
    let sound = run(None);
    assert_eq!(sound, run(Some(|_, _| {})), "an untouched plan is the same plan");
    // Two swapped blocks would not do: attention adds the same keys in another order, which may
    // have the same bits.
    for tamper in [
        (|step, plan| {
            if step == 6 {
                let tables = Arc::make_mut(&mut plan.assignments[0].tables);
                tables[0][1] = tables[0][0]
            }
        }) as Tamper,
        |step, plan| {
            if step == 6 {
                let tables = Arc::make_mut(&mut plan.assignments[0].tables);
                tables[1][1] = tables[1][2]
            }
        },
        |step, plan| {
            if step == 6 {
                Arc::make_mut(&mut plan.assignments[0].tables)[1][1].0 += 40
            }
        },
    ] {
        assert_ne!(sound, run(Some(tamper)), "a wrong block-table entry went unseen");
    }
}

/// A request in a failed step continues from its prompt and answer so far, with the same sampler
/// state.
#[test]
fn failed_steps_change_no_bit() {
    let _turn = take_turn();
    let bench = Bench::new(&tiny::alternating(), 2);
    let expected = TINY.alone(&bench);
    let caching = || EngineConfig { prefix_caching: true, ..bench.config() };
    let tiers = || bench.with_host(EngineConfig { force_preempt_every: Some(3), ..caching() });
    for config in [bench.config(), caching(), tiers()] {
        for tamper in [
            (|step, _| assert_ne!(step, 1, "planted panic")) as Tamper,
            |step, _| assert_ne!(step, 4, "planted panic"),
            |step, _| assert_ne!(step, 9, "planted panic"),
        ] {
            let engine = bench.start_tampered(config.clone(), Some(tamper));
            assert_eq!(TINY.on(&bench, &engine, 3).0, expected);
            let stats = engine.stats();
            assert_eq!(stats.steps_failed, 1);
            assert!(stats.samples_tried_again > 0);
            engine.shutdown();
        }
    }
}

/// A sampler that panics ends its own request; others in the step are not affected.
#[test]
fn a_sampler_that_panics_harms_nobody_else() {
    let bench = Bench::new(&tiny::experts(), 2);
    let params = SamplingParams { max_tokens: 8, temperature: 0.0, ignore_eos: true, ..SamplingParams::default() };
    let prompts: Vec<Vec<u32>> = (0..3).map(|i| bench.prompt(i, 20)).collect();
    let run = |broken: bool| {
        let width = bench.config().logits_width;
        // Its sampler masks a token that the model does not have.
        let banned_tokens = if broken { vec![width as u32] } else { Vec::new() };
        let engine = bench.start(EngineConfig { logits_width: width + 1, ..bench.config() });
        let others: Vec<_> = prompts.iter().map(|prompt| submit(&engine, prompt.clone(), params.clone())).collect();
        let mut last = submit(&engine, bench.prompt(9, 20), SamplingParams { banned_tokens, ..params.clone() });
        let mut end = None;
        while let Some(event) = last.recv() {
            if let Event::Finished { reason, .. } = event {
                end = Some(reason);
            }
        }
        let answers: Vec<Answer> = others.into_iter().map(read).collect();
        assert_eq!(engine.stats().steps_failed, 0);
        engine.shutdown();
        (answers, end.expect("it ends"))
    };
    let (expected, end) = run(false);
    assert_eq!(end, FinishReason::Length);
    let (found, end) = run(true);
    assert!(matches!(&end, FinishReason::Error(why) if why.contains("panicked")), "{end:?}");
    assert_eq!(found, expected);
}
