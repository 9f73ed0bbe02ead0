//! Events while a step computes: the next one is planned, messages are handled, results are
//! delivered.

use std::{
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use folio_engine::{EngineConfig, Event, FinishReason, KvEvent, RequestId, RequestOptions, SamplingParams, TimeLimit};

use crate::mock::{
    BOTH, Faults, answer, answers, config, params, reference, start, start_gated, submit, submit_with, tokens,
    wait_until, wait_until_idle,
};

#[test]
fn two_steps_are_in_flight_or_one() {
    for overlap in BOTH {
        let gated = start_gated(EngineConfig { overlap, ..config(32) }, Faults::default());
        let stream = submit(&gated.engine, tokens(0, 20), params(10));
        for step in 1..10 {
            gated.wait_for_submitted(if overlap { step + 1 } else { step });
            // However long the step is held, no more steps begin.
            assert_eq!(gated.steps.load(Ordering::SeqCst), step - 1);
            gated.permit(1);
            wait_until("it has begun", || gated.steps.load(Ordering::SeqCst) == step);
            let most = if overlap { step + 2 } else { step + 1 };
            assert!(gated.submitted.load(Ordering::SeqCst) <= most);
        }
        drop(gated.permits);
        assert_eq!(answer(stream).tokens, reference(&tokens(0, 20), 10));
        assert_eq!(gated.steps.load(Ordering::SeqCst), 10, "none beyond the last token");
    }
}

/// A held step delays no other work: requests arrive and end, and the tokens of the step before are
/// delivered.
#[test]
fn host_work_goes_on_while_a_step_computes() {
    for overlap in BOTH {
        let gated = start_gated(EngineConfig { overlap, ..config(32) }, Faults::default());
        let engine = &gated.engine;
        let mut first = submit(engine, tokens(0, 20), params(10));
        gated.wait_for_submitted(1);
        let mut second = submit(engine, tokens(1, 20), params(10));
        second.abort(0);
        let end = second.recv();
        assert!(matches!(end, Some(Event::Finished { reason: FinishReason::Aborted, .. })), "{end:?}");
        let dropped = submit(engine, tokens(2, 20), params(10));
        drop(dropped);
        wait_until("it has left", || engine.stats().samples_ended == 2);
        assert_eq!(gated.steps.load(Ordering::SeqCst), 0, "the first step is still held");
        gated.permit(1);
        let expected = reference(&tokens(0, 20), 2);
        let token = first.recv();
        assert!(matches!(token, Some(Event::Token { token, .. }) if token == expected[0]), "{token:?}");
        assert_eq!(gated.steps.load(Ordering::SeqCst), 1, "the second step is held");
        // A request in the step itself can end too.
        first.abort(0);
        let end = first.recv();
        assert!(matches!(end, Some(Event::Finished { reason: FinishReason::Aborted, .. })), "{end:?}");
        assert_eq!(gated.steps.load(Ordering::SeqCst), 1);
        drop(gated.permits);
        wait_until_idle(engine);
    }
}

/// Blocks of a request that ended with rows in flight are used by others, and their answers are
/// right.
#[test]
fn blocks_are_reused_while_a_step_still_writes_to_them() {
    for steps in 1..7 {
        let gated = start_gated(EngineConfig { max_seqs: 2, ..config(6) }, Faults::default());
        let leaving = submit(&gated.engine, tokens(0, 40), params(50));
        let staying: Vec<_> = (1..5).map(|i| submit(&gated.engine, tokens(i, 30), params(20))).collect();
        gated.run_overlapped(steps);
        drop(leaving);
        wait_until("it has left", || gated.engine.stats().samples_ended >= 1);
        drop(gated.permits);
        for (i, stream) in staying.into_iter().enumerate() {
            assert_eq!(answer(stream).tokens, reference(&tokens(i as u64 + 1, 30), 20), "after {steps} steps");
        }
        wait_until_idle(&gated.engine);
    }
}

#[test]
fn an_answer_that_ends_by_itself_leaves_its_row_in_flight_unheard() {
    let prompt = tokens(1, 20);
    let free = reference(&prompt, 10);
    for stop_at in 0..4 {
        let gated = start_gated(EngineConfig { eos: vec![free[stop_at]], ..config(32) }, Faults::default());
        let stopping = submit(&gated.engine, prompt.clone(), params(10));
        let other = submit(&gated.engine, tokens(2, 20), params(10));
        gated.run_overlapped(stop_at as u64 + 2);
        drop(gated.permits);
        let found = answer(stopping);
        assert_eq!((&found.tokens[..], found.reason), (&free[..stop_at], FinishReason::Stop(free[stop_at])));
        assert_eq!(found.usage.completion_tokens, stop_at + 1);
        assert_eq!(answer(other).tokens, reference(&tokens(2, 20), 10));
        wait_until_idle(&gated.engine);
        let stats = gated.engine.stats();
        let sampled = stop_at as u64 + 1 + 10;
        assert_eq!(stats.tokens_sampled, sampled);
        assert_eq!(stats.tokens_computed, 40 + sampled - 2 + 1, "one row ran beyond the end");
    }
}

#[test]
fn patience_ends_for_those_alone_who_never_ran() {
    let queue_timeout = Some(TimeLimit::InAll(Duration::from_millis(20)));
    let gated = start_gated(EngineConfig { queue_timeout, max_seqs: 1, ..config(32) }, Faults::default());
    let start = Instant::now();
    let running = submit(&gated.engine, tokens(0, 20), params(10));
    gated.wait_for_submitted(1);
    let waiting = submit(&gated.engine, tokens(1, 20), params(10));
    wait_until("the time is over", || start.elapsed() > Duration::from_millis(60));
    gated.permit(1);
    let found = answer(waiting);
    assert_eq!((found.tokens.len(), found.reason), (0, FinishReason::QueueTimeout));
    drop(gated.permits);
    assert_eq!(answer(running).tokens, reference(&tokens(0, 20), 10));
    wait_until_idle(&gated.engine);
}

/// Samples wait until the first of their request has computed the prompt; once the first runs, none
/// times out.
#[test]
fn patience_is_a_requests_and_not_a_samples() {
    for overlap in BOTH {
        let queue_timeout = Some(TimeLimit::InAll(Duration::from_millis(50)));
        let config = EngineConfig { queue_timeout, overlap, max_seqs: 2, ..config(32) };
        let gated = start_gated(config, Faults::default());
        let pair = || SamplingParams { n: 2, ..params(10) };
        let running = submit(&gated.engine, tokens(0, 200), pair());
        gated.wait_for_submitted(if overlap { 2 } else { 1 });
        let (waiting, came) = (submit(&gated.engine, tokens(1, 20), pair()), Instant::now());
        wait_until("the time is over", || came.elapsed() > Duration::from_millis(50));
        gated.permit(1);
        for found in answers(waiting, 2) {
            assert_eq!((found.tokens.len(), found.reason), (0, FinishReason::QueueTimeout));
        }
        drop(gated.permits);
        for found in answers(running, 2) {
            assert_eq!((found.tokens, found.reason), (reference(&tokens(0, 200), 10), FinishReason::Length));
        }
        wait_until_idle(&gated.engine);
    }
}

/// A step that never ends must not delay timeouts, of requests in it or after it.
#[test]
fn an_engine_that_gets_nowhere_is_given_up_without_a_word_from_it() {
    for overlap in BOTH {
        let queue_timeout = Some(TimeLimit::WithoutProgress(Duration::from_millis(20)));
        let config = EngineConfig { queue_timeout, overlap, max_seqs: 1, ..config(32) };
        let gated = start_gated(config.clone(), Faults::default());
        let running = submit(&gated.engine, tokens(0, 20), params(10));
        gated.wait_for_submitted(1);
        let found = answer(submit(&gated.engine, tokens(1, 20), params(10)));
        assert_eq!((found.tokens.len(), found.reason), (0, FinishReason::QueueTimeout));
        drop(gated.permits);
        assert_eq!(answer(running).tokens, reference(&tokens(0, 20), 10), "who runs is not ended by it");
        wait_until_idle(&gated.engine);

        let stall_timeout = Some(Duration::from_millis(20));
        let gated = start_gated(EngineConfig { queue_timeout: None, stall_timeout, ..config }, Faults::default());
        let both = [0, 1].map(|seed| submit(&gated.engine, tokens(seed, 20), params(10)));
        for stream in both {
            let found = answer(stream);
            assert_eq!((found.tokens.len(), found.reason), (0, FinishReason::Deadline));
        }
        drop(gated.permits);
        wait_until_idle(&gated.engine);
    }
}

#[test]
fn a_deadline_ends_a_request_wherever_it_is() {
    for overlap in BOTH {
        let gated = start_gated(EngineConfig { overlap, max_seqs: 1, ..config(32) }, Faults::default());
        let start = Instant::now();
        let within = |millis| RequestOptions { deadline: Some(Duration::from_millis(millis)), ..Default::default() };
        let running = submit_with(&gated.engine, tokens(0, 20), params(10), within(30));
        let waiting = submit_with(&gated.engine, tokens(1, 20), params(10), within(1));
        let late = submit_with(&gated.engine, tokens(2, 20), params(10), within(0));
        let patient = submit_with(&gated.engine, tokens(3, 20), params(10), within(1_000_000_000));
        gated.wait_for_submitted(1);
        wait_until("the time is over", || start.elapsed() > Duration::from_millis(31));
        drop(gated.permits);
        for stream in [running, waiting, late] {
            let found = answer(stream);
            assert_eq!(found.reason, FinishReason::Deadline);
            assert!(found.tokens.len() < 10);
        }
        assert_eq!(answer(patient).tokens, reference(&tokens(3, 20), 10));
        wait_until_idle(&gated.engine);
        assert_eq!(gated.engine.stats().scheduler.expired, 3);
    }
}

#[test]
fn what_matters_more_runs_sooner() {
    for overlap in BOTH {
        let gated = start_gated(EngineConfig { overlap, max_seqs: 1, ..config(32) }, Faults::default());
        let first = submit(&gated.engine, tokens(0, 20), params(3));
        gated.wait_for_submitted(1);
        let streams = [5, 0, -5].map(|priority| {
            let options = RequestOptions { priority, ..RequestOptions::default() };
            submit_with(&gated.engine, tokens(9, 20), params(3), options)
        });
        drop(gated.permits);
        assert_eq!(answer(first).tokens.len(), 3);
        streams.into_iter().for_each(|stream| assert_eq!(answer(stream).reason, FinishReason::Length));
        let mut order = gated.rows.lock().expect("the mock is sound").clone();
        order.dedup();
        assert_eq!(order, [0, 3, 2, 1].map(RequestId));
    }
}

#[test]
fn draining_lets_what_runs_finish() {
    let gated = start_gated(EngineConfig { max_seqs: 1, ..config(32) }, Faults::default());
    let streams: Vec<_> = (0..3).map(|i| submit(&gated.engine, tokens(i, 20), params(10))).collect();
    gated.wait_for_submitted(1);
    gated.engine.drain();
    let other = gated.engine.clone();
    let request = other.request(tokens(0, 3), params(1)).expect("valid");
    assert_eq!(other.submit(request).err(), Some(folio_engine::SubmitError::Draining));
    assert_eq!(other.num_live(), 3);
    drop(gated.permits);
    for (i, stream) in streams.into_iter().enumerate() {
        assert_eq!(answer(stream).tokens, reference(&tokens(i as u64, 20), 10));
    }
    assert_eq!(other.num_live(), 0);
    assert!(other.is_running());
    wait_until_idle(&other);
}

#[test]
fn cache_events_are_told_or_counted_as_lost() {
    let (sender, events) = flume::bounded(1000);
    let engine = start(EngineConfig { kv_events: Some(sender), ..config(32) });
    answer(submit(&engine, tokens(0, 40), params(30)));
    wait_until_idle(&engine);
    let stored = |event| match event {
        KvEvent::Stored { hashes, tokens, block_tokens, .. } => {
            assert_eq!((tokens.len(), block_tokens), (hashes.len() * 16, 16));
            hashes.len()
        }
        other => panic!("{other:?}"),
    };
    // 69 tokens are computed: the last is sampled and never read.
    assert_eq!(events.drain().flatten().map(stored).sum::<usize>(), 4);
    assert_eq!(engine.stats().kv_event_batches_lost, 0);
    let (sender, _events) = flume::bounded(1);
    let engine = start(EngineConfig { kv_events: Some(sender), ..config(32) });
    answer(submit(&engine, tokens(0, 40), params(30)));
    wait_until("batches are lost", || engine.stats().kv_event_batches_lost > 0);
}

/// A listener that missed removed blocks must be told to forget all of them.
#[test]
fn a_listener_that_missed_events_is_told_to_forget_everything() {
    let (sender, events) = flume::bounded(1);
    let engine = start(EngineConfig { kv_events: Some(sender), ..config(64) });
    // One batch when 16 tokens are full, two when more are: the queue holds the first. Returns
    // whether one was lost, and the batches.
    let run = |seed: u64, len: usize| {
        let before = engine.stats().kv_event_batches_lost;
        answer(submit(&engine, tokens(seed, len), params(10)));
        wait_until_idle(&engine);
        let batch = events.recv().expect("a batch");
        let cleared: Vec<bool> = batch.iter().map(|event| *event == KvEvent::Cleared).collect();
        (engine.stats().kv_event_batches_lost > before, cleared)
    };
    assert_eq!(run(0, 30), (true, vec![false]));
    assert_eq!(run(1, 30), (true, vec![true, false]));
    assert_eq!(run(2, 10), (false, vec![true, false]));
    assert_eq!(run(3, 30), (true, vec![false]));
    assert_eq!(run(4, 10), (false, vec![true, false]));
    assert_eq!(run(5, 10), (false, vec![false]));
}
