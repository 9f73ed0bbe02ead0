//! Events of the prefix cache, for routers that send a request to the server which holds its first
//! blocks.

use crate::blocks::{
    nodes::{NodeId, Nodes},
    prefix::ChainHash,
};

/// The tier in which a block can be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Medium {
    Device,
    Host,
    Disk,
}

/// Hashes are the low 64 bits of a block's chain hash: equal for sequences with equal beginnings,
/// within one process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvEvent {
    /// Consecutive blocks of one sequence were published.
    Stored {
        hashes: Vec<u64>,
        parent: Option<u64>,
        tokens: Vec<u32>,
        block_tokens: usize,
        medium: Medium,
        group: usize,
    },
    Removed {
        hashes: Vec<u64>,
        medium: Medium,
        group: usize,
    },
    /// All blocks were removed, on the device and in the host tier.
    Cleared,
}

/// Events since they were last taken; empty unless the configuration asks for events.
#[derive(Debug)]
pub(crate) struct EventLog {
    events: Option<Vec<KvEvent>>,
    block_tokens: usize,
}

impl EventLog {
    pub fn new(wanted: bool, block_tokens: usize) -> Self {
        Self { events: wanted.then(Vec::new), block_tokens }
    }

    pub fn take(&mut self) -> Vec<KvEvent> {
        self.events.as_mut().map(std::mem::take).unwrap_or_default()
    }

    pub fn stored(&mut self, nodes: &Nodes, node: NodeId, at: Medium, of: usize) {
        let Some(events) = &mut self.events else { return };
        let hash = nodes.hash(node).0 as u64;
        let parent = nodes.parent(node);
        let parent = (parent != NodeId::ROOT).then(|| nodes.hash(parent).0 as u64);
        if let Some(KvEvent::Stored { hashes, tokens, medium, group, .. }) = events.last_mut()
            && (*medium, *group) == (at, of)
            && hashes.last().copied() == parent
        {
            hashes.push(hash);
            tokens.extend(nodes.tokens(node));
            return;
        }
        events.push(KvEvent::Stored {
            hashes: vec![hash],
            parent,
            tokens: nodes.tokens(node).to_vec(),
            block_tokens: self.block_tokens,
            medium: at,
            group: of,
        });
    }

    pub fn removed(&mut self, hash: ChainHash, at: Medium, of: usize) {
        let Some(events) = &mut self.events else { return };
        if let Some(KvEvent::Removed { hashes, medium, group }) = events.last_mut()
            && (*medium, *group) == (at, of)
        {
            hashes.push(hash.0 as u64);
            return;
        }
        events.push(KvEvent::Removed { hashes: vec![hash.0 as u64], medium: at, group: of });
    }

    pub fn cleared(&mut self) {
        if let Some(events) = &mut self.events {
            events.push(KvEvent::Cleared);
        }
    }
}
