//! A failed step: the request at fault ends, and all others continue as if it had not failed.

use std::{
    collections::BTreeSet,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use folio_engine::{
    Background, Engine, EngineConfig, Error, Event, Executor, FinishReason, Rebuild, RequestId, RequestOptions,
    SamplingParams,
};

use crate::mock::{
    Answer, BOTH, Faults, Mock, answer, answers, config, params, reference, start_gated, start_rebuilding,
    start_rebuilding_gated, start_with, submit, submit_with, tokens, wait_until, wait_until_idle,
};

fn planted(steps: impl IntoIterator<Item = u64>, panics: bool) -> Faults {
    let mut faults = Faults::default();
    if panics { &mut faults.panicking_steps } else { &mut faults.failing_steps }.extend(steps);
    faults
}

fn assert_whole(found: &Answer, prompt: &[u32], len: usize) {
    assert_eq!((&found.tokens, &found.reason), (&reference(prompt, len), &FinishReason::Length));
}

/// No request is left in the scheduler or the executor.
fn assert_nothing_leaks(engine: &Engine, known: &Mutex<BTreeSet<RequestId>>) {
    wait_until_idle(engine);
    wait_until("everybody has left", || known.lock().expect("sound").is_empty());
    assert_eq!((engine.num_live(), engine.rows_in_flight()), (0, 0));
}

#[test]
fn what_fails_once_harms_nobody() {
    for overlap in BOTH {
        for panics in [false, true] {
            for step in 1..6 {
                let config = EngineConfig { max_seqs: 2, overlap, ..config(32) };
                let engine = start_with(config, planted([step], panics));
                let streams: Vec<_> = (0..6).map(|i| submit(&engine, tokens(i, 20), params(10))).collect();
                for (i, stream) in streams.into_iter().enumerate() {
                    assert_whole(&answer(stream), &tokens(i as u64, 20), 10);
                }
                let stats = engine.stats();
                assert_eq!((stats.steps_failed, stats.restarts), (1, 0));
                assert!((1..=2).contains(&stats.samples_tried_again));
                wait_until_idle(&engine);
            }
        }
    }
}

#[test]
fn the_step_behind_a_failed_one_is_not_run() {
    for step in 1..5 {
        let gated = start_gated(EngineConfig { max_seqs: 2, ..config(32) }, planted([step], true));
        let first = submit(&gated.engine, tokens(0, 20), params(10));
        gated.wait_for_submitted(2);
        let others = [1, 2].map(|i| submit(&gated.engine, tokens(i, 20), params(10)));
        gated.run_overlapped(step);
        // The queued step gets no permit, so this would never come if it were run.
        wait_until("the failure is known", || gated.engine.stats().steps_failed == 1);
        drop(gated.permits);
        for (i, stream) in [first].into_iter().chain(others).enumerate() {
            assert_whole(&answer(stream), &tokens(i as u64, 20), 10);
        }
        wait_until_idle(&gated.engine);
    }
}

/// The request panics in its prompt, at its first token or later, and the executor's thread
/// survives or not.
#[test]
fn one_who_makes_every_step_fail_dies_alone() {
    for (overlap, is_deadly) in [(true, false), (true, true), (false, false), (false, true)] {
        for poison in [1, 20, 21, 22, 27, 39] {
            for max_seqs in [3, 8] {
                let faults = Faults { poison: vec![(RequestId(2), poison)], is_deadly, ..Faults::default() };
                let (engine, known) = start_rebuilding(EngineConfig { overlap, max_seqs, ..config(32) }, faults);
                let streams: Vec<_> = (0..6).map(|i| submit(&engine, tokens(i, 20), params(20))).collect();
                for (i, stream) in streams.into_iter().enumerate() {
                    let found = answer(stream);
                    let prompt = tokens(i as u64, 20);
                    if i == 2 {
                        let reason = if is_deadly { "the executor's thread has ended" } else { "the step panicked" };
                        assert_eq!(found.reason, FinishReason::Error(reason.into()));
                        // A row that computes n tokens gives the one after them.
                        assert_eq!(found.tokens, reference(&prompt, poison.saturating_sub(20)));
                    } else {
                        assert_whole(&found, &prompt, 20);
                    }
                }
                let stats = engine.stats();
                assert_eq!((stats.steps_failed, stats.restarts), (2, if is_deadly { 2 } else { 0 }));
                assert_nothing_leaks(&engine, &known);
            }
        }
    }
}

#[test]
fn several_at_once_die_and_nobody_else() {
    for overlap in BOTH {
        let poison = [(0, 25), (1, 25), (3, 20), (6, 33)].map(|(id, len)| (RequestId(id), len));
        let faults = Faults { poison: poison.to_vec(), ..Faults::default() };
        let (engine, known) = start_rebuilding(EngineConfig { overlap, max_seqs: 4, ..config(32) }, faults);
        let streams: Vec<_> = (0..9).map(|i| submit(&engine, tokens(i, 20), params(20))).collect();
        for (i, stream) in streams.into_iter().enumerate() {
            let found = answer(stream);
            match poison.iter().find(|(id, _)| id.0 == i as u64) {
                Some((_, len)) => assert_eq!(found.tokens, reference(&tokens(i as u64, 20), len - 20)),
                None => assert_whole(&found, &tokens(i as u64, 20), 20),
            }
        }
        assert_nothing_leaks(&engine, &known);
    }
}

/// Requests that have shared many steps are tried last, and not at all once the one at fault is
/// found.
#[test]
fn a_newcomer_that_makes_steps_fail_costs_one_trial() {
    for (overlap, is_deadly) in [(true, false), (true, true), (false, false), (false, true)] {
        let (permits, gate) = flume::unbounded();
        let faults = Faults { poison: vec![(RequestId(7), 20)], is_deadly, ..Faults::default() };
        let config = EngineConfig { overlap, budget_tokens: 200, ..config(64) };
        let (engine, known) = start_rebuilding_gated(config, faults, Some(gate));
        let mut others: Vec<_> = (0..7).map(|i| submit(&engine, tokens(i, 20), params(30))).collect();
        let permit = || permits.send(()).expect("the engine runs");
        // All requests are in flight.
        for other in &mut others {
            (0..4).for_each(|_| permit());
            assert!(matches!(other.recv(), Some(Event::Token { .. })));
        }
        let guilty = submit(&engine, tokens(7, 20), params(30));
        drop(permits);
        assert!(matches!(answer(guilty).reason, FinishReason::Error(_)));
        for (i, other) in others.into_iter().enumerate() {
            let found = answer(other);
            assert_eq!(found.tokens, reference(&tokens(i as u64, 20), 30)[1..]);
        }
        let stats = engine.stats();
        assert_eq!((stats.steps_failed, stats.samples_tried_again), (2, 1));
        assert_nothing_leaks(&engine, &known);
    }
}

/// Requests that end the executor's thread do not use up its restarts by being tried.
#[test]
fn the_engine_outlives_three_that_kill_its_executor() {
    for overlap in BOTH {
        let poison = [1, 2, 3].map(|id| (RequestId(id), 20)).to_vec();
        let faults = Faults { poison, is_deadly: true, ..Faults::default() };
        let (engine, known) = start_rebuilding(EngineConfig { overlap, ..config(32) }, faults);
        let beside = submit(&engine, tokens(0, 20), params(100));
        for i in 1..4 {
            assert!(matches!(answer(submit(&engine, tokens(i, 20), params(3))).reason, FinishReason::Error(_)));
        }
        assert_whole(&answer(beside), &tokens(0, 20), 100);
        assert_eq!(engine.stats().restarts, 6);
        assert_nothing_leaks(&engine, &known);
    }
}

/// Requests that wait outside the scheduler are counted, and do not lower the expected wait.
#[test]
fn figures_during_a_trial_are_of_everybody() {
    let config = EngineConfig { max_seqs: 2, overlap: false, ..config(32) };
    let gated = start_gated(config, planted([6], true));
    let engine = &gated.engine;
    let streams: Vec<_> = (0..8).map(|i| submit(engine, tokens(i, 20), params(10))).collect();
    gated.permit(5);
    wait_until("five steps are done", || engine.stats().steps_done == 5);
    let before = engine.stats();
    gated.permit(1);
    gated.wait_for_submitted(7);
    // One more, so that figures are published during a trial.
    gated.permit(1);
    wait_until("a step of a trial is done", || engine.stats().steps_done == 6);
    let during = engine.stats();
    assert_eq!(during.steps_failed, 1);
    assert_eq!((during.scheduler.running, during.scheduler.waiting), (1, 7));
    // Six prompts, and one with five tokens more.
    assert!((140..=145).contains(&during.scheduler.waiting_tokens), "{during:?}");
    assert!(during.expected_wait >= before.expected_wait, "{before:?} {during:?}");
    drop(gated.permits);
    for (i, stream) in streams.into_iter().enumerate() {
        assert_whole(&answer(stream), &tokens(i as u64, 20), 10);
    }
    wait_until_idle(engine);
}

/// Neither is at fault alone, and their mutual failures come to an end.
#[test]
fn two_who_cannot_stand_each_other_are_both_served() {
    for overlap in BOTH {
        for prefix_caching in BOTH {
            let faults = Faults { quarrel: Some([RequestId(0), RequestId(1)]), ..Faults::default() };
            let (engine, known) = start_rebuilding(EngineConfig { overlap, prefix_caching, ..config(32) }, faults);
            let streams: Vec<_> = (0..4).map(|i| submit(&engine, tokens(i, 100), params(20))).collect();
            for (i, stream) in streams.into_iter().enumerate() {
                assert_whole(&answer(stream), &tokens(i as u64, 100), 20);
            }
            assert!(engine.stats().steps_failed > 0, "they never met");
            assert_nothing_leaks(&engine, &known);
        }
    }
}

#[test]
fn an_executor_that_dies_is_built_anew_and_everybody_goes_on() {
    for overlap in BOTH {
        for step in 1..6 {
            let faults = Faults { fatal_steps: [step].into(), ..Faults::default() };
            let (engine, known) = start_rebuilding(EngineConfig { max_seqs: 2, overlap, ..config(32) }, faults);
            let streams: Vec<_> = (0..6).map(|i| submit(&engine, tokens(i, 20), params(10))).collect();
            for (i, stream) in streams.into_iter().enumerate() {
                assert_whole(&answer(stream), &tokens(i as u64, 20), 10);
            }
            let stats = engine.stats();
            assert_eq!((stats.steps_failed, stats.restarts), (1, 1));
            assert!(!engine.is_restarting());
            assert_nothing_leaks(&engine, &known);
        }
    }
}

/// An executor that always dies, or cannot be rebuilt, ends the engine after three unexplained
/// attempts.
#[test]
fn an_executor_that_cannot_live_ends_the_engine() {
    static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());
    for can_be_built in [true, false] {
        let attempts = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&attempts);
        let faults = Faults { fatal_steps: (1..100).collect(), ..Faults::default() };
        let (permits, gate) = flume::unbounded();
        let executor = move || -> Box<dyn Executor> {
            Box::new(Background::start(Mock::new(32, faults.clone(), Some(gate.clone()))).expect("a thread"))
        };
        let first = executor();
        let rebuild = Rebuild::new(move || match counted.fetch_add(1, Ordering::SeqCst) {
            _ if can_be_built => Ok(executor()),
            1 => panic!("planted panic"),
            _ => Err(Error::Step("no memory".into())),
        });
        let warn = |line: std::fmt::Arguments<'_>| LINES.lock().expect("sound").push(line.to_string());
        let config = EngineConfig { rebuild: Some(rebuild), warn: Some(warn), ..config(32) };
        let engine = Engine::start(first, config).expect("a sound configuration");
        // Three are tried alone and end, which costs no restarts; the last one is left over.
        let streams: Vec<_> = (0..4).map(|i| submit(&engine, tokens(i, 5), params(3))).collect();
        drop(permits);
        for stream in streams {
            // An error of rebuilding is for the operator.
            assert_eq!(answer(stream).reason, FinishReason::Error("the executor's thread has ended".into()));
        }
        wait_until("the thread has ended", || !engine.is_running());
        let last = LINES.lock().expect("sound").drain(..).next_back().expect("a line");
        assert!(last.contains(if can_be_built { "too often" } else { "no memory" }), "{last}");
        let expected = if can_be_built { 6 } else { 3 };
        assert_eq!((attempts.load(Ordering::SeqCst), engine.num_live()), (expected, 0));
    }
}

