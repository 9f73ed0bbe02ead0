//! How many bytes may be taken, and which flag said so.

use anyhow::{Result, bail};

use crate::args::MemoryArgs;
use crate::table;
use crate::target::Target;

/// Host tier under a disk tier for which none was asked: what is read from disk must land somewhere.
const HOST_UNDER_DISK: u64 = 256 << 20;

/// Where nothing tells how much is free.
const FREE_UNKNOWN: u64 = 8 << 30;

/// Of a GPU's free memory, where nobody names a share: kernels and libraries need some of it too.
const GPU_SHARE: f64 = 0.9;

/// Part of a budget that is for bodies, where nobody says, and the most it comes to.
const BODY_SHARE: u64 = 16;
const BODY_MOST: u64 = 128 << 20;

#[derive(Clone, Debug, PartialEq)]
pub enum Budget {
    /// For everything.
    All { bytes: u64, flag: String },
    /// For keys and values alone.
    Kv { bytes: u64, flag: String },
    /// Nobody named one: keys and values get what requests can use, at most half of what the rest leaves free.
    Polite { free: u64 },
}

impl Budget {
    /// A GPU is there to be used; a machine's memory is shared with others.
    pub fn of(args: &MemoryArgs, target: &Target) -> Result<Self> {
        let budget = Self::named(args, target.free_bytes())?;
        Ok(match (budget, target) {
            (Self::Polite { free }, Target::Cuda(_)) => {
                Self::All { bytes: (free as f64 * GPU_SHARE) as u64, flag: format!("{GPU_SHARE} of the GPU's memory") }
            }
            (budget, _) => budget,
        })
    }

    /// `free` is what the device could give now.
    fn named(args: &MemoryArgs, free: Option<u64>) -> Result<Self> {
        if let Some(size) = args.memory {
            return Ok(Self::All { bytes: size.0, flag: "--memory".into() });
        }
        if let Some(share) = args.memory_fraction {
            if !(share > 0.0 && share <= 1.0) {
                bail!("--memory-fraction is {share}, but a share lies above 0 and is at most 1");
            }
            let Some(free) = free else { bail!("--memory-fraction: how much memory is free is not known here") };
            let flag = format!("--memory-fraction {share}");
            return Ok(Self::All { bytes: (free as f64 * share) as u64, flag });
        }
        if let Some(mib) = args.kv_cache_mib {
            return Ok(Self::Kv { bytes: mebibytes("--kv-cache-mib", mib)?, flag: "--kv-cache-mib".into() });
        }
        if let Some(size) = args.kv_cache_memory_bytes {
            return Ok(Self::Kv { bytes: size.0, flag: "--kv-cache-memory-bytes".into() });
        }
        Ok(Self::Polite { free: free.unwrap_or(FREE_UNKNOWN) })
    }

    /// What keys and values may take beside `fixed` bytes of other things.
    pub fn for_kv(&self, fixed: u64) -> u64 {
        match self {
            Self::All { bytes, .. } => bytes.saturating_sub(fixed),
            Self::Kv { bytes, .. } => *bytes,
            Self::Polite { free } => free.saturating_sub(fixed) / 2,
        }
    }

