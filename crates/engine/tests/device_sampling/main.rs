//! A device that samples tokens itself, and begins the next step while one is in flight, gives
//! every request the tokens and logprobs of sampling on the host; and its faults affect only their
//! own requests. With drafts and without, on the host and on the device.

mod device;
mod drafted;
mod drafted_ends;
mod drafters;
mod drafting_methods;
mod faults;
mod harness;
mod sampler;
#[path = "../batch_invariance/tiny.rs"]
mod tiny;

use device::POISON;
use folio_engine::{EngineConfig, Event, FinishReason, Pooling, SamplingParams};
use harness::{Bench, MAX_SEQS, Outcome, prompt};

/// Every sampling parameter, one or several at a time.
fn params(index: usize) -> SamplingParams {
    let base = SamplingParams { max_tokens: 5 + index % 13, ignore_eos: true, ..SamplingParams::default() };
    let drawn = SamplingParams { temperature: 0.8, seed: index as u64, ..base.clone() };
    let greedy = SamplingParams { temperature: 0.0, ..base };
    match index % 12 {
        0 => greedy,
        1 => SamplingParams { logprobs: Some(3), prompt_logprobs: Some(2), ..greedy },
        2 => SamplingParams { top_p: 0.9, logprobs: Some(0), ..drawn },
        3 => SamplingParams { top_k: Some(5), min_p: 0.05, ..drawn },
        4 => SamplingParams { repetition_penalty: 1.3, logprobs: Some(1), ..greedy },
        5 => SamplingParams { frequency_penalty: 0.7, presence_penalty: 0.4, top_p: 0.95, ..drawn },
        // Most tokens are half of a bad word, so that one soon occurs.
        6 => SamplingParams { bad_words: (0..60).map(|token| vec![token * 3, token * 3]).collect(), ..greedy },
        7 => {
            let stop_token_ids = (0..100).collect();
            SamplingParams { min_tokens: 4, stop_token_ids, logprobs: Some(2), ..drawn }
        }
        8 => SamplingParams { stop_token_ids: (0..40).map(|token| token * 5).collect(), ..drawn },
        9 => SamplingParams { allowed_tokens: Some((20..60).collect()), banned_tokens: vec![30, 31], ..drawn },
        10 => SamplingParams { logit_bias: vec![(3, 5.0), (4, -50.0), (90, 8.0)], logprobs: Some(1), ..greedy },
        _ => SamplingParams { n: 2, logprobs: Some(1), ..drawn },
    }
}

fn requests(count: usize) -> Vec<(Vec<u32>, SamplingParams)> {
    (0..count).map(|index| (prompt(index, 1 + index * 11 % 70), params(index))).collect()
}

fn check(bench: &Bench, how: &str, config: &dyn Fn() -> EngineConfig) {
    let requests = requests(48);
    let expected = bench.run_alone(&requests);
    assert!(expected.iter().flatten().any(|outcome| matches!(outcome.reason, Some(FinishReason::Stop(_)))));
    for draws_tokens in [false, true] {
        let (found, notes, stats) = bench.run(config(), draws_tokens, &requests);
        for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert_eq!(found, expected, "request {index}, {how}, drawn on the device: {draws_tokens}");
        }
        assert_eq!(stats.steps_failed, 0);
        assert_eq!(notes.overlapped > 0 && notes.awaited > 0, draws_tokens && config().overlap, "{how}: {notes:?}");
    }
}

#[test]
fn every_way_to_sample() {
    for model in [tiny::alternating(), tiny::experts()] {
        let bench = Bench::new(&model);
        check(&bench, "overlapped", &|| bench.config());
        check(&bench, "without overlap", &|| EngineConfig { overlap: false, ..bench.config() });
        check(&bench, "in chunks", &|| EngineConfig { max_chunk: Some(7), ..bench.config() });
    }
}

#[test]
fn preempted_and_swapped() {
    let model = tiny::alternating();
    let bench = Bench::new(&model);
    check(&bench, "after forced preemption", &|| EngineConfig { force_preempt_every: Some(3), ..bench.config() });
    let small = || EngineConfig { groups: bench.groups(16), prefix_caching: true, ..bench.config() };
    check(&bench, "in a small pool", &small);
    let host = || bench.with_host(EngineConfig { force_preempt_every: Some(3), ..small() });
    check(&bench, "in a small pool above a host tier", &host);
    let (_, notes, _) = bench.run(host(), true, &requests(48));
    assert!(notes.moved_ahead > 0, "no block moved while a step was under way: {notes:?}");
}

