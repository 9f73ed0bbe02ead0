//! A router's view: the cache's contents by its events alone, compared with those that the
//! scheduler reports.

use std::collections::BTreeSet;

use folio_scheduler::{KvEvent, Medium, SchedulerStats};

use crate::invariants::{Found, Invariant};

#[derive(Debug, Default)]
pub struct Router {
    /// Blocks in the cache by events alone: (tier, group, hash).
    found: BTreeSet<(u8, usize, u64)>,
}

fn tier(medium: Medium) -> u8 {
    match medium {
        Medium::Device => 0,
        Medium::Host => 1,
        Medium::Disk => 2,
    }
}

impl Router {
    pub fn hear(&mut self, events: &[KvEvent]) -> Result<(), Found> {
        for event in events {
            match event {
                KvEvent::Stored { hashes, tokens, block_tokens, medium, group, .. } => {
                    if tokens.len() != hashes.len() * block_tokens {
                        return Err((Invariant::I5, format!("{} tokens for {} blocks", tokens.len(), hashes.len())));
                    }
                    for &hash in hashes {
                        if !self.found.insert((tier(*medium), *group, hash)) {
                            return Err((
                                Invariant::I5,
                                format!("{hash:x} is stored twice ({medium:?}, group {group})"),
                            ));
                        }
                    }
                }
                KvEvent::Removed { hashes, medium, group } => {
                    for &hash in hashes {
                        if !self.found.remove(&(tier(*medium), *group, hash)) {
                            let what = format!("{hash:x} is removed, but was not stored ({medium:?}, group {group})");
                            return Err((Invariant::I5, what));
                        }
                    }
                }
                KvEvent::Cleared => self.found.retain(|(tier, ..)| *tier == 2),
            }
        }
        Ok(())
    }

    pub fn check(&self, stats: &SchedulerStats) -> Result<(), Found> {
        for (group, figures) in stats.groups.iter().enumerate() {
            for (tier, held) in [(0, figures.blocks_cached), (1, figures.host_slots_used)] {
                let found = self.found.range((tier, group, 0)..=(tier, group, u64::MAX)).count();
                if found != held {
                    let what = format!("events name {found} blocks, {held} are cached (tier {tier}, group {group})");
                    return Err((Invariant::I5, what));
                }
            }
        }
        Ok(())
    }
}
