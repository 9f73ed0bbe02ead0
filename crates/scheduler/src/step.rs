//! Plans one step: tokens of running requests, then of waiting ones.
//!
//! Every decoding request gets its row first. Prompts get the rest, as far as the inter-token
//! target allows: half of it goes to the first request in the order and half to shorter ones, so
//! that no request is stuck after a long prompt. Drafts come last. A request without free blocks
//! takes those of the last request in the order. Rows are final only when the plan is written:
//! until then a preempted request returns the rows it was given.
//!
//! The order is by tenant, the one with the fewest tokens for its weight first, and within a tenant
//! by arrival, as shifted by priority.

use std::collections::HashMap;

use crate::{
    Assignment, Nanos, Preempted, RequestId, Scheduler, StepInFlight, StepPlan, admit::Crowd,
    blocks::prefix::ChainHash, pace::StepShape, request::Request,
};

/// A step while it is planned.
#[derive(Debug, Default)]
pub(crate) struct Step {
    pub plan: StepPlan,
    /// Tokens of the budget that are left; prompts get at most `prompt_left` of them.
    pub tokens_left: usize,
    pub prompt_left: usize,
    pub logit_rows_left: usize,
    pub shape: StepShape,
    /// Whether a request did not get the blocks it needed: then no request is admitted.
    pub is_short: bool,
    /// Blocks that running requests will fill next, and by which request; built when the first
    /// waiting request needs it.
    pub computing: Option<HashMap<ChainHash, RequestId>>,
    /// Room that the running requests need; built when the first waiting request needs it.
    pub crowd: Option<Crowd>,
}

impl Step {
    pub fn give(&mut self, request: &mut Request, tokens: usize) {
        let rows = if request.is_decoding() { &mut self.shape.decode_rows } else { &mut self.shape.prompt_rows };
        *rows += tokens;
        self.tokens_left -= tokens;
        let prompt_left = if request.is_decoding() { self.prompt_left } else { self.prompt_left - tokens };
        self.prompt_left = prompt_left.min(self.tokens_left);
        let before = request.prompt_targets().tokens.len();
        request.chunk += tokens;
        self.logit_rows_left -= request.prompt_targets().tokens.len() - before;
    }

    fn take_back(&mut self, request: &mut Request) {
        let rows = if request.is_decoding() { &mut self.shape.decode_rows } else { &mut self.shape.prompt_rows };
        *rows -= request.chunk;
        self.tokens_left += request.chunk;
        if !request.is_decoding() {
            self.prompt_left += request.chunk;
        }
        self.logit_rows_left += request.prompt_targets().tokens.len();
        request.chunk = 0;
    }
}

impl Scheduler {
    /// Plans the next step, while another one may be in flight. A plan is empty, and is no step,
    /// when no request can run: all wait for the step in flight or for the disk tier.
    pub fn schedule(&mut self, now: Nanos) -> StepPlan {
        assert!(self.flights.len() < 2, "two steps are in flight already");
        self.now = self.now.max(now);
        self.blocks.copying_pays = self.copying_pays();
        let mut step = Step {
            tokens_left: self.config.budget_tokens,
            logit_rows_left: self.config.prompt_logit_rows,
            ..Step::default()
        };
        self.expire(&mut step);
        self.sort_running();
        self.force_preemption(&mut step);
        let num_decoding = self.allot_decodes(&mut step);
        let might_decode = (self.running.len() + self.waiting.len()).min(self.config.max_seqs);
        step.prompt_left = step.tokens_left.min(self.pace.prompt_allowance(step.shape.decode_rows, might_decode));
        if num_decoding < self.running.len() {
            self.allot_prompts(&mut step);
        }
        if !step.is_short {
            self.admit_waiting(&mut step);
        }
        if step.shape.prompt_rows > 0 {
            self.top_up(&mut step);
        }
        self.allot_drafts(&mut step);
        self.write(step)
    }

