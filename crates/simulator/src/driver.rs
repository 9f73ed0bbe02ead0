//! Drives the real scheduler like an engine, with one or more steps in flight, and checks every
//! result.
//!
//! The order is the engine's: schedule, submit, collect the oldest step, commit, end requests.
//! Steps run in order, either when they are submitted or when they are collected, which must make
//! no difference.

mod collect;
mod ends;
mod plan;

use std::collections::{BTreeMap, VecDeque};

use folio_scheduler::{
    Departed, DiskTaskKind, Draft, DraftStats, NewRequest, RequestId, Scheduler, SchedulerConfig, SchedulerError,
    SchedulerStats, StepPlan,
};

use crate::{
    client::{Client, End, Wants},
    coverage::Coverage,
    disk::{Disk, DiskManners},
    events::Router,
    fairness,
    hash::Rng,
    invariants::{self, Found, Invariant, Violation},
    model::{Model, Output},
    perturb::Perturb,
    progress::Progress,
    trace::Trace,
    truth::Sampling,
};

/// Behaviour of the engine around the scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Manners {
    /// Most steps in flight.
    pub depth: usize,
    pub disk: DiskManners,
    /// Tokens that a client may leave unread before its request is aborted.
    pub buffer: usize,
    /// Decides which steps run when submitted, which when collected, and their duration.
    pub seed: u64,
}

impl Default for Manners {
    fn default() -> Self {
        Self { depth: 1, disk: DiskManners { latency: 1, failures: 0 }, buffer: 8, seed: 0 }
    }
}

/// The end of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Departure {
    pub id: RequestId,
    pub end: End,
    /// None if the scheduler does not report it: with a failed step or the process.
    pub departed: Option<Departed>,
    pub tick: u64,
}

#[derive(Debug)]
struct Step {
    number: u64,
    plan: StepPlan,
    output: Option<Output>,
    /// Requests that read through an entry that was flipped on purpose.
    flipped: Vec<RequestId>,
}

#[derive(Debug)]
pub struct Driver {
    pub scheduler: Scheduler,
    pub model: Model,
    pub disk: Disk,
    pub now: u64,
    pub tick: u64,
    pub coverage: Coverage,
    pub trace: Trace,
    pub perturb: Option<Perturb>,
    pub config: SchedulerConfig,
    /// In the order in which they ended.
    pub departures: Vec<Departure>,
    manners: Manners,
    clients: BTreeMap<RequestId, Client>,
    /// Ended requests that still have rows in a step up to the given one.
    ghosts: Vec<(u64, Client)>,
    in_flight: VecDeque<Step>,
    router: Router,
    next_step: u64,
    progress: Progress,
    /// The row to fail in the next collected step: that of the request at this index of the plan.
    spoil_row: Option<usize>,
    /// Whether the bounds of fairness are suspended from here on.
    lenient: bool,
    draining: bool,
    /// Whether this turn's plan was not empty.
    planned: bool,
    /// The expected counts of the scheduler.
    drafts: DraftStats,
}

impl Driver {
    pub fn new(config: SchedulerConfig, manners: Manners) -> Result<Self, SchedulerError> {
        Ok(Self {
            scheduler: Scheduler::new(config.clone())?,
            model: Model::new(&config),
            disk: Disk::new(manners.disk, manners.seed),
            now: 0,
            tick: 0,
            coverage: Coverage::default(),
            trace: Trace::default(),
            perturb: None,
            lenient: config.force_preempt_every.is_some(),
            config,
            manners,
            clients: BTreeMap::new(),
            ghosts: Vec::new(),
            in_flight: VecDeque::new(),
            departures: Vec::new(),
            router: Router::default(),
            next_step: 0,
            progress: Progress::default(),
            spoil_row: None,
            draining: false,
            planned: false,
            drafts: DraftStats::default(),
        })
    }

    pub fn clients(&self) -> &BTreeMap<RequestId, Client> {
        &self.clients
    }

    /// The last submitted step, while it is in flight.
    pub fn newest_plan(&self) -> Option<&StepPlan> {
        self.in_flight.back().map(|step| &step.plan)
    }

    pub fn num_in_flight(&self) -> usize {
        self.in_flight.len()
    }

    pub fn is_draining(&self) -> bool {
        self.draining
    }

    /// Whether no request is alive, nothing is in flight and the disk is quiet.
    pub fn is_idle(&self) -> bool {
        self.clients.is_empty() && self.in_flight.is_empty() && !self.disk.busy() && !self.scheduler.has_work()
    }

    pub fn add(&mut self, request: NewRequest, wants: Wants) -> Result<(), SchedulerError> {
        let wants = Wants { sampling: Sampling { salt: request.cache_salt, ..wants.sampling }, ..wants };
        let mut client = Client::new(&request, wants, self.model.windows());
        client.place = fairness::place(self.now, request.priority, self.config.aging);
        let added = self.scheduler.add(request, self.now);
        self.trace.say(|| {
            format!("add {} ({} + {} tokens): {added:?}", client.id.0, client.prompt_len, {
                client.max_len - client.prompt_len.min(client.max_len)
            })
        });
        match added {
            Ok(()) => {
                self.coverage.requests += 1;
                self.coverage.forks += u64::from(client.fork_of.is_some());
                self.model.admit(client.id, wants.sampling);
                self.clients.insert(client.id, client);
                Ok(())
            }
            Err(error) => {
                self.coverage.refused += 1;
                Err(error)
            }
        }
    }

