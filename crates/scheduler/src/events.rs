//! What happens in the prefix cache, for routers that send a request to where its beginning is.

/// Where a block can be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Medium {
    Device,
    Host,
    Disk,
}

/// Hashes are the low 64 bits of a block's chain hash: equal for equal beginnings, within one process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvEvent {
    /// Consecutive blocks of one sequence can be found from now on.
    Stored { hashes: Vec<u64>, parent: Option<u64>, tokens: Vec<u32>, block_tokens: usize, medium: Medium, group: usize },
    Removed { hashes: Vec<u64>, medium: Medium, group: usize },
    /// Nothing can be found any more, anywhere.
    Cleared,
}