    fn expire(&mut self, step: &mut Step) {
        while let Some(&(deadline, id)) = self.deadlines.first()
            && deadline <= self.now
        {
            let departed = self.remove(id).expect("only known requests have deadlines");
            self.counts.expired += 1;
            step.plan.expired.push((id, departed));
        }
    }

    /// Test hook: preempts the running requests one after the other.
    fn force_preemption(&mut self, step: &mut Step) {
        let number = self.counts.steps + 1;
        let Some(every) = self.config.force_preempt_every.filter(|&every| every > 0) else { return };
        if !number.is_multiple_of(every) || self.running.is_empty() {
            return;
        }
        let start = (number / every) as usize % self.running.len();
        let mut turns = (0..self.running.len()).map(|i| (start + i) % self.running.len());
        if let Some(victim) = turns.find(|&i| self.running[i].computed > self.running[i].forced_at) {
            self.running[victim].forced_at = self.running[victim].computed;
            self.preempt(victim, step);
        }
    }

    /// Gives every decoding request its row. Returns their number.
    fn allot_decodes(&mut self, step: &mut Step) -> usize {
        let (mut index, mut num_decoding) = (0, 0);
        while index < self.running.len() && step.tokens_left > 0 {
            let request = &self.running[index];
            let rows = request.remaining();
            if request.is_decoding() && rows > 0 {
                self.allot(index, rows, step);
                num_decoding += usize::from(self.running.get(index).is_some_and(|r| r.chunk > 0));
            }
            index += 1;
        }
        num_decoding
    }

    /// Gives rows to running requests whose prompt is not computed; the first in the order may
    /// preempt others.
    fn allot_prompts(&mut self, step: &mut Step) {
        let under_way: Vec<usize> = self.prompts_under_way().collect();
        let Some((&first, others)) = under_way.split_first() else { return };
        let longest = self.running[first].remaining();
        let mut shorter: Vec<usize> =
            others.iter().copied().filter(|&index| self.running[index].remaining() < longest).collect();
        shorter.sort_by_key(|&index| self.running[index].remaining());
        let may_start = self.waiting.len() > 0 && self.running.len() < self.config.max_seqs;
        let share = if shorter.is_empty() && !may_start { step.prompt_left } else { step.prompt_left.div_ceil(2) };
        let chunk = self.chunk(&self.running[first], share, step);
        self.allot(first, chunk, step);
        for index in shorter {
            // Requests later in the order may have been preempted by those before them.
            let Some(request) = self.running.get(index) else { continue };
            let chunk = self.chunk(request, step.prompt_left, step);
            self.allot(index, chunk, step);
        }
    }

    /// Gives rows that admission has left to prompts of running requests, in order, while blocks
    /// are free.
    fn top_up(&mut self, step: &mut Step) {
        let under_way: Vec<usize> = self.prompts_under_way().collect();
        for index in under_way {
            let Self { running, blocks, .. } = self;
            let request = &mut running[index];
            let most = request.remaining().min(request.chunk + step.prompt_left);
            let mut more = most.min(self.config.max_chunk.unwrap_or(usize::MAX)).saturating_sub(request.chunk);
            if request.owes_prompt_logits() {
                more = more.min(step.logit_rows_left);
            }
            blocks.free_passed(&mut request.tables, request.planned);
            if more > 0 && blocks.grow(&mut request.tables, request.planned + request.chunk + more) {
                step.give(request, more);
                self.waiting.charge(request.tenant, request.bill(more));
            }
        }
    }

    fn prompts_under_way(&self) -> impl Iterator<Item = usize> {
        let is_under_way = |r: &Request| !r.is_decoding() && r.remaining() > 0;
        self.running.iter().enumerate().filter(move |(_, r)| is_under_way(r)).map(|(index, _)| index)
    }

