//! Decides which tokens run next and which KV blocks they use.
//!
//! There is no prefill or decode phase. Every request has tokens computed and tokens in all; each
//! step hands out a budget so that the first catches up with the second. Steps overlap: the next
//! one is planned while the last is in flight, so plans name rows and not token values. This crate
//! never sees a device, a clock or a random number: the same calls give the same plans.

#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

mod admit;
mod blocks;
mod config;
mod draft;
mod error;
mod events;
mod integrity;
mod pace;
mod plan;
mod queue;
mod request;
mod speculate;
mod stats;
mod step;

use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    hash::BuildHasherDefault,
};

use blocks::{Blocks, nodes::FirstWord, pool::Pool};
pub use config::{BLOCK_TOKENS, GroupConfig, SchedulerConfig};
pub use draft::Draft;
pub use error::SchedulerError;
pub use events::{KvEvent, Medium};
use pace::{Pace, StepShape};
pub use plan::{
    Assignment, BlockId, Departed, DiskChunk, DiskTask, DiskTaskKind, HostSlot, Miss, Nanos, NewRequest, Preempted,
    PromptTargets, RequestId, RowResult, StepPlan, Transfer,
};
use queue::{OrderKey, Waiting};
use request::{Fetch, Request};
pub use stats::{DraftStats, GroupStats, SchedulerStats};

#[derive(Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    blocks: Blocks,
    pace: Pace,
    /// Sorted by [`queue::Place`]; these requests hold blocks. Boxed, because requests are inserted
    /// and removed in the middle.
    #[allow(clippy::vec_box)]
    running: Vec<Box<Request>>,
    /// Requests without blocks, preempted ones included.
    waiting: Waiting,
    /// All requests of `running` and `waiting`.
    known: HashMap<RequestId, Whereabouts, BuildHasherDefault<FirstWord>>,
    deadlines: BTreeSet<(Nanos, RequestId)>,
    /// Steps planned and not committed, oldest first.
    flights: VecDeque<StepInFlight>,
    now: Nanos,
    next_arrival: u64,
    is_draining: bool,
    /// Average time that a request runs.
    residence: Option<Nanos>,
    counts: Counts,
}

#[derive(Clone, Copy, Debug)]
struct Whereabouts {
    tenant: u64,
    key: OrderKey,
    runs: bool,
}

#[derive(Debug)]
struct StepInFlight {
    ids: Vec<RequestId>,
    shape: StepShape,
}

#[derive(Debug, Default)]
struct Counts {
    steps: u64,
    hit_tokens: u64,
    host_hit_tokens: u64,
    prompt_tokens: u64,
    preemptions: u64,
    expired: u64,
    drafts: DraftStats,
}

impl Scheduler {
    pub fn new(config: SchedulerConfig) -> Result<Self, SchedulerError> {
        config.validate()?;
        Ok(Self {
            blocks: Blocks::new(&config),
            pace: Pace::new(config.inter_token_target, config.inter_token_steps, config.longest_step),
            config,
            running: Vec::new(),
            waiting: Waiting::default(),
            known: HashMap::default(),
            deadlines: BTreeSet::new(),
            flights: VecDeque::new(),
            now: 0,
            next_arrival: 0,
            is_draining: false,
            residence: None,
            counts: Counts::default(),
        })
    }

    /// Queues a request. A request that could not finish even alone is refused.
    pub fn add(&mut self, request: NewRequest, now: Nanos) -> Result<(), SchedulerError> {
        let prompt = request.prompt.len();
        let max_len = request.max_len;
        if self.is_draining {
            return Err(SchedulerError::Draining);
        }
        if self.known.contains_key(&request.id) {
            return Err(SchedulerError::DuplicateId(request.id));
        }
        if prompt == 0 {
            return Err(SchedulerError::EmptyPrompt);
        }
        if prompt >= max_len {
            return Err(SchedulerError::PromptTooLong { prompt, max_len });
        }
        self.check_fits(max_len)?;
        self.now = self.now.max(now);
        let key = OrderKey::new(&request, self.now, self.next_arrival, self.config.aging);
        self.next_arrival += 1;
        self.known.insert(request.id, Whereabouts { tenant: request.tenant, key, runs: false });
        self.deadlines.extend(request.deadline.map(|deadline| (deadline, request.id)));
        let weight = request.weight;
        self.waiting.push(Box::new(Request::new(request, key, self.blocks.tables())), weight);
        Ok(())
    }

    /// Whether a sequence of `max_len` tokens can ever be held.
    pub fn check_fits(&self, max_len: usize) -> Result<(), SchedulerError> {
        for (group, config) in self.config.groups.iter().enumerate() {
            let (needed, total) = (self.config.most_blocks(group, max_len), config.blocks);
            if needed > total {
                return Err(SchedulerError::NeverFits { max_len, group, needed, total });
            }
        }
        Ok(())
    }