/// Requests are aborted one after the other, each at another moment; the others are not affected.
#[test]
fn clients_that_leave() {
    let model = tiny::experts();
    let bench = Bench::new(&model);
    let requests = requests(3 * MAX_SEQS);
    let expected = bench.run_alone(&requests);
    let engine = bench.start(bench.config(), true).engine;
    let streams: Vec<_> = requests.iter().map(|(prompt, params)| harness::submit(&engine, prompt, params)).collect();
    let all = streams.into_iter().zip(requests.iter().zip(&expected)).enumerate();
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
    harness::wait_until_idle(&engine);
}

/// A row that is not a number fails alone, and so does the row after it, which is in flight by
/// then.
#[test]
fn a_row_that_is_not_a_number() {
    let model = tiny::experts();
    let bench = Bench::new(&model);
    let mut requests = requests(24);
    for index in [0, 1, 3, 7, 8] {
        // In the prompt's last place, and once in the answer.
        let (prompt, params) = &mut requests[index];
        match index {
            8 => *params = SamplingParams { allowed_tokens: Some(vec![POISON]), ..params.clone() },
            _ => prompt.push(POISON),
        }
    }
    let expected = bench.run_alone(&requests);
    let is_error = |outcome: &Outcome| matches!(&outcome.reason, Some(FinishReason::Error(why)) if why.contains("NaN"));
    let num_failed = expected.iter().filter(|outcomes| outcomes.iter().any(is_error)).count();
    assert!((5..12).contains(&num_failed), "{num_failed} of 24 fail");
    assert_eq!(expected[8][0].tokens, [POISON]);
    let (found, notes, stats) = bench.run(bench.config(), true, &requests);
    assert_eq!(found, expected);
    assert_eq!(stats.steps_failed, 0);
    assert!(notes.overlapped > 0);
}

/// A sampler that panics ends its own request.
#[test]
fn a_request_that_names_a_token_that_there_is_not() {
    let model = tiny::experts();
    let bench = Bench::new(&model);
    let width = bench.config().logits_width;
    let mut requests = requests(6);
    let expected = bench.run_alone(&requests);
    requests[2].1.banned_tokens = vec![width as u32];
    let config = EngineConfig { logits_width: width + 1, ..bench.config() };
    let (found, _, stats) = bench.run(config, true, &requests);
    assert!(matches!(&found[2][0].reason, Some(FinishReason::Error(why)) if why.contains("panicked")));
    for index in [0, 1, 3, 4, 5] {
        assert_eq!(found[index], expected[index], "request {index}");
    }
    assert_eq!(stats.steps_failed, 0);
}

/// Embeddings come from the same steps as tokens, and in chunks.
#[test]
fn embeddings_beside_tokens() {
    let model = tiny::alternating();
    let bench = Bench::new(&model);
    let requests = requests(20);
    let expected = bench.run_alone(&requests);
    let config = || EngineConfig { max_chunk: Some(13), embedding_width: model.spec.hidden, ..bench.config() };
    let [on_host, on_device] = [false, true].map(|draws_tokens| {
        let engine = bench.start(config(), draws_tokens).engine;
        let streams: Vec<_> =
            requests.iter().map(|(prompt, params)| harness::submit(&engine, prompt, params)).collect();
        let pooled = (0..12).map(|i| {
            let pooling = if i % 2 == 0 { Pooling::Mean } else { Pooling::Last };
            let request = engine.embedding(prompt(500 + i, 1 + 7 * i), pooling).expect("valid");
            engine.submit(request).expect("room")
        });
        let pooled: Vec<_> = pooled.collect();
        let vectors = pooled.into_iter().map(|mut stream| match stream.recv() {
            Some(Event::Embedding(vector)) => vector,
            other => panic!("{other:?}"),
        });
        let vectors: Vec<Vec<f32>> = vectors.collect();
        for (index, (stream, (_, params))) in streams.into_iter().zip(&requests).enumerate() {
            assert_eq!(harness::read(stream, params.n, usize::MAX), expected[index], "request {index}");
        }
        assert_eq!(harness::wait_until_idle(&engine).steps_failed, 0);
        vectors
    });
    assert_eq!(on_host, on_device);
}
