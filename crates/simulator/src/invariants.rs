//! Invariants of every step. I1 to I6 and I8 are the scheduler's own `check_integrity`; the rest is
//! checked here from outside, with nothing but the plans and the clients' records.

use std::collections::BTreeMap;

use folio_scheduler::{
    Assignment, BlockId, DiskTaskKind, RequestId, SchedulerConfig, SchedulerStats, StepPlan, Transfer,
};

use crate::{client::Client, disk::Disk};

/// The seventeen invariants of `docs/simulator.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Invariant {
    /// I1 to I6 and I8: the scheduler's own state.
    Integrity,
    /// An assertion inside the scheduler.
    Panic,
    I4,
    I5,
    I6,
    I7,
    I8,
    I9,
    I10,
    I11,
    I12,
    I13,
    I14,
    I15,
    I16,
    I17,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{invariant:?} at tick {tick}: {what}")]
pub struct Violation {
    pub invariant: Invariant,
    pub tick: u64,
    pub what: String,
}

impl Violation {
    /// Whether it is the same fault, at any place and of any request.
    pub fn is_like(&self, other: &Violation) -> bool {
        let words = |v: &Violation| -> String { v.what.chars().filter(|c| !c.is_ascii_digit()).take(48).collect() };
        let told_apart = matches!(self.invariant, Invariant::Integrity | Invariant::Panic);
        self.invariant == other.invariant && (!told_apart || words(self) == words(other))
    }
}

pub type Found = (Invariant, String);

/// Requirements on a plan in any state.
pub struct PlanCheck<'a> {
    pub config: &'a SchedulerConfig,
    pub clients: &'a BTreeMap<RequestId, Client>,
    pub disk: &'a Disk,
}

impl PlanCheck<'_> {
    pub fn check(&self, plan: &StepPlan, stats: &SchedulerStats) -> Result<(), Found> {
        let (rows, budget) = (plan.num_rows(), self.config.budget_tokens);
        if rows > budget {
            return Err((Invariant::I7, format!("{rows} rows, but the budget is {budget}")));
        }
        if stats.running > self.config.max_seqs || plan.assignments.len() > self.config.max_seqs {
            let seats = self.config.max_seqs;
            return Err((Invariant::I7, format!("{} run on {seats} seats", stats.running)));
        }
        let targets: usize = plan.assignments.iter().map(|a| a.prompt_targets.tokens.len()).sum();
        if targets > self.config.prompt_logit_rows {
            return Err((Invariant::I7, format!("{targets} prompt rows, {} allowed", self.config.prompt_logit_rows)));
        }
        if stats.running + stats.waiting != self.clients.len() {
            let (runs, waits, live) = (stats.running, stats.waiting, self.clients.len());
            return Err((Invariant::I8, format!("{runs} run and {waits} wait, but {live} are there")));
        }
        for (i, a) in plan.assignments.iter().enumerate() {
            if plan.assignments[..i].iter().any(|other| other.id == a.id) {
                return Err((Invariant::I8, format!("request {} is in the plan twice", a.id.0)));
            }
            let Some(client) = self.clients.get(&a.id) else {
                return Err((Invariant::I9, format!("request {} has rows, but it has ended", a.id.0)));
            };
            self.check_assignment(a, client)?;
        }
        check_draft_slots(plan, self.config.block_tokens)?;
        self.check_transfers(plan)
    }

    fn check_assignment(&self, a: &Assignment, client: &Client) -> Result<(), Found> {
        let id = a.id.0;
        let rows = a.num_rows();
        let end = a.first + rows;
        let known = client.truth.len();
        if rows == 0 || rows > self.config.max_chunk.unwrap_or(usize::MAX) {
            return Err((Invariant::I7, format!("request {id} gets {rows} rows")));
        }
        if a.awaits_token && (client.pending == 0 || end != known + client.pending || a.num_drafts > 0) {
            let what = format!("request {id} awaits a token at {}, {known} known, {} pending", end - 1, client.pending);
            return Err((Invariant::I12, what));
        }
        if a.awaits_token && client.expects_drafts {
            return Err((Invariant::I12, format!("request {id} is planned ahead of a result that drafts wait for")));
        }
        if a.num_drafts > 0 || !a.parents.is_empty() {
            let drafted = a.tokens.len().checked_sub(a.num_drafts).map(|from| &a.tokens[from..]);
            let proposed = client.drafts.tokens().get(..a.num_drafts);
            let is_theirs = drafted == proposed && client.drafts.parents().get(..a.num_drafts) == Some(&a.parents[..]);
            if !a.samples || client.pending > 0 || a.num_drafts + 1 != rows || !is_theirs {
                return Err((Invariant::I12, format!("request {id} verifies drafts that nobody made")));
            }
        }
        let total = known + client.pending;
        if end - a.num_drafts > total || a.samples != (end - a.num_drafts == total) {
            let what = format!("request {id} computes up to {end} of {total}, samples: {}", a.samples);
            return Err((Invariant::I12, what));
        }
        if a.samples && total + a.num_drafts + 1 > client.max_len {
            let what = format!("request {id} would have {} of {} tokens", total + a.num_drafts + 1, client.max_len);
            return Err((Invariant::I6, what));
        }
        for (group, table) in a.tables.iter().enumerate() {
            if table.len() != end.div_ceil(self.config.block_tokens) {
                let what = format!("request {id} has {} blocks for {end} tokens, group {group}", table.len());
                return Err((Invariant::I6, what));
            }
        }
        check_targets(a, client)
    }

    /// Host slots belong to the disk task that works on them.
    fn check_transfers(&self, plan: &StepPlan) -> Result<(), Found> {
        for transfer in &plan.transfers {
            let taken = match *transfer {
                Transfer::Save { group, to, .. } => self.disk.owns(group, to, true),
                Transfer::Load { group, from, .. } => self.disk.owns(group, from, false),
                Transfer::Copy { from, to, .. } => from == to,
            };
            if taken {
                return Err((Invariant::I4, format!("{transfer:?}, but a disk task owns the slot")));
            }
        }
        // Two stores may read one slot; a fetch owns the slots that it writes.
        for (i, task) in plan.disk_tasks.iter().enumerate() {
            let writes = task.kind == DiskTaskKind::Fetch;
            let slots = || task.slots.iter().enumerate().flat_map(|(g, slots)| slots.iter().map(move |&s| (g, s)));
            let mut others = plan.disk_tasks[..i].iter().filter(|o| writes || o.kind == DiskTaskKind::Fetch);
            let clash = others.any(|other| slots().any(|(g, s)| other.slots[g].contains(&s)));
            if clash || slots().any(|(g, s)| self.disk.owns(g, s, writes)) {
                return Err((Invariant::I4, format!("a fetch shares a slot with another task: {task:?}")));
            }
        }
        Ok(())
    }
}

