//! One request's fault is its own; a step's fault is the step's; the engine goes on.

use folio_engine::{
    Engine, EngineConfig, Executor, FinishReason, RequestId, Result, RowOutput, SamplingState, StepPlan, SubmitError,
};

use crate::mock::{Faults, answer, config, params, reference, start_with, submit, tokens, wait_until};

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

/// Takes the whole engine down: it fails where nothing guards it.
struct Fatal(flume::Receiver<()>);

impl Executor for Fatal {
    fn admit(&mut self, _: RequestId, _: SamplingState) {
        let _ = self.0.recv();
        panic!("planted panic");
    }

    fn submit(&mut self, _: &StepPlan) -> Result<()> {
        Ok(())
    }

    fn collect(&mut self) -> Result<Vec<RowOutput>> {
        Ok(Vec::new())
    }

    fn release(&mut self, _: RequestId) {}
}

#[test]
fn when_the_engine_dies_nobody_waits_for_it() {
    let (gate, receiver) = flume::unbounded();
    let engine = Engine::start(Box::new(Fatal(receiver)), config(8)).expect("a sound configuration");
    let mut streams: Vec<_> = (0..3).map(|i| submit(&engine, tokens(i, 5), params(3))).collect();
    assert!(engine.is_running());
    drop(gate);
    // The first was being admitted, the others were still queued.
    assert!(streams.iter_mut().all(|stream| stream.recv().is_none()));
    wait_until("the thread has ended", || !engine.is_running());
    let request = engine.request(tokens(0, 3), params(1)).expect("valid");
    assert_eq!(engine.submit(request).err(), Some(SubmitError::Stopped));
}
