//! Whether the engine gets anywhere, as a watchdog sees it.

use std::time::{Duration, Instant};

use folio_engine::{Engine, EngineConfig};

use crate::{
    faults::Fatal,
    mock::{BOTH, Faults, answer, config, params, start_gated, submit, tokens, wait_until, wait_until_idle},
};

#[test]
fn a_step_that_hangs_shows_and_one_that_ends_counts() {
    for overlap in BOTH {
        let gated = start_gated(EngineConfig { overlap, ..config(32) }, Faults::default());
        let engine = &gated.engine;
        assert_eq!(engine.stalled_for(), None);
        let idle = Instant::now();
        wait_until("it was idle for a while", || idle.elapsed() > Duration::from_millis(20));
        let submitted = Instant::now();
        let stream = submit(engine, tokens(0, 20), params(3));
        // However long it was idle, the work has only just come.
        let stalled = engine.stalled_for().expect("there is work");
        assert!(stalled <= submitted.elapsed(), "{stalled:?}");
        gated.wait_for_submitted(1);
        wait_until("rows are in flight", || engine.rows_in_flight() >= 20);
        wait_until("it is stalled", || engine.stalled_for() > Some(Duration::from_millis(20)));
        let permitted = Instant::now();
        gated.permit(1);
        wait_until("the step has counted", || engine.stalled_for() <= Some(permitted.elapsed()));
        drop(gated.permits);
        assert_eq!(answer(stream).tokens.len(), 3);
        assert_eq!(engine.stalled_for(), None);
        wait_until_idle(engine);
        assert_eq!(engine.rows_in_flight(), 0);
    }
}

#[test]
fn a_dead_engine_with_work_left_is_stalled() {
    let (gate, receiver) = flume::unbounded();
    let engine = Engine::start(Box::new(Fatal(receiver)), config(8)).expect("a sound configuration");
    let mut stream = submit(&engine, tokens(0, 5), params(3));
    drop(gate);
    assert!(stream.recv().is_none());
    wait_until("the thread has ended", || !engine.is_running());
    wait_until("it shows", || engine.stalled_for() > Some(Duration::from_millis(5)));
}
