//! The lower tiers, for KV blocks that leave the device: host memory, and a folder on disk.
//!
//! The scheduler decides which blocks go where, in its plans: transfers between device blocks and
//! host slots are part of a step, and disk tasks between host slots and files run beside the steps
//! on a thread of their own. This module is the storage: [`HostTier`] is bytes, [`DiskStore`] is
//! files, [`DiskIo`] is the thread. It knows neither requests nor devices, and returns stored
//! blocks bit for bit or not at all: a lost, damaged or foreign file costs a prefix hit and never
//! an answer.

mod chunk_file;
mod disk;
mod error;
mod folder;
mod host;
mod index;
mod io;
mod storing;
#[cfg(test)]
mod tests;

use std::{sync::Arc, time::Duration};

pub use disk::{CHUNK_BLOCKS, DiskConfig, DiskStats, DiskStore};
pub use error::TierError;
pub use host::{Allocate, HostGroup, HostTier};
pub use io::{DiskDone, DiskIo};

/// The tiers below the device; by default none.
#[derive(Clone, Debug, Default)]
pub struct TierConfig {
    pub host: Option<Arc<HostTier>>,
    /// Needs a host tier, which all its blocks pass through.
    pub disk: Option<DiskStore>,
    /// Time to copy a block of all groups between device and host, one way: see [`copy_cost`].
    pub copy_cost: Duration,
}

/// Bytes a second between device and host that [`copy_cost`] assumes.
const COPY_BYTES_PER_SECOND: f64 = 8e9;

/// Assumed time to copy this many bytes between device and host.
///
/// Computed from one stated rate, which a single core's copy and a bus of sixteen lanes both reach,
/// and not measured: it is only compared with the time to compute a block again, which is tens of
/// times longer, and without a measurement every start plans the same.
pub fn copy_cost(block_bytes: u64) -> Duration {
    Duration::from_secs_f64(block_bytes as f64 / COPY_BYTES_PER_SECOND)
}
