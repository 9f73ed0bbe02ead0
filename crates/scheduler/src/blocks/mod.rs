//! Paged KV storage, as bookkeeping: one pool a layer group, one table for each (request, group).
//!
//! All groups of a request grow, share and shrink together; a prefix hit counts only as far as every group has it.

pub(crate) mod pool;
pub(crate) mod prefix;
pub(crate) mod table;

use pool::{Content, Pool};
use prefix::{BlockKey, ChainHash, Hasher};
use table::Table;

use crate::SchedulerConfig;

#[derive(Debug)]
pub(crate) struct Blocks {
    pub pools: Vec<Pool>,
    pub block_tokens: usize,
    pub hasher: Hasher,
    pub prefix_caching: bool,
}

/// How much of a sequence is in the cache already.
#[derive(Debug)]
pub(crate) struct Match {
    pub blocks: usize,
    /// How many of those lie on each group's free list: taking them uses up free blocks.
    pub free: Vec<usize>,
}

impl Blocks {
    pub fn new(config: &SchedulerConfig) -> Self {
        Self {
            pools: config.blocks.iter().map(|&n| Pool::new(n)).collect(),
            block_tokens: config.block_tokens,
            hasher: Hasher { key: config.hash_key, bits: config.hash_bits },
            prefix_caching: config.prefix_caching,
        }
    }

    pub fn tables(&self) -> Vec<Table> {
        self.pools.iter().map(|_| Table::default()).collect()
    }

    /// Blocks that hold `tokens` tokens.
    pub fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_tokens)
    }

    /// Makes the tables hold `tokens` tokens; false, and nothing changed, if a pool has not enough.
    #[must_use]
    pub fn grow(&mut self, tables: &mut [Table], tokens: usize) -> bool {
        let needed = self.blocks_for(tokens);
        let enough = |(table, pool): (&Table, &Pool)| needed.saturating_sub(table.num_blocks()) <= pool.num_free();
        if !tables.iter().zip(&self.pools).all(enough) {
            return false;
        }
        for (table, pool) in tables.iter_mut().zip(&mut self.pools) {
            while table.num_blocks() < needed {
                table.push(pool.take().expect("counted above"));
            }
        }
        true
    }

    pub fn release(&mut self, tables: &mut [Table]) {
        for (table, pool) in tables.iter_mut().zip(&mut self.pools) {
            table.release(pool);
        }
    }

    /// Extends `hashes` to the first `num_blocks` blocks of `tokens`.
    pub fn extend_hashes(&self, hashes: &mut Vec<ChainHash>, salt: u64, tokens: &[u32], num_blocks: usize) {
        while hashes.len() < num_blocks {
            let index = hashes.len();
            let parent = hashes.last().copied().unwrap_or(ChainHash::START);
            let range = index * self.block_tokens..(index + 1) * self.block_tokens;
            hashes.push(self.hasher.hash(parent, salt, &tokens[range]));
        }
    }

    /// Block `index` of a sequence whose hashes reach that far.
    pub fn key<'a>(&self, hashes: &[ChainHash], salt: u64, tokens: &'a [u32], index: usize) -> BlockKey<'a> {
        let parent_hash = if index == 0 { ChainHash::START } else { hashes[index - 1] };
        let tokens = &tokens[index * self.block_tokens..(index + 1) * self.block_tokens];
        BlockKey { hash: hashes[index], parent_hash, salt, tokens }
    }

    /// How many of the first `limit` blocks every group has.
    pub fn matched(&self, hashes: &[ChainHash], salt: u64, tokens: &[u32], limit: usize) -> Match {
        let mut parents = vec![Content::START; self.pools.len()];
        let mut free = vec![0; self.pools.len()];
        for index in 0..limit {
            let key = self.key(hashes, salt, tokens, index);
            let found: Option<Vec<(Content, bool)>> =
                self.pools.iter().zip(&parents).map(|(pool, &parent)| pool.peek(parent, &key)).collect();
            let Some(found) = found else { return Match { blocks: index, free } };
            for (group, (content, is_free)) in found.into_iter().enumerate() {
                parents[group] = content;
                free[group] += usize::from(is_free);
            }
        }
        Match { blocks: limit, free }
    }

    /// Puts the first `num_blocks` blocks, which [`Blocks::matched`] found, into empty tables.
    pub fn share(&mut self, tables: &mut [Table], hashes: &[ChainHash], salt: u64, tokens: &[u32], num_blocks: usize) {
        for index in 0..num_blocks {
            let key = self.key(hashes, salt, tokens, index);
            for (table, pool) in tables.iter_mut().zip(&mut self.pools) {
                let parent = table.content().expect("only found blocks are shared");
                table.push_shared(pool.share(parent, &key).expect("matched in this step"));
            }
        }
    }
}
