//! Requests for embeddings.

use folio_engine::{
    Engine, EngineConfig, Event, FinishReason, InvalidRequest, Pooling, RequestId, RequestStream, Usage,
};

use crate::mock::{
    BOTH, Faults, answer, config, params, reference, start, start_rebuilding, start_rebuilding_gated, start_with,
    submit, tokens, wait_until, wait_until_idle,
};

const WIDTH: usize = 5;
const POOLINGS: [Pooling; 2] = [Pooling::Mean, Pooling::Last];

fn embed(engine: &Engine, prompt: Vec<u32>, pooling: Pooling) -> RequestStream {
    engine.submit(engine.embedding(prompt, pooling).expect("valid")).expect("room")
}

/// Reads at most one vector, and the end.
fn read(mut stream: RequestStream) -> (Option<Vec<f32>>, FinishReason, Usage) {
    let mut vector = None;
    loop {
        match stream.recv().expect("an end") {
            Event::Embedding(found) => assert!(vector.replace(found).is_none()),
            Event::Finished { sample, reason, usage } => {
                assert_eq!((sample, stream.recv()), (0, None));
                return (vector, reason, usage);
            }
            other => panic!("{other:?}"),
        }
    }
}

/// The mock's vector depends on all that its blocks hold.
fn expected(prompt: &[u32]) -> Option<Vec<f32>> {
    Some(vec![reference(prompt, 1)[0] as f32; WIDTH])
}

fn faults() -> Faults {
    Faults { embedding_width: WIDTH, ..Faults::default() }
}

#[test]
fn a_prompt_is_answered_by_one_vector() {
    for overlap in BOTH {
        for force_preempt_every in [None, Some(2)] {
            let config = EngineConfig {
                embedding_width: WIDTH,
                overlap,
                prompt_logit_rows: 7,
                force_preempt_every,
                max_model_len: 100,
                ..config(32)
            };
            let engine = start_with(config, faults());
            let beside = submit(&engine, tokens(77, 20), params(30));
            let streams: Vec<_> = [1, 2, 16, 17, 40, 100]
                .into_iter()
                .flat_map(|len| POOLINGS.map(|pooling| (len, embed(&engine, tokens(len as u64, len), pooling))))
                .collect();
            for (len, stream) in streams {
                let (vector, reason, usage) = read(stream);
                assert_eq!((vector, reason), (expected(&tokens(len as u64, len)), FinishReason::Length));
                assert_eq!((usage.prompt_tokens, usage.completion_tokens), (len, 0));
            }
            assert_eq!(answer(beside).tokens, reference(&tokens(77, 20), 30));
            wait_until_idle(&engine);
            assert_eq!(engine.stats().tokens_sampled, 30);
        }
    }
}

#[test]
fn the_last_state_needs_no_row_that_the_cache_has() {
    let engine = start_with(EngineConfig { embedding_width: WIDTH, ..config(32) }, faults());
    let cached = |pooling| {
        let (vector, _, usage) = read(embed(&engine, tokens(0, 40), pooling));
        assert_eq!(vector, expected(&tokens(0, 40)));
        usage.cached_tokens
    };
    assert_eq!([Pooling::Mean, Pooling::Last, Pooling::Mean].map(cached), [0, 32, 0]);
}

#[test]
fn what_cannot_be_pooled_is_refused() {
    let none = start(config(8));
    assert_eq!(none.embedding(vec![1], Pooling::Mean).expect_err("none"), InvalidRequest::NoEmbeddings);
    let check = |blocks: usize, prompt: Vec<u32>, expected: InvalidRequest| {
        let engine = start(EngineConfig { embedding_width: WIDTH, max_model_len: 100, ..config(blocks) });
        assert_eq!(engine.embedding(prompt, Pooling::Last).expect_err("invalid"), expected);
    };
    check(8, vec![], InvalidRequest::EmptyPrompt);
    check(8, tokens(0, 101), InvalidRequest::InputTooLong { input: 101, most: 100 });
    check(4, tokens(0, 64), InvalidRequest::InputTooLong { input: 64, most: 63 });
    let unknown = InvalidRequest::UnknownToken { token: 50_000, position: 1, logits_width: 50_000 };
    check(8, vec![1, 50_000], unknown);
}

#[test]
fn an_executor_that_gives_something_else_ends_the_request_alone() {
    for embedding_width in [0, 4] {
        let engine = start_with(
            EngineConfig { embedding_width: WIDTH, ..config(32) },
            Faults { embedding_width, ..Faults::default() },
        );
        let beside = submit(&engine, tokens(1, 20), params(10));
        let (vector, reason, _) = read(embed(&engine, tokens(0, 40), Pooling::Mean));
        assert_eq!((vector, reason), (None, FinishReason::Error("the step gave no embedding".into())));
        assert_eq!(answer(beside).tokens, reference(&tokens(1, 20), 10));
        wait_until_idle(&engine);
    }
}

/// The sum is computed again after a failed step.
#[test]
fn vectors_survive_failed_steps() {
    for (overlap, is_deadly) in [(true, false), (true, true), (false, false)] {
        let faults = Faults { poison: vec![(RequestId(1), 30)], is_deadly, ..faults() };
        let config = EngineConfig { embedding_width: WIDTH, overlap, prompt_logit_rows: 16, ..config(32) };
        let (engine, _) = start_rebuilding(config, faults);
        let streams: Vec<_> = (0..4).map(|i| embed(&engine, tokens(i, 40), POOLINGS[i as usize % 2])).collect();
        for (i, stream) in streams.into_iter().enumerate() {
            let (vector, reason, usage) = read(stream);
            let is_guilty = i == 1;
            assert_eq!(vector, expected(&tokens(i as u64, 40)).filter(|_| !is_guilty));
            assert_eq!(reason == FinishReason::Length, !is_guilty);
            assert_eq!(usage.completion_tokens, 0);
        }
        wait_until_idle(&engine);
    }
}

/// A preempted request is in no step when the executor dies, and its sum is lost too.
#[test]
fn what_is_pooled_by_half_survives_a_restart_that_nobody_was_in() {
    let (permits, gate) = flume::unbounded();
    let faults = Faults { fatal_steps: [45].into(), ..faults() };
    let config = EngineConfig { embedding_width: WIDTH, overlap: false, prompt_logit_rows: 1, ..config(6) };
    let (engine, _) = start_rebuilding_gated(config, faults, Some(gate));
    // It has four of the six blocks when the other needs a third, and is preempted.
    let first = submit(&engine, tokens(0, 16), params(70));
    wait_until("it is in a step", || engine.rows_in_flight() == 16);
    let vector = embed(&engine, tokens(1, 48), Pooling::Mean);
    (1..45).for_each(|_| permits.send(()).expect("the engine runs"));
    wait_until("the last step is under way", || engine.stats().steps_done == 44 && engine.rows_in_flight() == 1);
    assert_eq!(engine.stats().scheduler.preemptions, 1);
    drop(first);
    wait_until("it has left", || engine.num_live() == 1);
    drop(permits);
    let (vector, reason, _) = read(vector);
    assert_eq!((vector, reason), (expected(&tokens(1, 48)), FinishReason::Length));
    let stats = engine.stats();
    assert_eq!((stats.restarts, stats.samples_tried_again), (1, 0));
    wait_until_idle(&engine);
}
