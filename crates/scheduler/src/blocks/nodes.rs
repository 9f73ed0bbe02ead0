//! The tree of published blocks: one node for "these tokens after that node", whatever group or
//! tier holds the keys and values.
//!
//! A node stands for the whole sequence up to the end of its block. It is found by its keyed hash
//! and confirmed by comparing tokens and parent: a collision costs a miss, never a wrong answer. A
//! node exists while something refers to it: a child, a table, a disk task, or a block or host slot
//! with its keys and values.

use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, Hasher},
};

use super::prefix::{BlockKey, ChainHash};
use crate::{BlockId, HostSlot};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NodeId(u32);

impl NodeId {
    /// The parent of every sequence's first block.
    pub const ROOT: NodeId = NodeId(0);
}

/// The place of a node's keys and values in one group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Place {
    pub device: Option<BlockId>,
    pub host: Option<HostSlot>,
}

#[derive(Debug)]
struct Node {
    hash: ChainHash,
    parent: NodeId,
    salt: u64,
    tokens: Box<[u32]>,
    places: Box<[Place]>,
    /// References by children, tables and disk tasks.
    holds: u32,
}

#[derive(Debug)]
pub(crate) struct Nodes {
    slab: Vec<Option<Node>>,
    vacant: Vec<u32>,
    by_hash: HashMap<ChainHash, NodeId, BuildHasherDefault<FirstWord>>,
    num_groups: usize,
    forgotten: Forgotten,
}

impl Nodes {
    /// `memory`: number of removed nodes whose hashes are remembered.
    pub fn new(num_groups: usize, memory: usize) -> Self {
        let root = Node {
            hash: ChainHash::START,
            parent: NodeId::ROOT,
            salt: 0,
            tokens: Box::default(),
            places: vec![Place::default(); num_groups].into(),
            holds: 1,
        };
        Self {
            slab: vec![Some(root)],
            vacant: Vec::new(),
            by_hash: HashMap::default(),
            num_groups,
            forgotten: Forgotten::new(memory),
        }
    }

    /// The node for `key` after `parent`, compared token by token.
    pub fn find(&self, parent: NodeId, key: &BlockKey<'_>) -> Option<NodeId> {
        let &id = self.by_hash.get(&key.hash)?;
        let node = self.node(id);
        (node.parent == parent && node.salt == key.salt && *node.tokens == *key.tokens).then_some(id)
    }

    /// As [`Nodes::find`], but the node is made if it does not exist. None if another sequence has
    /// the same hash. The caller holds the node.
    pub fn find_or_make(&mut self, parent: NodeId, key: &BlockKey<'_>) -> Option<NodeId> {
        if self.by_hash.contains_key(&key.hash) {
            let id = self.find(parent, key)?;
            self.hold(id);
            return Some(id);
        }
        self.hold(parent);
        let node = Node {
            hash: key.hash,
            parent,
            salt: key.salt,
            tokens: key.tokens.into(),
            places: vec![Place::default(); self.num_groups].into(),
            holds: 1,
        };
        let id = match self.vacant.pop() {
            Some(index) => {
                self.slab[index as usize] = Some(node);
                NodeId(index)
            }
            None => {
                self.slab.push(Some(node));
                NodeId(self.slab.len() as u32 - 1)
            }
        };
        self.by_hash.insert(key.hash, id);
        Some(id)
    }

    pub fn hold(&mut self, id: NodeId) {
        self.node_mut(id).holds += 1;
    }

    pub fn let_go(&mut self, id: NodeId) {
        let node = self.node_mut(id);
        assert!(node.holds > 0, "a node is released twice");
        node.holds -= 1;
        self.settle(id);
    }

    pub fn place(&self, id: NodeId, group: usize) -> Place {
        self.node(id).places[group]
    }

    pub fn set_device(&mut self, id: NodeId, group: usize, block: Option<BlockId>) {
        self.node_mut(id).places[group].device = block;
        self.settle(id);
    }

    pub fn set_host(&mut self, id: NodeId, group: usize, slot: Option<HostSlot>) {
        self.node_mut(id).places[group].host = slot;
        self.settle(id);
    }

    pub fn hash(&self, id: NodeId) -> ChainHash {
        self.node(id).hash
    }

    pub fn parent(&self, id: NodeId) -> NodeId {
        self.node(id).parent
    }

    pub fn tokens(&self, id: NodeId) -> &[u32] {
        &self.node(id).tokens
    }

    /// Whether a node of this hash ever existed, as far as is remembered. A node may outlive its
    /// keys and values, because its children need it.
    pub fn was_known(&self, hash: ChainHash) -> bool {
        self.by_hash.contains_key(&hash) || self.forgotten.contains(hash)
    }

    /// Nodes besides the root.
    #[cfg(test)]
    fn len(&self) -> usize {
        self.by_hash.len()
    }

    /// Removes a node without references, and ancestors that were needed by it alone.
    fn settle(&mut self, mut id: NodeId) {
        while id != NodeId::ROOT {
            let node = self.node(id);
            if node.holds > 0 || node.places.iter().any(|p| *p != Place::default()) {
                return;
            }
            let node = self.slab[id.0 as usize].take().expect("looked at above");
            let removed = self.by_hash.remove(&node.hash);
            assert_eq!(removed, Some(id), "the index and a node disagree");
            self.vacant.push(id.0);
            self.forgotten.insert(node.hash);
            id = node.parent;
            self.node_mut(id).holds -= 1;
        }
    }

