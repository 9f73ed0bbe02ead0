//! A step that failed: what was in flight is given up, an executor that went with it is built anew, and those who were
//! in the step are tried again ([`crate::trial`]).

use std::{
    collections::{BTreeMap, VecDeque},
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use folio_scheduler::{DiskTask, DiskTaskKind, RequestId, StepPlan};

use crate::{
    Admission, Error, Executor, FinishReason, Result, StepOutput, Wake,
    background::guarded,
    command::step_done,
    core::{Core, Step},
};

/// What is known of a failure until nothing is in flight any more.
pub(crate) struct Failure {
    /// Of the first step that failed.
    pub reason: String,
    executor_gone: bool,
    /// Where the rows of each sample ended, in the steps that were given up.
    pub ends: BTreeMap<RequestId, usize>,
}

impl Core {
    /// Everything in flight is given up once it has ended.
    pub fn fail(&mut self, step: Step, error: &Error) {
        let new = || Failure { reason: error.to_string(), executor_gone: false, ends: BTreeMap::new() };
        let failure = self.failure.get_or_insert_with(new);
        failure.executor_gone |= matches!(error, Error::ExecutorGone | Error::Lost(_));
        for row in &step.rows {
            let end = failure.ends.entry(row.id).or_default();
            *end = row.end.max(*end);
        }
        // Answered only after `fail_steps`; until then they stay with the last step.
        match self.in_flight.back_mut() {
            Some(last) => last.tasks.extend(step.tasks),
            None => self.recover(step.tasks),
        }
    }

    fn recover(&mut self, tasks: Vec<DiskTask>) {
        let Some(failure) = self.failure.take() else { return };
        self.shared.stats().steps_failed += 1;
        let failed = self.scheduler.fail_steps();
        self.warn(format_args!("a step failed, with {} requests in flight: {}", failed.len(), failure.reason));
        // What was to be stored may never have been written; what is to be fetched lies on the disk as before.
        let (fetches, stores): (Vec<_>, Vec<_>) = tasks.into_iter().partition(|task| task.kind == DiskTaskKind::Fetch);
        stores.iter().for_each(|task| self.scheduler.disk_done(task.ticket, false));
        self.publish_events();
        if failure.executor_gone
            && let Err(error) = self.restart(self.is_guilt_proven(&failed))
        {
            // Without an executor nothing will ever run: better to end, and to be seen to.
            self.warn(format_args!("there is no executor any more, and the engine ends: {error}"));
            self.stopping = true;
            self.last_word = FinishReason::Error(failure.reason);
            return;
        }
        self.start_tasks(fetches);
        self.suspect(&failed, &failure);
    }

    /// Puts a new executor in the place of one that is gone, through a request that ends for it or for no known reason.
    fn restart(&mut self, is_explained: bool) -> Result<()> {
        let Some(rebuild) = self.shared.config.rebuild.clone() else { return Err(Error::ExecutorGone) };
        self.shared.restarting.store(true, Ordering::Release);
        // It takes a while, and nothing that is known has to wait for it.
        self.mail.send();
        let start = Instant::now();
        // The old one's memory first: there may be no room for both.
        let old = std::mem::replace(&mut self.executor, Box::new(Gone));
        let _ = guarded(|| drop(old));
        let rebuilt =
            self.restarts.attempt(is_explained, || guarded(|| rebuild.call()).unwrap_or(Err(Error::RebuildPanicked)));
        self.shared.progress.note();
        self.shared.restarting.store(false, Ordering::Release);
        self.executor = rebuilt?;
        self.shared.progress.follow(self.executor.pulse());
        self.warn(format_args!("the executor was built anew in {:.1?}", start.elapsed()));
        self.shared.stats().restarts += 1;
        self.generation += 1;
        self.executor.on_done(step_done(self.line.clone(), self.generation));
        for (&id, sample) in &self.samples {
            self.executor.admit(id, sample.admission(&self.shared.config.eos));
        }
        Ok(())
    }
}

/// Restarts so many times in [`RESTART_WINDOW`], failed attempts included. One that a request explains, which failed
/// alone and has ended, is not counted: such requests would use them up, and the executor is none the worse.
const MOST_RESTARTS: usize = 3;
const RESTART_WINDOW: Duration = Duration::from_secs(60);

/// When an executor was last built anew: one that never lives long is not worth building again and again.
#[derive(Debug, Default)]
pub(crate) struct Restarts(VecDeque<Instant>);

impl Restarts {
    /// Builds until it works, or has been tried too often of late.
    fn attempt<T>(&mut self, is_first_free: bool, build: impl Fn() -> Result<T>) -> Result<T> {
        let mut result = if is_first_free { build() } else { Err(Error::TooManyRestarts) };
        while result.is_err() && self.allow(Instant::now()) {
            result = build();
        }
        result
    }

    fn allow(&mut self, now: Instant) -> bool {
        self.0.retain(|&time| now.saturating_duration_since(time) < RESTART_WINDOW);
        let allowed = self.0.len() < MOST_RESTARTS;
        if allowed {
            self.0.push_back(now);
        }
        allowed
    }
}

/// Stands where an executor was.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_restarts_in_a_minute_and_no_more() {
        let start = Instant::now();
        let mut restarts = Restarts::default();
        let mut allow = |seconds| restarts.allow(start + Duration::from_secs(seconds));
        assert!(allow(0) && allow(10) && allow(20));
        assert!(!allow(59));
        assert!(allow(60) && !allow(69));
        assert!(allow(100) && allow(100) && !allow(100));
    }
}
