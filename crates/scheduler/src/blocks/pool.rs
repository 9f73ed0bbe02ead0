//! The blocks of one layer group in one tier: reference counts, the free list in order of eviction,
//! and the node that each published block belongs to.
//!
//! A pool never copies or moves a block and knows no requests. Blocks are handed out as [`Filling`]
//! or [`Sealed`] handles, which cannot be cloned and are returned through [`Pool::discard`] or
//! [`Pool::release`]. The host tier is a pool as well: there a handle is a pin.

use super::nodes::NodeId;
use crate::BlockId;

const NONE: u32 = u32::MAX;

/// A writable block with one owner.
#[derive(Debug)]
pub(crate) struct Filling(BlockId);

impl Filling {
    pub fn id(&self) -> BlockId {
        self.0
    }
}

/// A full block, never written again; shared only through [`Pool::share`].
#[derive(Debug)]
pub(crate) struct Sealed {
    id: BlockId,
    /// The node of its content, which this handle refers to. None if the block, and therefore any
    /// block after it, cannot be published.
    node: Option<NodeId>,
}

impl Sealed {
    pub fn id(&self) -> BlockId {
        self.id
    }

    pub fn node(&self) -> Option<NodeId> {
        self.node
    }
}

#[derive(Debug)]
struct Block {
    /// Handles on this block.
    refs: u32,
    /// Neighbours on the free list, if the block is free.
    prev: u32,
    next: u32,
    /// The node whose keys and values are here. A free block may have one: these blocks *are* the
    /// prefix cache.
    node: Option<NodeId>,
}

#[derive(Debug)]
pub(crate) struct Pool {
    blocks: Vec<Block>,
    /// Every block is in exactly one place: held (`refs > 0`) or on this list, the next to be taken
    /// first.
    free_head: u32,
    free_tail: u32,
    num_free: usize,
    num_published: usize,
}

impl Pool {
    pub fn new(num_blocks: usize) -> Self {
        let block = || Block { refs: 0, prev: NONE, next: NONE, node: None };
        let mut pool = Self {
            blocks: (0..num_blocks).map(|_| block()).collect(),
            free_head: NONE,
            free_tail: NONE,
            num_free: 0,
            num_published: 0,
        };
        for id in 0..num_blocks as u32 {
            pool.push_last(id);
        }
        pool
    }

    pub fn num_blocks(&self) -> usize {
        self.blocks.len()
    }

    pub fn num_free(&self) -> usize {
        self.num_free
    }

    /// Number of published blocks, held or free.
    pub fn num_published(&self) -> usize {
        self.num_published
    }

    pub fn is_free(&self, id: BlockId) -> bool {
        self.blocks[id.0 as usize].refs == 0
    }

    /// The next free block in order of eviction, and the node whose keys and values it held.
    pub fn take(&mut self) -> Option<(Filling, Option<NodeId>)> {
        let id = self.free_head;
        if id == NONE {
            return None;
        }
        self.unlink(id);
        let node = self.forget(BlockId(id));
        let block = &mut self.blocks[id as usize];
        assert_eq!(block.refs, 0, "free block {id} is held");
        block.refs = 1;
        Some((Filling(BlockId(id)), node))
    }

    /// Seals a block that holds all its tokens. The caller has a reference to `node` for the
    /// handle.
    pub fn seal(&mut self, block: Filling, node: Option<NodeId>) -> Sealed {
        Sealed { id: block.0, node }
    }

    /// Publishes a block as the place of `node`'s keys and values.
    pub fn publish(&mut self, id: BlockId, node: NodeId) {
        let before = self.blocks[id.0 as usize].node.replace(node);
        assert_eq!(before, None, "block {} is published twice", id.0);
        self.num_published += 1;
    }

    /// Ends a block's publication. Returns its node.
    pub fn forget(&mut self, id: BlockId) -> Option<NodeId> {
        let node = self.blocks[id.0 as usize].node.take();
        self.num_published -= usize::from(node.is_some());
        node
    }

    /// Another handle on a full block. The caller has a reference to `node` for it.
    pub fn share(&mut self, id: BlockId, node: Option<NodeId>) -> Sealed {
        if self.is_free(id) {
            self.unlink(id.0);
        }
        self.blocks[id.0 as usize].refs += 1;
        Sealed { id, node }
    }

    /// Returns a block that was never full.
    pub fn discard(&mut self, block: Filling) {
        self.drop_handle(block.0);
    }

    /// Returns a handle on a full block. The caller drops the reference to the returned node.
    pub fn release(&mut self, block: Sealed) -> Option<NodeId> {
        self.drop_handle(block.id);
        block.node
    }