/// While a request is tried, others arrive, are aborted, and reach their deadline.
#[test]
fn the_doors_stay_open_during_a_trial() {
    let gated = start_gated(EngineConfig { max_seqs: 3, ..config(32) }, planted([1], true));
    let engine = &gated.engine;
    let within = |millis| RequestOptions { deadline: Some(Duration::from_millis(millis)), ..Default::default() };
    let tried = submit(engine, tokens(0, 20), params(10));
    gated.wait_for_submitted(1);
    gated.permit(1);
    wait_until("it failed", || engine.stats().steps_failed == 1);
    let late = submit_with(engine, tokens(1, 20), params(10), within(1));
    let newcomer = submit(engine, tokens(2, 20), SamplingParams { n: 3, ..params(10) });
    let mut leaving = submit(engine, tokens(3, 20), params(10));
    leaving.abort(0);
    assert!(matches!(leaving.recv(), Some(Event::Finished { reason: FinishReason::Aborted, .. })));
    let start = Instant::now();
    wait_until("the time is over", || start.elapsed() > Duration::from_millis(2));
    drop(gated.permits);
    assert_whole(&answer(tried), &tokens(0, 20), 10);
    assert_eq!(answer(late).reason, FinishReason::Deadline);
    for found in answers(newcomer, 3) {
        assert_whole(&found, &tokens(2, 20), 10);
    }
    wait_until_idle(engine);
}

