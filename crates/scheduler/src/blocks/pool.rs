//! The blocks of one layer group: who holds them, in which order free ones are taken, and which full ones can be
//! found again by their content.
//!
//! A block is never copied or moved here; the pool knows nothing of requests. Blocks leave it as [`Filling`] or
//! [`Sealed`] handles, which cannot be cloned and must come back through [`Pool::discard`] or [`Pool::release`].

use std::collections::HashMap;

use super::prefix::{BlockKey, ChainHash};
use crate::BlockId;

const NONE: u32 = u32::MAX;

/// Writable, one owner.
#[derive(Debug)]
pub(crate) struct Filling(BlockId);

impl Filling {
    pub fn id(&self) -> BlockId {
        self.0
    }
}

/// Full, never written again; shared only through [`Pool::share`].
#[derive(Debug)]
pub(crate) struct Sealed {
    id: BlockId,
    content: Option<Content>,
}

impl Sealed {
    pub fn id(&self) -> BlockId {
        self.id
    }

    /// None when nobody can find this block through the index, and so none of its successors.
    pub fn content(&self) -> Option<Content> {
        self.content
    }
}

/// A number for "these tokens after that content", never used twice. Two blocks with the same number hold the same
/// keys and values; the number stands for the whole sequence up to the block's end, which a hash would only suggest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Content(u64);

impl Content {
    /// What comes before the first block.
    pub const START: Content = Content(0);
}

#[derive(Debug)]
struct Published {
    hash: ChainHash,
    parent_hash: ChainHash,
    parent: Content,
    content: Content,
    salt: u64,
    tokens: Box<[u32]>,
}

impl Published {
    fn is(&self, parent: Content, key: &BlockKey<'_>) -> bool {
        self.parent == parent && self.salt == key.salt && *self.tokens == *key.tokens
    }
}

#[derive(Debug)]
struct Block {
    /// Table entries that name this block.
    refs: u32,
    /// Neighbours on the free list, where the block is free.
    prev: u32,
    next: u32,
    published: Option<Published>,
}

#[derive(Debug)]
pub(crate) struct Pool {
    blocks: Vec<Block>,
    /// Every block is in exactly one place: held by a table (`refs > 0`) or on this list, next to be taken first.
    free_head: u32,
    free_tail: u32,
    num_free: usize,
    /// Hash of a full block -> block. Entries may point at free blocks: that *is* the prefix cache.
    published: HashMap<ChainHash, BlockId>,
    next_content: u64,
}

