//! Shorthands for the simulator's driver, and a scheduler without a model for tests of order and
//! time alone.

use std::collections::BTreeMap;

use folio_scheduler::{NewRequest, RequestId, RowResult, Scheduler, SchedulerConfig, StepPlan};
use folio_simulator::{Departure, Driver, End, Manners, Wants, hash::Rng};

pub fn tokens(seed: u64, len: usize) -> Vec<u32> {
    let mut rng = Rng(seed);
    (0..len).map(|_| rng.below(1000) as u32).collect()
}

/// Clients, model and scheduler; every answer is compared with the unloaded one as it arrives.
pub struct Sim {
    pub driver: Driver,
    next_id: u64,
}

impl Sim {
    pub fn new(config: SchedulerConfig) -> Self {
        Self::with(config, Manners::default())
    }

    /// The same with up to `depth` steps in flight.
    pub fn deep(config: SchedulerConfig, depth: usize) -> Self {
        Self::with(config, Manners { depth, ..Manners::default() })
    }

    pub fn with(config: SchedulerConfig, manners: Manners) -> Self {
        Self { driver: Driver::new(config, manners).expect("a sound configuration"), next_id: 0 }
    }

    pub fn add(&mut self, prompt: Vec<u32>, num_tokens: usize) -> RequestId {
        self.add_with(prompt, num_tokens, |_| {})
    }

    /// `change` edits the request before it is added; samples differ by id.
    pub fn add_with(&mut self, prompt: Vec<u32>, num_tokens: usize, change: impl FnOnce(&mut NewRequest)) -> RequestId {
        let id = RequestId(self.next_id);
        self.next_id += 1;
        let max_len = prompt.len() + num_tokens;
        let mut request = NewRequest::new(id, prompt, max_len);
        change(&mut request);
        let mut wants = Wants::default();
        wants.sampling.seed = if request.fork_of.is_some() { id.0 } else { 0 };
        self.driver.add(request, wants).expect("the request fits");
        id
    }

    pub fn step(&mut self) {
        self.driver.turn().unwrap_or_else(|violation| panic!("{violation}"));
    }

    pub fn abort(&mut self, id: RequestId) {
        self.driver.abort(id).unwrap_or_else(|violation| panic!("{violation}"));
    }

    /// Runs until all requests have ended and the disk is idle; the driver stops a run without
    /// progress.
    pub fn run_to_end(&mut self) {
        while !self.driver.is_idle() {
            self.step();
        }
    }

    pub fn computed(&self) -> u64 {
        self.driver.model.tokens_computed
    }

    pub fn hit_tokens(&self) -> u64 {
        self.driver.stats().hit_tokens
    }

    pub fn departure(&self, id: RequestId) -> Departure {
        *self.driver.departures.iter().find(|d| d.id == id).expect("it has ended")
    }

    pub fn finished(&self) -> Vec<RequestId> {
        let done = |d: &&Departure| matches!(d.end, End::Length | End::Stop);
        self.driver.departures.iter().filter(done).map(|d| d.id).collect()
    }
}

/// The scheduler with a clock and no model: every sampled token is the same.
pub struct Clocked {
    pub scheduler: Scheduler,
    pub now: u64,
    /// Requests that finished in the last step.
    pub finished: Vec<RequestId>,
    wanted: BTreeMap<RequestId, usize>,
}

impl Clocked {
    pub fn new(config: SchedulerConfig) -> Self {
        Self {
            scheduler: Scheduler::new(config).expect("sound"),
            now: 0,
            finished: Vec::new(),
            wanted: BTreeMap::new(),
        }
    }

    pub fn add(&mut self, request: NewRequest) {
        self.wanted.insert(request.id, request.max_len - request.prompt.len());
        self.scheduler.add(request, self.now).expect("fits");
    }

    /// Runs one step that takes the time that `time` returns for its plan; complete requests are
    /// finished.
    pub fn step(&mut self, time: impl FnOnce(&StepPlan) -> u64) -> StepPlan {
        self.finished.clear();
        let plan = self.scheduler.schedule(self.now);
        if plan.is_empty() {
            return plan;
        }
        let took = time(&plan);
        self.now += took;
        let result = |a: &folio_scheduler::Assignment| RowResult {
            id: a.id,
            accepted: Vec::new(),
            token: a.samples.then_some(7),
        };
        self.scheduler.commit(&plan.assignments.iter().map(result).collect::<Vec<_>>(), took);
        for a in plan.assignments.iter().filter(|a| a.samples) {
            let left = self.wanted.get_mut(&a.id).expect("known");
            *left -= 1;
            if *left == 0 {
                self.scheduler.finish(a.id).expect("it ran");
                self.finished.push(a.id);
            }
        }
        self.scheduler.check_integrity().expect("sound");
        plan
    }
}
