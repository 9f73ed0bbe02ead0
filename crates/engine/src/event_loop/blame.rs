//! Finds the request that made a step fail. Each request of the step is tried alone, from its
//! prompt and its answer so far, while all others wait outside the scheduler. A request that fails
//! alone ends with the error, and the search ends with it. A request that computes the tokens with
//! which the step failed is cleared and loses nothing: its samples depend on its seed and its own
//! tokens.
//!
//! Requests with the shortest answers are tried first, and among them the newest: a request that
//! has been in many steps is seldom at fault, and the others should wait for few trials.
//!
//! No request is blamed for a step that it shared, and the search ends: each round ends a request
//! that failed alone, or clears all of them, and a request that is tried twice at the same token
//! runs alone until it has another token.

use std::{cmp::Reverse, time::Instant};

use folio_scheduler::RequestId;

use super::{EventLoop, failure::Failure, sample::Sample};
use crate::FinishReason;

/// A search for the request at fault.
#[derive(Debug, Default)]
pub(super) struct Blame {
    /// The request that is tried now, alone in the scheduler.
    current: Option<Suspect>,
    /// Requests still to be tried; the last is the next.
    untried: Vec<Suspect>,
}

#[derive(Clone, Copy, Debug)]
struct Suspect {
    id: RequestId,
    /// The suspect is cleared by a step without failure that computes this many of its tokens.
    until: usize,
    is_cleared: bool,
}

impl Blame {
    pub fn is_current(&self, id: RequestId) -> bool {
        self.current.is_some_and(|suspect| suspect.id == id)
    }
}

impl EventLoop {
    /// Whether the request that is tried alone is among those of a failed step, and so at fault.
    pub(super) fn is_suspect_among(&self, failed: &[RequestId]) -> bool {
        self.blame.as_ref().is_some_and(|blame| failed.iter().any(|&id| blame.is_current(id)))
    }

    /// Continues or begins the search after a failure. The requests of failed steps have left the
    /// scheduler; all others leave it too and start again later.
    pub(super) fn find_blame(&mut self, failed: &[RequestId], failure: &Failure) {
        if let Some(blame) = &mut self.blame {
            let found = blame.current.take_if(|suspect| failed.contains(&suspect.id));
            assert!(failed.len() <= usize::from(found.is_some()), "a suspect is tried alone");
            if let Some(found) = found {
                self.warn(format_args!("request {} ends, because it failed alone too", found.id.0));
                self.end(found.id, FinishReason::Error(failure.reason.clone()));
                self.end_blame();
            } else if let Some(Suspect { id, .. }) = blame.current {
                self.withdraw(id);
                self.requeue(id);
            }
            return;
        }
        let others: Vec<RequestId> = self.samples.keys().filter(|id| !failed.contains(id)).copied().collect();
        others.into_iter().for_each(|id| self.withdraw(id));
        let suspect = |&id: &RequestId| {
            let until = failure.ends.get(&id).copied().unwrap_or(0);
            Suspect { id, until, is_cleared: false }
        };
        let mut untried: Vec<Suspect> = failed.iter().map(suspect).collect();
        let output_len = |id: &RequestId| self.samples.get(id).map_or(0, |sample| sample.output.len());
        untried.sort_by_key(|suspect| (Reverse(output_len(&suspect.id)), suspect.id));
        self.blame = Some(Blame { current: None, untried });
    }

    /// A step ended without failure and computed the tokens of `id` up to `end`.
    pub(super) fn note_computed(&mut self, id: RequestId, end: usize) {
        if let Some(suspect) = self.blame.as_mut().and_then(|blame| blame.current.as_mut()) {
            suspect.is_cleared |= suspect.id == id && end >= suspect.until;
        }
    }

    /// Whether the current suspect, if any, is cleared or has ended, so that the next one or all
    /// other requests can go on.
    pub(super) fn is_suspect_decided(&self) -> bool {
        let is_open = |suspect: &Suspect| !suspect.is_cleared && self.samples.contains_key(&suspect.id);
        let is_decided = |blame: &Blame| !blame.current.as_ref().is_some_and(is_open);
        self.in_flight.is_empty() && self.blame.as_ref().is_some_and(is_decided)
    }

    pub(super) fn advance_blame(&mut self) {
        while self.is_suspect_decided() {
            self.next_suspect();
        }
        self.expire_outside();
    }

    fn next_suspect(&mut self) {
        let Some(blame) = &mut self.blame else { return };
        if let Some(done) = blame.current.take() {
            self.withdraw(done.id);
            return;
        }
        let Some(mut suspect) = blame.untried.pop() else { return self.end_blame() };
        // A request that has ended in the meantime needs no trial.
        let Some(sample) = self.samples.get_mut(&suspect.id) else { return };
        if sample.is_tried_again() {
            suspect.until = suspect.until.max(sample.num_tokens());
        }
        blame.current = Some(suspect);
        self.shared.stats().samples_tried_again += 1;
        self.requeue(suspect.id);
    }

    fn end_blame(&mut self) {
        self.blame = None;
        // In the order of their submission.
        let ids: Vec<RequestId> = self.samples.keys().copied().collect();
        ids.into_iter().for_each(|id| self.requeue(id));
    }

    /// Ends requests outside the scheduler whose deadline has passed.
    fn expire_outside(&mut self) {
        let Some(blame) = &self.blame else { return };
        let now = Instant::now();
        let is_late = |(id, sample): &(&RequestId, &Sample)| {
            !blame.is_current(**id) && sample.deadline.is_some_and(|deadline| deadline <= now)
        };
        let late: Vec<RequestId> = self.samples.iter().filter(is_late).map(|(&id, _)| id).collect();
        late.into_iter().for_each(|id| self.depart(id, FinishReason::Deadline, None));
    }

    /// Takes a sample out of the scheduler. It continues later from its prompt and its answer so
    /// far.
    fn withdraw(&mut self, id: RequestId) {
        if let (Some(departed), Some(sample)) = (self.scheduler.abort(id), self.samples.get_mut(&id)) {
            sample.withdrawn(departed);
        }
    }

    /// Adds a sample to the scheduler's queue again.
    fn requeue(&mut self, id: RequestId) {
        let Some(sample) = self.samples.get_mut(&id) else { return };
        if sample.start_again() {
            // The executor's state of the sample may be that of the failed step.
            self.executor.release(id);
            self.executor.admit(id, sample.admission(&self.shared.config.eos));
        }
        self.enqueue(id);
    }
}
