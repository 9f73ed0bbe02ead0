//! The number of bytes that may be taken, and the flag that set it.

use anyhow::{Result, bail};

use crate::device::Device;
use crate::options::{BodyMemory, MemoryBudget, MemoryOptions};
use crate::units;

/// Host tier under a disk tier if none was requested: blocks read from disk need host memory.
const HOST_UNDER_DISK: u64 = 256 << 20;

/// Assumed free memory, if the system does not report it.
const FREE_UNKNOWN: u64 = 8 << 30;

/// Default share of a budget for request bodies, and its maximum in bytes.
const BODY_SHARE: u64 = 16;
const BODY_MOST: u64 = 128 << 20;

#[derive(Clone, Debug, PartialEq)]
pub enum Budget {
    /// Bytes for everything.
    All { bytes: u64, flag: String },
    /// Bytes for keys and values alone.
    Kv { bytes: u64, flag: String },
    /// No size was given: the KV cache gets what requests can use, at most half of what the rest
    /// leaves free.
    Polite { free: u64 },
}

impl Budget {
    /// A GPU is used fully; a machine's memory is shared with other programs.
    pub fn of(options: &MemoryOptions, device: &dyn Device) -> Result<Self> {
        let budget = Self::named(options, device.free_bytes())?;
        Ok(match (budget, device.default_share()) {
            (Self::Polite { free }, Some(share)) => {
                Self::All { bytes: (free as f64 * share) as u64, flag: format!("{share} of the GPU's memory") }
            }
            (budget, _) => budget,
        })
    }

    /// `free`: memory that the device has now.
    fn named(options: &MemoryOptions, free: Option<u64>) -> Result<Self> {
        Ok(match options.budget {
            MemoryBudget::Total(bytes) => Self::All { bytes, flag: "--memory".into() },
            MemoryBudget::Fraction(share) => {
                if !(share > 0.0 && share <= 1.0) {
                    bail!("--memory-fraction is {share}, but a share lies above 0 and is at most 1");
                }
                let Some(free) = free else { bail!("--memory-fraction: how much memory is free is not known here") };
                let flag = format!("--memory-fraction {share}");
                Self::All { bytes: (free as f64 * share) as u64, flag }
            }
            MemoryBudget::KvCache { bytes, setting } => Self::Kv { bytes, flag: setting.into() },
            MemoryBudget::Auto => Self::Polite { free: free.unwrap_or(FREE_UNKNOWN) },
        })
    }

    /// Bytes for the KV cache beside `fixed` bytes of other things.
    pub fn for_kv(&self, fixed: u64) -> u64 {
        match self {
            Self::All { bytes, .. } => bytes.saturating_sub(fixed),
            Self::Kv { bytes, .. } => *bytes,
            Self::Polite { free } => free.saturating_sub(fixed) / 2,
        }
    }

    /// Whether more is useful than the running requests can use: a given size is used up.
    pub fn is_named(&self) -> bool {
        !matches!(self, Self::Polite { .. })
    }

    pub fn describe(&self) -> String {
        match self {
            Self::All { flag, .. } | Self::Kv { flag, .. } => flag.clone(),
            Self::Polite { .. } => "half of what is free".into(),
        }
    }
}

/// Bytes of the host tier.
pub fn host_bytes(options: &MemoryOptions) -> u64 {
    let default = if options.disk_tier.is_some() { HOST_UNDER_DISK } else { 0 };
    options.host_tier_bytes.unwrap_or(default)
}

