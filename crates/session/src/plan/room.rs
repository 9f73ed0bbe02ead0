//! Compares a plan with the memory that exists. A given size may be meant for another machine; here
//! it would fail only once the cache has filled, when the system ends the process.

use anyhow::{Result, bail};

use super::{Budget, Bytes, Plan};
use crate::device::Device;
use crate::machine;
use crate::options::{MemoryBudget, MemoryOptions};
use crate::units;

/// A plan that exceeds the existing memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Excess {
    pub planned: u64,
    pub available: u64,
    /// The owner of that memory.
    pub place: &'static str,
    /// The flag that requested the size.
    flag: String,
}

impl Excess {
    /// The excess over the memory of the device, or of the host if the device has its own. Default
    /// sizes were made to fit.
    pub fn of(bytes: &Bytes, budget: &Budget, options: &MemoryOptions, device: &dyn Device) -> Option<Self> {
        let is_named = matches!(options.budget, MemoryBudget::Total(_) | MemoryBudget::KvCache { .. })
            || options.bodies.is_some_and(|bodies| bodies.total.is_some())
            || options.host_tier_bytes.is_some();
        if !is_named {
            return None;
        }
        let host = machine::memory_available();
        if !device.has_own_memory() {
            return Self::over(bytes.total(), host, "this machine", budget.describe());
        }
        Self::over(bytes.total(), device.free_bytes(), "the GPU", budget.describe())
            .or_else(|| Self::over(bytes.on_host(), host, "this machine", "--kv-host-mib".into()))
    }

    fn over(planned: u64, available: Option<u64>, place: &'static str, flag: String) -> Option<Self> {
        let available = available.filter(|&available| planned > available)?;
        Some(Self { planned, available, place, flag })
    }

    /// The excess in words, without a remedy.
    pub fn describe(&self) -> String {
        format!(
            "the plan takes {} ({}), but {} has {} left, limits of its control groups included",
            units::bytes(self.planned),
            self.flag,
            self.place,
            units::bytes(self.available)
        )
    }
}

impl Plan {
    /// Whether the plan may be carried out here; with a warning if it is in spite of the excess.
    pub(crate) fn check(&self, unchecked: bool) -> Result<Option<String>> {
        match &self.excess {
            None => Ok(None),
            Some(excess) if unchecked => Ok(Some(format!(
                "{}; it goes on because of --memory-unchecked, and the system may end it at any moment",
                excess.describe()
            ))),
            Some(excess) => bail!(
                "{}; name a smaller size, or let --memory-fraction 0.9 find one; --memory-unchecked takes it all the same",
                excess.describe()
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_there_is_has_both_figures() {
        const GIB: u64 = 1 << 30;
        let over = |planned, available| Excess::over(planned, available, "this machine", "--memory".into());
        assert_eq!(over(GIB, Some(GIB)), None);
        assert_eq!(over(GIB, None), None, "where the system does not say");
        let text = over(40 * GIB, Some(22 * GIB)).expect("too much").describe();
        for part in ["40.0 GiB", "--memory", "22.0 GiB", "this machine", "control groups"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
