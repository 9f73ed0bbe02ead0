//! Streams: tokens in order, exactly one end, aborts on drop, many at a time.

use std::{
    future::Future,
    pin::pin,
    sync::{Arc, atomic::Ordering},
    task::{Context, Poll, Wake, Waker},
    thread::Thread,
};

use folio_engine::{Engine, EngineConfig, Event, FinishReason, SamplingParams, SubmitError};

use crate::mock::{
    BOTH, Faults, Gated, answer, answers, config, params, reference, start, start_gated, submit, tokens, wait_until,
    wait_until_idle,
};

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(value) => return value,
            Poll::Pending => std::thread::park(),
        }
    }
}

#[test]
fn tokens_come_in_order_by_both_ways_of_reading() {
    BOTH.into_iter().for_each(check_both_ways_of_reading);
}

fn check_both_ways_of_reading(overlap: bool) {
    let engine = start(EngineConfig { overlap, ..config(16) });
    let prompt = tokens(1, 33);
    let expected = reference(&prompt, 12);
    assert_eq!(answer(submit(&engine, prompt.clone(), params(12))).tokens, expected);
    let mut stream = submit(&engine, prompt, params(12));
    let mut found = Vec::new();
    let usage = block_on(async {
        while let Some(event) = stream.next().await {
            match event {
                Event::Token { token, .. } => found.push(token),
                Event::Finished { usage, .. } => return usage,
                Event::PromptLogprobs(_) | Event::StopToken { .. } | Event::Embedding(_) => panic!("nobody asked"),
            }
        }
        panic!("no end")
    });
    assert_eq!(found, expected);
    assert_eq!(usage.cached_tokens, 32, "the second run hits the first one's blocks");
}

#[test]
fn a_dropped_stream_frees_its_blocks_and_runs_no_further() {
    for overlap in BOTH {
        for steps_before in 1..6 {
            let config = EngineConfig { budget_tokens: 16, overlap, ..config(32) };
            let gated = start_gated(config, Faults::default());
            let stream = submit(&gated.engine, tokens(2, 40), SamplingParams { n: 2, ..params(100) });
            gated.permit(steps_before);
            wait_until("the steps have begun", || gated.steps.load(Ordering::SeqCst) == steps_before);
            drop(stream);
            wait_until("both have ended", || gated.engine.stats().samples_ended == 2);
            drop(gated.permits);
            wait_until_idle(&gated.engine);
            // The steps that were in flight then, at most.
            assert!(gated.steps.load(Ordering::SeqCst) <= steps_before + 2);
        }
    }
}

#[test]
fn one_sample_can_be_aborted_alone() {
    for overlap in BOTH {
        let gated = start_gated(EngineConfig { overlap, ..config(32) }, Faults::default());
        let prompt = tokens(3, 20);
        let mut stream = submit(&gated.engine, prompt.clone(), SamplingParams { n: 3, ..params(30) });
        gated.permit(8);
        while !matches!(stream.recv(), Some(Event::Token { sample: 1, .. })) {}
        stream.abort(1);
        stream.abort(7);
        drop(gated.permits);
        let mut ends = vec![None; 3];
        while let Some(event) = stream.recv() {
            if let Event::Finished { sample, reason, usage } = event {
                assert!(ends[sample].replace((reason, usage.completion_tokens)).is_none());
            }
        }
        let (reason, len) = ends[1].clone().expect("ended");
        assert!(reason == FinishReason::Aborted && len < 30);
        assert_eq!([&ends[0], &ends[2]], [&Some((FinishReason::Length, 30)); 2]);
    }
}

/// Full blocks and the partial one are shared: each further sample computes the prompt's last token
/// and nothing else.
#[test]
fn samples_share_the_prompt() {
    for overlap in BOTH {
        let engine = start(EngineConfig { overlap, ..config(64) });
        let prompt = tokens(4, 100);
        let all = answers(submit(&engine, prompt.clone(), SamplingParams { n: 5, ..params(6) }), 5);
        let cached: Vec<usize> = all.iter().map(|a| a.usage.cached_tokens).collect();
        assert_eq!(cached, [0, 99, 99, 99, 99]);
        wait_until_idle(&engine);
        let stats = engine.stats();
        assert_eq!((stats.prompt_tokens_computed, stats.tokens_computed), (100 + 4, 100 + 4 + 5 * 5));
        assert_eq!(stats.iteration_tokens.sum, stats.tokens_computed);
        assert_eq!(stats.iteration_tokens.counts.iter().sum::<u64>(), stats.steps_done);
        assert!(stats.last_step_tokens > 0);
        assert!(all.iter().all(|a| a.tokens == reference(&prompt, 6)));
    }
}

