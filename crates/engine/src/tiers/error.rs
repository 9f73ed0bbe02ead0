//! What can go wrong below the device. None of it ends a request: at start it is told to the caller, later it costs a
//! prefix hit.

use std::{io, path::PathBuf};

#[derive(Debug, thiserror::Error)]
pub enum TierError {
    #[error("cannot {action} {path}: {source}", path = path.display())]
    Io { action: &'static str, path: PathBuf, source: io::Error },

    #[error("a host tier of {bytes} bytes cannot be allocated")]
    HostMemory { bytes: u64 },

    #[error("{path} holds no 32 hexadecimal digits; without that file the disk tier starts anew", path = path.display())]
    BadHashKey { path: PathBuf },

    /// Truncated or changed since it was written; it is gone now.
    #[error("{path} is damaged and was removed: {problem}", path = path.display())]
    Damaged { path: PathBuf, problem: String },

    /// Whole, but another's.
    #[error("{path} is left alone: its {field} is not what belongs there", path = path.display())]
    Foreign { path: PathBuf, field: &'static str },

    #[error("chunk {key:032x} is not on disk")]
    Missing { key: u128 },

    #[error("a chunk of {bytes} bytes is more than the disk tier's {limit}")]
    TooLarge { bytes: u64, limit: u64 },

    #[error("the disk tier stores nothing for a while")]
    StoringIsPaused,
}

impl TierError {
    pub(super) fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { action, path, source }
    }
}
