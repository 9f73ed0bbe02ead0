//! Slots of held blocks that hold no token: what paging wastes, beside the bound that half a block
//! a request sets.

use folio_engine::Occupancy;

use crate::rates::Streams;

/// Sums over the steps of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waste {
    slots_held: u64,
    tokens_stored: u64,
    sequences: u64,
}

impl Waste {
    /// Adds what lies between two readings.
    pub fn add(&mut self, before: &Occupancy, after: &Occupancy) {
        self.slots_held += after.slots_held - before.slots_held;
        self.tokens_stored += after.tokens_stored - before.tokens_stored;
        self.sequences += after.sequences - before.sequences;
    }

    /// Unused slots over all slots.
    pub fn share(&self) -> f64 {
        1.0 - self.tokens_stored as f64 / self.slots_held.max(1) as f64
    }

    pub fn mean_live_length(&self) -> f64 {
        self.tokens_stored as f64 / self.sequences.max(1) as f64
    }

    /// Half a block of 16 a request: 8 over the mean live length.
    pub fn bound(&self) -> f64 {
        8.0 / self.mean_live_length()
    }

    pub fn slots_held(&self) -> u64 {
        self.slots_held
    }

    pub fn describe(streams: &Streams) -> String {
        format!(
            "waste {:.2}% of {} slots held, all steps; the bound 8 / mean live length {:.0} is {:.2}%",
            streams.waste * 100.0,
            streams.slots_held,
            streams.mean_live_length,
            streams.waste_bound * 100.0
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_of_what_lies_between() {
        let before = Occupancy { slots_held: 1000, tokens_stored: 10, sequences: 7 };
        let after = Occupancy { slots_held: 2000, tokens_stored: 970, sequences: 11 };
        let mut waste = Waste::default();
        waste.add(&before, &after);
        assert!((waste.share() - 0.04).abs() < 1e-12);
        assert!((waste.mean_live_length() - 240.0).abs() < 1e-12);
        assert!((waste.bound() - 8.0 / 240.0).abs() < 1e-12);
    }
}