#[test]
fn prompt_logprobs_come_once_and_whole() {
    for (force_preempt_every, overlap) in
        [(None, true), (None, false), (Some(1), true), (Some(2), true), (Some(2), false)]
    {
        let engine = start(EngineConfig { force_preempt_every, overlap, prompt_logit_rows: 7, ..config(32) });
        for len in [1, 2, 16, 17, 40, 40] {
            let prompt = tokens(5, len);
            let params = SamplingParams { prompt_logprobs: Some(0), n: 2, ..params(6) };
            let mut stream = submit(&engine, prompt.clone(), params);
            let (mut found, mut has_token) = (None, false);
            while let Some(event) = stream.recv() {
                match event {
                    Event::PromptLogprobs(all) => {
                        assert!(found.replace(all).is_none() && !has_token);
                    }
                    Event::Token { sample, .. } => has_token |= sample == 0,
                    Event::StopToken { .. } | Event::Embedding(_) => panic!("nobody asked"),
                    Event::Finished { reason, .. } => assert_eq!(reason, FinishReason::Length),
                }
            }
            let found: Vec<Option<u32>> =
                found.expect("asked for").iter().map(|l| l.as_ref().map(|l| l.token)).collect();
            let expected: Vec<Option<u32>> =
                std::iter::once(None).chain(prompt[1..].iter().copied().map(Some)).collect();
            assert_eq!(found, expected);
        }
    }
}

#[test]
fn two_hundred_requests_from_threads_are_answered_as_if_alone() {
    for overlap in BOTH {
        let engine =
            start(EngineConfig { max_seqs: 16, budget_tokens: 96, max_chunk: Some(48), overlap, ..config(14) });
        std::thread::scope(|scope| {
            for thread in 0..8u64 {
                let engine = engine.clone();
                scope.spawn(move || client(&engine, thread));
            }
        });
        wait_until("all have ended", || engine.stats().samples_ended == 200);
        wait_until_idle(&engine);
        assert!(engine.stats().scheduler.preemptions > 0, "the pool is too large to test anything");
    }
}

/// Sends 25 requests, aborts every fifth, and compares the answers of the rest.
fn client(engine: &Engine, number: u64) {
    let streams: Vec<_> = (0..25u64)
        .map(|i| {
            let mut prompt = tokens(i % 3, 40 + i as usize);
            prompt.extend(tokens(number, i as usize % 7));
            let stream = submit(engine, prompt.clone(), params(1 + (i as usize * 7) % 60));
            (i, prompt, stream)
        })
        .collect();
    for (i, prompt, stream) in streams {
        if i % 5 == 4 {
            drop(stream);
            continue;
        }
        assert_eq!(answer(stream).tokens, reference(&prompt, 1 + (i as usize * 7) % 60));
    }
}

#[test]
fn shutdown_ends_every_stream() {
    let gated = start_gated(config(32), Faults::default());
    let streams: Vec<_> = (0..12).map(|i| submit(&gated.engine, tokens(i, 30), params(200))).collect();
    gated.permit(1);
    let other = gated.engine.clone();
    let thread = std::thread::spawn(move || gated.engine.shutdown());
    drop(gated.permits);
    thread.join().expect("shutdown returns");
    for stream in streams {
        assert!(matches!(answer(stream).reason, FinishReason::Aborted | FinishReason::Length));
    }
    assert!(!other.is_running());
    let request = other.request(tokens(0, 3), params(1)).expect("valid");
    assert_eq!(other.submit(request).err(), Some(SubmitError::Stopped));
}

#[test]
fn an_idle_engine_runs_no_steps_and_ends_with_its_last_handle() {
    for overlap in BOTH {
        let Gated { engine, permits, steps, .. } =
            start_gated(EngineConfig { overlap, ..config(32) }, Faults::default());
        drop(permits);
        assert_eq!(answer(submit(&engine, tokens(0, 5), params(3))).tokens.len(), 3);
        assert_eq!(steps.load(Ordering::SeqCst), 3);
        let stream = submit(&engine, tokens(0, 5), params(3));
        drop(engine);
        assert_eq!(answer(stream).reason, FinishReason::Length, "a stream keeps the engine alive");
        assert_eq!(steps.load(Ordering::SeqCst), 6);
        wait_until("the executor is dropped", || Arc::strong_count(&steps) == 1);
    }
}
