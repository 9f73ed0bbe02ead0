//! Where one request keeps one layer group: blocks that fell out of the window, then full ones, then those being filled.
//!
//! A table is given back through [`super::Blocks`], tail first, so that a sequence's end is forgotten before its start. A
//! debug build catches one that is dropped with blocks in it.

use std::collections::VecDeque;

use super::{
    nodes::NodeId,
    pool::{Filling, Sealed},
};
use crate::BlockId;

#[derive(Debug, Default)]
pub(crate) struct Table {
    /// How many blocks of the front are held no more.
    gone: usize,
    /// Not empty once anything is gone: the last full block says what comes before the next one.
    sealed: VecDeque<Sealed>,
    filling: VecDeque<Filling>,
    /// Whether `ids` has changed since somebody asked.
    changed: bool,
}

impl Table {
    /// Blocks up to its end, those gone included.
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

    /// What the next block to be sealed comes after, if that can be found.
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

    /// Starts an empty table behind `gone` blocks that it will never need.
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

    /// The first block held, if it is full, lies before block `end` and is not the last full one.
    pub fn pop_passed(&mut self, end: usize) -> Option<Sealed> {
        if self.gone >= end || self.sealed.len() < 2 {
            return None;
        }
        self.changed = true;
        self.gone += 1;
        self.sealed.pop_front()
    }

    /// The last block being filled, if the table has more than `num_blocks`.
    pub fn pop_beyond(&mut self, num_blocks: usize) -> Option<Filling> {
        if self.num_blocks() <= num_blocks {
            return None;
        }
        self.changed = true;
        self.filling.pop_back()
    }

    /// The last block; the empty table is as new.
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
