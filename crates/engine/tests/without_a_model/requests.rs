//! Refused requests, and the ends of answers.

use std::time::Duration;

use folio_engine::{
    Background, Engine, EngineConfig, Event, FinishReason, GroupConfig, InvalidRequest, Miss, RequestOptions,
    SamplingParams, SubmitError, Usage,
};

use crate::mock::{
    BOTH, Faults, Mock, answer, answers, config, params, reference, start, start_gated, submit, submit_with, tokens,
    wait_until,
};

#[test]
fn an_answer_ends_at_the_first_rule_that_holds() {
    let prompt = tokens(1, 20);
    let free = reference(&prompt, 200);
    let base = params(10);
    let check = |eos: Vec<u32>, max_model_len: usize, params: SamplingParams, len: usize, reason: FinishReason| {
        for overlap in BOTH {
            let engine = start(EngineConfig { eos: eos.clone(), max_model_len, overlap, ..config(32) });
            let found = answer(submit(&engine, prompt.clone(), params.clone()));
            let stop_token = usize::from(matches!(reason, FinishReason::Stop(_)));
            assert_eq!((&found.tokens[..], &found.reason), (&free[..len], &reason), "{params:?}");
            let completion_tokens = len + stop_token;
            let usage = Usage { prompt_tokens: 20, completion_tokens, ..Usage::default() };
            // Durations are up to the clock, except that one token takes no time from itself to
            // itself.
            let timing = found.usage.timing;
            assert!(completion_tokens > 1 || timing.decode == Duration::ZERO);
            assert_eq!(found.usage, Usage { cache_miss: Some(Miss::New), timing, ..usage });
        }
    };
    use FinishReason::{Length, Stop};
    let third = free[3];
    let ids = |ids: &[u32]| SamplingParams { stop_token_ids: ids.to_vec(), ..base.clone() };
    check(vec![], 2048, base.clone(), 10, Length);
    check(vec![], 25, params(100), 5, Length);
    check(vec![], 21, params(100), 1, Length);
    check(vec![third], 2048, base.clone(), 3, Stop(third));
    check(vec![third], 2048, SamplingParams { ignore_eos: true, ..base.clone() }, 10, Length);
    check(vec![], 2048, ids(&[third]), 3, Stop(third));
    check(vec![third], 2048, SamplingParams { ignore_eos: true, ..ids(&[third]) }, 3, Stop(third));
    check(vec![free[0]], 2048, base.clone(), 0, Stop(free[0]));
    check(vec![free[9]], 2048, base.clone(), 9, Stop(free[9]));
    check(vec![third], 2048, SamplingParams { min_tokens: 3, ..base.clone() }, 3, Stop(third));
    // The mock samples any token; the rule itself must prevent the stop.
    check(vec![third], 2048, SamplingParams { min_tokens: 4, ..base.clone() }, 10, Length);
}

#[test]
fn what_cannot_run_is_refused_where_it_is_made() {
    let engine = start(EngineConfig { max_model_len: 100, ..config(4) });
    let check = |prompt: Vec<u32>, params: SamplingParams, expected: InvalidRequest| {
        assert_eq!(engine.request(prompt, params).expect_err("invalid"), expected);
    };
    check(vec![], params(1), InvalidRequest::EmptyPrompt);
    check(tokens(0, 100), params(1), InvalidRequest::PromptTooLong { prompt: 100, most: 99 });
    let unknown = InvalidRequest::UnknownToken { token: 50_000, position: 1, logits_width: 50_000 };
    check(vec![1, 50_000], params(1), unknown);
    let too_many = InvalidRequest::TooManySamples { n: 9, most: 8 };
    check(tokens(0, 10), SamplingParams { n: 9, ..params(1) }, too_many);
    check(tokens(0, 10), params(60), InvalidRequest::NeverFits { max_len: 70, most: 64 });
    for params in [params(0), SamplingParams { n: 0, ..params(1) }, SamplingParams { temperature: -1.0, ..params(1) }] {
        let found = engine.request(tokens(0, 10), params);
        assert!(matches!(found, Err(InvalidRequest::Sampling(_))), "{found:?}");
    }
    assert!(engine.request(tokens(0, 10), params(54)).is_ok());
    assert!(engine.request(tokens(0, 10), params(usize::MAX)).is_err());
    let request = engine.request(tokens(0, 10), params(5)).expect("valid");
    let error = request.with_options(RequestOptions { weight: 0, ..RequestOptions::default() }).expect_err("refused");
    assert_eq!(error.to_string(), "weight is 0, but must be at least 1");
}

