//! What is refused, and when an answer ends.

use folio_engine::{EngineConfig, FinishReason, InvalidRequest, SamplingParams, SubmitError, Usage};

use crate::mock::{answer, answers, config, params, reference, start, start_gated, submit, tokens, wait_until};

#[test]
fn an_answer_ends_at_the_first_rule_that_holds() {
    let prompt = tokens(1, 20);
    let free = reference(&prompt, 200);
    let base = params(10);
    let check = |eos: Vec<u32>, max_model_len: usize, params: SamplingParams, len: usize, reason: FinishReason| {
        let engine = start(EngineConfig { eos, max_model_len, ..config(32) });
        let found = answer(submit(&engine, prompt.clone(), params.clone()));
        let stop_token = usize::from(matches!(reason, FinishReason::Stop(_)));
        assert_eq!((&found.tokens[..], &found.reason), (&free[..len], &reason), "{params:?}");
        let usage = Usage { prompt_tokens: 20, completion_tokens: len + stop_token, cached_tokens: 0 };
        assert_eq!(found.usage, usage);
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
    // The mock samples what it likes; the rule itself must hold the stop back.
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
        let executor = Box::new(crate::mock::Mock::default());
        let error = folio_engine::Engine::start(executor, config).expect_err("refused").to_string();
        assert!(error.contains(word), "{error}");
    };
    check(|c| c.max_seqs = 0, "max_seqs");
    check(|c| c.budget_tokens = 0, "budget_tokens");
    check(|c| c.blocks = vec![], "blocks");
    check(|c| c.max_model_len = 1, "max_model_len");
    check(|c| c.logits_width = 0, "logits_width");
    check(|c| c.max_chunk = Some(0), "max_chunk");
    check(|c| c.prompt_logit_rows = 0, "prompt_logit_rows");
}

#[test]
fn a_full_queue_refuses_and_takes_again() {
    let (engine, permits, _) = start_gated(EngineConfig { max_seqs: 2, max_waiting: 1, ..config(32) });
    let request = |n| engine.request(tokens(2, 10), SamplingParams { n, ..params(2) }).expect("valid");
    let two = engine.submit(request(2)).expect("room");
    let one = engine.submit(request(1)).expect("room");
    assert_eq!(engine.submit(request(1)).err(), Some(SubmitError::QueueFull));
    drop(permits);
    assert_eq!(answers(two, 2).len() + answers(one, 1).len(), 3);
    wait_until("all have ended", || engine.stats().samples_ended == 3);
    assert!(engine.submit(request(2)).is_ok());
}
