//! Answers end at the same token as without drafts, however long the drafts are; and a fault
//! affects only its own request.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicUsize, Ordering},
};

use folio_engine::{
    EngineConfig, Event, FinishReason, SamplingParams,
    speculate::{AdaptOptions, Speculation},
};

use crate::{
    device::{Notes, POISON},
    drafted::{Expected, bench, options},
    drafters::{Manner, Met},
    harness::{self, Bench, MAX_SEQS, Outcome, prompt, run_on},
    requests, tiny,
};

/// Sequences that a drafter may know, which continue after the ends.
fn with_long_sequences(bench: &Bench<'_>, requests: Vec<(Vec<u32>, SamplingParams)>) -> Expected {
    let unending = |(prompt, params): &(Vec<u32>, SamplingParams)| {
        let (stop_token_ids, max_tokens) = (Vec::new(), 40);
        (prompt.clone(), SamplingParams { stop_token_ids, max_tokens, ..params.clone() })
    };
    let long = Expected::new(bench, requests.iter().map(unending).collect());
    Expected { sequences: long.sequences, ..Expected::new(bench, requests) }
}

fn check(bench: &Bench<'_>, expected: &Expected, how: &str) {
    for draws_tokens in [false, true] {
        for (manner, most) in [(Manner::Perfect, 9), (Manner::Trees, 16)] {
            let met = Arc::new(Mutex::new(Met::default()));
            let drafter = expected.drafter(bench, manner, draws_tokens, &met);
            let stats = expected.check(bench, how, bench.config(), draws_tokens, drafter, most);
            assert!(stats.speculation.accepted_tokens > 20, "{how}: {:?}", stats.speculation);
            assert_eq!(met.lock().expect("nothing panics with it").faults, [""; 0], "{how}");
        }
    }
}

#[test]
fn at_every_length() {
    let model = tiny::alternating();
    let bench = bench(&model);
    let params = |max_tokens| SamplingParams { max_tokens, temperature: 0.0, ignore_eos: true, ..Default::default() };
    // Some end with the model's longest sequence.
    let at_most = (1..20).map(|max_tokens| (prompt(max_tokens, 10 + max_tokens), params(max_tokens)));
    let at_context = (1..20).map(|rest| (prompt(100 + rest, 128 - rest), params(60)));
    let expected = with_long_sequences(&bench, at_most.chain(at_context).collect());
    check(&bench, &expected, "lengths");
}

#[test]
fn at_every_stop() {
    let model = tiny::experts();
    let bench = bench(&model);
    let params = SamplingParams { max_tokens: 16, temperature: 0.9, ignore_eos: true, ..SamplingParams::default() };
    let plain = bench.run_alone(&[(prompt(3, 20), params.clone())]);
    let stops = plain[0][0].tokens.iter().enumerate().flat_map(|(place, &token)| {
        let params = SamplingParams { stop_token_ids: vec![token], ..params.clone() };
        let logprobs = (place % 2 == 0).then_some(1);
        let late = SamplingParams { min_tokens: place + 1, ..params.clone() };
        [SamplingParams { logprobs, ..params }, late]
    });
    let expected = with_long_sequences(&bench, stops.map(|params| (prompt(3, 20), params)).collect());
    let stopped = expected.answers.iter().filter(|answer| matches!(answer[0].reason, Some(FinishReason::Stop(_))));
    assert!(stopped.count() >= 16);
    check(&bench, &expected, "stops");
}

/// After valid tokens of the same step, and with rows of a tree that are not numbers and not on the
/// path.
#[test]
fn a_row_that_is_not_a_number() {
    let model = tiny::experts();
    let bench = bench(&model);
    let mut requests = requests(36);
    for (_, params) in requests.iter_mut().filter(|(prompt, _)| prompt.len() % 2 == 0) {
        params.logit_bias.push((POISON, 6.0));
        params.max_tokens += 8;
    }
    let expected = Expected::new(&bench, requests);
    let fails = |outcome: &&Outcome| matches!(&outcome.reason, Some(FinishReason::Error(why)) if why.contains("NaN"));
    let late = expected.answers.iter().flatten().filter(fails).filter(|outcome| outcome.tokens.len() > 2).count();
    assert!((3..16).contains(&late), "{late} fail behind some tokens");
    check(&bench, &expected, "not a number");
}

static WARNINGS: AtomicUsize = AtomicUsize::new(0);