/// A request's deadline passes before its trial.
#[test]
fn a_suspect_may_run_out_of_time() {
    let gated = start_gated(EngineConfig { max_seqs: 2, ..config(32) }, planted([2], true));
    let options = RequestOptions { deadline: Some(Duration::from_millis(30)), ..Default::default() };
    let start = Instant::now();
    let late = submit_with(&gated.engine, tokens(0, 20), params(10), options);
    gated.wait_for_submitted(1);
    let patient = submit(&gated.engine, tokens(1, 20), params(10));
    gated.permit(1);
    gated.wait_for_submitted(2);
    wait_until("the time is over", || start.elapsed() > Duration::from_millis(31));
    drop(gated.permits);
    assert_eq!(answer(late).reason, FinishReason::Deadline);
    assert_whole(&answer(patient), &tokens(1, 20), 10);
    wait_until_idle(&gated.engine);
}

/// The suspect is aborted during its trial, or all requests are.
#[test]
fn a_trial_ends_with_its_suspect() {
    for all_leave in [false, true] {
        let gated = start_gated(EngineConfig { max_seqs: 4, ..config(32) }, planted([2], true));
        let mut streams: Vec<_> = (0..4).map(|i| submit(&gated.engine, tokens(i, 20), params(10))).collect();
        gated.permit(2);
        wait_until("it failed", || gated.engine.stats().steps_failed == 1);
        gated.wait_for_submitted(3);
        let leaving = if all_leave { 4 } else { 1 };
        drop(streams.drain(..leaving));
        drop(gated.permits);
        for (i, stream) in streams.into_iter().enumerate() {
            assert_whole(&answer(stream), &tokens((i + leaving) as u64, 20), 10);
        }
        wait_until_idle(&gated.engine);
        assert_eq!(gated.engine.num_live(), 0);
    }
}

