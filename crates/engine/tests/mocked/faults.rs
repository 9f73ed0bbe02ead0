//! One request's fault is its own; a step's fault is the step's; the engine goes on.

use folio_engine::{EngineConfig, FinishReason, RequestId};

use crate::mock::{Faults, answer, config, params, reference, start_with, submit, tokens};

#[test]
fn a_row_that_is_not_a_number_ends_its_request_alone() {
    for broken_at in [20, 25, 33] {
        let faults = Faults { broken_row: Some((RequestId(1), broken_at)), ..Faults::default() };
        let engine = start_with(config(32), faults);
        let streams: Vec<_> = (0..3).map(|i| submit(&engine, tokens(i, 20), params(20))).collect();
        for (i, stream) in streams.into_iter().enumerate() {
            let found = answer(stream);
            let expected = reference(&tokens(i as u64, 20), 20);
            if i == 1 {
                assert_eq!(found.reason, FinishReason::Error("not a number".into()));
                assert_eq!(found.tokens, expected[..broken_at - 20]);
            } else {
                assert_eq!((found.tokens, found.reason), (expected, FinishReason::Length));
            }
        }
    }
}

#[test]
fn a_failed_step_ends_what_was_in_it_and_nothing_else() {
    for panics in [false, true] {
        for step in 1..5 {
            let mut faults = Faults::default();
            if panics { &mut faults.panicking_steps } else { &mut faults.failing_steps }.insert(step);
            let engine = start_with(EngineConfig { max_seqs: 2, ..config(32) }, faults);
            let streams: Vec<_> = (0..6).map(|i| submit(&engine, tokens(i, 20), params(10))).collect();
            let mut failed = 0;
            for (i, stream) in streams.into_iter().enumerate() {
                let found = answer(stream);
                let expected = reference(&tokens(i as u64, 20), 10);
                match found.reason {
                    FinishReason::Length => assert_eq!(found.tokens, expected),
                    FinishReason::Error(reason) => {
                        failed += 1;
                        assert!(reason.contains(if panics { "panicked" } else { "planted failure" }), "{reason}");
                        assert_eq!(found.tokens, expected[..found.tokens.len()]);
                    }
                    other => panic!("{other:?}"),
                }
            }
            assert!((1..=2).contains(&failed), "{failed} failed");
            let again = answer(submit(&engine, tokens(0, 20), params(10)));
            assert_eq!(again.tokens, reference(&tokens(0, 20), 10));
            assert_eq!(engine.stats().steps_failed, 1);
        }
    }
}
