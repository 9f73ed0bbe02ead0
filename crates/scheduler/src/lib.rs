//! Decides which tokens run next and which KV blocks they use.
//!
//! There is no prefill or decode phase. Every request has tokens computed and tokens in all; each step hands out a
//! budget so that the first catches up with the second. This crate never sees a device, a clock or a random number:
//! the same calls give the same plans.

mod blocks;
mod config;
mod error;
mod integrity;
mod plan;
mod policy;
mod request;
mod stats;

use std::collections::{HashMap, HashSet, VecDeque};

use blocks::{Blocks, prefix::ChainHash};
pub use config::{BLOCK_TOKENS, SchedulerConfig};
pub use error::SchedulerError;
pub use plan::{Assignment, BlockId, Departed, NewRequest, PromptTargets, RequestId, StepPlan};
use policy::{Allowance, Policy};
use request::Request;
pub use stats::{GroupStats, SchedulerStats};

#[derive(Debug)]
pub struct Scheduler {
    policy: Policy,
    blocks: Blocks,
    /// In order of arrival; these hold blocks.
    running: Vec<Request>,
    /// In order of arrival, those sent back by preemption included; these hold none.
    waiting: VecDeque<Request>,
    /// Arrival of every request in one of the two queues.
    arrivals: HashMap<RequestId, u64>,
    next_arrival: u64,
    step: u64,
    hit_tokens: u64,
    prompt_tokens: u64,
    preemptions: u64,
}

/// A plan in the making.
struct Step {
    plan: StepPlan,
    left: Allowance,
    /// Full blocks that this step computes, wholly or in part.
    computing: HashSet<ChainHash>,
}

/// Why a waiting request did or did not start.
enum Admission {
    Started,
    /// A running request computes what this one needs next: better to wait for it and share.
    Shares,
    /// Not enough blocks or budget for it, and none for those behind it.
    Full,
}

impl Scheduler {
    pub fn new(config: SchedulerConfig) -> Result<Self, SchedulerError> {
        config.validate()?;
        Ok(Self {
            policy: Policy::new(&config),
            blocks: Blocks::new(&config),
            running: Vec::new(),
            waiting: VecDeque::new(),
            arrivals: HashMap::new(),
            next_arrival: 0,
            step: 0,
            hit_tokens: 0,
            prompt_tokens: 0,
            preemptions: 0,
        })
    }

    /// Queues a request. One that could not finish even alone is refused.
    pub fn add(&mut self, request: NewRequest) -> Result<(), SchedulerError> {
        let prompt = request.prompt.len();
        let max_len = request.max_len;
        if self.arrivals.contains_key(&request.id) {
            return Err(SchedulerError::DuplicateId(request.id));
        }
        if prompt == 0 {
            return Err(SchedulerError::EmptyPrompt);
        }
        if prompt >= max_len {
            return Err(SchedulerError::PromptTooLong { prompt, max_len });
        }
        self.check_fits(max_len)?;
        let arrival = self.next_arrival;
        self.next_arrival += 1;
        self.arrivals.insert(request.id, arrival);
        self.waiting.push_back(Request::new(request, arrival, self.blocks.tables()));
        Ok(())
    }

    /// Whether a sequence of `max_len` tokens can ever be held.
    pub fn check_fits(&self, max_len: usize) -> Result<(), SchedulerError> {
        let needed = self.blocks.blocks_for(max_len);
        for (group, pool) in self.blocks.pools.iter().enumerate() {
            let total = pool.num_blocks();
            if needed > total {
                return Err(SchedulerError::NeverFits { max_len, group, needed, total });
            }
        }
        Ok(())
    }

    pub fn has_work(&self) -> bool {
        !self.running.is_empty() || !self.waiting.is_empty()
    }

    /// The next step: tokens for those who run, in order of arrival, then for those who wait. Never empty while there
    /// is work.
    pub fn schedule(&mut self) -> StepPlan {
        assert!(self.running.iter().all(|r| r.in_flight == 0), "the last step is not committed");
        self.step += 1;
        let mut step = Step { plan: StepPlan::default(), left: self.policy.allowance(), computing: HashSet::new() };
        if let Some(victim) = self.policy.forced_victim(self.step, &self.running) {
            self.running[victim].forced_at = self.running[victim].computed;
            self.preempt(victim, &mut step);
        }
        if self.continue_running(&mut step) {
            self.admit_waiting(&mut step);
        }
        assert!(!step.plan.is_empty() || !self.has_work(), "there is work, but no request can run");
        step.plan
    }

