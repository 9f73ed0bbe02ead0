//! Recovers from a failed step: all steps in flight are dropped, an executor that was lost is
//! rebuilt, and the requests of the step are tried again ([`super::blame`]).

use std::{collections::BTreeMap, sync::atomic::Ordering, time::Instant};

use folio_scheduler::{DiskTask, DiskTaskKind, RequestId, StepPlan};

use super::{EventLoop, step::Step};
use crate::{
    Admission, Error, Executor, FinishReason, Result, StepOutput, Wake, background::guarded, messages::step_done,
};

/// A failure, until no step is in flight any more.
pub(super) struct Failure {
    /// Error of the first step that failed.
    pub reason: String,
    is_executor_lost: bool,
    /// End of each sample's rows in the dropped steps, as a number of its tokens.
    pub ends: BTreeMap<RequestId, usize>,
}

impl EventLoop {
    /// Drops a step. The scheduler forgets it when no step is in flight any more.
    pub(super) fn fail(&mut self, step: Step, error: &Error) {
        let new = || Failure { reason: error.to_string(), is_executor_lost: false, ends: BTreeMap::new() };
        let failure = self.failure.get_or_insert_with(new);
        failure.is_executor_lost |= matches!(error, Error::ExecutorGone | Error::Lost(_));
        for row in &step.rows {
            let end = failure.ends.entry(row.id).or_default();
            *end = row.end.max(*end);
        }
        // Disk tasks are answered only after `fail_steps`; until then the newest step holds them.
        match self.in_flight.newest_mut() {
            Some(newest) => newest.tasks.extend(step.tasks),
            None => self.recover(step.tasks),
        }
    }

    fn recover(&mut self, tasks: Vec<DiskTask>) {
        let Some(failure) = self.failure.take() else { return };
        self.shared.stats().steps_failed += 1;
        let failed = self.scheduler.fail_steps();
        self.warn(format_args!("a step failed, with {} requests in flight: {}", failed.len(), failure.reason));
        // A block to be stored may never have been written. A block to be fetched is on disk as
        // before.
        let (fetches, stores): (Vec<_>, Vec<_>) = tasks.into_iter().partition(|task| task.kind == DiskTaskKind::Fetch);
        stores.iter().for_each(|task| self.scheduler.disk_done(task.ticket, false));
        self.publish_events();
        if failure.is_executor_lost
            && let Err(error) = self.restart(self.is_suspect_among(&failed))
        {
            // No step can run without an executor: the engine ends, and its end can be seen.
            self.warn(format_args!("the engine ends, because its executor cannot be rebuilt: {error}"));
            self.is_stopping = true;
            self.stop_reason = FinishReason::Error(failure.reason);
            return;
        }
        self.start_tasks(fetches);
        self.find_blame(&failed, &failure);
    }

    /// Replaces an executor that was lost. `is_explained`: a request failed alone and explains it.
    fn restart(&mut self, is_explained: bool) -> Result<()> {
        let Some(rebuild) = self.shared.config.rebuild.clone() else { return Err(Error::ExecutorGone) };
        self.shared.restarting.store(true, Ordering::Release);
        // A rebuild takes a while, and no posted event has to wait for it.
        self.outbox.send();
        let start = Instant::now();
        // The old executor's memory is freed first: there may be no room for both.
        let old = std::mem::replace(&mut self.executor, Box::new(Gone));
        let _ = guarded(|| drop(old));
        let rebuilt =
            self.restarts.attempt(is_explained, || guarded(|| rebuild.call()).unwrap_or(Err(Error::RebuildPanicked)));
        self.shared.progress.note();
        self.shared.restarting.store(false, Ordering::Release);
        self.executor = rebuilt?;
        self.shared.progress.follow(self.executor.pulse());
        self.warn(format_args!("the executor was rebuilt in {:.1?}", start.elapsed()));
        self.shared.stats().restarts += 1;
        self.generation += 1;
        self.executor.on_done(step_done(self.sender.clone(), self.generation));
        for (&id, sample) in &self.samples {
            self.executor.admit(id, sample.admission(&self.shared.config.eos));
        }
        Ok(())
    }
}

/// Takes the place of an executor while a new one is built.
struct Gone;

impl Executor for Gone {
    fn on_done(&mut self, _: Wake) {}

    fn admit(&mut self, _: RequestId, _: Admission) {}

    fn submit(&mut self, _: StepPlan) -> Result<()> {
        Err(Error::ExecutorGone)
    }

    fn collect(&mut self) -> Result<StepOutput> {
        Err(Error::ExecutorGone)
    }

    fn release(&mut self, _: RequestId) {}
}