/// Results collected over several steps are complete and sent once; cache figures are of the first
/// run.
#[test]
fn prompt_logprobs_and_usage_survive_a_trial() {
    for overlap in BOTH {
        for step in 1..9 {
            let config = EngineConfig { overlap, prompt_logit_rows: 7, ..config(32) };
            let engine = start_with(config, planted([step], true));
            let params = SamplingParams { prompt_logprobs: Some(0), n: 2, ..params(6) };
            let prompt = tokens(5, 40);
            let mut stream = submit(&engine, prompt.clone(), params);
            let (mut logprobs, mut found) = (None, vec![Vec::new(); 2]);
            while let Some(event) = stream.recv() {
                match event {
                    Event::PromptLogprobs(all) => assert!(logprobs.replace(all).is_none() && found[0].is_empty()),
                    Event::Token { sample, token, .. } => found[sample].push(token),
                    Event::StopToken { .. } | Event::Embedding(_) => panic!("nobody asked"),
                    Event::Finished { sample, reason, usage } => {
                        assert_eq!(reason, FinishReason::Length);
                        assert_eq!((usage.prompt_tokens, usage.completion_tokens), (40, 6));
                        assert!(sample == 1 || usage.cached_tokens == 0, "{usage:?}");
                        assert!(usage.cached_tokens < 40, "{usage:?}");
                    }
                }
            }
            let logprobs: Vec<_> = logprobs.expect("asked for").iter().map(|l| l.as_ref().map(|l| l.token)).collect();
            let expected: Vec<_> = std::iter::once(None).chain(prompt[1..].iter().copied().map(Some)).collect();
            assert_eq!(logprobs, expected);
            assert_eq!(found, vec![reference(&prompt, 6); 2]);
            wait_until_idle(&engine);
        }
    }
}