    /// The step that `schedule` planned is computed: `results` has every request of it, with its new token if one was
    /// sampled. Requests that have left since are passed over. One that sampled without a result must be finished
    /// before the next step.
    pub fn commit(&mut self, results: &[(RequestId, Option<u32>)]) {
        for &(id, sampled) in results {
            let Some(index) = self.running_index(id) else { continue };
            let request = &mut self.running[index];
            request.advance(sampled);
            Self::seal_full_blocks(&mut self.blocks, request);
        }
        assert!(self.running.iter().all(|r| r.in_flight == 0), "a request of the step has no result");
    }

    /// The step that `schedule` planned failed: those in it are gone, and are named; others start anew. Nothing
    /// computed so far is trusted.
    pub fn fail_step(&mut self) -> Vec<RequestId> {
        let failed: Vec<RequestId> = self.running.iter().filter(|r| r.in_flight > 0).map(|r| r.id).collect();
        for &id in &failed {
            self.remove(id);
        }
        while let Some(last) = self.running.len().checked_sub(1) {
            self.send_back(last);
        }
        for pool in &mut self.blocks.pools {
            pool.forget_all();
        }
        failed
    }

    /// A request has all its tokens. None if it is not known.
    pub fn finish(&mut self, id: RequestId) -> Option<Departed> {
        self.remove(id)
    }

    /// A request is no longer wanted, in whatever state it is. None if it is not known.
    pub fn abort(&mut self, id: RequestId) -> Option<Departed> {
        self.remove(id)
    }

    pub fn stats(&self) -> SchedulerStats {
        let block_tokens = self.blocks.block_tokens;
        let group = |(group, pool): (usize, &blocks::pool::Pool)| {
            let blocks_used = pool.num_blocks() - pool.num_free();
            let slots_held = blocks_used * block_tokens;
            let unused: usize = self.running.iter().map(|r| r.unused_slots(group, block_tokens)).sum();
            GroupStats {
                blocks_total: pool.num_blocks(),
                blocks_used,
                blocks_cached: pool.num_published(),
                slots_held,
                tokens_stored: slots_held - unused,
            }
        };
        SchedulerStats {
            running: self.running.len(),
            waiting: self.waiting.len(),
            groups: self.blocks.pools.iter().enumerate().map(group).collect(),
            hit_tokens: self.hit_tokens,
            prompt_tokens: self.prompt_tokens,
            preemptions: self.preemptions,
            steps: self.step,
        }
    }

    /// False if blocks ran out, so that nobody new may start.
    fn continue_running(&mut self, step: &mut Step) -> bool {
        let mut index = 0;
        let mut had_enough = true;
        while index < self.running.len() && step.left.tokens > 0 {
            let chunk = self.policy.chunk(&self.running[index], &step.left);
            if chunk == 0 {
                assert!(self.running[index].remaining() > 0, "a request sampled nothing and was not finished");
                index += 1;
                continue;
            }
            loop {
                let request = &mut self.running[index];
                if self.blocks.grow(&mut request.tables, request.computed + chunk) {
                    self.assign(index, chunk, step);
                    index += 1;
                    break;
                }
                had_enough = false;
                let victim = self.policy.victim(&self.running);
                assert!(victim >= index, "a request of this step is preempted");
                self.preempt(victim, step);
                if victim == index {
                    break;
                }
            }
        }
        had_enough
    }

    fn admit_waiting(&mut self, step: &mut Step) {
        let mut position = 0;
        while position < self.waiting.len() && step.left.tokens > 0 && self.policy.has_seat(self.running.len()) {
            match self.admit(position, step) {
                Admission::Started => {}
                Admission::Shares => position += 1,
                Admission::Full => return,
            }
        }
    }

