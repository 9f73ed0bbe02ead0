//! The block table of one request in one layer group: blocks behind the window, then full blocks,
//! then those being filled.
//!
//! A table's blocks are returned through [`super::Blocks`], last block first, so that the end of a
//! sequence is evicted before its start. A debug build catches a table that is dropped with blocks
//! in it.

use std::collections::VecDeque;

use super::{
    nodes::NodeId,
    pool::{Filling, Sealed},
};
use crate::BlockId;

#[derive(Debug, Default)]
pub(crate) struct Table {
    /// Number of first blocks that were freed behind the window.
    gone: usize,
    /// Not empty once `gone` is positive: the last full block is the parent of the next one.
    sealed: VecDeque<Sealed>,
    filling: VecDeque<Filling>,
    /// Whether `ids` has changed since [`Table::take_changed`].
    changed: bool,
}

impl Table {
    /// Number of blocks up to its end, with those behind the window.
    pub fn num_blocks(&self) -> usize {
        self.num_sealed() + self.filling.len()
    }

    pub fn num_held(&self) -> usize {
        self.sealed.len() + self.filling.len()
    }

    pub fn num_sealed(&self) -> usize {
        self.gone + self.sealed.len()
    }

    pub fn num_gone(&self) -> usize {
        self.gone
    }

    pub fn filling(&self) -> impl Iterator<Item = BlockId> {
        self.filling.iter().map(Filling::id)
    }

    pub fn sealed(&self) -> impl Iterator<Item = &Sealed> {
        self.sealed.iter()
    }

    pub fn ids(&self) -> impl Iterator<Item = BlockId> {
        let gone = std::iter::repeat_n(BlockId::GONE, self.gone);
        gone.chain(self.sealed.iter().map(Sealed::id)).chain(self.filling())
    }

    pub fn take_changed(&mut self) -> bool {
        std::mem::take(&mut self.changed)
    }

    /// The block at `index`, if it is still held.
    pub fn id(&self, index: usize) -> Option<BlockId> {
        let held = index.checked_sub(self.gone)?;
        match self.sealed.get(held) {
            Some(block) => Some(block.id()),
            None => self.filling.get(held - self.sealed.len()).map(Filling::id),
        }
    }

    /// The full block at `index`, if it is still held.
    pub fn full(&self, index: usize) -> Option<&Sealed> {
        self.sealed.get(index.checked_sub(self.gone)?)
    }

    /// The parent of the next block to be sealed, if that can be published.
    pub fn last_node(&self) -> Option<NodeId> {
        match self.sealed.back() {
            Some(block) => block.node(),
            None => Some(NodeId::ROOT),
        }
    }

    pub fn push(&mut self, block: Filling) {
        self.changed = true;
        self.filling.push_back(block);
    }

    /// Begins an empty table after `gone` blocks that it will never need.
    pub fn skip(&mut self, gone: usize) {
        assert_eq!(self.num_blocks(), 0, "a table in use skips blocks");
        self.changed = true;
        self.gone = gone;
    }

    pub fn push_shared(&mut self, block: Sealed) {
        assert!(self.filling.is_empty(), "a shared block after one of its own");
        self.changed = true;
        self.sealed.push_back(block);
    }

    pub fn pop_filled(&mut self) -> Filling {
        self.filling.pop_front().expect("a full block was being filled")
    }

    pub fn push_sealed(&mut self, block: Sealed) {
        self.sealed.push_back(block);
    }

    /// Removes the first held block if it is full, before block `end`, and not the last full one.
    pub fn pop_passed(&mut self, end: usize) -> Option<Sealed> {
        if self.gone >= end || self.sealed.len() < 2 {
            return None;
        }
        self.changed = true;
        self.gone += 1;
        self.sealed.pop_front()
    }

    /// Removes the last block being filled, if the table has more than `num_blocks` blocks.
    pub fn pop_beyond(&mut self, num_blocks: usize) -> Option<Filling> {
        if self.num_blocks() <= num_blocks {
            return None;
        }
        self.changed = true;
        self.filling.pop_back()
    }

    /// Removes the last full block. An empty table is as good as new.
    pub fn pop_sealed(&mut self) -> Option<Sealed> {
        self.changed = true;
        let block = self.sealed.pop_back();
        if block.is_none() {
            self.gone = 0;
        }
        block
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        debug_assert!(
            self.num_held() == 0 || std::thread::panicking(),
            "a table is dropped with {} blocks in it",
            self.num_held()
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blocks::pool::Pool;

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "dropped with 1 blocks")]
    fn a_dropped_table_is_caught() {
        let mut pool = Pool::new(1);
        let mut table = Table::default();
        table.push(pool.take().expect("free").0);
        drop(table);
    }
}
