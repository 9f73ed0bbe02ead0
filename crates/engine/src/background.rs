//! An executor for devices that compute on the thread that asks: a thread of its own does so, one command after the
//! other, while the engine's thread plans, listens and delivers.
//!
//! A panic inside a step is that step's error, and the thread lives on: what a step works in is made anew from its
//! plan.

use std::{
    collections::HashSet,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread::JoinHandle,
    time::Instant,
};

use folio_scheduler::{RequestId, StepPlan};

use crate::{Error, Executor, Result, RowOutput, SamplingState, StepOutput, Wake, executor::MOST_IN_FLIGHT};

/// Does a step from its beginning to its end on the thread that calls.
pub trait StepRunner: Send {
    /// A request joins.
    fn admit(&mut self, id: RequestId, state: SamplingState);

    /// Transfers in order, then all rows; one output an assignment.
    fn run(&mut self, plan: &StepPlan) -> Result<Vec<RowOutput>>;

    /// A request has left.
    fn release(&mut self, id: RequestId);
}

enum Command {
    OnDone(Wake),
    Admit(RequestId, SamplingState),
    Run { plan: StepPlan, era: u64 },
    Release(RequestId),
}

/// The handle on the thread. Dropping it waits for the step that runs, and leaves out those behind it.
pub struct Background {
    /// None once it is being dropped: that ends the thread.
    commands: Option<mpsc::Sender<Command>>,
    results: mpsc::Receiver<Result<StepOutput>>,
    num_in_flight: usize,
    /// Failures collected so far. A step of an era in which one failed before it is not run.
    era: u64,
    closing: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Background {
    pub fn start(runner: impl StepRunner + 'static) -> Result<Self> {
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
        };
        let thread = std::thread::Builder::new().name("folio-executor".into()).spawn(move || worker.run())?;
        Ok(Self { commands: Some(commands), results, num_in_flight: 0, era: 0, closing, thread: Some(thread) })
    }

    fn send(&self, command: Command) -> Result<()> {
        let commands = self.commands.as_ref().ok_or(Error::ExecutorGone)?;
        commands.send(command).map_err(|_| Error::ExecutorGone)
    }
}

impl Executor for Background {
    fn on_done(&mut self, wake: Wake) {
        // A thread that is gone is met when a step is submitted; so it is below.
        let _ = self.send(Command::OnDone(wake));
    }

    fn admit(&mut self, id: RequestId, state: SamplingState) {
        let _ = self.send(Command::Admit(id, state));
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

/// What the thread owns.
struct Worker<R> {
    commands: mpsc::Receiver<Command>,
    runner: R,
    results: mpsc::Sender<Result<StepOutput>>,
    closing: Arc<AtomicBool>,
    /// Requests that the runner could not take in; their rows fail, and nobody else's.
    broken: HashSet<RequestId>,
    /// The last era with a failed step.
    failed_era: Option<u64>,
    /// The last to go: whoever wakes then finds both channels closed.
    waker: Waker,
}

/// If the thread ends by a fault, steps in flight are never answered: this says so for as many as there may be.
struct Waker(Wake);

impl Drop for Waker {
    fn drop(&mut self) {
        (0..MOST_IN_FLIGHT).for_each(|_| (self.0)());
    }
}

impl<R: StepRunner> Worker<R> {
    fn run(mut self) {
        while let Ok(command) = self.commands.recv() {
            match command {
                Command::OnDone(wake) => self.waker = Waker(wake),
                Command::Admit(id, state) => {
                    if guarded(|| self.runner.admit(id, state)).is_none() {
                        self.broken.insert(id);
                    }
                }
                Command::Run { plan, era } => self.answer(plan, era),
                Command::Release(id) => {
                    self.broken.remove(&id);
                    // What a runner fails to forget is lost memory at worst: an id that comes back is admitted anew.
                    let _ = guarded(|| self.runner.release(id));
                }
            }
        }
    }

    fn answer(&mut self, plan: StepPlan, era: u64) {
        let result = if self.closing.load(Ordering::Acquire) {
            Err(Error::ExecutorGone)
        } else if self.failed_era == Some(era) {
            Err(Error::Step("the step before this one failed".into()))
        } else {
            self.step(plan)
        };
        if result.is_err() {
            self.failed_era = Some(era);
        }
        // Nobody listens while the engine ends.
        let _ = self.results.send(result);
        (self.waker.0)();
    }

    fn step(&mut self, mut plan: StepPlan) -> Result<StepOutput> {
        let failures = self.take_broken(&mut plan);
        let start = Instant::now();
        let mut rows = guarded(|| self.runner.run(&plan)).unwrap_or(Err(Error::StepPanicked))?;
        let took = start.elapsed();
        for (index, failure) in failures {
            // A runner that gives too few rows is found out by the engine, which counts them.
            rows.insert(index.min(rows.len()), failure);
        }
        Ok(StepOutput { rows, took })
    }

    /// Takes rows out of the plan that cannot run, and says where in the results their failures belong.
    fn take_broken(&self, plan: &mut StepPlan) -> Vec<(usize, RowOutput)> {
        if self.broken.is_empty() {
            return Vec::new();
        }
        let is_broken = |(index, id): (usize, RequestId)| {
            let failure = || RowOutput::failed(id, "the request could not be prepared: its sampler panicked");
            self.broken.contains(&id).then(|| (index, failure()))
        };
        let failures = plan.assignments.iter().map(|a| a.id).enumerate().filter_map(is_broken).collect();
        plan.assignments.retain(|a| !self.broken.contains(&a.id));
        failures
    }
}

/// What `work` gives, or none if it panicked. Whatever it was working on is made anew from the next plan, or belongs to
/// a request that ends.
pub(crate) fn guarded<T>(work: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(work)).ok()
}
