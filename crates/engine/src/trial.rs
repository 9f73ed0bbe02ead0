//! Which of those who were in a failed step made it fail? Each of them is tried alone, from its prompt and what it has
//! of an answer, while everybody else waits outside the scheduler. One that fails alone ends with the error, and with
//! it the trials. One that gets past the place where it failed is innocent and loses nothing: what it samples depends
//! on its seed and its own tokens.
//!
//! Those with the shortest answers are tried first, and among them the newest: who has shared many steps is seldom the
//! one, and the others wait for as few trials as can be.
//!
//! Nobody is ever blamed for a step that it shared, and the trials come to an end: each round ends a sample that failed
//! alone, or finds all innocent, and one that is tried twice for the same place goes on alone until it has a further
//! token.

use std::{cmp::Reverse, time::Instant};

use folio_scheduler::RequestId;

use crate::{FinishReason, config::nanos, core::Core, failure::Failure, sample::Sample};

#[derive(Debug, Default)]
pub(crate) struct Trials {
    /// Alone with the scheduler.
    on_trial: Option<Suspect>,
    /// Still to be tried; the last is the next.
    suspects: Vec<Suspect>,
}

#[derive(Clone, Copy, Debug)]
struct Suspect {
    id: RequestId,
    /// Innocent once a step has ended well that computed this many of its tokens.
    until: usize,
    is_innocent: bool,
}

impl Trials {
    /// Whether it is the one in the scheduler.
    pub fn is_inside(&self, id: RequestId) -> bool {
        self.on_trial.is_some_and(|suspect| suspect.id == id)
    }
}

impl Core {
    /// Whether the one on trial is in a step that failed, and so guilty.
    pub(crate) fn is_guilt_proven(&self, failed: &[RequestId]) -> bool {
        self.trials.as_ref().is_some_and(|trials| failed.iter().any(|&id| trials.is_inside(id)))
    }

    /// Those who were in steps that failed are not in the scheduler any more; all others start anew too.
    pub(crate) fn suspect(&mut self, failed: &[RequestId], failure: &Failure) {
        if let Some(trials) = &mut self.trials {
            let guilty = trials.on_trial.take_if(|suspect| failed.contains(&suspect.id));
            assert!(failed.len() <= usize::from(guilty.is_some()), "a suspect is tried alone");
            if let Some(guilty) = guilty {
                self.warn(format_args!("request {} failed alone too, and ends", guilty.id.0));
                self.end(guilty.id, FinishReason::Error(failure.reason.clone()));
                self.end_trials();
            } else if let Some(Suspect { id, .. }) = trials.on_trial {
                self.withdraw(id);
                self.enlist_again(id);
            }
            return;
        }
        let others: Vec<RequestId> = self.samples.keys().filter(|id| !failed.contains(id)).copied().collect();
        others.into_iter().for_each(|id| self.withdraw(id));
        let suspect = |&id: &RequestId| {
            let until = failure.ends.get(&id).copied().unwrap_or(0);
            Suspect { id, until, is_innocent: false }
        };
        let mut suspects: Vec<Suspect> = failed.iter().map(suspect).collect();
        let output_len = |id: &RequestId| self.samples.get(id).map_or(0, |sample| sample.output.len());
        suspects.sort_by_key(|suspect| (Reverse(output_len(&suspect.id)), suspect.id));
        self.trials = Some(Trials { on_trial: None, suspects });
    }

    /// A step has ended well in which `id` got as far as `end`.
    pub(crate) fn note_computed(&mut self, id: RequestId, end: usize) {
        if let Some(suspect) = self.trials.as_mut().and_then(|trials| trials.on_trial.as_mut()) {
            suspect.is_innocent |= suspect.id == id && end >= suspect.until;
        }
    }

    /// Whether the next suspect can be let in, or everybody.
    pub(crate) fn is_trial_over(&self) -> bool {
        let is_open = |suspect: &Suspect| !suspect.is_innocent && self.samples.contains_key(&suspect.id);
        let is_over = |trials: &Trials| !trials.on_trial.as_ref().is_some_and(is_open);
        self.in_flight.is_empty() && self.trials.as_ref().is_some_and(is_over)
    }

    pub(crate) fn tend_trials(&mut self) {
        while self.is_trial_over() {
            self.next_trial();
        }
        self.expire_held();
    }

    fn next_trial(&mut self) {
        let Some(trials) = &mut self.trials else { return };
        if let Some(done) = trials.on_trial.take() {
            self.withdraw(done.id);
            return;
        }
        let Some(mut suspect) = trials.suspects.pop() else { return self.end_trials() };
        // One that has left meanwhile needs no trial.
        let Some(sample) = self.samples.get_mut(&suspect.id) else { return };
        if sample.is_tried_again() {
            suspect.until = suspect.until.max(sample.num_tokens());
        }
        trials.on_trial = Some(suspect);
        self.shared.stats().samples_tried_again += 1;
        self.enlist_again(suspect.id);
    }

    fn end_trials(&mut self) {
        self.trials = None;
        // In the order in which they came.
        let ids: Vec<RequestId> = self.samples.keys().copied().collect();
        ids.into_iter().for_each(|id| self.enlist_again(id));
    }

    /// Those outside the scheduler have deadlines too.
    fn expire_held(&mut self) {
        let Some(trials) = &self.trials else { return };
        let now = Instant::now();
        let is_late = |(id, sample): &(&RequestId, &Sample)| {
            !trials.is_inside(**id) && sample.deadline.is_some_and(|deadline| deadline <= now)
        };
        let late: Vec<RequestId> = self.samples.iter().filter(is_late).map(|(&id, _)| id).collect();
        late.into_iter().for_each(|id| self.depart(id, FinishReason::Deadline, None));
    }

    /// Takes a sample out of the scheduler; it goes on later from its prompt and what it has of an answer.
    fn withdraw(&mut self, id: RequestId) {
        if let (Some(departed), Some(sample)) = (self.scheduler.abort(id), self.samples.get_mut(&id)) {
            sample.withdrawn(departed);
        }
    }

    /// Lets a sample in that has been there before, perhaps.
    fn enlist_again(&mut self, id: RequestId) {
        let Some(sample) = self.samples.get_mut(&id) else { return };
        if sample.start_anew() {
            // Nobody knows what the executor saw of it.
            self.executor.release(id);
            self.executor.admit(id, sample.admission(&self.shared.config.eos));
        }
        self.enlist(id);
    }

    /// Hands a sample to the scheduler.
    pub(crate) fn enlist(&mut self, id: RequestId) {
        let Some(sample) = self.samples.get(&id) else { return };
        let request = sample.to_request(id, self.epoch);
        match self.scheduler.add(request, nanos(self.epoch.elapsed())) {
            Ok(()) => self.scheduler.expect_drafts(id, self.shared.config.expects_drafts),
            Err(error) => self.end(id, FinishReason::Error(error.to_string())),
        }
    }
}