    /// Whether more than the running requests can use is welcome: a size that somebody named is used up.
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
pub fn host_bytes(args: &MemoryArgs) -> Result<u64> {
    match (args.kv_host_mib, args.kv_offloading_size) {
        (Some(mib), _) => mebibytes("--kv-host-mib", mib),
        (None, Some(gib)) if (0.0..1e6).contains(&gib) => Ok((gib * (1u64 << 30) as f64) as u64),
        (None, Some(gib)) => bail!("--kv-offloading-size is {gib}, but it counts GiB from 0 to 1000000"),
        (None, None) if args.kv_disk.is_some() => Ok(HOST_UNDER_DISK),
        (None, None) => Ok(0),
    }
}

/// Bytes for the bodies of requests, where there are any. They lie in the host's memory, which is not the budget's where
/// the device has its own.
pub fn body_bytes(args: &MemoryArgs, budget: &Budget, host_is_apart: bool) -> Result<u64> {
    let Some(longest) = args.body_bytes else { return Ok(0) };
    let least = folio_server::least_body_memory(longest) as u64;
    if let Some(size) = args.max_body_memory {
        if size.0 < least {
            bail!(
                "--max-body-memory is {}, but a body of {} (--max-body-bytes) may take {} of it; allow that much, or shorter bodies",
                table::bytes(size.0),
                table::bytes(longest as u64),
                table::bytes(least)
            );
        }
        return Ok(size.0);
    }
    let share = match budget {
        Budget::All { bytes, .. } if !host_is_apart => bytes / BODY_SHARE,
        Budget::Polite { free } => free / BODY_SHARE,
        _ => BODY_MOST,
    };
    Ok(share.min(BODY_MOST).max(least))
}

pub fn mebibytes(flag: &str, mib: u64) -> Result<u64> {
    match mib.checked_mul(1 << 20) {
        Some(bytes) => Ok(bytes),
        None => bail!("{flag} {mib} is more than can be counted in bytes"),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        memory: MemoryArgs,
    }

    fn args(flags: &[&str]) -> MemoryArgs {
        Line::try_parse_from([&["folio"], flags].concat()).expect("flags parse").memory
    }

    #[test]
    fn the_flag_that_is_given_counts() {
        let free = Some(1000 << 20);
        let check = |flags: &[&str], fixed: u64, expect: u64| {
            let budget = Budget::named(&args(flags), free).expect("a budget");
            assert_eq!(budget.for_kv(fixed << 20), expect << 20, "{flags:?}");
        };
        check(&[], 400, 300);
        check(&[], 2000, 0);
        check(&["--memory", "500MiB"], 400, 100);
        check(&["--memory", "100MiB"], 400, 0);
        check(&["--memory-fraction", "0.5"], 400, 100);
        check(&["--gpu-memory-utilization", "0.5"], 400, 100);
        check(&["--kv-cache-mib", "64"], 400, 64);
        check(&["--kv-cache-memory-bytes", "64MiB"], 400, 64);
        for share in ["0", "1.5", "nan"] {
            assert!(Budget::named(&args(&["--memory-fraction", share]), free).is_err(), "{share}");
        }
        assert!(Budget::named(&args(&["--kv-cache-mib", "99999999999999999"]), free).is_err());
        let both = Line::try_parse_from(["folio", "--memory", "1GiB", "--kv-cache-mib", "5"]);
        assert!(both.is_err(), "one budget at a time");
    }

    #[test]
    fn bodies_have_a_share_of_their_own() {
        const MIB: u64 = 1 << 20;
        let check = |flags: &[&str], longest: Option<usize>, apart: bool, expect: Option<u64>| {
            let args = MemoryArgs { body_bytes: longest, ..args(flags) };
            let budget = Budget::named(&args, Some(640 * MIB)).expect("a budget");
            assert_eq!(body_bytes(&args, &budget, apart).ok(), expect.map(|mib| mib * MIB), "{flags:?} {longest:?}");
        };
        let four = Some(4 << 20);
        check(&[], None, false, Some(0));
        check(&["--max-body-memory", "1MiB"], None, false, Some(0));
        check(&[], four, false, Some(40));
        check(&["--memory", "200MiB"], four, false, Some(20));
        check(&["--memory", "1GiB"], four, false, Some(64));
        check(&["--memory", "80GiB"], four, false, Some(128));
        check(&["--memory", "200MiB"], four, true, Some(128));
        check(&["--kv-cache-mib", "64"], four, false, Some(128));
        check(&["--memory", "200MiB"], Some(40 << 20), false, Some(200));
        check(&["--max-body-memory", "20MiB"], four, false, Some(20));
        check(&["--max-body-memory", "2GiB"], four, false, Some(2048));
        check(&["--max-body-memory", "19MiB"], four, false, None);
    }

    #[test]
    fn host_tier() {
        let check = |flags: &[&str], expect: Option<u64>| {
            assert_eq!(host_bytes(&args(flags)).ok(), expect, "{flags:?}");
        };
        check(&[], Some(0));
        check(&["--kv-disk", "x"], Some(256 << 20));
        check(&["--kv-disk", "x", "--kv-host-mib", "7"], Some(7 << 20));
        check(&["--kv-offloading-size", "1.5"], Some(3 << 29));
        check(&["--kv-offloading-size", "nan"], None);
    }
}
