//! Where one request keeps one layer group: full blocks first, then those being filled.
//!
//! A table is given back with [`Table::release`], tail first, so that a sequence's end is forgotten before its start. A
//! debug build catches one that is dropped with blocks in it.

use std::collections::VecDeque;

use super::{
    pool::{Content, Filling, Pool, Sealed},
    prefix::BlockKey,
};
use crate::BlockId;

#[derive(Debug, Default)]
pub(crate) struct Table {
    sealed: Vec<Sealed>,
    filling: VecDeque<Filling>,
}

impl Table {
    pub fn num_blocks(&self) -> usize {
        self.sealed.len() + self.filling.len()
    }

    pub fn num_sealed(&self) -> usize {
        self.sealed.len()
    }

    pub fn filling(&self) -> impl Iterator<Item = BlockId> {
        self.filling.iter().map(Filling::id)
    }

    pub fn ids(&self) -> impl Iterator<Item = BlockId> {
        self.sealed.iter().map(Sealed::id).chain(self.filling())
    }

    /// What the next block to be sealed comes after, if that can be found.
    pub fn content(&self) -> Option<Content> {
        self.sealed.last().map_or(Some(Content::START), Sealed::content)
    }

    pub fn push(&mut self, block: Filling) {
        self.filling.push_back(block);
    }

    pub fn push_shared(&mut self, block: Sealed) {
        assert!(self.filling.is_empty(), "a shared block after one of its own");
        self.sealed.push(block);
    }

    /// The first block being filled is full: publishes it, where `key` is given.
    pub fn seal_next(&mut self, pool: &mut Pool, key: Option<&BlockKey<'_>>) {
        let block = self.filling.pop_front().expect("a full block was being filled");
        let sealed = match key {
            Some(key) => pool.seal(block, self.content(), key),
            None => pool.seal_private(block),
        };
        self.sealed.push(sealed);
    }

    pub fn release(&mut self, pool: &mut Pool) {
        while let Some(block) = self.filling.pop_back() {
            pool.discard(block);
        }
        while let Some(block) = self.sealed.pop() {
            pool.release(block);
        }
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        debug_assert!(
            self.num_blocks() == 0 || std::thread::panicking(),
            "a table is dropped with {} blocks in it",
            self.num_blocks()
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "dropped with 1 blocks")]
    fn a_dropped_table_is_caught() {
        let mut pool = Pool::new(1);
        let mut table = Table::default();
        table.push(pool.take().expect("free"));
        drop(table);
    }
}