#[test]
fn what_leaves_no_token_to_choose_is_refused() {
    let engine = start(EngineConfig { logits_width: 4, eos: vec![2], ..config(4) });
    let base = || params(5);
    for (params, is_sound) in [
        (SamplingParams { allowed_tokens: Some(vec![2]), ..base() }, true),
        (SamplingParams { allowed_tokens: Some(vec![2]), min_tokens: 1, ..base() }, false),
        (SamplingParams { allowed_tokens: Some(vec![2]), min_tokens: 1, ignore_eos: true, ..base() }, true),
        (SamplingParams { allowed_tokens: Some(vec![1]), stop_token_ids: vec![1], min_tokens: 1, ..base() }, false),
        (SamplingParams { allowed_tokens: Some(vec![1, 3]), banned_tokens: vec![3, 1], ..base() }, false),
        (SamplingParams { banned_tokens: vec![0, 1, 2, 3], ..base() }, false),
        (SamplingParams { banned_tokens: vec![0, 1], bad_words: vec![vec![2], vec![3]], ..base() }, false),
        (SamplingParams { banned_tokens: vec![0, 1], bad_words: vec![vec![2], vec![3, 3]], ..base() }, true),
        (SamplingParams { banned_tokens: vec![0, 1, 3], ..base() }, true),
        (SamplingParams { banned_tokens: vec![0, 1, 3], min_tokens: 1, ..base() }, false),
    ] {
        let found = engine.request(vec![1], params.clone()).map(drop);
        assert_eq!(found, if is_sound { Ok(()) } else { Err(InvalidRequest::NothingToChoose) }, "{params:?}");
    }
}

#[test]
fn a_configuration_that_would_wait_for_ever_is_refused() {
    let check = |change: fn(&mut EngineConfig), word: &str| {
        let mut config = config(8);
        change(&mut config);
        let executor = Box::new(Background::start(Mock::new(8, Faults::default(), None)).expect("a thread"));
        let error = Engine::start(executor, config).expect_err("refused").to_string();
        assert!(error.contains(word), "{error}");
    };
    check(|c| c.max_seqs = 0, "max_seqs");
    check(|c| c.budget_tokens = 0, "budget_tokens");
    check(|c| c.groups = vec![], "blocks");
    check(|c| c.groups = vec![GroupConfig::new(0)], "blocks");
    check(|c| c.groups[0].host_slots = 4, "host tier");
    check(|c| c.max_model_len = 1, "max_model_len");
    check(|c| c.logits_width = 0, "logits_width");
    check(|c| c.max_chunk = Some(0), "max_chunk");
    check(|c| c.prompt_logit_rows = 0, "prompt_logit_rows");
}

#[test]
fn a_full_queue_refuses_with_an_estimate_and_takes_again() {
    for overlap in BOTH {
        let config = EngineConfig { max_seqs: 2, max_waiting: 1, overlap, ..config(32) };
        let gated = start_gated(config, Faults::default());
        let engine = &gated.engine;
        let request = |n, len| engine.request(tokens(2, len), SamplingParams { n, ..params(20) }).expect("valid");
        let two = engine.submit(request(2, 10)).expect("room");
        let one = engine.submit(request(1, 100)).expect("room");
        let refused = |engine: &Engine| match engine.submit(request(1, 10)).err() {
            Some(SubmitError::QueueFull { retry_after }) => retry_after,
            other => panic!("{other:?}"),
        };
        // No time has been measured yet.
        assert_eq!(refused(engine), Duration::ZERO);
        gated.permit(3);
        wait_until("there is an estimate", || refused(engine) > Duration::ZERO);
        drop(gated.permits);
        assert_eq!(answers(two, 2).len() + answers(one, 1).len(), 3);
        assert!(engine.submit(request(2, 10)).is_ok());
    }
}

#[test]
fn requests_of_different_salts_share_nothing() {
    let engine = start(config(64));
    let prompt = tokens(3, 40);
    let cached = |cache_salt: u64| {
        let options = RequestOptions { cache_salt, ..RequestOptions::default() };
        let usage = answer(submit_with(&engine, prompt.clone(), params(2), options)).usage;
        (usage.cached_tokens, usage.cache_miss.is_some())
    };
    assert_eq!([cached(1), cached(2), cached(1), cached(0)], [(0, true), (0, true), (32, false), (0, true)]);
}

/// The stop token is no part of the answer, but its logprobs were requested.
#[test]
fn the_logprobs_of_a_token_that_ends_the_answer_are_told() {
    let prompt = tokens(0, 20);
    let stop = reference(&prompt, 4)[3];
    for logprobs in [None, Some(0)] {
        let engine = start(EngineConfig { eos: vec![stop], ..config(32) });
        let mut stream = submit(&engine, prompt.clone(), SamplingParams { logprobs, ..params(10) });
        let events: Vec<Event> = std::iter::from_fn(|| stream.recv()).collect();
        let told = events.iter().enumerate().find_map(|(i, event)| match event {
            Event::StopToken { sample, token, logprobs } => Some((i, *sample, *token, logprobs.is_some())),
            _ => None,
        });
        assert_eq!(told, logprobs.map(|_| (3, 0, stop, true)));
        let Some(Event::Finished { reason, usage, .. }) = events.last() else { panic!("{events:?}") };
        assert_eq!((reason, usage.completion_tokens), (&FinishReason::Stop(stop), 4));
        assert_eq!(events.len(), 4 + usize::from(told.is_some()));
    }
}