/// Failures at random moments, among requests that share prompts, are preempted and aborted.
#[test]
fn under_load_failures_change_no_answer() {
    for (seed, overlap) in (0..6u64).flat_map(|seed| BOTH.map(|overlap| (seed, overlap))) {
        let is_bad = |step: &u64| tokens(seed * 1000 + step, 1)[0].is_multiple_of(7);
        let faults = planted((1..400).filter(is_bad), true);
        let poison = (0..40).filter(|id| id % 9 == seed % 9).map(|id| (RequestId(id), 40 + id as usize % 15));
        let faults = Faults { poison: poison.collect(), ..faults };
        let config = EngineConfig { max_seqs: 6, budget_tokens: 96, overlap, ..config(20) };
        let (engine, known) = start_rebuilding(config, faults.clone());
        let prompt = |i: u64| [tokens(i % 3, 30 + i as usize % 5), tokens(i, i as usize % 7)].concat();
        let streams: Vec<_> = (0..40).map(|i| submit(&engine, prompt(i), params(30))).collect();
        for (i, stream) in streams.into_iter().enumerate() {
            if i % 11 == 10 {
                drop(stream);
                continue;
            }
            let found = answer(stream);
            let expected = reference(&prompt(i as u64), 30);
            assert_eq!(found.tokens, expected[..found.tokens.len()], "seed {seed}, request {i}");
            // A random failure may strike a request on trial, which then ends with it.
            assert!(found.reason == FinishReason::Length || matches!(found.reason, FinishReason::Error(_)));
            let is_poisoned = faults.poison.iter().any(|(id, _)| id.0 == i as u64);
            assert!(!is_poisoned || found.reason != FinishReason::Length, "seed {seed}, request {i}");
        }
        assert_nothing_leaks(&engine, &known);
    }
}
