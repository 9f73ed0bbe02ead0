//! A request's fault ends that request; a step's fault ends that step; the engine continues.

use std::time::Duration;

use folio_engine::{
    Admission, Assignment, Background, Engine, EngineConfig, Executor, FinishReason, RequestId, Result, RowOutput,
    Sampled, StepOutput, StepPlan, StepRunner, SubmitError, Wake,
};

use crate::mock::{
    BOTH, Bomb, Faults, answer, config, params, reference, start_gated, start_with, submit, tokens, wait_until,
    wait_until_idle,
};

#[test]
fn a_row_that_is_not_a_number_ends_its_request_alone() {
    for overlap in BOTH {
        for broken_at in [20, 25, 33] {
            let faults = Faults { broken_row: Some((RequestId(1), broken_at)), ..Faults::default() };
            let engine = start_with(EngineConfig { overlap, ..config(32) }, faults);
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
            wait_until_idle(&engine);
        }
    }
}

/// The row after a token that was never sampled is in flight when its request ends.
#[test]
fn a_row_behind_one_that_is_not_a_number_harms_nobody() {
    let faults = Faults { broken_row: Some((RequestId(0), 22)), ..Faults::default() };
    let gated = start_gated(config(32), faults);
    let broken = submit(&gated.engine, tokens(0, 20), params(20));
    let sound = submit(&gated.engine, tokens(1, 20), params(20));
    gated.run_overlapped(6);
    drop(gated.permits);
    let found = answer(broken);
    assert_eq!(found.reason, FinishReason::Error("not a number".into()));
    assert_eq!(found.tokens, reference(&tokens(0, 20), 2));
    assert_eq!(answer(sound).tokens, reference(&tokens(1, 20), 20));
    wait_until_idle(&gated.engine);
}

#[test]
fn a_panic_where_a_request_comes_or_goes_is_that_requests_own() {
    for overlap in BOTH {
        let faults =
            Faults { panicking_admit: Some(RequestId(1)), panicking_release: Some(RequestId(2)), ..Faults::default() };
        let engine = start_with(EngineConfig { overlap, ..config(32) }, faults);
        let streams: Vec<_> = (0..4).map(|i| submit(&engine, tokens(i, 20), params(5))).collect();
        for (i, stream) in streams.into_iter().enumerate() {
            let found = answer(stream);
            match i {
                1 => assert!(matches!(&found.reason, FinishReason::Error(why) if why.contains("panicked"))),
                _ => assert_eq!(found.tokens, reference(&tokens(i as u64, 20), 5)),
            }
        }
        assert_eq!(engine.stats().steps_failed, 0);
        wait_until_idle(&engine);
    }
}

#[test]
fn a_token_that_nobody_asked_for_is_nobodys() {
    for overlap in BOTH {
        let faults = Faults { is_eager: true, ..Faults::default() };
        let engine = start_with(EngineConfig { overlap, budget_tokens: 16, ..config(32) }, faults);
        let streams: Vec<_> = (0..3).map(|i| submit(&engine, tokens(i, 70), params(5))).collect();
        for (i, stream) in streams.into_iter().enumerate() {
            assert_eq!(answer(stream).tokens, reference(&tokens(i as u64, 70), 5));
        }
        wait_until_idle(&engine);
        assert!(engine.is_running());
    }
}

struct Fragile(flume::Receiver<()>);

impl StepRunner for Fragile {
    fn admit(&mut self, _: RequestId, _: Admission) {}

    fn run(&mut self, _: &StepPlan) -> Result<Vec<RowOutput>> {
        let _ = self.0.recv();
        std::panic::panic_any(Bomb)
    }

    fn release(&mut self, _: RequestId) {}
}

#[test]
fn when_the_executors_thread_dies_every_request_ends() {
    for overlap in BOTH {
        let (gate, receiver) = flume::unbounded();
        let executor = Background::start(Fragile(receiver)).expect("a thread");
        let engine = Engine::start(Box::new(executor), EngineConfig { overlap, ..config(8) }).expect("sound");
        let streams: Vec<_> = (0..3).map(|i| submit(&engine, tokens(i, 5), params(3))).collect();
        drop(gate);
        for stream in streams {
            let reason = answer(stream).reason;
            assert!(matches!(&reason, FinishReason::Error(why) if why.contains("thread has ended")), "{reason:?}");
        }
        assert_eq!(engine.num_live(), 0);
    }
}

/// Ends the whole engine: it panics in a call that is not guarded.
pub struct Fatal(pub flume::Receiver<()>);

impl Executor for Fatal {
    fn on_done(&mut self, _: Wake) {}

    fn admit(&mut self, _: RequestId, _: Admission) {
        let _ = self.0.recv();
        panic!("planted panic");
    }

    fn submit(&mut self, _: StepPlan) -> Result<()> {
        Ok(())
    }

    fn collect(&mut self) -> Result<StepOutput> {
        Ok(StepOutput { rows: Vec::new(), took: Duration::ZERO, drafting: Duration::ZERO })
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
    // The first was being admitted, and the others were still queued.
    assert!(streams.iter_mut().all(|stream| stream.recv().is_none()));
    wait_until("the thread has ended", || !engine.is_running());
    let request = engine.request(tokens(0, 3), params(1)).expect("valid");
    assert_eq!(engine.submit(request).err(), Some(SubmitError::Stopped));
}

/// Returns more results than requested.
struct Talkative;

impl StepRunner for Talkative {
    fn admit(&mut self, _: RequestId, _: Admission) {}

    fn run(&mut self, plan: &StepPlan) -> Result<Vec<RowOutput>> {
        let sampled = |token| Sampled { token, logprobs: None };
        let output = |a: &Assignment| RowOutput { sampled: vec![sampled(1), sampled(2)], ..RowOutput::new(a.id) };
        Ok(plan.assignments.iter().map(output).collect())
    }

    fn release(&mut self, _: RequestId) {}
}

#[test]
fn drafts_that_nobody_made_are_not_accepted() {
    let executor = Background::start(Talkative).expect("a thread");
    let engine = Engine::start(Box::new(executor), config(8)).expect("sound");
    let reason = answer(submit(&engine, tokens(1, 5), params(3))).reason;
    assert!(matches!(&reason, FinishReason::Error(why) if why.contains("that it did not have")), "{reason:?}");
    assert!(engine.is_running());
}
