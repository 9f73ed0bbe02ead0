//! The second half of a turn: the oldest step runs, the reads of its rows are checked, and its
//! results are applied.

use std::collections::BTreeMap;

use folio_scheduler::{Assignment, RequestId, RowResult, StepPlan};

use super::{Driver, Step};
use crate::{
    client::{Client, End},
    hash,
    invariants::{Found, Invariant, Violation},
};

impl Driver {
    pub(super) fn execute(&mut self, index: usize) {
        let step = &mut self.in_flight[index];
        if step.output.is_some() {
            return;
        }
        let fault = self.model.run_transfers(&step.plan.transfers);
        if let Some(perturb) = &mut self.perturb {
            step.flipped = perturb.flip(&mut step.plan, &self.model, &self.config);
        }
        let mut output = self.model.run_rows(&step.plan);
        output.fault = fault.or(output.fault);
        step.output = Some(output);
    }

    /// Collects the oldest step: runs it if necessary, checks every row's reads, commits, and ends
    /// finished requests.
    pub fn collect(&mut self) -> Result<(), Violation> {
        if self.in_flight.is_empty() {
            return Ok(());
        }
        self.execute(0);
        let Step { number, plan, output, flipped } = self.in_flight.pop_front().expect("not empty");
        self.count_flips(&flipped);
        let mut output = output.expect("just run");
        if let Some(fault) = output.fault.take() {
            return self.violated((Invariant::I12, fault));
        }
        self.check_digests(&plan, &output.digests).or_else(|found| self.violated(found))?;
        self.spoil(&plan, &mut output.results);
        self.coverage.kv_moves += output.moved;
        output.results.iter().for_each(|result| self.drafts.accept(result.accepted.len()));
        let took = 1_000_000 + 50_000 * plan.num_rows() as u64 + hash::mix(number, self.manners.seed) % 1_000_000;
        self.now = self.now.saturating_add(took);
        self.scheduler.commit(&output.results, took);
        self.trace.results(&output.results);
        self.disk.step_done(number, self.tick, &self.model);
        let mut ends = Vec::new();
        for ((a, result), &fold) in plan.assignments.iter().zip(&output.results).zip(&output.folds) {
            let settled = self.settle(a, result, fold).or_else(|found| self.violated(found))?;
            ends.extend(settled.map(|end| (a.id, end)));
        }
        for (id, end) in ends {
            self.end(id, end)?;
        }
        self.release_ghosts(number);
        self.integrity()
    }

    /// Flips in a failed step or behind a failed row are not checked.
    fn count_flips(&mut self, flipped: &[RequestId]) {
        for &id in flipped {
            let client = alive_or_not(&mut self.clients, &mut self.ghosts, id);
            let counts = client.is_some_and(|client| !client.broken);
            if let Some(perturb) = self.perturb.as_mut().filter(|_| counts) {
                perturb.effective += 1;
            }
        }
    }

    /// Checks I12 row by row, also for requests that have ended since.
    pub(super) fn check_digests(&mut self, plan: &StepPlan, digests: &[u64]) -> Result<(), Found> {
        let mut digests = digests.iter();
        for a in &plan.assignments {
            let Some(client) = alive_or_not(&mut self.clients, &mut self.ghosts, a.id) else {
                return Err((Invariant::I9, format!("request {} ran after it was forgotten", a.id.0)));
            };
            let own = a.num_rows() - a.num_drafts;
            let len = client.truth.len();
            for (row, position) in a.positions().enumerate() {
                if let Some(draft) = row.checked_sub(own) {
                    path_to(draft, a).into_iter().for_each(|node| client.truth.push(a.drafts()[node]));
                }
                let read = digests.next().copied();
                if !client.broken && client.truth.digests().get(position).copied() != read {
                    let what = format!("request {} read something else at position {position} than alone", a.id.0);
                    return Err((Invariant::I12, what));
                }
                client.truth.truncate(len);
            }
        }
        Ok(())
    }

    pub(super) fn spoil(&mut self, plan: &StepPlan, results: &mut [RowResult]) {
        let Some(nth) = self.spoil_row else { return };
        let sampling =
            plan.assignments.iter().zip(results).filter(|(a, _)| a.samples && self.clients.contains_key(&a.id));
        let sampling: Vec<&mut RowResult> = sampling.map(|(_, r)| r).collect();
        let num = sampling.len();
        if let Some(result) = sampling.into_iter().nth(nth % num.max(1)) {
            self.spoil_row = None;
            *result = RowResult { id: result.id, accepted: Vec::new(), token: None };
            self.progress.fault(self.tick);
        }
    }

    /// Applies a step's result to its client.
    pub(super) fn settle(&mut self, a: &Assignment, result: &RowResult, fold: u64) -> Result<Option<End>, Found> {
        let live = self.clients.contains_key(&a.id);
        let client = alive_or_not(&mut self.clients, &mut self.ghosts, a.id).expect("checked before");
        client.in_flight -= 1;
        client.pending -= usize::from(a.samples);
        let mut end = None;
        let before = client.truth.len();
        if a.samples {
            let Some(token) = result.token else {
                client.broken = true;
                return Ok(live.then_some(End::RowFailed));
            };
            if client.broken {
                return Ok(None);
            }
            if live && a.first + a.num_rows() - a.num_drafts != client.truth.len() {
                return Err((Invariant::I12, format!("request {} samples at the wrong place", a.id.0)));
            }
            for token in result.accepted.iter().copied().chain([token]) {
                if token != client.truth.next(client.wants.sampling) {
                    return Err((Invariant::I12, format!("request {} has another answer than alone", a.id.0)));
                }
                client.fold = hash::folded(client.fold, client.truth.len(), token);
                client.truth.push(token);
                if live && end.is_none() {
                    end = client.end(self.manners.buffer);
                }
            }
            self.coverage.drafts_accepted += result.accepted.len() as u64;
        }
        if live && client.fold != fold {
            return Err((Invariant::I15, format!("request {}: the state is not that of its tokens", a.id.0)));
        }
        let computed = if a.num_drafts > 0 { before + result.accepted.len() } else { a.first + a.num_rows() };
        if computed > client.ceiling {
            client.ceiling = computed;
            self.progress.rise(self.tick);
        }
        Ok(end)
    }
}

/// The drafts on the path to one of them, itself included.
fn path_to(draft: usize, a: &Assignment) -> Vec<usize> {
    let mut path: Vec<usize> = std::iter::successors(Some(draft), |&node| a.parents[node].map(usize::from)).collect();
    path.reverse();
    path
}

fn alive_or_not<'a>(
    clients: &'a mut BTreeMap<RequestId, Client>,
    ghosts: &'a mut [(u64, Client)],
    id: RequestId,
) -> Option<&'a mut Client> {
    clients.get_mut(&id).or_else(|| ghosts.iter_mut().map(|(_, c)| c).find(|c| c.id == id))
}
