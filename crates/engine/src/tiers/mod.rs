//! Where KV blocks go that the device has no room for: host memory, and below it a folder on disk.
//!
//! The scheduler decides what is kept where and says so in its plans: transfers between device blocks and host slots
//! are part of a step, and disk tasks between host slots and files run beside the steps on a thread of their own. This
//! module is the storage they name: [`HostTier`] is bytes, [`DiskStore`] is files, [`DiskIo`] is the thread. It knows
//! neither requests nor devices, and what it is given comes back bit for bit or not at all: a lost, damaged or foreign
//! file costs a prefix hit and never an answer.

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

/// What there is below the device; by default nothing.
#[derive(Clone, Debug, Default)]
pub struct TierConfig {
    pub host: Option<Arc<HostTier>>,
    /// Needs a host tier, through which all its blocks pass.
    pub disk: Option<DiskStore>,
    /// What a block of all groups costs to move between device and host, one way: see [`copy_cost`].
    pub copy_cost: Duration,
}

/// Bytes a second between device and host that [`copy_cost`] reckons with.
const COPY_BYTES_PER_SECOND: f64 = 8e9;

/// What moving so many bytes between device and host is taken to cost.
///
/// Computed from one stated rate, which a single core's copy and a bus of sixteen lanes both reach, and not measured:
/// the cost is only held against that of computing a block again, which is tens of times more, and a start that
/// measures nothing plans the same every time.
pub fn copy_cost(block_bytes: u64) -> Duration {
    Duration::from_secs_f64(block_bytes as f64 / COPY_BYTES_PER_SECOND)
}