    /// From now on no request is added; those that were run to their end.
    pub fn drain(&mut self) {
        self.is_draining = true;
    }

    /// Whether there are requests, or transfers that no plan has yet.
    pub fn has_work(&self) -> bool {
        let has_tasks = self.blocks.disk.as_ref().is_some_and(|disk| !disk.tasks.is_empty());
        !self.known.is_empty() || !self.blocks.transfers.is_empty() || has_tasks
    }

    /// The oldest step in flight is done and took `took`: `results` has every request of its plan,
    /// in order. Results of requests that have ended since are ignored. A request whose row sampled
    /// no token must be finished before the next step is planned.
    pub fn commit(&mut self, results: &[RowResult], took: Nanos) {
        let step = self.flights.pop_front().expect("no step is in flight");
        assert_eq!(results.len(), step.ids.len(), "results and requests of the step");
        self.pace.observe(step.shape, took);
        // Most requests still follow each other as they did in the plan.
        let mut next = 0;
        for (result, id) in results.iter().zip(step.ids) {
            assert_eq!(result.id, id, "results come in the plan's order");
            self.counts.drafts.accept(result.accepted.len());
            let is_next = self.running.get(next).is_some_and(|request| request.id == id);
            match if is_next { Some(next) } else { self.running_index(id) } {
                Some(index) => {
                    self.take_result(index, result);
                    next = index + 1;
                }
                None => self.take_late_result(result),
            }
        }
    }

    /// The result of a request that was preempted since, or has ended.
    fn take_late_result(&mut self, result: &RowResult) {
        if let Some(&Whereabouts { tenant, key, .. }) = self.known.get(&result.id) {
            self.waiting.change(tenant, key, |request| request.take_result(&result.accepted, result.token));
        }
    }

    fn take_result(&mut self, index: usize, result: &RowResult) {
        let Self { running, blocks, .. } = self;
        let request = &mut running[index];
        request.take_result(&result.accepted, result.token);
        let full = request.computed / blocks.block_tokens;
        let sealed = request.tables[0].num_sealed();
        if full > sealed {
            if blocks.prefix_caching {
                blocks.extend_hashes(&mut request.hashes, request.salt, &request.tokens, full);
            }
            let sequence = blocks::Sequence { tokens: &request.tokens, hashes: &request.hashes, salt: request.salt };
            blocks.seal(&mut request.tables, &sequence, full);
            // Answers are seldom sent as prompts again: only prompts are stored on disk.
            for index in sealed..full.min(request.prompt_len / blocks.block_tokens) {
                blocks.store_chunk(&request.tables, &sequence, index);
            }
        }
        blocks.shrink(&mut request.tables, request.planned);
    }

    /// A step in flight failed. All steps in flight are dropped: their requests are removed and
    /// returned; all others start again. No computed block is trusted.
    pub fn fail_steps(&mut self) -> Vec<RequestId> {
        let mut failed: Vec<RequestId> = std::mem::take(&mut self.flights).into_iter().flat_map(|s| s.ids).collect();
        failed.sort_unstable();
        failed.dedup();
        failed.retain(|&id| self.remove(id).is_some());
        while let Some(last) = self.running.len().checked_sub(1) {
            self.requeue(last);
        }
        self.blocks.drop_transfers();
        self.blocks.forget_all();
        failed
    }

    /// Removes a request that has all its tokens. None if it is not known.
    pub fn finish(&mut self, id: RequestId) -> Option<Departed> {
        if let Some(index) = self.running_index(id) {
            let ran = self.now.saturating_sub(self.running[index].started);
            self.residence = Some(self.residence.map_or(ran, |old| old - old / 8 + ran / 8));
        }
        self.remove(id)
    }

    /// Removes a request in any state. None if it is not known.
    pub fn abort(&mut self, id: RequestId) -> Option<Departed> {
        self.remove(id)
    }

    /// The disk tier has a file for the chunk of this key.
    pub fn disk_found(&mut self, key: u128) {
        if let Some(disk) = &mut self.blocks.disk {
            disk.found(key);
        }
    }

    /// The disk tier has no file for the chunk any more.
    pub fn disk_lost(&mut self, key: u128) {
        if let Some(disk) = &mut self.blocks.disk {
            disk.lost(key);
        }
    }

