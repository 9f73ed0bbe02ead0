//! Errors of the lower tiers. None of them ends a request: at the start the caller gets it, later
//! it costs a prefix hit.

use std::{io, path::PathBuf};

#[derive(Debug, thiserror::Error)]
pub enum TierError {
    #[error("cannot {action} {path}: {source}", path = path.display())]
    Io { action: &'static str, path: PathBuf, source: io::Error },

    #[error("a host tier of {bytes} bytes cannot be allocated")]
    HostMemory { bytes: u64 },

    #[error("{path} must hold 32 hexadecimal digits; the disk tier starts empty if the file is deleted", path = path.display())]
    BadHashKey { path: PathBuf },

    /// Truncated or changed since it was written; removed now.
    #[error("{path} is damaged and was removed: {problem}", path = path.display())]
    Damaged { path: PathBuf, problem: String },

    /// Whole, but of another writer.
    #[error("{path} stays as it is: its {field} is not the expected one", path = path.display())]
    Foreign { path: PathBuf, field: &'static str },

    #[error("chunk {key:032x} is not on disk")]
    Missing { key: u128 },

    #[error("a chunk of {bytes} bytes is more than the disk tier's {limit}")]
    TooLarge { bytes: u64, limit: u64 },

    #[error("the disk tier has paused storing after a failure")]
    StoringIsPaused,
}

impl TierError {
    pub(super) fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { action, path, source }
    }
}