    /// Tokens of a prompt that this step computes, at most `most`.
    pub(crate) fn chunk(&self, request: &Request, most: usize, step: &Step) -> usize {
        let chunk = request.remaining().min(most).min(step.prompt_left).min(self.max_chunk());
        if request.owes_prompt_logits() { chunk.min(step.logit_rows_left) } else { chunk }
    }

    pub(crate) fn max_chunk(&self) -> usize {
        self.config.max_chunk.unwrap_or(usize::MAX)
    }

    /// Gives a running request rows for its next `chunk` tokens, and blocks. The last requests in
    /// the order are preempted until there are enough.
    fn allot(&mut self, index: usize, chunk: usize, step: &mut Step) {
        if chunk == 0 {
            return;
        }
        loop {
            let Self { running, blocks, waiting, .. } = self;
            let request = &mut running[index];
            blocks.free_passed(&mut request.tables, request.planned);
            if blocks.grow(&mut request.tables, request.planned + chunk) {
                step.give(request, chunk);
                waiting.charge(request.tenant, request.bill(chunk));
                return;
            }
            step.is_short = true;
            let last = running.len() - 1;
            // Steps in flight may fill blocks that the window has passed: waiting is better than
            // starting again.
            if last == index && !running[last].flights.is_empty() {
                return;
            }
            self.running[last].setbacks += 1;
            self.preempt(last, step);
            if last == index {
                return;
            }
        }
    }

    fn preempt(&mut self, index: usize, step: &mut Step) {
        let request = &mut self.running[index];
        self.waiting.refund(request.tenant, request.give_back());
        step.take_back(request);
        request.preemptions += 1;
        self.counts.preemptions += 1;
        let has_host = self.blocks.groups.iter().all(|group| group.host.num_blocks() > 0);
        let full = (request.computed / self.blocks.block_tokens) as Nanos;
        step.plan.preempted.push(Preempted {
            id: request.id,
            computing: self.pace.computing(request.computed).unwrap_or(0),
            copying: has_host.then(|| self.config.copy_cost.saturating_mul(2 * full)),
        });
        self.requeue(index);
    }

    /// Whether copying a block to the host tier and back costs less than computing it again.
    fn copying_pays(&self) -> bool {
        let computing = self.pace.computing(self.config.block_tokens);
        computing.is_none_or(|computing| self.config.copy_cost.saturating_mul(2) <= computing)
    }

    fn write(&mut self, step: Step) -> StepPlan {
        let Step { mut plan, shape, .. } = step;
        plan.transfers = std::mem::take(&mut self.blocks.transfers);
        if let Some(disk) = &mut self.blocks.disk {
            plan.disk_tasks = std::mem::take(&mut disk.tasks);
        }
        plan.assignments = self.running.iter_mut().filter(|r| r.chunk > 0).map(|r| assign(r)).collect();
        plan.assignments.iter().for_each(|a| self.counts.drafts.plan(a.num_drafts));
        if !plan.is_empty() {
            self.counts.steps += 1;
            self.flights.push_back(StepInFlight { ids: plan.assignments.iter().map(|a| a.id).collect(), shape });
        }
        plan
    }
}

/// The assignment for the rows that the request was given.
fn assign(request: &mut Request) -> Assignment {
    let first = request.planned;
    let (end, known) = (first + request.chunk, request.tokens.len());
    let (num_drafts, parents) = (request.drafts.len(), request.drafts.parents().to_vec());
    assert!(num_drafts == 0 || request.chunk == 1 + num_drafts, "drafts of request {} have no root", request.id.0);
    let awaits_token = num_drafts == 0 && end > known;
    assert!(!awaits_token || end == known + 1, "request {} awaits more than one token", request.id.0);
    let mut tokens = request.tokens[first.min(known)..end.min(known)].to_vec();
    tokens.extend(request.drafts.tokens());
    let prompt_targets = request.prompt_targets();
    let tables = request.table_ids();
    let samples = request.depart();
    Assignment { id: request.id, first, tokens, awaits_token, num_drafts, parents, samples, prompt_targets, tables }
}