impl Pool {
    pub fn new(num_blocks: usize) -> Self {
        let block = || Block { refs: 0, prev: NONE, next: NONE, published: None };
        let mut pool = Self {
            blocks: (0..num_blocks).map(|_| block()).collect(),
            free_head: NONE,
            free_tail: NONE,
            num_free: 0,
            published: HashMap::new(),
            next_content: 1,
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

    /// Blocks that can be found by content, held or free.
    pub fn num_published(&self) -> usize {
        self.published.len()
    }

    /// The free block that is missed least; what it held is forgotten.
    pub fn take(&mut self) -> Option<Filling> {
        let id = self.free_head;
        if id == NONE {
            return None;
        }
        self.unlink(id);
        self.forget(id);
        let block = &mut self.blocks[id as usize];
        assert_eq!(block.refs, 0, "free block {id} is held");
        block.refs = 1;
        Some(Filling(BlockId(id)))
    }

    /// A block whose every token is computed can be found from now on, unless its content can be found already, or
    /// another block's hash is in the way, or `parent` cannot be found either.
    pub fn seal(&mut self, block: Filling, parent: Option<Content>, key: &BlockKey<'_>) -> Sealed {
        let id = block.0;
        let Some(parent) = parent else { return Sealed { id, content: None } };
        if let Some(&other) = self.published.get(&key.hash) {
            let known = self.published_of(other);
            let content = known.is(parent, key).then_some(known.content);
            return Sealed { id, content };
        }
        let content = Content(self.next_content);
        self.next_content += 1;
        self.published.insert(key.hash, id);
        self.blocks[id.0 as usize].published = Some(Published {
            hash: key.hash,
            parent_hash: key.parent_hash,
            parent,
            content,
            salt: key.salt,
            tokens: key.tokens.into(),
        });
        Sealed { id, content: Some(content) }
    }

    /// A full block that nobody shall find.
    pub fn seal_private(&mut self, block: Filling) -> Sealed {
        Sealed { id: block.0, content: None }
    }

    /// The published block that holds `key` after `parent`, and whether it is free: compared token by token.
    pub fn peek(&self, parent: Content, key: &BlockKey<'_>) -> Option<(Content, bool)> {
        let &id = self.published.get(&key.hash)?;
        let known = self.published_of(id);
        known.is(parent, key).then(|| (known.content, self.blocks[id.0 as usize].refs == 0))
    }

    /// One more holder of the published block that [`Pool::peek`] finds.
    pub fn share(&mut self, parent: Content, key: &BlockKey<'_>) -> Option<Sealed> {
        let (content, is_free) = self.peek(parent, key)?;
        let id = self.published[&key.hash];
        if is_free {
            self.unlink(id.0);
        }
        self.blocks[id.0 as usize].refs += 1;
        Some(Sealed { id, content: Some(content) })
    }

    /// Gives back a block that was never full.
    pub fn discard(&mut self, block: Filling) {
        self.drop_holder(block.0);
    }

    pub fn release(&mut self, block: Sealed) {
        self.drop_holder(block.id);
    }

    /// Empties the index; held blocks stay with their holders.
    pub fn forget_all(&mut self) {
        self.published.clear();
        for block in &mut self.blocks {
            block.published = None;
        }
    }

    fn drop_holder(&mut self, id: BlockId) {
        let block = &mut self.blocks[id.0 as usize];
        assert!(block.refs > 0, "block {} is given back twice", id.0);
        block.refs -= 1;
        if block.refs > 0 {
            return;
        }
        // What nobody can find again is taken first.
        if block.published.is_some() { self.push_last(id.0) } else { self.push_first(id.0) }
    }

    fn published_of(&self, id: BlockId) -> &Published {
        self.blocks[id.0 as usize].published.as_ref().expect("the index names only published blocks")
    }

    fn forget(&mut self, id: u32) {
        if let Some(published) = self.blocks[id as usize].published.take() {
            let removed = self.published.remove(&published.hash);
            assert_eq!(removed, Some(BlockId(id)), "the index and block {id} disagree");
        }
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

    /// Checks the pool against the holders' own count: `held[b]` table entries name block `b`, `filling` are writable.
    pub fn check(
        &self,
        held: &[u32],
        filling: &[BlockId],
        rehash: impl Fn(ChainHash, u64, &[u32]) -> ChainHash,
        block_tokens: usize,
    ) -> Result<(), String> {
        let mut on_list = vec![false; self.blocks.len()];
        let (mut id, mut prev) = (self.free_head, NONE);
        while id != NONE {
            let block = &self.blocks[id as usize];
            if std::mem::replace(&mut on_list[id as usize], true) {
                return Err(format!("block {id} is on the free list twice"));
            }
            if block.prev != prev {
                return Err(format!("the free list is torn before block {id}"));
            }
            (prev, id) = (id, block.next);
        }
        if on_list.iter().filter(|&&f| f).count() != self.num_free || self.free_tail != prev {
            return Err(format!("the free list does not hold the {} blocks it says", self.num_free));
        }
        for (id, block) in self.blocks.iter().enumerate() {
            if block.refs != held[id] {
                return Err(format!("block {id} counts {} holders, but {} tables name it", block.refs, held[id]));
            }
            if (block.refs == 0) != on_list[id] {
                return Err(format!("block {id} with {} holders: on the free list {}", block.refs, on_list[id]));
            }
            let Some(published) = &block.published else { continue };
            if self.published.get(&published.hash) != Some(&BlockId(id as u32)) {
                return Err(format!("block {id} is published, but the index does not name it"));
            }
            if published.tokens.len() != block_tokens {
                return Err(format!("block {id} is published with {} tokens", published.tokens.len()));
            }
            if rehash(published.parent_hash, published.salt, &published.tokens) != published.hash {
                return Err(format!("block {id} is published under a hash that is not its tokens'"));
            }
        }
        if self.blocks.iter().filter(|b| b.published.is_some()).count() != self.published.len() {
            return Err("the index names blocks that are not published".into());
        }
        for id in filling {
            let block = &self.blocks[id.0 as usize];
            if block.refs != 1 || block.published.is_some() {
                return Err(format!("block {} is writable, but has {} holders or is published", id.0, block.refs));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(hash: u128, tokens: &[u32]) -> BlockKey<'_> {
        BlockKey { hash: ChainHash(hash), parent_hash: ChainHash::START, salt: 0, tokens }
    }

    #[test]
    fn unpublished_blocks_are_taken_before_cached_ones_and_those_oldest_first() {
        let mut pool = Pool::new(3);
        let [a, b, c] = [0; 3].map(|_| pool.take().expect("three blocks"));
        let a = pool.seal(a, Some(Content::START), &key(1, &[1]));
        let b = pool.seal(b, Some(Content::START), &key(2, &[2]));
        let (a_id, b_id, c_id) = (a.id(), b.id(), c.id());
        pool.release(b);
        pool.release(a);
        pool.discard(c);
        let order: Vec<BlockId> = std::iter::from_fn(|| pool.take()).map(|f| f.id()).collect();
        assert_eq!(order, [c_id, b_id, a_id]);
        assert_eq!(pool.num_published(), 0);
    }

    #[test]
    fn a_hit_needs_the_same_tokens_after_the_same_content() {
        let mut pool = Pool::new(4);
        let first = pool.take().expect("free");
        let first = pool.seal(first, Some(Content::START), &key(1, &[7]));
        let second = pool.take().expect("free");
        let second = pool.seal(second, first.content(), &key(2, &[8]));
        let parent = first.content().expect("published");
        assert!(pool.share(parent, &key(2, &[9])).is_none(), "other tokens under the same hash");
        assert!(pool.share(Content::START, &key(2, &[8])).is_none(), "the same tokens after something else");
        let salted = BlockKey { salt: 1, ..key(2, &[8]) };
        assert!(pool.share(parent, &salted).is_none(), "another salt");
        let shared = pool.share(parent, &key(2, &[8])).expect("a hit");
        assert_eq!(shared.id(), second.id());
        for block in [first, second, shared] {
            pool.release(block);
        }
        assert_eq!(pool.num_free(), 4);
    }

    #[test]
    #[should_panic(expected = "given back twice")]
    fn giving_back_twice_is_caught() {
        let mut pool = Pool::new(1);
        let block = pool.take().expect("free");
        let forged = Filling(block.id());
        pool.discard(block);
        pool.discard(forged);
    }
}