#[test]
fn a_drafter_that_fails_costs_its_drafts() {
    let model = tiny::alternating();
    let bench = bench(&model);
    let expected = Expected::new(&bench, requests(24));
    for draws_tokens in [false, true] {
        for manner in [Manner::Failing, Manner::Broken] {
            WARNINGS.store(0, Ordering::SeqCst);
            let met = Arc::new(Mutex::new(Met::default()));
            let drafter = expected.drafter(&bench, manner, true, &met);
            let warn = |_: std::fmt::Arguments<'_>| {
                WARNINGS.fetch_add(1, Ordering::SeqCst);
            };
            let speculation = Speculation::new(drafter, options(4)).with_warn(Some(warn));
            let started = bench.start_drafting(bench.config(), draws_tokens, Notes::default(), Some(speculation));
            let (found, _, stats) = run_on(started, &expected.requests);
            assert_eq!(found, expected.answers, "{manner:?}");
            assert_eq!(stats.steps_failed, 0);
            let warnings = WARNINGS.load(Ordering::SeqCst);
            match manner {
                Manner::Broken => assert_eq!((warnings, stats.speculation.draft_tokens), (2, 0)),
                _ => assert!(warnings > 0 && warnings <= 2, "{warnings} lines"),
            }
        }
    }
}

/// If the decoder has no room for them, drafts are cut and nothing else.
#[test]
fn a_step_without_room_for_drafts() {
    let model = tiny::alternating();
    for draft_rows in [0, 3, 30] {
        let bench = Bench::with_draft_rows(&model, draft_rows);
        let expected = Expected::new(&bench, requests(36));
        for draws_tokens in [false, true] {
            let met = Arc::new(Mutex::new(Met::default()));
            let drafter = expected.drafter(&bench, Manner::Trees, false, &met);
            let stats = expected.check(&bench, "without room", bench.config(), draws_tokens, drafter, 20);
            assert!(stats.speculation.accepted_tokens > 0);
        }
    }
}

/// Requests are aborted one after the other, each at another moment, with drafts in flight; the
/// others are not affected.
#[test]
fn clients_that_leave() {
    let model = tiny::experts();
    let bench = bench(&model);
    let expected = Expected::new(&bench, requests(3 * MAX_SEQS));
    let met = Arc::new(Mutex::new(Met::default()));
    for draws_tokens in [false, true] {
        let speculation = Speculation::new(expected.drafter(&bench, Manner::Trees, false, &met), options(10));
        let started = bench.start_drafting(bench.config(), draws_tokens, Notes::default(), Some(speculation));
        let streams = expected.requests.iter().map(|(prompt, params)| harness::submit(&started.engine, prompt, params));
        let streams: Vec<_> = streams.collect();
        let all = streams.into_iter().zip(expected.requests.iter().zip(&expected.answers)).enumerate();
        std::thread::scope(|scope| {
            for (index, (stream, ((_, params), expected))) in all {
                scope.spawn(move || {
                    let most = if index % 3 == 0 { index % 7 } else { usize::MAX };
                    let found = harness::read(stream, params.n, most);
                    if most == usize::MAX {
                        assert_eq!(&found, expected, "request {index}");
                    } else {
                        let is_beginning = |(found, all): (&Outcome, &Outcome)| all.tokens.starts_with(&found.tokens);
                        assert!(found.iter().zip(expected).all(is_beginning), "request {index}");
                    }
                });
            }
        });
        let stats = harness::wait_until_idle(&started.engine);
        assert!(stats.speculation.accepted_tokens > 20 && stats.steps_failed == 0);
    }
    assert_eq!(met.lock().expect("nothing panics with it").faults, [""; 0]);
}

/// A failed step is dropped with its drafts; requests return with their answers so far, which
/// drafts continue.
#[test]
fn a_step_that_fails() {
    let model = tiny::alternating();
    let bench = bench(&model);
    let expected = Expected::new(&bench, requests(20));
    for broken_draw in [3, 6, 9] {
        let met = Arc::new(Mutex::new(Met::default()));
        let notes = Notes { broken_draw: Some(broken_draw), ..Notes::default() };
        let speculation = Speculation::new(expected.drafter(&bench, Manner::Trees, false, &met), options(8));
        let config = EngineConfig { prefix_caching: true, ..bench.config() };
        let started = bench.start_drafting(config, true, notes, Some(speculation));
        let (found, _, stats) = run_on(started, &expected.requests);
        assert_eq!(found, expected.answers, "the draw of number {broken_draw} fails");
        assert!(stats.steps_failed == 1 && stats.samples_tried_again > 0 && stats.speculation.accepted_tokens > 10);
        assert_eq!(met.lock().expect("nothing panics with it").faults, [""; 0]);
    }
}

