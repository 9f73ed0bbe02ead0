//! An executor with a thread of its own. It runs steps, one command after the other, while the
//! engine's thread plans, receives messages and delivers results.
//!
//! Some runners compute on that thread. Others submit work to a device: the thread then starts the
//! next step as soon as its plan arrives, while the device computes the one before, so that the
//! device never waits for the host.
//!
//! A panic inside a step is that step's error, and the thread goes on: the data of a step is made
//! anew from its plan.

use std::{
    collections::{HashSet, VecDeque},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use folio_device::Pulse;
use folio_scheduler::{RequestId, StepPlan};

use crate::{Admission, Error, Executor, Result, RowOutput, StepOutput, Wake, executor::MOST_IN_FLIGHT, prefetch};

/// Time for which the thread polls for a command after a step.
const SOON: Duration = Duration::from_micros(200);

/// Runs a step from its beginning to its end on the calling thread.
pub trait StepRunner: Send {
    /// Adds a request.
    fn admit(&mut self, id: RequestId, admission: Admission);

    /// Runs the transfers in order, then all rows. Returns one output for each assignment.
    fn run(&mut self, plan: &StepPlan) -> Result<Vec<RowOutput>>;

    /// Starts a step, after at most one that is in flight. None: the step is in flight, and
    /// [`StepRunner::finish`] returns its results.
    fn start(&mut self, plan: &StepPlan) -> Result<Option<Vec<RowOutput>>> {
        self.run(plan).map(Some)
    }

    /// Whether a step can start before the results of the one in flight are known.
    fn may_start(&self, _plan: &StepPlan) -> bool {
        false
    }

    /// Whether [`StepRunner::finish`] would not wait.
    fn is_done(&mut self) -> bool {
        true
    }

    /// Waits for the oldest step in flight.
    fn finish(&mut self) -> Result<Vec<RowOutput>> {
        Err(Error::NothingSubmitted)
    }

    /// Whether a device computes the steps, and not the threads of this machine.
    fn computes_elsewhere(&self) -> bool {
        false
    }

    /// See [`Executor::pulse`]; called once, at the start.
    fn pulse(&self) -> Option<Pulse> {
        None
    }

    /// Time spent on drafts since the last call.
    fn take_drafting(&mut self) -> Duration {
        Duration::ZERO
    }

    /// After a failed step: whether every later step will fail too, until the runner is rebuilt.
    fn is_lost(&mut self) -> bool {
        false
    }

    /// Removes a request.
    fn release(&mut self, id: RequestId);
}

enum Command {
    OnDone(Wake),
    Admit(RequestId, Box<Admission>),
    Run { plan: StepPlan, era: u64 },
    Release(RequestId),
}

/// The handle on the thread. Dropping it waits for the step that runs, and skips those after it.
pub struct Background {
    /// None while it is dropped, which ends the thread.
    commands: Option<mpsc::Sender<Command>>,
    results: mpsc::Receiver<Result<StepOutput>>,
    num_in_flight: usize,
    computes_elsewhere: bool,
    pulse: Option<Pulse>,
    /// Failures collected so far. After a failure, the other steps of its era are not run.
    era: u64,
    closing: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Background {
    pub fn start(runner: impl StepRunner + 'static) -> Result<Self> {
        let (computes_elsewhere, pulse) = (runner.computes_elsewhere(), runner.pulse());
        let (commands, inbox) = mpsc::channel();
        let (outbox, results) = mpsc::channel();
        let closing = Arc::new(AtomicBool::new(false));
        let worker = Worker {
            commands: inbox,
            runner,
            results: outbox,
            closing: Arc::clone(&closing),
            broken: HashSet::new(),
            failed_era: None,
            waker: Waker(Box::new(|| {})),
            in_flight: VecDeque::new(),
            free_since: Instant::now(),
        };
        let thread = std::thread::Builder::new().name("folio-executor".into()).spawn(move || worker.run())?;
        Ok(Self {
            commands: Some(commands),
            results,
            num_in_flight: 0,
            computes_elsewhere,
            pulse,
            era: 0,
            closing,
            thread: Some(thread),
        })
    }

    fn send(&self, command: Command) -> Result<()> {
        let commands = self.commands.as_ref().ok_or(Error::ExecutorGone)?;
        commands.send(command).map_err(|_| Error::ExecutorGone)
    }
}

impl Executor for Background {
    fn on_done(&mut self, wake: Wake) {
        // An error of a thread that has ended is reported when a step is submitted; the same holds
        // below.
        let _ = self.send(Command::OnDone(wake));
    }

    fn admit(&mut self, id: RequestId, admission: Admission) {
        let _ = self.send(Command::Admit(id, Box::new(admission)));
    }

    fn submit(&mut self, plan: StepPlan) -> Result<()> {
        assert!(self.num_in_flight < MOST_IN_FLIGHT, "at most {MOST_IN_FLIGHT} steps in flight");
        self.send(Command::Run { plan, era: self.era })?;
        self.num_in_flight += 1;
        Ok(())
    }

    fn collect(&mut self) -> Result<StepOutput> {
        if self.num_in_flight == 0 {
            return Err(Error::NothingSubmitted);
        }
        self.num_in_flight -= 1;
        let result = self.results.recv().unwrap_or(Err(Error::ExecutorGone));
        if result.is_err() {
            self.era += 1;
        }
        result
    }

    fn release(&mut self, id: RequestId) {
        let _ = self.send(Command::Release(id));
    }

    fn computes_elsewhere(&self) -> bool {
        self.computes_elsewhere
    }

    fn pulse(&self) -> Option<Pulse> {
        self.pulse.clone()
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.closing.store(true, Ordering::Release);
        self.commands = None;
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has ended too.
            let _ = thread.join();
        }
    }
}

/// State of the thread.
struct Worker<R> {
    commands: mpsc::Receiver<Command>,
    runner: R,
    results: mpsc::Sender<Result<StepOutput>>,
    closing: Arc<AtomicBool>,
    /// Requests that the runner failed to admit; their rows fail, and no others.
    broken: HashSet<RequestId>,
    /// The last era with a failed step.
    failed_era: Option<u64>,
    /// Started and not finished, oldest first.
    in_flight: VecDeque<InFlight>,
    /// Time at which the last step ended.
    free_since: Instant,
    /// The last field, so that both channels are closed when it wakes the engine.
    waker: Waker,
}

struct InFlight {
    started: Instant,
    era: u64,
    failures: Vec<(usize, RowOutput)>,
}

/// Reports as many steps as may be in flight when the thread ends by a fault, because they are
/// never answered.
struct Waker(Wake);

impl Drop for Waker {
    fn drop(&mut self) {
        (0..MOST_IN_FLIGHT).for_each(|_| (self.0)());
    }
}

impl<R: StepRunner> Worker<R> {
    fn run(mut self) {
        while let Some(command) = self.next() {
            match command {
                Command::OnDone(wake) => self.waker = Waker(wake),
                Command::Admit(id, admission) => {
                    if guarded(|| self.runner.admit(id, *admission)).is_none() {
                        self.broken.insert(id);
                    }
                }
                Command::Run { plan, era } => self.run_step(plan, era),
                Command::Release(id) => {
                    self.broken.remove(&id);
                    // A runner that fails to remove a request loses memory at worst: an id that
                    // returns is admitted anew.
                    let _ = guarded(|| self.runner.release(id));
                }
            }
        }
        while !self.in_flight.is_empty() {
            self.finish();
        }
    }

    /// The next command. While there is none, steps in flight are finished. A step's results are
    /// mostly followed by the next plan, and a device's step takes milliseconds at most, so the
    /// thread polls: waking up late would cost a share of that.
    fn next(&mut self) -> Option<Command> {
        loop {
            if self.in_flight.is_empty() {
                if self.free_since.elapsed() > SOON {
                    return self.commands.recv().ok();
                }
            } else if guarded(|| self.runner.is_done()).unwrap_or(true) {
                self.finish();
                continue;
            }
            match self.commands.try_recv() {
                Ok(command) => return Some(command),
                Err(mpsc::TryRecvError::Disconnected) => return None,
                Err(mpsc::TryRecvError::Empty) => std::thread::yield_now(),
            }
        }
    }

    fn run_step(&mut self, mut plan: StepPlan, era: u64) {
        prefetch::plan(&plan);
        if !self.in_flight.is_empty() && !guarded(|| self.runner.may_start(&plan)).unwrap_or(false) {
            while !self.in_flight.is_empty() {
                self.finish();
            }
        }
        if self.closing.load(Ordering::Acquire) {
            return self.answer(Err(Error::ExecutorGone), era);
        }
        if self.failed_era == Some(era) {
            return self.answer(Err(Error::after_failure()), era);
        }
        let failures = self.remove_broken(&mut plan);
        let step = InFlight { started: Instant::now(), era, failures };
        match guarded(|| self.runner.start(&plan)).unwrap_or(Err(Error::StepPanicked)) {
            Ok(None) => self.in_flight.push_back(step),
            Ok(Some(rows)) => self.return_results(step, Ok(rows)),
            // Results are returned in the order of the plans.
            Err(error) => {
                while !self.in_flight.is_empty() {
                    self.finish();
                }
                self.return_results(step, Err(error));
            }
        }
    }

    /// Waits for the oldest step in flight and returns its results.
    fn finish(&mut self) {
        let Some(step) = self.in_flight.pop_front() else { return };
        let rows = match self.failed_era == Some(step.era) {
            // The device still has to finish the step.
            true => {
                let _ = guarded(|| self.runner.finish());
                Err(Error::after_failure())
            }
            false => guarded(|| self.runner.finish()).unwrap_or(Err(Error::StepPanicked)),
        };
        self.return_results(step, rows);
    }

    fn return_results(&mut self, step: InFlight, rows: Result<Vec<RowOutput>>) {
        let now = Instant::now();
        let took = now - step.started.max(self.free_since);
        self.free_since = now;
        let drafting = guarded(|| self.runner.take_drafting()).unwrap_or_default();
        let rows = rows.map_err(|error| match guarded(|| self.runner.is_lost()).unwrap_or(true) {
            true => Error::Lost(error.to_string()),
            false => error,
        });
        let output = rows.map(|mut rows| {
            for (index, failure) in step.failures {
                // If a runner returns too few rows, the engine, which counts them, reports it.
                rows.insert(index.min(rows.len()), failure);
            }
            StepOutput { rows, took, drafting }
        });
        self.answer(output, step.era);
    }

    fn answer(&mut self, result: Result<StepOutput>, era: u64) {
        if result.is_err() {
            self.failed_era = Some(era);
        }
        // The engine receives no results while it ends.
        let _ = self.results.send(result);
        (self.waker.0)();
    }

    /// Removes assignments that cannot run from the plan. Returns their failures with their places
    /// among the results.
    fn remove_broken(&self, plan: &mut StepPlan) -> Vec<(usize, RowOutput)> {
        if self.broken.is_empty() {
            return Vec::new();
        }
        let is_broken = |(index, id): (usize, RequestId)| {
            let failure = || RowOutput::failed(id, "the request was not admitted: its sampler panicked");
            self.broken.contains(&id).then(|| (index, failure()))
        };
        let failures = plan.assignments.iter().map(|a| a.id).enumerate().filter_map(is_broken).collect();
        plan.assignments.retain(|a| !self.broken.contains(&a.id));
        failures
    }
}

/// The result of `work`, or none if it panicked. The data that `work` left half changed is made
/// anew from the next plan, or belongs to a request that ends.
pub(crate) fn guarded<T>(work: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(work)).ok()
}
