//! Ends of requests: finished, aborted, failed with their step, or gone with the process.

use folio_scheduler::{Departed, DraftStats, RequestId, Scheduler};

use super::{Departure, Driver};
use crate::{
    client::End,
    events::Router,
    hash,
    invariants::{self, Invariant, Violation},
    model::Model,
};

impl Driver {
    /// Takes a live request out of the scheduler, and checks that the scheduler had it once.
    pub(super) fn end(&mut self, id: RequestId, end: End) -> Result<(), Violation> {
        let known = self.clients.contains_key(&id);
        let departed = match end {
            End::Length | End::Stop => self.scheduler.finish(id),
            _ => self.scheduler.abort(id),
        };
        if departed.is_some() != known {
            let what = format!("request {} ends ({end:?}); alive: {known}, known: {}", id.0, departed.is_some());
            return self.violated((Invariant::I9, what));
        }
        let Some(departed) = departed else { return Ok(()) };
        let counted = self.clients[&id].preemptions;
        if departed.preemptions != counted {
            let what = format!("request {} was preempted {counted} times, not {}", id.0, departed.preemptions);
            return self.violated((Invariant::I9, what));
        }
        self.leave(id, end, Some(departed));
        if !matches!(end, End::Length | End::Stop) {
            let stats = self.scheduler.stats();
            invariants::check_held(&stats, &self.clients, &self.config).or_else(|found| self.violated(found))?;
        }
        Ok(())
    }

    /// Updates the records of a request that has left the scheduler.
    pub(super) fn leave(&mut self, id: RequestId, end: End, departed: Option<Departed>) {
        let Some(client) = self.clients.remove(&id) else { return };
        self.trace.say(|| format!("request {} ends: {end:?}", id.0));
        self.departures.push(Departure { id, end, departed, tick: self.tick });
        let coverage = &mut self.coverage;
        *match end {
            End::Length => &mut coverage.ended_by_length,
            End::Stop => &mut coverage.ended_by_stop,
            End::Aborted if client.in_flight > 0 => &mut coverage.aborted_in_flight,
            End::Aborted if client.started => &mut coverage.aborted_running,
            End::Aborted => &mut coverage.aborted_waiting,
            End::Crashed => &mut coverage.crashed,
            End::Stalled => &mut coverage.stalled,
            End::Expired => &mut coverage.expired,
            End::StepFailed => &mut coverage.failed_requests,
            End::RowFailed => &mut coverage.failed_rows,
        } += 1;
        self.progress.rise(self.tick);
        self.coverage.aborted_with_drafts += u64::from(end == End::Aborted && self.has_drafts_in_flight(id));
        if client.in_flight == 0 {
            self.model.release(id);
        } else {
            self.ghosts.push((self.next_step - 1, client));
        }
    }

    /// Whether a step in flight verifies drafts of the request.
    pub(super) fn has_drafts_in_flight(&self, id: RequestId) -> bool {
        self.in_flight.iter().flat_map(|step| &step.plan.assignments).any(|a| a.id == id && a.num_drafts > 0)
    }

    pub(super) fn release_ghosts(&mut self, done: u64) {
        let model = &mut self.model;
        self.ghosts.retain(|(until, client)| {
            if *until <= done {
                model.release(client.id);
            }
            *until > done
        });
    }

    /// Drops the steps in flight, as after a fault of the executor.
    pub fn fail_steps(&mut self) -> Result<(), Violation> {
        if self.in_flight.is_empty() {
            return Ok(());
        }
        self.note_fault();
        self.coverage.failed_steps += 1;
        let mut named = self.scheduler.fail_steps();
        self.trace.say(|| format!("steps under way fail: {named:?}"));
        named.sort_unstable();
        let in_them: Vec<RequestId> = self.clients.values().filter(|c| c.in_flight > 0).map(|c| c.id).collect();
        if named != in_them {
            let what = format!("a failed step names {named:?}, but had {in_them:?}");
            return self.violated((Invariant::I9, what));
        }
        self.coverage.failed_with_drafts += in_them.iter().filter(|&&id| self.has_drafts_in_flight(id)).count() as u64;
        self.in_flight.clear();
        self.disk.steps_failed(self.tick);
        for id in named {
            self.leave(id, End::StepFailed, None);
        }
        self.release_ghosts(u64::MAX);
        self.model.scribble(hash::mix(self.tick, 3), |group, slot| self.disk.owns(group, slot, true));
        self.integrity()
    }

    /// The process crashes and restarts; only the disk is unchanged.
    pub fn restart(&mut self) -> Result<(), Violation> {
        self.trace.say(|| "restart".into());
        self.fold_stats();
        self.coverage.restarts += 1;
        self.in_flight.clear();
        let ids: Vec<RequestId> = self.clients.keys().copied().collect();
        for id in ids {
            self.leave(id, End::Crashed, None);
        }
        self.ghosts.clear();
        self.disk.restart();
        self.model = Model::new(&self.config);
        self.scheduler = Scheduler::new(self.config.clone()).expect("as sound as before");
        for key in self.disk.keys() {
            self.scheduler.disk_found(key);
        }
        self.router = Router::default();
        self.drafts = DraftStats::default();
        self.draining = false;
        self.integrity()
    }
}