/// For any number of nodes from step to step, and with steps planned ahead or not.
#[test]
fn as_many_as_pay() {
    let model = tiny::experts();
    let bench = bench(&model);
    let long = requests(36).into_iter().map(|(prompt, params)| {
        let stop_token_ids = Vec::new();
        (prompt, SamplingParams { max_tokens: 40, min_tokens: 0, stop_token_ids, ..params })
    });
    let expected = Expected::new(&bench, long.collect());
    for draws_tokens in [false, true] {
        for manner in [Manner::Perfect, Manner::Bad, Manner::Trees] {
            let met = Arc::new(Mutex::new(Met::default()));
            let drafter = expected.drafter(&bench, manner, draws_tokens, &met);
            let speculation = Speculation::new(drafter, AdaptOptions { most_nodes: 12, fixed: None });
            let started = bench.start_drafting(bench.config(), draws_tokens, Notes::default(), Some(speculation));
            let (found, _, stats) = run_on(started, &expected.requests);
            assert_eq!(found, expected.answers, "{manner:?}, drawn on the device: {draws_tokens}");
            assert_eq!((stats.steps_failed, &met.lock().expect("nothing panics with it").faults), (0, &Vec::new()));
        }
    }
}

/// A request's counts of drafts, and the engine's sum of them.
#[test]
fn drafts_are_counted() {
    let model = tiny::alternating();
    let bench = bench(&model);
    let params = SamplingParams { max_tokens: 21, temperature: 0.0, ignore_eos: true, ..SamplingParams::default() };
    let expected = Expected::new(&bench, vec![(prompt(9, 30), params.clone())]);
    for (manner, accepted, rejected) in [(Manner::Perfect, 16, 0), (Manner::Bad, 0, 4 * 16 + 3 + 2 + 1)] {
        let met = Arc::new(Mutex::new(Met::default()));
        let speculation = Speculation::new(expected.drafter(&bench, manner, false, &met), options(4));
        let config = EngineConfig { overlap: false, ..bench.config() };
        let started = bench.start_drafting(config, false, Notes::default(), Some(speculation));
        let mut stream = harness::submit(&started.engine, &prompt(9, 30), &params);
        let usage = std::iter::from_fn(|| stream.recv()).find_map(|event| match event {
            Event::Finished { usage, .. } => Some(usage),
            _ => None,
        });
        let usage = usage.expect("it ends");
        assert_eq!((usage.accepted_drafts, usage.rejected_drafts), (accepted, rejected), "{manner:?}");
        let stats = harness::wait_until_idle(&started.engine).speculation;
        assert_eq!(stats.accepted_tokens, accepted as u64);
        assert_eq!(stats.draft_tokens, (accepted + rejected) as u64);
        assert_eq!(stats.accepted_per_position.iter().sum::<u64>(), accepted as u64);
        assert!(stats.drafting > std::time::Duration::ZERO && stats.drafting < stats.steps);
    }
}

/// A method that reads steps delays none while no request has had a draft for long.
#[test]
fn steps_that_nobody_drafts_for_overlap() {
    let model = tiny::experts();
    let bench = bench(&model);
    let params = SamplingParams { max_tokens: 60, temperature: 0.0, ignore_eos: true, ..SamplingParams::default() };
    let requests = (0..4).map(|seed| (prompt(seed, 5 + seed), params.clone()));
    let expected = Expected::new(&bench, requests.collect());
    for (most_nodes, fixed) in [(0, None), (4, Some(4))] {
        let met = Arc::new(Mutex::new(Met::default()));
        let drafter = expected.drafter(&bench, Manner::Bad, true, &met);
        let speculation = Speculation::new(drafter, AdaptOptions { most_nodes, fixed });
        let started = bench.start_drafting(bench.config(), true, Notes::default(), Some(speculation));
        let (found, notes, _) = run_on(started, &expected.requests);
        assert_eq!(found, expected.answers);
        assert_eq!(notes.overlapped > 10, most_nodes == 0, "{notes:?}");
        assert_eq!(met.lock().expect("nothing panics with it").faults, [""; 0]);
    }
}
