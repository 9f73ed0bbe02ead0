//! The first half of a turn: a plan is made, checked and submitted.

use folio_scheduler::{BlockId, Draft, Preempted, StepPlan, Transfer};

use super::{Driver, Step};
use crate::{
    client::End,
    fairness, hash,
    invariants::{self, Invariant, PlanCheck, Violation},
};

impl Driver {
    /// Plans a step and submits it. False if the plan was empty.
    pub fn schedule(&mut self) -> Result<bool, Violation> {
        let had_preempted = self.coverage.preemptions;
        let plan = self.scheduler.schedule(self.now);
        self.trace.plan(&plan);
        self.integrity()?;
        for &(id, departed) in &plan.expired {
            let due = self.clients.get(&id).and_then(|c| c.deadline).is_some_and(|d| d <= self.now);
            if !due {
                return self.violated((Invariant::I9, format!("request {} expires, but is not due", id.0)));
            }
            self.leave(id, End::Expired, Some(departed));
        }
        let late = self.clients.values().find(|c| c.deadline.is_some_and(|d| d < self.now));
        if let Some(late) = late {
            let what = format!("request {} is alive behind its deadline", late.id.0);
            return self.violated((Invariant::I9, what));
        }
        self.note_preempted(&plan)?;
        plan.assignments.iter().for_each(|a| self.drafts.plan(a.num_drafts));
        let stats = self.scheduler.stats();
        if stats.drafts != self.drafts {
            return self.violated((Invariant::I15, format!("{:?} are counted, not {:?}", stats.drafts, self.drafts)));
        }
        let check = PlanCheck { config: &self.config, clients: &self.clients, disk: &self.disk };
        let under_way = self.in_flight.iter().flat_map(|s| s.plan.assignments.iter().map(|a| (s.number, a)));
        let checked = check
            .check(&plan, &stats)
            .and_then(|()| invariants::check_held(&stats, &self.clients, &self.config))
            .and_then(|()| invariants::check_published(&plan, under_way, &self.clients, self.config.block_tokens))
            .and_then(|()| match self.lenient || self.coverage.preemptions > had_preempted {
                true => Ok(()),
                false => fairness::check_order(&plan, &self.clients, &self.config),
            });
        checked.or_else(|found| self.violated(found))?;
        let empty = plan.is_empty();
        self.submit(plan);
        Ok(!empty)
    }

    pub(super) fn note_preempted(&mut self, plan: &StepPlan) -> Result<(), Violation> {
        for &Preempted { id, .. } in &plan.preempted {
            let newest = self.next_step;
            let Some(client) = self.clients.get_mut(&id) else {
                return self.violated((Invariant::I9, format!("request {} is preempted, but has ended", id.0)));
            };
            client.preemptions += 1;
            client.preempted_at = Some(newest);
            client.waits = true;
            client.drafts = Draft::default();
            self.coverage.preemptions += 1;
            self.coverage.preempted_in_flight += u64::from(client.in_flight > 0);
            self.coverage.preempted_with_drafts += u64::from(self.has_drafts_in_flight(id));
            let client = &self.clients[&id];
            if !self.lenient {
                fairness::check_preemptions(client).or_else(|found| self.violated(found))?;
            }
        }
        Ok(())
    }

    pub(super) fn submit(&mut self, plan: StepPlan) {
        let empty = plan.is_empty();
        let number = self.next_step;
        let after = if empty { self.in_flight.back().map(|s| s.number) } else { Some(number) };
        for task in &plan.disk_tasks {
            self.disk.accept(task, after, self.tick, &self.model);
        }
        if empty {
            self.coverage.empty_plans += 1;
            return;
        }
        self.next_step += 1;
        self.count(&plan);
        for a in &plan.assignments {
            let client = self.clients.get_mut(&a.id).expect("checked");
            client.in_flight += 1;
            client.pending += usize::from(a.samples);
            client.targets_planned += a.prompt_targets.tokens.len();
            client.started = true;
            client.waits = false;
            let proposed = std::mem::take(&mut client.drafts);
            self.coverage.drafts_cut += u64::from(a.num_drafts < proposed.len());
        }
        self.in_flight.push_back(Step { number, plan, output: None, flipped: Vec::new() });
        if hash::mix(self.manners.seed, number) & 1 == 0 {
            // All earlier steps must have run by then.
            for index in 0..self.in_flight.len() {
                self.execute(index);
            }
        }
    }

    pub(super) fn count(&mut self, plan: &StepPlan) {
        let coverage = &mut self.coverage;
        coverage.steps += 1;
        coverage.overlapped_steps += u64::from(!self.in_flight.is_empty());
        coverage.rows += plan.num_rows() as u64;
        for transfer in &plan.transfers {
            match transfer {
                Transfer::Copy { .. } => coverage.copies += 1,
                Transfer::Save { .. } => coverage.saves += 1,
                Transfer::Load { .. } => coverage.loads += 1,
            }
        }
        for a in &plan.assignments {
            coverage.awaited_rows += u64::from(a.awaits_token);
            coverage.drafts_planned += a.num_drafts as u64;
            coverage.draft_trees += u64::from(!is_chain(&a.parents));
            let blocks = |rows: usize| (a.first + rows).div_ceil(self.config.block_tokens);
            coverage.draft_blocks += (blocks(a.num_rows()) - blocks(a.num_rows() - a.num_drafts)) as u64;
            coverage.prompt_targets += a.prompt_targets.tokens.len() as u64;
            coverage.chunked_prompts += u64::from(!a.samples && a.first > 0);
            let gone = a.tables.iter().flatten().filter(|b| **b == BlockId::GONE);
            coverage.gone_entries += gone.count() as u64;
        }
    }
}

fn is_chain(parents: &[Option<u16>]) -> bool {
    parents.iter().enumerate().all(|(node, parent)| parent.map(usize::from) == node.checked_sub(1))
}