    fn admit(&mut self, position: usize, step: &mut Step) -> Admission {
        let block_tokens = self.blocks.block_tokens;
        let request = &mut self.waiting[position];
        let limit = if self.blocks.prefix_caching { request.shareable_tokens() / block_tokens } else { 0 };
        self.blocks.extend_hashes(&mut request.hashes, request.salt, &request.tokens, limit);
        let hit = self.blocks.matched(&request.hashes, request.salt, &request.tokens, limit);
        if hit.blocks < limit && step.computing.contains(&request.hashes[hit.blocks]) {
            return Admission::Shares;
        }
        let needed = self.blocks.blocks_for(request.tokens.len()) - hit.blocks;
        for (group, pool) in self.blocks.pools.iter().enumerate() {
            let headroom = self.policy.headroom(&self.running, group, block_tokens);
            if needed + hit.free[group] + headroom > pool.num_free() {
                return Admission::Full;
            }
        }
        let computed = hit.blocks * block_tokens;
        request.computed = computed;
        let chunk = self.policy.chunk(request, &step.left);
        if chunk == 0 {
            request.computed = 0;
            return Admission::Full;
        }
        let mut request = self.waiting.remove(position).expect("in the queue");
        self.blocks.share(&mut request.tables, &request.hashes, request.salt, &request.tokens, hit.blocks);
        assert!(self.blocks.grow(&mut request.tables, computed + chunk), "free blocks were counted above");
        if request.cached_tokens.is_none() {
            request.cached_tokens = Some(computed);
            self.hit_tokens += computed as u64;
            self.prompt_tokens += request.prompt_len as u64;
        }
        let index = self.running.partition_point(|r| r.arrival < request.arrival);
        self.running.insert(index, request);
        self.assign(index, chunk, step);
        Admission::Started
    }

    /// Puts the next `chunk` tokens of a running request, whose tables hold them, into the plan.
    fn assign(&mut self, index: usize, chunk: usize, step: &mut Step) {
        let request = &mut self.running[index];
        let (first, end) = (request.computed, request.computed + chunk);
        let prompt_targets = request.prompt_targets(chunk);
        step.left.tokens -= chunk;
        step.left.prompt_logit_rows -= prompt_targets.tokens.len();
        request.in_flight = chunk;
        if self.blocks.prefix_caching {
            let block_tokens = self.blocks.block_tokens;
            let full = end.div_ceil(block_tokens).min(request.tokens.len() / block_tokens);
            self.blocks.extend_hashes(&mut request.hashes, request.salt, &request.tokens, full);
            step.computing.extend(request.hashes.get(first / block_tokens..full).unwrap_or_default());
        }
        step.plan.assignments.push(Assignment {
            id: request.id,
            first,
            tokens: request.tokens[first..end].to_vec(),
            samples: end == request.tokens.len(),
            prompt_targets,
            tables: request.tables.iter().map(|t| t.ids().collect()).collect(),
        });
    }

    fn seal_full_blocks(blocks: &mut Blocks, request: &mut Request) {
        let full = request.computed / blocks.block_tokens;
        if blocks.prefix_caching {
            blocks.extend_hashes(&mut request.hashes, request.salt, &request.tokens, full);
        }
        for group in 0..blocks.pools.len() {
            while request.tables[group].num_sealed() < full {
                let index = request.tables[group].num_sealed();
                let key =
                    blocks.prefix_caching.then(|| blocks.key(&request.hashes, request.salt, &request.tokens, index));
                request.tables[group].seal_next(&mut blocks.pools[group], key.as_ref());
            }
        }
    }

    fn preempt(&mut self, index: usize, step: &mut Step) {
        step.plan.preempted.push(self.running[index].id);
        self.preemptions += 1;
        self.running[index].preemptions += 1;
        self.send_back(index);
    }

    /// From running to its old place among the waiting, with nothing computed.
    fn send_back(&mut self, index: usize) {
        let mut request = self.running.remove(index);
        assert_eq!(request.in_flight, 0, "a request of the step under way is preempted");
        self.blocks.release(&mut request.tables);
        request.computed = 0;
        let position = self.waiting.partition_point(|r| r.arrival < request.arrival);
        self.waiting.insert(position, request);
    }

    fn remove(&mut self, id: RequestId) -> Option<Departed> {
        let arrival = *self.arrivals.get(&id)?;
        let mut request = match self.running_index(id) {
            Some(index) => self.running.remove(index),
            None => {
                let position = self.waiting.partition_point(|r| r.arrival < arrival);
                self.waiting.remove(position).expect("a known request runs or waits")
            }
        };
        assert_eq!(request.id, id, "the queues are not in order of arrival");
        self.arrivals.remove(&id);
        self.blocks.release(&mut request.tables);
        Some(Departed { cached_tokens: request.cached_tokens.unwrap_or(0), preemptions: request.preemptions })
    }

    fn running_index(&self, id: RequestId) -> Option<usize> {
        let arrival = self.arrivals.get(&id)?;
        self.running.binary_search_by_key(arrival, |r| r.arrival).ok()
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        for request in &mut self.running {
            self.blocks.release(&mut request.tables);
        }
    }
}