    /// A [`DiskTask`] has ended, and its host slots are the scheduler's again.
    pub fn disk_done(&mut self, ticket: u64, ok: bool) {
        for id in self.blocks.disk_done(ticket, ok) {
            let Some(&Whereabouts { tenant, key, runs: false }) = self.known.get(&id) else { continue };
            self.waiting.change(tenant, key, |request| {
                request.fetch = match request.fetch {
                    Fetch::Waits(tasks) if tasks > 1 => Fetch::Waits(tasks - 1),
                    _ => Fetch::Done,
                };
            });
        }
    }

    /// Empties the prefix cache; running requests keep their blocks.
    pub fn clear_cache(&mut self) {
        self.blocks.forget_all();
    }

    /// Events of the prefix cache since the last call.
    pub fn take_events(&mut self) -> Vec<KvEvent> {
        self.blocks.events.take()
    }

    /// Expected wait of a request that is added now, from the times of steps and requests so far.
    pub fn expected_wait(&self) -> Nanos {
        let queued = self.waiting.len() as Nanos + 1;
        let prompts = self.pace.computing(self.waiting.num_tokens()).unwrap_or(0);
        if self.running.len() < self.config.max_seqs {
            return prompts;
        }
        prompts.max(self.residence.unwrap_or(0).saturating_mul(queued) / self.config.max_seqs as Nanos)
    }

    pub fn stats(&self) -> SchedulerStats {
        let block_tokens = self.blocks.block_tokens;
        let used = |pool: &Pool| pool.num_blocks() - pool.num_free();
        let group = |(group, at): (usize, &blocks::Group)| {
            let slots_held = used(&at.pool) * block_tokens;
            let unused: usize = self.running.iter().map(|r| r.unused_slots(group, block_tokens)).sum();
            GroupStats {
                blocks_total: at.pool.num_blocks(),
                blocks_used: used(&at.pool),
                blocks_cached: at.pool.num_published(),
                slots_held,
                tokens_stored: slots_held - unused,
                host_slots_total: at.host.num_blocks(),
                host_slots_used: at.host.num_published(),
            }
        };
        let disk = self.blocks.disk.as_ref();
        SchedulerStats {
            running: self.running.len(),
            waiting: self.waiting.len(),
            waiting_tokens: self.waiting.num_tokens(),
            groups: self.blocks.groups.iter().enumerate().map(group).collect(),
            hit_tokens: self.counts.hit_tokens,
            host_hit_tokens: self.counts.host_hit_tokens,
            prompt_tokens: self.counts.prompt_tokens,
            preemptions: self.counts.preemptions,
            expired: self.counts.expired,
            steps: self.counts.steps,
            drafts: self.counts.drafts.clone(),
            disk_fetched: disk.map_or(0, |disk| disk.fetched),
            disk_failed: disk.map_or(0, |disk| disk.failed),
        }
    }

    /// Test hook: the `nth` allocation of blocks from now, counted from 0, fails as if the pool
    /// were empty.
    pub fn inject_shortage(&mut self, nth: usize) {
        self.blocks.shortage_in = Some(nth);
    }

    /// Preempts a running request: it returns to its old place in the queue, with nothing computed.
    fn requeue(&mut self, index: usize) {
        let mut request = self.running.remove(index);
        self.blocks.release(&mut request.tables);
        request.lose_everything();
        self.known.get_mut(&request.id).expect("it runs").runs = false;
        self.waiting.catch_up(request.tenant);
        self.waiting.put_back(request);
    }

    fn remove(&mut self, id: RequestId) -> Option<Departed> {
        let index = self.running_index(id);
        let Whereabouts { tenant, key, .. } = self.known.remove(&id)?;
        let mut request = match index {
            Some(index) => self.running.remove(index),
            None => self.waiting.take(tenant, key).expect("a known request runs or waits"),
        };
        self.waiting.ended(tenant);
        self.blocks.release(&mut request.tables);
        if let Some(deadline) = request.deadline {
            self.deadlines.remove(&(deadline, id));
        }
        let (cached_tokens, miss) = request.hit.unwrap_or((0, Some(Miss::NeverRan)));
        Some(Departed { cached_tokens, miss, preemptions: request.preemptions })
    }

    fn running_index(&self, id: RequestId) -> Option<usize> {
        let at = self.known.get(&id).filter(|at| at.runs)?;
        let place = self.waiting.place(at.tenant, at.key);
        Some(self.running.binary_search_by_key(&place, |r| r.place()).expect("a running request has a place"))
    }

    /// Sorts the running requests by the tokens that their tenants have had by now.
    fn sort_running(&mut self) {
        if !self.waiting.rank() {
            return;
        }
        for request in &mut self.running {
            request.rank = self.waiting.rank_of(request.tenant);
        }
        self.running.sort_by_key(|request| request.place());
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        for request in &mut self.running {
            self.blocks.release(&mut request.tables);
        }
    }
}
