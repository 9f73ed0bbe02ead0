//! An executor with a thread of its own that runs steps, one command after the other, while the engine's thread plans,
//! listens and delivers.
//!
//! Some runners compute on that thread. Others hand their work to a device: the thread then begins the next step as soon
//! as its plan comes, while the device is busy with the one before, so that the device never waits for the host.
//!
//! A panic inside a step is that step's error, and the thread lives on: what a step works in is made anew from its
//! plan.

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

use crate::{Admission, Error, Executor, Result, RowOutput, StepOutput, Wake, arrive, executor::MOST_IN_FLIGHT};

/// How long the thread stays awake behind a step.
const SOON: Duration = Duration::from_micros(200);

/// Does a step from its beginning to its end on the thread that calls.
pub trait StepRunner: Send {
    /// A request joins.
    fn admit(&mut self, id: RequestId, admission: Admission);

    /// Transfers in order, then all rows; one output an assignment.
    fn run(&mut self, plan: &StepPlan) -> Result<Vec<RowOutput>>;

    /// Begins a step, behind at most one that is under way. None: it is under way now, and [`StepRunner::finish`] will tell.
    fn start(&mut self, plan: &StepPlan) -> Result<Option<Vec<RowOutput>>> {
        self.run(plan).map(Some)
    }

    /// Whether a step can begin before the results of the one under way are known.
    fn may_start(&self, _plan: &StepPlan) -> bool {
        false
    }

    /// Whether [`StepRunner::finish`] would not wait.
    fn is_done(&mut self) -> bool {
        true
    }

    /// Waits for the oldest step that is under way.
    fn finish(&mut self) -> Result<Vec<RowOutput>> {
        Err(Error::NothingSubmitted)
    }

    /// Whether a device computes, and not the threads of this machine.
    fn computes_elsewhere(&self) -> bool {
        false
    }

    /// See [`Executor::pulse`]; asked once, at the start.
    fn pulse(&self) -> Option<Pulse> {
        None
    }

    /// How much time went into drafts since it was last asked.
    fn take_drafting(&mut self) -> Duration {
        Duration::ZERO
    }

    /// After a step that failed: whether all that come will fail too, until the runner is built anew.
    fn is_lost(&mut self) -> bool {
        false
    }

    /// A request has left.
    fn release(&mut self, id: RequestId);
}

enum Command {
    OnDone(Wake),
    Admit(RequestId, Box<Admission>),
    Run { plan: StepPlan, era: u64 },
    Release(RequestId),
}

/// The handle on the thread. Dropping it waits for the step that runs, and leaves out those behind it.
pub struct Background {
    /// None once it is being dropped: that ends the thread.
    commands: Option<mpsc::Sender<Command>>,
    results: mpsc::Receiver<Result<StepOutput>>,
    num_in_flight: usize,
    computes_elsewhere: bool,
    pulse: Option<Pulse>,
    /// Failures collected so far. A step of an era in which one failed before it is not run.
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
            under_way: VecDeque::new(),
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
        // A thread that is gone is met when a step is submitted; so it is below.
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
    /// Begun and not finished, oldest first.
    under_way: VecDeque<UnderWay>,
    /// When the last step ended.
    free_since: Instant,
    /// The last to go: whoever wakes then finds both channels closed.
    waker: Waker,
}

struct UnderWay {
    started: Instant,
    era: u64,
    failures: Vec<(usize, RowOutput)>,
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
        while let Some(command) = self.next() {
            match command {
                Command::OnDone(wake) => self.waker = Waker(wake),
                Command::Admit(id, admission) => {
                    if guarded(|| self.runner.admit(id, *admission)).is_none() {
                        self.broken.insert(id);
                    }
                }
                Command::Run { plan, era } => self.take(plan, era),
                Command::Release(id) => {
                    self.broken.remove(&id);
                    // What a runner fails to forget is lost memory at worst: an id that comes back is admitted anew.
                    let _ = guarded(|| self.runner.release(id));
                }
            }
        }
        while !self.under_way.is_empty() {
            self.finish();
        }
    }

    /// The next command. Steps under way are finished while none is there. Behind a step's results there is mostly the plan
    /// of the next, and a device's step takes milliseconds at most: to wake up late would cost a share of that.
    fn next(&mut self) -> Option<Command> {
        loop {
            if self.under_way.is_empty() {
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

    fn take(&mut self, mut plan: StepPlan, era: u64) {
        arrive::plan(&plan);
        if !self.under_way.is_empty() && !guarded(|| self.runner.may_start(&plan)).unwrap_or(false) {
            while !self.under_way.is_empty() {
                self.finish();
            }
        }
        if self.closing.load(Ordering::Acquire) {
            return self.answer(Err(Error::ExecutorGone), era);
        }
        if self.failed_era == Some(era) {
            return self.answer(Err(Error::Step("the step before this one failed".into())), era);
        }
        let failures = self.take_broken(&mut plan);
        let step = UnderWay { started: Instant::now(), era, failures };
        match guarded(|| self.runner.start(&plan)).unwrap_or(Err(Error::StepPanicked)) {
            Ok(None) => self.under_way.push_back(step),
            Ok(Some(rows)) => self.tell(step, Ok(rows)),
            // Results come in the order of the plans.
            Err(error) => {
                while !self.under_way.is_empty() {
                    self.finish();
                }
                self.tell(step, Err(error));
            }
        }
    }

    /// Waits for the oldest step under way and tells its results.
    fn finish(&mut self) {
        let Some(step) = self.under_way.pop_front() else { return };
        let rows = match self.failed_era == Some(step.era) {
            // The device still has to be done with it.
            true => {
                let _ = guarded(|| self.runner.finish());
                Err(Error::Step("the step before this one failed".into()))
            }
            false => guarded(|| self.runner.finish()).unwrap_or(Err(Error::StepPanicked)),
        };
        self.tell(step, rows);
    }

    fn tell(&mut self, step: UnderWay, rows: Result<Vec<RowOutput>>) {
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
                // A runner that gives too few rows is found out by the engine, which counts them.
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
        // Nobody listens while the engine ends.
        let _ = self.results.send(result);
        (self.waker.0)();
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