    /// Aborts a request in any state. I9 and I13 are checked on the way.
    pub fn abort(&mut self, id: RequestId) -> Result<(), Violation> {
        self.end(id, End::Aborted)
    }

    pub fn drain(&mut self) {
        self.trace.say(|| "drain".into());
        self.draining = true;
        self.coverage.drains += 1;
        self.scheduler.drain();
    }

    pub fn clear_cache(&mut self) {
        self.trace.say(|| "clear the cache".into());
        self.coverage.cache_clears += 1;
        self.scheduler.clear_cache();
    }

    /// Lets the nth allocation from now fail.
    pub fn inject_shortage(&mut self, nth: usize) {
        self.trace.say(|| format!("allocation {nth} from now fails"));
        self.coverage.shortages += 1;
        self.note_fault();
        self.scheduler.inject_shortage(nth);
    }

    pub fn spoil_row(&mut self, nth: usize) {
        self.spoil_row = Some(nth);
    }

    pub fn lose_chunk(&mut self, nth: usize) {
        if let Some(key) = self.disk.lose(nth) {
            self.trace.say(|| format!("chunk {key:x} is lost"));
            self.coverage.chunks_lost += 1;
            self.scheduler.disk_lost(key);
        }
    }

    fn note_fault(&mut self) {
        self.lenient = true;
        self.progress.fault(self.tick);
    }

    /// Drafts the next `num` tokens of a request, wrong from index `wrong_from` on.
    pub fn draft(&mut self, id: RequestId, num: usize, wrong_from: usize) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        let drafts = Draft::chain(client.drafted(num, wrong_from));
        self.propose(id, drafts);
    }

    /// Drafts a tree of `num` nodes; `right` of them are the next tokens.
    pub fn draft_tree(&mut self, id: RequestId, num: usize, right: usize, rng: &mut Rng) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        let drafts = client.drafted_tree(num, right, rng);
        self.propose(id, drafts);
    }

    fn propose(&mut self, id: RequestId, drafts: Draft) {
        if self.scheduler.draft(id, drafts.clone()) {
            self.trace.say(|| format!("drafts for {}: {:?} behind {:?}", id.0, drafts.tokens(), drafts.parents()));
            self.clients.get_mut(&id).expect("looked up by the caller").drafts = drafts;
        }
    }

    pub fn expect_drafts(&mut self, id: RequestId, expected: bool) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        client.expects_drafts = expected;
        self.scheduler.expect_drafts(id, expected);
    }

    pub fn poll_disk(&mut self) {
        for ended in self.disk.poll(self.tick, &mut self.model) {
            self.trace.say(|| format!("disk: {ended:?}"));
            let (all, failed) = match ended.kind {
                DiskTaskKind::Store => (&mut self.coverage.stores, &mut self.coverage.stores_failed),
                DiskTaskKind::Fetch => (&mut self.coverage.fetches, &mut self.coverage.fetches_failed),
            };
            *all += 1;
            *failed += u64::from(!ended.ok);
            self.scheduler.disk_done(ended.ticket, ended.ok);
        }
    }

    /// Adds figures that the scheduler counts itself.
    pub fn fold_stats(&mut self) {
        let stats = self.scheduler.stats();
        self.coverage.hit_tokens += stats.hit_tokens;
        self.coverage.host_hit_tokens += stats.host_hit_tokens;
    }

    pub fn stats(&self) -> SchedulerStats {
        self.scheduler.stats()
    }

    /// One turn of the engine's loop.
    pub fn turn(&mut self) -> Result<(), Violation> {
        self.begin_turn()?;
        self.end_turn()
    }

    /// The first part of a turn, until a step is in flight.
    pub fn begin_turn(&mut self) -> Result<(), Violation> {
        self.tick += 1;
        self.now = self.now.saturating_add(1_000);
        self.poll_disk();
        self.planned = self.schedule()?;
        // A figure for refused requests: it must be available at any moment.
        let _ = self.scheduler.expected_wait();
        Ok(())
    }

    pub fn end_turn(&mut self) -> Result<(), Violation> {
        // Without a new step there is nothing to overlap with.
        if self.in_flight.len() >= self.manners.depth || !self.planned {
            self.collect()?;
        }
        self.check_progress()
    }

    fn check_progress(&mut self) -> Result<(), Violation> {
        let stuck = !self.planned && self.in_flight.is_empty() && !self.disk.busy();
        let bound = Progress::bound(&self.config, self.clients.values(), self.manners.disk.latency);
        let found = self.progress.check(self.tick, self.clients.len(), stuck, bound);
        found.or_else(|found| self.violated(found))?;
        if !self.clients.is_empty() && !self.scheduler.has_work() {
            return self.violated((Invariant::I8, "requests are alive, but the scheduler has no work".into()));
        }
        if self.is_idle() {
            let (stats, kept) = (self.scheduler.stats(), self.model.num_requests());
            invariants::check_idle(&stats, kept).or_else(|found| self.violated(found))?;
        }
        Ok(())
    }

    fn integrity(&mut self) -> Result<(), Violation> {
        if self.config.kv_events {
            let events = self.scheduler.take_events();
            let heard = self.router.hear(&events).and_then(|()| self.router.check(&self.scheduler.stats()));
            heard.or_else(|found| self.violated(found))?;
        }
        self.scheduler.check_integrity().or_else(|what| self.violated((Invariant::Integrity, what)))
    }

    pub(crate) fn violated<T>(&self, (invariant, what): Found) -> Result<T, Violation> {
        Err(Violation { invariant, tick: self.tick, what })
    }
}