/// Bytes for the bodies of requests, if there are any. They are in the host's memory, which is not
/// part of the budget if the device has its own.
pub fn body_bytes(options: &MemoryOptions, budget: &Budget, host_is_apart: bool) -> Result<u64> {
    let Some(BodyMemory { body_bytes, least, total }) = options.bodies else { return Ok(0) };
    if let Some(total) = total {
        if total < least {
            bail!(
                "--max-body-memory is {}, but a body of {} (--max-body-bytes) may take {} of it; allow that much, or shorter bodies",
                units::bytes(total),
                units::bytes(body_bytes),
                units::bytes(least)
            );
        }
        return Ok(total);
    }
    let share = match budget {
        Budget::All { bytes, .. } if !host_is_apart => bytes / BODY_SHARE,
        Budget::Polite { free } => free / BODY_SHARE,
        _ => BODY_MOST,
    };
    Ok(share.min(BODY_MOST).max(least))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_budget(budget: MemoryBudget) -> MemoryOptions {
        MemoryOptions { budget, ..MemoryOptions::default() }
    }

    fn kv(mib: u64) -> MemoryBudget {
        MemoryBudget::KvCache { bytes: mib << 20, setting: "--kv-cache-mib" }
    }

    #[test]
    fn the_budget_that_is_given_counts() {
        let free = Some(1000 << 20);
        let check = |budget: MemoryBudget, fixed: u64, expect: u64| {
            let found = Budget::named(&with_budget(budget), free).expect("a budget");
            assert_eq!(found.for_kv(fixed << 20), expect << 20, "{budget:?}");
        };
        check(MemoryBudget::Auto, 400, 300);
        check(MemoryBudget::Auto, 2000, 0);
        check(MemoryBudget::Total(500 << 20), 400, 100);
        check(MemoryBudget::Total(100 << 20), 400, 0);
        check(MemoryBudget::Fraction(0.5), 400, 100);
        check(kv(64), 400, 64);
        for share in [0.0, 1.5, f64::NAN] {
            assert!(Budget::named(&with_budget(MemoryBudget::Fraction(share)), free).is_err(), "{share}");
        }
    }

    #[test]
    fn bodies_have_a_share_of_their_own() {
        const MIB: u64 = 1 << 20;
        let check = |budget: MemoryBudget, bodies: Option<BodyMemory>, apart: bool, expect: Option<u64>| {
            let options = MemoryOptions { bodies, ..with_budget(budget) };
            let budget = Budget::named(&options, Some(640 * MIB)).expect("a budget");
            let found = body_bytes(&options, &budget, apart).ok();
            assert_eq!(found, expect.map(|mib| mib * MIB), "{:?} {bodies:?}", options.budget);
        };
        let total = |mib: u64| MemoryBudget::Total(mib * MIB);
        // A server's body of 4 MiB may take 20 MiB.
        let of = |total: Option<u64>| {
            Some(BodyMemory { body_bytes: 4 * MIB, least: 20 * MIB, total: total.map(|mib| mib * MIB) })
        };
        check(MemoryBudget::Auto, None, false, Some(0));
        check(MemoryBudget::Auto, of(None), false, Some(40));
        check(total(200), of(None), false, Some(20));
        check(total(1 << 10), of(None), false, Some(64));
        check(total(80 << 10), of(None), false, Some(128));
        check(total(200), of(None), true, Some(128));
        check(kv(64), of(None), false, Some(128));
        let long = BodyMemory { body_bytes: 40 * MIB, least: 200 * MIB, total: None };
        check(total(200), Some(long), false, Some(200));
        check(MemoryBudget::Auto, of(Some(20)), false, Some(20));
        check(MemoryBudget::Auto, of(Some(2048)), false, Some(2048));
        check(MemoryBudget::Auto, of(Some(19)), false, None);
    }

    #[test]
    fn host_tier() {
        let disk_tier = Some("x".into());
        assert_eq!(host_bytes(&MemoryOptions::default()), 0);
        assert_eq!(host_bytes(&MemoryOptions { disk_tier: disk_tier.clone(), ..MemoryOptions::default() }), 256 << 20);
        let both = MemoryOptions { disk_tier, host_tier_bytes: Some(7 << 20), ..MemoryOptions::default() };
        assert_eq!(host_bytes(&both), 7 << 20);
    }
}
