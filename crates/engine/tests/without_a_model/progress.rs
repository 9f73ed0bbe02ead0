//! The engine's progress, as a watchdog sees it.

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
        // Idle time does not count: the work has only just come.
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

/// A step of minutes with beats is not stalled; without them it is, like any other.
#[test]
fn a_step_that_gets_on_counts_before_its_end() {
    for overlap in BOTH {
        let gated = start_gated(EngineConfig { overlap, ..config(32) }, Faults::default());
        let engine = &gated.engine;
        let stream = submit(engine, tokens(0, 20), params(3));
        gated.wait_for_submitted(1);
        for _ in 0..3 {
            wait_until("it is stalled", || engine.stalled_for() > Some(Duration::from_millis(10)));
            let beaten = Instant::now();
            gated.pulse.beat();
            let stalled = engine.stalled_for().expect("there is work");
            assert!(stalled <= beaten.elapsed(), "{stalled:?}");
        }
        wait_until("it is stalled", || engine.stalled_for() > Some(Duration::from_millis(10)));
        drop(gated.permits);
        assert_eq!(answer(stream).tokens.len(), 3);
    }
}

/// Clients that abort and return do not hide a step that hangs; nor does the end of all of its
/// requests.
#[test]
fn a_step_that_hangs_shows_while_clients_come_and_go() {
    for overlap in BOTH {
        let gated = start_gated(EngineConfig { overlap, ..config(32) }, Faults::default());
        let engine = &gated.engine;
        let mut leaving = submit(engine, tokens(0, 20), params(3));
        gated.wait_for_submitted(if overlap { 2 } else { 1 });
        for i in 1..5 {
            let pause = Instant::now();
            wait_until("a while is over", || pause.elapsed() > Duration::from_millis(5));
            drop(leaving);
            wait_until("it has left", || engine.num_live() == 0);
            let stalled = engine.stalled_for().expect("its step is under way");
            assert!(stalled >= Duration::from_millis(5 * i), "{stalled:?}");
            leaving = submit(engine, tokens(i, 20), params(3));
        }
        let stalled = engine.stalled_for().expect("there is work");
        assert!(stalled >= Duration::from_millis(20), "{stalled:?}");
        let permitted = Instant::now();
        gated.permit(1);
        wait_until("the step has counted", || engine.stalled_for() <= Some(permitted.elapsed()));
        drop(gated.permits);
        assert_eq!(answer(leaving).tokens.len(), 3);
        wait_until("nothing is under way", || engine.stalled_for().is_none());
    }
}

#[test]
fn an_engine_that_was_shut_down_has_no_work() {
    let gated = start_gated(config(32), Faults::default());
    let stream = submit(&gated.engine, tokens(0, 20), params(3));
    gated.wait_for_submitted(1);
    let watcher = gated.engine.clone();
    drop(gated.permits);
    gated.engine.shutdown();
    assert_eq!((watcher.stalled_for(), watcher.rows_in_flight()), (None, 0));
    drop(stream);
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