/// I4 for drafts: the blocks they are written to are in no other request's table.
fn check_draft_slots(plan: &StepPlan, block_tokens: usize) -> Result<(), Found> {
    for a in plan.assignments.iter().filter(|a| a.num_drafts > 0) {
        let others = || plan.assignments.iter().filter(|other| other.id != a.id);
        for (group, table) in a.tables.iter().enumerate() {
            let written = &table[(a.first / block_tokens).min(table.len())..];
            let shared = |other: &&Assignment| other.tables[group].iter().any(|block| written.contains(block));
            if let Some(other) = others().find(shared) {
                let what = format!("request {} drafts into a block of request {}", a.id.0, other.id.0);
                return Err((Invariant::I4, what));
            }
        }
    }
    Ok(())
}

/// Every row of the prompt is requested once, in order, and is among the assignment's rows.
fn check_targets(a: &Assignment, client: &Client) -> Result<(), Found> {
    let targets = &a.prompt_targets;
    let num = targets.tokens.len();
    let end = a.first + a.num_rows();
    if num == 0 {
        let owed = client.wants_prompt_logits && a.samples && client.targets_planned + 1 < client.prompt_len;
        let what = || format!("request {} samples with prompt rows still owed", a.id.0);
        return if owed { Err((Invariant::I12, what())) } else { Ok(()) };
    }
    let wanted = client.prompt().get(targets.first + 1..targets.first + 1 + num);
    let in_order = targets.first == client.targets_planned;
    let in_rows = targets.first >= a.first && targets.first + num <= end;
    if !client.wants_prompt_logits || !in_order || !in_rows || wanted != Some(&targets.tokens[..]) {
        let what = format!("request {}: prompt rows {}..{} out of order", a.id.0, targets.first, targets.first + num);
        return Err((Invariant::I12, what));
    }
    Ok(())
}

/// I5, checked from outside: no row reads a block that a step in flight writes for another request.
pub fn check_published<'a>(
    new: &StepPlan,
    under_way: impl Iterator<Item = (u64, &'a Assignment)> + Clone,
    clients: &BTreeMap<RequestId, Client>,
    block_tokens: usize,
) -> Result<(), Found> {
    for a in &new.assignments {
        let own = a.first / block_tokens;
        for (step, other) in under_way.clone() {
            // A request that left or lost its blocks since may write to blocks of another request.
            let holds = |c: &Client| c.preempted_at.is_none_or(|at| at < step);
            if other.id == a.id || !clients.get(&other.id).is_some_and(holds) {
                continue;
            }
            let written = other.first / block_tokens..(other.first + other.num_rows()).div_ceil(block_tokens);
            for (mine, theirs) in a.tables.iter().zip(other.tables.iter()) {
                let Some(written) = theirs.get(written.clone()) else { continue };
                let reads = &mine[..own.min(mine.len())];
                if let Some(block) = reads.iter().find(|b| **b != BlockId::GONE && written.contains(b)) {
                    let what = format!("request {} reads block {} that {} still writes", a.id.0, block.0, other.id.0);
                    return Err((Invariant::I5, what));
                }
            }
        }
    }
    Ok(())
}

/// I13: no more blocks are held than the remaining requests can need.
pub fn check_held(
    stats: &SchedulerStats,
    clients: &BTreeMap<RequestId, Client>,
    config: &SchedulerConfig,
) -> Result<(), Found> {
    for (group, figures) in stats.groups.iter().enumerate() {
        let most: usize = clients.values().map(|client| config.most_blocks(group, client.max_len)).sum();
        if figures.blocks_used > most {
            let what = format!("{} blocks are held, but those alive need {most}, group {group}", figures.blocks_used);
            return Err((Invariant::I13, what));
        }
    }
    Ok(())
}

/// I14: without requests, nothing is held and every gauge is at zero.
pub fn check_idle(stats: &SchedulerStats, kept: usize) -> Result<(), Found> {
    let held = stats.groups.iter().any(|g| g.blocks_used + g.slots_held + g.tokens_stored > 0);
    if stats.running + stats.waiting + stats.waiting_tokens > 0 || held {
        return Err((Invariant::I14, format!("idle, but {stats:?}")));
    }
    if kept > 0 {
        return Err((Invariant::I14, format!("idle, but the executor keeps {kept} requests")));
    }
    Ok(())
}
