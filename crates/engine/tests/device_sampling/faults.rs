//! Steps that fail while another is in flight, a device that is lost, and a runner's errors in
//! their order.

use std::collections::VecDeque;

use folio_engine::{
    Admission, Background, EngineConfig, Error, Executor, FinishReason, RequestId, Result, RowOutput, StepPlan,
    StepRunner,
};

use crate::{
    device::{Notes, Shared},
    harness::{self, Bench, Outcome},
    requests, tiny,
};

/// A request in a failed step continues from its prompt and answer so far, with the same sampler
/// state.
#[test]
fn failed_steps_and_draws_change_no_answer() {
    let model = tiny::alternating();
    let bench = Bench::new(&model);
    let requests = requests(30);
    let expected = bench.run_alone(&requests);
    for number in [0, 1, 5, 12] {
        for notes in [
            Notes { broken_step: Some(number), ..Notes::default() },
            Notes { broken_draw: Some(number), ..Notes::default() },
        ] {
            let what = format!("{notes:?}");
            let (found, _, stats) = bench.run_with(bench.config(), true, notes, &requests);
            assert_eq!(stats.steps_failed, 1, "{what}");
            assert_eq!(stats.restarts, 0, "{what}");
            for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
                assert_eq!(found, expected, "request {index}, {what}");
            }
        }
    }
}

/// A device that is lost is opened again, and no request is affected.
#[test]
fn a_device_that_is_lost() {
    let model = tiny::experts();
    let bench = Bench::new(&model);
    let requests = requests(30);
    let expected = bench.run_alone(&requests);
    for broken in [
        Notes { broken_step: Some(9), stays_broken: true, ..Notes::default() },
        Notes { broken_draw: Some(9), stays_broken: true, ..Notes::default() },
    ] {
        let spare = Shared::default();
        let config = EngineConfig { rebuild: Some(harness::rebuild(tiny::experts(), spare.clone())), ..bench.config() };
        let (found, _, stats) = bench.run_with(config, true, broken, &requests);
        assert_eq!((stats.steps_failed, stats.restarts), (1, 1));
        assert!(spare.notes().steps > 0, "the new one runs");
        for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert_eq!(found, expected, "request {index}");
        }
    }
    // Without a function to rebuild it the engine ends, and reports why.
    let broken = Notes { broken_step: Some(9), stays_broken: true, ..Notes::default() };
    let started = bench.start_with(bench.config(), true, broken);
    let streams: Vec<_> = requests.iter().map(|(p, params)| harness::submit(&started.engine, p, params)).collect();
    let outcomes: Vec<Outcome> = streams.into_iter().flat_map(|stream| harness::read(stream, 2, usize::MAX)).collect();
    let says_why =
        |outcome: &&Outcome| matches!(&outcome.reason, Some(FinishReason::Error(why)) if why.contains("was broken"));
    assert!(outcomes.iter().filter(says_why).count() > 10);
}

/// Steps are in flight until their results are taken; those of given numbers fail, at their
/// beginning or at their end.
struct Scripted {
    started: u64,
    under_way: VecDeque<u64>,
    fails_at_start: Option<u64>,
    fails_at_end: Option<u64>,
}

impl StepRunner for Scripted {
    fn admit(&mut self, _: RequestId, _: Admission) {}

    fn run(&mut self, _: &StepPlan) -> Result<Vec<RowOutput>> {
        panic!("steps are started here")
    }

    fn start(&mut self, _: &StepPlan) -> Result<Option<Vec<RowOutput>>> {
        let number = self.started;
        self.started += 1;
        if self.fails_at_start == Some(number) {
            return Err(Error::Step(format!("step {number} fails at its start")));
        }
        self.under_way.push_back(number);
        Ok(None)
    }

    fn may_start(&self, _: &StepPlan) -> bool {
        true
    }

    /// Not before both have begun.
    fn is_done(&mut self) -> bool {
        self.started >= 2
    }

    fn finish(&mut self) -> Result<Vec<RowOutput>> {
        let number = self.under_way.pop_front().expect("one is under way");
        if self.fails_at_end == Some(number) {
            return Err(Error::Step(format!("step {number} fails at its end")));
        }
        Ok(Vec::new())
    }

    fn release(&mut self, _: RequestId) {}
}

fn run_two(fails_at_start: Option<u64>, fails_at_end: Option<u64>) -> [Result<usize, String>; 2] {
    let runner = Scripted { started: 0, under_way: VecDeque::new(), fails_at_start, fails_at_end };
    let mut executor = Background::start(runner).expect("a thread");
    executor.on_done(Box::new(|| {}));
    for _ in 0..2 {
        executor.submit(StepPlan::default()).expect("it lives");
    }
    std::array::from_fn(|_| executor.collect().map(|output| output.rows.len()).map_err(|error| error.to_string()))
}

#[test]
fn results_come_in_the_order_of_the_plans() {
    let before = || Err("the step before this one failed".to_owned());
    assert_eq!(run_two(None, Some(9)), [Ok(0), Ok(0)]);
    assert_eq!(run_two(None, Some(0)), [Err("step 0 fails at its end".to_owned()), before()]);
    assert_eq!(run_two(Some(0), None), [Err("step 0 fails at its start".to_owned()), before()]);
    assert_eq!(run_two(Some(1), None), [Ok(0), Err("step 1 fails at its start".to_owned())]);
    // The second begins while the first, which will fail, is in flight.
    assert_eq!(
        run_two(Some(1), Some(0)),
        [Err("step 0 fails at its end".to_owned()), Err("step 1 fails at its start".to_owned())]
    );
}
