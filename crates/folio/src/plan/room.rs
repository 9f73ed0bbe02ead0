//! Whether what is planned is there to be taken. A size that somebody names may be that of another machine; on this one it
//! would be found out only once the cache has filled, by the system's ending the process.

use anyhow::{Result, bail};

use super::{Budget, Bytes, Plan};
use crate::args::MemoryArgs;
use crate::machine;
use crate::table;
use crate::target::Target;

/// More was planned than there is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Excess {
    pub planned: u64,
    pub available: u64,
    /// Whose memory it is.
    pub place: &'static str,
    /// The flag that asked for so much.
    flag: String,
}

impl Excess {
    /// Of the device or, where that has memory of its own, of the host. What nobody named was made to fit.
    pub fn of(bytes: &Bytes, budget: &Budget, args: &MemoryArgs, target: &Target) -> Option<Self> {
        let sizes = [&args.memory, &args.kv_cache_memory_bytes, &args.max_body_memory];
        let is_named = sizes.iter().any(|size| size.is_some())
            || args.kv_cache_mib.or(args.kv_host_mib).is_some()
            || args.kv_offloading_size.is_some();
        if !is_named {
            return None;
        }
        let host = machine::memory_available();
        match target {
            Target::Cpu(_) => Self::over(bytes.total(), host, "this machine", budget.describe()),
            Target::Cuda(_) => Self::over(bytes.total(), target.free_bytes(), "the GPU", budget.describe())
                .or_else(|| Self::over(bytes.on_host(), host, "this machine", "--kv-host-mib".into())),
        }
    }

    fn over(planned: u64, available: Option<u64>, place: &'static str, flag: String) -> Option<Self> {
        let available = available.filter(|&available| planned > available)?;
        Some(Self { planned, available, place, flag })
    }

    /// In words, without saying what to do.
    pub fn describe(&self) -> String {
        format!(
            "the plan takes {} ({}), but {} has {} left, limits of its control groups included",
            table::bytes(self.planned),
            self.flag,
            self.place,
            table::bytes(self.available)
        )
    }
}

impl Plan {
    /// Whether it may be carried out here.
    pub fn check(&self, unchecked: bool) -> Result<()> {
        match &self.excess {
            None => Ok(()),
            Some(excess) if unchecked => {
                let _ = std::io::Write::write_fmt(
                    &mut std::io::stderr(),
                    format_args!(
                        "WARNING: {}; it goes on because of --memory-unchecked, and the system may end it at any moment\n",
                        excess.describe()
                    ),
                );
                Ok(())
            }
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
