//! One [`Adapt`] a salt: each is told what its own requests' drafts came to, and how long steps took.

use std::time::Duration;

use folio_scheduler::RequestId;

use super::{
    super::{Draft, Owner, salts::Salts},
    Adapt, AdaptOptions,
};

/// Steps without anybody who expects drafts after which no step waits for the method any more.
const PATIENCE: u32 = 32;
/// And how much time it may take in them, in steps, to keep up with answers that it is not asked about.
const PATIENT_STEPS: u32 = 1;

/// See the [module](self).
#[derive(Debug)]
pub(in crate::speculate) struct Watches {
    options: AdaptOptions,
    watches: Salts<Watch>,
    /// Salts of the last step.
    present: Vec<u64>,
    /// Requests that had another token to come behind it.
    decoding: usize,
}

/// Of one salt.
#[derive(Debug)]
struct Watch {
    adapt: Adapt,
    /// Steps since one of its requests last expected drafts, and what the method took in them.
    quiet_steps: u32,
    quiet_time: Duration,
    /// Who had another token to come behind the last step, and the nodes that each is asked for.
    decoding: Vec<RequestId>,
    nodes: Vec<usize>,
    /// Of those of the step before, one was in this.
    goes_on: bool,
    /// Rows of its drafts in the step.
    drafts: usize,
}

/// What a step was to one request.
#[derive(Clone, Copy, Debug)]
pub(in crate::speculate) struct Seen<'a> {
    pub id: RequestId,
    pub owner: Owner,
    pub drafted: &'a Draft,
    pub accepted: &'a [u16],
    /// There is something to draft for.
    pub goes_on: bool,
}

/// What a step was to all of them.
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

    /// Requests that are asked for a draft.
    fn asked(&self) -> usize {
        self.nodes.iter().filter(|&&nodes| nodes > 0).count()
    }

    fn note_quiet(&mut self, drafting: Duration, step: Duration) {
        if !self.decoding.is_empty() && self.adapt.expects() {
            (self.quiet_steps, self.quiet_time) = (0, Duration::ZERO);
            return;
        }
        self.quiet_time += drafting;
        let is_dear = self.quiet_time > PATIENT_STEPS * step;
        self.quiet_steps = if is_dear { PATIENCE } else { self.quiet_steps.saturating_add(1) };
    }
}

impl Watches {
    pub fn new(options: AdaptOptions) -> Self {
        Self { options, watches: Salts::default(), present: Vec::new(), decoding: 0 }
    }

    /// Whether a request of one of these salts is worth waiting for.
    pub fn wait(&self, mut salts: impl Iterator<Item = u64>) -> bool {
        salts.any(|salt| self.watches.get(salt).is_none_or(|watch| watch.quiet_steps < PATIENCE))
    }

    /// Whether the next step of a salt's requests should not be planned ahead of its result.
    pub fn expects(&self, salt: u64) -> bool {
        self.watches.get(salt).is_some_and(|watch| watch.adapt.expects())
    }

    pub fn forget(&mut self, id: RequestId) {
        self.watches.values_mut().for_each(|(_, watch)| watch.adapt.forget(id));
    }

    /// Takes in a step. How many nodes to ask for in the next one, for each of these requests.
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

    /// Finds out which salts are in a step, and how much of it is theirs.
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

    /// The drafts behind the step were made, of such lengths, in the order of its requests. What that took is put down to
    /// those who asked for them; where nobody did, to all alike.
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
