//! One [`Adapt`] for each salt: each gets the results of its own requests' drafts, and the times of
//! steps.

use std::time::Duration;

use folio_scheduler::RequestId;

use super::{
    super::{Draft, Owner, salts::Salts},
    Adapt, AdaptOptions,
};

/// Steps without a request that expects drafts after which steps no longer wait for the method.
const MOST_QUIET_STEPS: u32 = 32;
/// Most time of the method in these steps, in steps, to keep up with answers without drafts.
const MOST_STEPS_TO_KEEP_UP: u32 = 1;

/// See the [module](self).
#[derive(Debug)]
pub(in crate::speculate) struct Watches {
    options: AdaptOptions,
    watches: Salts<Watch>,
    /// Salts of the last step.
    present: Vec<u64>,
    /// Requests that continued after it.
    decoding: usize,
}

/// State of one salt.
#[derive(Debug)]
struct Watch {
    adapt: Adapt,
    /// Steps since one of its requests last expected drafts, and the method's time in them.
    quiet_steps: u32,
    quiet_time: Duration,
    /// Requests that continued after the last step, and the nodes requested for each.
    decoding: Vec<RequestId>,
    nodes: Vec<usize>,
    /// One of the requests of the step before was in this one.
    goes_on: bool,
    /// Rows of its drafts in the step.
    drafts: usize,
}

/// The part of one request in a step.
#[derive(Clone, Copy, Debug)]
pub(in crate::speculate) struct Seen<'a> {
    pub id: RequestId,
    pub owner: Owner,
    pub drafted: &'a Draft,
    pub accepted: &'a [u16],
    /// Whether a draft can be made for it.
    pub goes_on: bool,
}

/// A step, for all requests together.
#[derive(Clone, Copy, Debug)]
pub(in crate::speculate) struct StepNote {
    pub rows: usize,
    pub gap: Duration,
    pub took: Duration,
    pub is_decode_only: bool,
}

impl Watch {
    fn new(options: AdaptOptions) -> Self {
        Self {
            adapt: Adapt::new(options),
            quiet_steps: 0,
            quiet_time: Duration::ZERO,
            decoding: Vec::new(),
            nodes: Vec::new(),
            goes_on: false,
            drafts: 0,
        }
    }

    /// Number of requests for which a draft is requested.
    fn asked(&self) -> usize {
        self.nodes.iter().filter(|&&nodes| nodes > 0).count()
    }

    fn note_quiet(&mut self, drafting: Duration, step: Duration) {
        if !self.decoding.is_empty() && self.adapt.expects() {
            (self.quiet_steps, self.quiet_time) = (0, Duration::ZERO);
            return;
        }
        self.quiet_time += drafting;
        let is_dear = self.quiet_time > MOST_STEPS_TO_KEEP_UP * step;
        self.quiet_steps = if is_dear { MOST_QUIET_STEPS } else { self.quiet_steps.saturating_add(1) };
    }
}

impl Watches {
    pub fn new(options: AdaptOptions) -> Self {
        Self { options, watches: Salts::default(), present: Vec::new(), decoding: 0 }
    }

    /// Whether a step has to wait for the method, because of a request of one of these salts.
    pub fn wait(&self, mut salts: impl Iterator<Item = u64>) -> bool {
        salts.any(|salt| self.watches.get(salt).is_none_or(|watch| watch.quiet_steps < MOST_QUIET_STEPS))
    }

    /// Whether the next step of a salt's requests should not be planned ahead of its result.
    pub fn expects(&self, salt: u64) -> bool {
        self.watches.get(salt).is_some_and(|watch| watch.adapt.expects())
    }

    pub fn forget(&mut self, id: RequestId) {
        self.watches.values_mut().for_each(|(_, watch)| watch.adapt.forget(id));
    }

    /// Takes a step. Returns the nodes to request in the next one, for each of these requests.
    pub fn behind(&mut self, step: StepNote, seen: &[Seen<'_>]) -> Vec<usize> {
        self.meet(seen);
        let all_drafts: usize = seen.iter().map(|seen| seen.drafted.len()).sum();
        self.decoding = seen.iter().filter(|seen| seen.goes_on).count();
        for &salt in &self.present {
            let Some(watch) = self.watches.get_mut(salt) else { continue };
            // Between steps of others there may have been nothing to do.
            if watch.goes_on {
                watch.adapt.note_gap(step.gap);
            }
            let others_drafts = all_drafts - watch.drafts;
            watch.adapt.note_step(step.rows - others_drafts, step.took, step.is_decode_only);
            let own = || seen.iter().filter(|seen| seen.owner.salt == salt);
            for seen in own().filter(|seen| !seen.drafted.is_empty()) {
                watch.adapt.note_walk(seen.id, seen.drafted, seen.accepted);
            }
            watch.decoding.clear();
            watch.decoding.extend(own().filter(|seen| seen.goes_on).map(|seen| seen.id));
            watch.adapt.most(&watch.decoding, self.decoding - watch.decoding.len(), &mut watch.nodes);
        }
        let nodes = |seen: &Seen<'_>| {
            let watch = self.watches.get(seen.owner.salt).filter(|_| seen.goes_on)?;
            let at = watch.decoding.iter().position(|&id| id == seen.id)?;
            watch.nodes.get(at).copied()
        };
        seen.iter().map(|seen| nodes(seen).unwrap_or(0)).collect()
    }

    /// Finds the salts of a step, and their parts of it.
    fn meet(&mut self, seen: &[Seen<'_>]) {
        self.present.clear();
        for seen in seen {
            let options = self.options;
            let watch = self.watches.of(seen.owner, || Watch::new(options));
            if !self.present.contains(&seen.owner.salt) {
                self.present.push(seen.owner.salt);
                (watch.goes_on, watch.drafts) = (false, 0);
            }
            watch.goes_on |= watch.decoding.contains(&seen.id);
            watch.drafts += seen.drafted.len();
        }
    }

    /// Drafts of these lengths were made after the step, in the order of its requests. Their time
    /// counts for the salts that requested them; if none did, for all salts alike.
    pub fn drafted(&mut self, step: StepNote, seen: &[Seen<'_>], lengths: &[usize], took: Duration) {
        let watches = self.present.iter().filter_map(|&salt| self.watches.get(salt));
        let asked: usize = watches.map(Watch::asked).sum();
        for &salt in &self.present {
            let Some(watch) = self.watches.get_mut(salt) else { continue };
            let (part, whole) = match (asked, self.decoding) {
                (0, 0) => (1, self.present.len()),
                (0, decoding) => (watch.decoding.len(), decoding),
                (asked, _) => (watch.asked(), asked),
            };
            let share = took.mul_f64(part as f64 / whole as f64);
            if part > 0 {
                let own = seen.iter().zip(lengths).filter(|(seen, _)| seen.owner.salt == salt);
                let longest = own.map(|(_, &length)| length).max().unwrap_or(0);
                watch.adapt.note_drafting(self.decoding, longest, share);
            }
            watch.note_quiet(share, step.took);
        }
    }
}

#[cfg(test)]
mod tests;
