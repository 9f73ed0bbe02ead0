//! One step's plan: tokens for those who run, then for those who wait.
//!
//! First every request that decodes gets its row. What is left goes to prompts, as far as the inter-token target allows:
//! half of it to the request first in line, the rest to shorter ones, so that nobody is stuck behind a long prompt. Drafts
//! come last. A request whose blocks run out takes them from the last in line. Rows are final only when the plan is
//! written: until then a request that gives way hands back what it was given.
//!
//! The line is that of the tenants, the one that has had the least for its weight first, and within a tenant that of
//! arrival, as priority shifts it.

use std::collections::HashMap;

use crate::{
    Assignment, Nanos, Preempted, RequestId, Scheduler, StepInFlight, StepPlan, admit::Crowd,
    blocks::prefix::ChainHash, pace::StepShape, request::Request,
};

/// A plan in the making.
#[derive(Debug, Default)]
pub(crate) struct Step {
    pub plan: StepPlan,
    /// Tokens that may still be handed out; to prompts no more than `prompt_left`.
    pub tokens_left: usize,
    pub prompt_left: usize,
    pub logit_rows_left: usize,
    pub shape: StepShape,
    /// A request did not get the blocks it needed, so nobody new may start.
    pub is_short: bool,
    /// Blocks that those who run will fill next, and by whom; built when the first newcomer asks.
    pub computing: Option<HashMap<ChainHash, RequestId>>,
    /// Likewise.
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
    /// The next step, while one other may be in flight. Empty, and then no step at all, when nobody can run: all wait for
    /// what is in flight, or for the disk.
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
        self.line_up();
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

    /// Test hook: someone loses its blocks, in turns.
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

    /// How many requests decode in this step.
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

    /// For those whose prompt is under way; the first in line may take blocks from others.
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
            // Those behind may have lost their place to those before.
            let Some(request) = self.running.get(index) else { continue };
            let chunk = self.chunk(request, step.prompt_left, step);
            self.allot(index, chunk, step);
        }
    }

    /// What newcomers left goes to prompts under way, in line, as far as blocks are free.
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

    /// Tokens of a prompt in this step, of `most`.
    pub(crate) fn chunk(&self, request: &Request, most: usize, step: &Step) -> usize {
        let chunk = request.remaining().min(most).min(step.prompt_left).min(self.max_chunk());
        if request.owes_prompt_logits() { chunk.min(step.logit_rows_left) } else { chunk }
    }

    pub(crate) fn max_chunk(&self) -> usize {
        self.config.max_chunk.unwrap_or(usize::MAX)
    }

    /// Gives the next `chunk` tokens of a running request a place in the step, and blocks; the last in line give way until
    /// there are enough.
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
            // What is in flight may fill blocks that its window has passed: better to wait than to start anew.
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
        self.send_back(index);
    }

    /// Whether a block is worth its way to the host tier and back.
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

/// The rows that a request was given, as the executor hears of them.
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
