//! Flips table entries on the way to the model, to show that the simulator detects it.

use folio_scheduler::{BlockId, RequestId, SchedulerConfig, StepPlan};

use crate::{hash::Rng, model::Model};

#[derive(Clone, Debug)]
pub struct Perturb {
    rng: Rng,
    /// One entry in this number is flipped.
    one_in: usize,
    /// Remaining flips; unlimited in the ordinary mode.
    left: usize,
    /// Whether only flips that must show are made.
    only_effective: bool,
    pub flips: u64,
    /// Flips of an entry through which a row reads a wrong value, in steps that were collected.
    pub effective: u64,
}

impl Perturb {
    /// Flips every entry of every plan with probability 1 / `one_in`.
    pub fn chance(seed: u64, one_in: usize) -> Self {
        Self { rng: Rng(seed), one_in, left: usize::MAX, only_effective: false, flips: 0, effective: 0 }
    }

    /// Flips the next entry whose change must show, once.
    pub fn once(seed: u64) -> Self {
        Self { rng: Rng(seed), one_in: 2, left: 1, only_effective: true, flips: 0, effective: 0 }
    }

    /// Flips entries of a plan that is about to run; returns the requests with rows that must show
    /// it.
    pub fn flip(&mut self, plan: &mut StepPlan, model: &Model, config: &SchedulerConfig) -> Vec<RequestId> {
        let mut shown = Vec::new();
        let len = config.block_tokens;
        for a in &mut plan.assignments {
            for group in 0..a.tables.len() {
                let blocks = config.groups[group].blocks;
                for index in 0..a.tables[group].len() {
                    let right = a.tables[group][index];
                    if self.left == 0 || blocks < 2 || right == BlockId::GONE || !self.rng.chance(self.one_in) {
                        continue;
                    }
                    let wrong = BlockId((right.0 + 1 + self.rng.below(blocks - 1) as u32) % blocks as u32);
                    // The part of this block that the first row reads; later rows see no more of
                    // it.
                    let seen = config.groups[group].window.map_or(0, |w| (a.first + 1).saturating_sub(w));
                    let from = seen.max(index * len);
                    let to = a.first.min((index + 1) * len);
                    let shows = from < to && model.differ(group, [right, wrong], from - index * len, to - index * len);
                    if self.only_effective && !shows {
                        continue;
                    }
                    let mut tables = a.tables.to_vec();
                    tables[group][index] = wrong;
                    a.tables = tables.into();
                    self.left -= 1;
                    self.flips += 1;
                    shown.extend(shows.then_some(a.id));
                }
            }
        }
        shown
    }
}