    pub fn ids(&self) -> impl Iterator<Item = BlockId> + use<> {
        (0..self.blocks.len() as u32).map(BlockId)
    }

    fn drop_handle(&mut self, id: BlockId) {
        let block = &mut self.blocks[id.0 as usize];
        assert!(block.refs > 0, "block {} is returned twice", id.0);
        block.refs -= 1;
        if block.refs > 0 {
            return;
        }
        // Blocks that are not published are taken first.
        if block.node.is_some() { self.push_last(id.0) } else { self.push_first(id.0) }
    }

    fn push_last(&mut self, id: u32) {
        let last = std::mem::replace(&mut self.free_tail, id);
        self.blocks[id as usize].prev = last;
        self.blocks[id as usize].next = NONE;
        match last {
            NONE => self.free_head = id,
            _ => self.blocks[last as usize].next = id,
        }
        self.num_free += 1;
    }

    fn push_first(&mut self, id: u32) {
        let first = std::mem::replace(&mut self.free_head, id);
        self.blocks[id as usize].next = first;
        self.blocks[id as usize].prev = NONE;
        match first {
            NONE => self.free_tail = id,
            _ => self.blocks[first as usize].prev = id,
        }
        self.num_free += 1;
    }

    fn unlink(&mut self, id: u32) {
        let Block { prev, next, .. } = self.blocks[id as usize];
        match prev {
            NONE => self.free_head = next,
            _ => self.blocks[prev as usize].next = next,
        }
        match next {
            NONE => self.free_tail = prev,
            _ => self.blocks[next as usize].prev = prev,
        }
        self.num_free -= 1;
    }

    /// Checks the pool against a count of its holders: `held[b]` handles are on block `b`,
    /// `filling` are writable, and `named[b]` is the node whose keys and values are in `b`.
    pub fn check(&self, held: &[u32], filling: &[BlockId], named: &[Option<NodeId>]) -> Result<(), String> {
        let mut on_list = vec![false; self.blocks.len()];
        let (mut id, mut prev) = (self.free_head, NONE);
        while id != NONE {
            let block = &self.blocks[id as usize];
            if std::mem::replace(&mut on_list[id as usize], true) {
                return Err(format!("block {id} is on the free list twice"));
            }
            if block.prev != prev {
                return Err(format!("the free list is broken before block {id}"));
            }
            (prev, id) = (id, block.next);
        }
        if on_list.iter().filter(|&&f| f).count() != self.num_free || self.free_tail != prev {
            return Err(format!("the free list does not hold the {} blocks it says", self.num_free));
        }
        for (id, block) in self.blocks.iter().enumerate() {
            if block.refs != held[id] {
                return Err(format!("block {id} counts {} holders, but {} name it", block.refs, held[id]));
            }
            if (block.refs == 0) != on_list[id] {
                return Err(format!("block {id} with {} holders: on the free list {}", block.refs, on_list[id]));
            }
            if block.node != named[id] {
                return Err(format!("block {id} is published as {:?}, but the tree says {:?}", block.node, named[id]));
            }
        }
        if self.blocks.iter().filter(|b| b.node.is_some()).count() != self.num_published {
            return Err(format!("{} blocks are not published", self.num_published));
        }
        for id in filling {
            let block = &self.blocks[id.0 as usize];
            if block.refs != 1 || block.node.is_some() {
                return Err(format!("block {} is writable, but has {} holders or is published", id.0, block.refs));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unpublished_blocks_are_taken_before_cached_ones_and_those_oldest_first() {
        let mut pool = Pool::new(3);
        let [a, b, c] = [0; 3].map(|_| pool.take().expect("three blocks").0);
        let ids = [c.id(), b.id(), a.id()];
        for block in [&a, &b] {
            pool.publish(block.id(), NodeId::ROOT);
        }
        let (a, b) = (pool.seal(a, None), pool.seal(b, None));
        pool.release(b);
        pool.release(a);
        pool.discard(c);
        let taken: Vec<_> = std::iter::from_fn(|| pool.take()).collect();
        let order: Vec<BlockId> = taken.iter().map(|(block, _)| block.id()).collect();
        assert_eq!(order, ids);
        assert_eq!(taken.iter().filter(|(_, node)| node.is_some()).count(), 2);
        assert_eq!(pool.num_published(), 0);
    }

    #[test]
    #[should_panic(expected = "returned twice")]
    fn returning_a_block_twice_is_caught() {
        let mut pool = Pool::new(1);
        let (block, _) = pool.take().expect("free");
        let forged = Filling(block.id());
        pool.discard(block);
        pool.discard(forged);
    }
}