    fn node(&self, id: NodeId) -> &Node {
        self.slab[id.0 as usize].as_ref().expect("a node that is held exists")
    }

    fn node_mut(&mut self, id: NodeId) -> &mut Node {
        self.slab[id.0 as usize].as_mut().expect("a node that is held exists")
    }

    /// Checks every node: tables and tasks refer to it `holds[index]` times, and `rehash` gives the
    /// hash of its tokens.
    pub fn check(
        &self,
        holds: &[u32],
        rehash: impl Fn(ChainHash, u64, &[u32]) -> ChainHash,
        block_tokens: usize,
    ) -> Result<(), String> {
        let mut children = vec![0; self.slab.len()];
        for node in self.slab.iter().flatten().skip(1) {
            children[node.parent.0 as usize] += 1;
        }
        let mut alive = 0;
        for (index, node) in self.slab.iter().enumerate().skip(1) {
            let Some(node) = node else { continue };
            alive += 1;
            let expected = children[index] + holds[index];
            if node.holds != expected {
                return Err(format!("node {index} counts {} holds, but has {expected}", node.holds));
            }
            if node.holds == 0 && node.places.iter().all(|p| *p == Place::default()) {
                return Err(format!("nothing refers to node {index}"));
            }
            if self.by_hash.get(&node.hash) != Some(&NodeId(index as u32)) {
                return Err(format!("node {index} is not in the index"));
            }
            if node.tokens.len() != block_tokens {
                return Err(format!("node {index} has {} tokens", node.tokens.len()));
            }
            if rehash(self.node(node.parent).hash, node.salt, &node.tokens) != node.hash {
                return Err(format!("node {index} has a hash that is not its tokens'"));
            }
        }
        if alive != self.by_hash.len() {
            return Err("the index names nodes that are not there".into());
        }
        Ok(())
    }

    /// The place of each node's keys and values in `group`, for the integrity check.
    pub fn places(&self, group: usize) -> impl Iterator<Item = (Place, NodeId)> {
        let each =
            move |(index, node): (usize, &Option<Node>)| Some((node.as_ref()?.places[group], NodeId(index as u32)));
        self.slab.iter().enumerate().filter_map(each)
    }

    /// One more than the highest index of a node.
    pub fn end(&self) -> usize {
        self.slab.len()
    }
}

impl NodeId {
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Hashes of removed nodes, the newer ones in place of older ones; may forget a hash, and may
/// rarely take one for another.
#[derive(Debug)]
struct Forgotten(Box<[u64]>);

impl Forgotten {
    fn new(memory: usize) -> Self {
        Self(vec![0; memory.clamp(64, 1 << 16).next_power_of_two()].into())
    }

    fn slot(&self, hash: ChainHash) -> usize {
        hash.0 as usize & (self.0.len() - 1)
    }

    fn insert(&mut self, hash: ChainHash) {
        let slot = self.slot(hash);
        self.0[slot] = (hash.0 >> 64) as u64 | 1;
    }

    fn contains(&self, hash: ChainHash) -> bool {
        self.0[self.slot(hash)] == (hash.0 >> 64) as u64 | 1
    }
}

/// A chain hash is a keyed hash already, so its first word is used as it is.
#[derive(Default)]
pub(crate) struct FirstWord(u64);

impl Hasher for FirstWord {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(byte);
        }
    }

    fn write_u128(&mut self, value: u128) {
        // In tests of collisions a hash has few bits, which are spread over the table.
        self.0 = (value as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = value.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(hash: u128, tokens: &[u32]) -> BlockKey<'_> {
        BlockKey { hash: ChainHash(hash), salt: 0, tokens }
    }

    #[test]
    fn a_hit_needs_the_same_tokens_after_the_same_node() {
        let mut nodes = Nodes::new(1, 64);
        let first = nodes.find_or_make(NodeId::ROOT, &key(1, &[7])).expect("new");
        let second = nodes.find_or_make(first, &key(2, &[8])).expect("new");
        assert_eq!(nodes.find(first, &key(2, &[8])), Some(second));
        assert_eq!(nodes.find(first, &key(2, &[9])), None, "other tokens under the same hash");
        assert_eq!(nodes.find(NodeId::ROOT, &key(2, &[8])), None, "the same tokens after something else");
        assert_eq!(nodes.find(first, &BlockKey { salt: 1, ..key(2, &[8]) }), None, "another salt");
        assert_eq!(nodes.find_or_make(first, &key(2, &[9])), None, "in the way");
    }

    #[test]
    fn what_nothing_needs_goes_with_those_before_it() {
        let mut nodes = Nodes::new(1, 64);
        let first = nodes.find_or_make(NodeId::ROOT, &key(1, &[7])).expect("new");
        let second = nodes.find_or_make(first, &key(2, &[8])).expect("new");
        nodes.let_go(first);
        assert_eq!(nodes.len(), 2, "the child holds it");
        assert!(nodes.was_known(ChainHash(1)), "though its keys are nowhere");
        nodes.set_device(second, 0, Some(BlockId(3)));
        nodes.let_go(second);
        assert_eq!(nodes.len(), 2, "a block holds it");
        nodes.set_device(second, 0, None);
        assert_eq!(nodes.len(), 0);
        assert!(nodes.was_known(ChainHash(2)) && !nodes.was_known(ChainHash(3)));
    }
}
