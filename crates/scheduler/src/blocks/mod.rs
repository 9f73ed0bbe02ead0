//! The bookkeeping of paged KV storage: a device pool and a host pool for each layer group, a block
//! table for each request and group, and the tree that maps sequences to blocks.
//!
//! All groups of a request grow, share and shrink together. A prefix hit counts only as far as
//! every group has the blocks that its next row reads: all of them, or a window. Transfers are
//! collected in order, for the next plan.

pub(crate) mod disk;
mod host;
pub(crate) mod nodes;
pub(crate) mod pool;
pub(crate) mod prefix;
pub(crate) mod table;

use disk::DiskTier;
use nodes::{NodeId, Nodes};
use pool::{Filling, Pool, Sealed};
use prefix::{BlockKey, ChainHash, Hasher};
use table::Table;

use crate::{BlockId, DiskTask, DiskTaskKind, Medium, SchedulerConfig, Transfer, events::EventLog};

#[derive(Debug)]
pub(crate) struct Group {
    pub pool: Pool,
    pub host: Pool,
    pub window: Option<usize>,
}

#[derive(Debug)]
pub(crate) struct Blocks {
    pub groups: Vec<Group>,
    pub block_tokens: usize,
    pub prefix_caching: bool,
    pub hasher: Hasher,
    pub nodes: Nodes,
    /// Transfers that no plan has yet.
    pub transfers: Vec<Transfer>,
    pub events: EventLog,
    pub disk: Option<DiskTier>,
    /// Whether copying a block to the host tier and back costs less than computing it again.
    pub copying_pays: bool,
    /// Test hook: number of allocations that succeed before one fails.
    pub shortage_in: Option<usize>,
}

/// Blocks of a sequence that were found in the prefix cache.
#[derive(Debug)]
pub(crate) struct Match {
    /// One for each block.
    pub nodes: Vec<NodeId>,
    pub groups: Vec<GroupMatch>,
}

/// A match in one group.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct GroupMatch {
    /// No row to come reads a block before this one: they are behind the window.
    pub first: usize,
    /// Blocks on the device, and the free ones among them: sharing those uses up free blocks.
    pub on_device: usize,
    pub free: usize,
}

/// A sequence as the prefix cache sees it; its hashes cover the blocks that are asked for.
#[derive(Clone, Copy)]
pub(crate) struct Sequence<'a> {
    pub tokens: &'a [u32],
    pub hashes: &'a [ChainHash],
    pub salt: u64,
}

impl Blocks {
    pub fn new(config: &SchedulerConfig) -> Self {
        let group = |g: &crate::GroupConfig| Group {
            pool: Pool::new(g.blocks),
            host: Pool::new(if config.prefix_caching { g.host_slots } else { 0 }),
            window: g.window,
        };
        let memory = 4 * config.groups.iter().map(|g| g.blocks + g.host_slots).max().unwrap_or(0);
        Self {
            groups: config.groups.iter().map(group).collect(),
            block_tokens: config.block_tokens,
            prefix_caching: config.prefix_caching,
            hasher: Hasher { key: config.hash_key, bits: config.hash_bits },
            nodes: Nodes::new(config.groups.len(), memory),
            transfers: Vec::new(),
            events: EventLog::new(config.kv_events, config.block_tokens),
            disk: config.disk_chunk_blocks.filter(|_| config.prefix_caching).map(DiskTier::new),
            copying_pays: true,
            shortage_in: None,
        }
    }

    pub fn tables(&self) -> Vec<Table> {
        self.groups.iter().map(|_| Table::default()).collect()
    }

    /// Blocks that hold `tokens` tokens.
    pub fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_tokens)
    }

    /// The first block that a row at `position` reads in `group`.
    fn first_seen(&self, group: usize, position: usize) -> usize {
        self.groups[group].window.map_or(0, |window| (position + 1).saturating_sub(window) / self.block_tokens)
    }

    /// Grows the tables to hold `tokens` tokens. False, without a change, if a pool has too few
    /// free blocks.
    #[must_use]
    pub fn grow(&mut self, tables: &mut [Table], tokens: usize) -> bool {
        let needed = self.blocks_for(tokens);
        if self.shortage_strikes() {
            return false;
        }
        let lacks =
            |(table, group): (&Table, &Group)| needed.saturating_sub(table.num_blocks()) > group.pool.num_free();
        if tables.iter().zip(&self.groups).any(lacks) {
            return false;
        }
        for (group, table) in tables.iter_mut().enumerate() {
            while table.num_blocks() < needed {
                table.push(self.take(group).expect("counted above"));
            }
        }
        true
    }

    fn shortage_strikes(&mut self) -> bool {
        match &mut self.shortage_in {
            Some(0) => {
                self.shortage_in = None;
                true
            }
            Some(left) => {
                *left -= 1;
                false
            }
            None => false,
        }
    }

    /// A free device block. Its content is saved to the host tier if that pays, and forgotten
    /// otherwise.
    fn take(&mut self, group: usize) -> Option<Filling> {
        let (block, node) = self.groups[group].pool.take()?;
        if let Some(node) = node {
            self.events.removed(self.nodes.hash(node), Medium::Device, group);
            self.save(group, node, block.id());
            self.nodes.set_device(node, group, None);
        }
        Some(block)
    }

    /// Frees full blocks that no row from `position` on reads.
    pub fn free_passed(&mut self, tables: &mut [Table], position: usize) {
        for (group, table) in tables.iter_mut().enumerate() {
            let end = self.first_seen(group, position);
            while let Some(block) = table.pop_passed(end) {
                self.release_full(group, block);
            }
        }
    }

    /// Frees blocks after those that hold `tokens` tokens.
    pub fn shrink(&mut self, tables: &mut [Table], tokens: usize) {
        let needed = self.blocks_for(tokens);
        for (group, table) in self.groups.iter_mut().zip(tables) {
            while let Some(block) = table.pop_beyond(needed) {
                group.pool.discard(block);
            }
        }
    }

    pub fn release(&mut self, tables: &mut [Table]) {
        self.shrink(tables, 0);
        for (group, table) in tables.iter_mut().enumerate() {
            while let Some(block) = table.pop_sealed() {
                self.release_full(group, block);
            }
        }
    }

    fn release_full(&mut self, group: usize, block: Sealed) {
        if let Some(node) = self.groups[group].pool.release(block) {
            self.nodes.let_go(node);
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

    pub fn key<'a>(&self, sequence: &Sequence<'a>, index: usize) -> BlockKey<'a> {
        let tokens = &sequence.tokens[index * self.block_tokens..(index + 1) * self.block_tokens];
        BlockKey { hash: sequence.hashes[index], salt: sequence.salt, tokens }
    }

    /// Seals and publishes the first `full` blocks: they hold all their tokens and are never
    /// written again.
    pub fn seal(&mut self, tables: &mut [Table], sequence: &Sequence<'_>, full: usize) {
        for (group, table) in tables.iter_mut().enumerate() {
            while table.num_sealed() < full {
                let parent = table.last_node().filter(|_| self.prefix_caching);
                let index = table.num_sealed();
                let node = parent.and_then(|p| self.nodes.find_or_make(p, &self.key(sequence, index)));
                let block = table.pop_filled();
                if let Some(node) = node
                    && self.nodes.place(node, group).device.is_none()
                {
                    self.publish(group, block.id(), node);
                }
                table.push_sealed(self.groups[group].pool.seal(block, node));
            }
        }
    }

    fn publish(&mut self, group: usize, block: BlockId, node: NodeId) {
        self.groups[group].pool.publish(block, node);
        self.nodes.set_device(node, group, Some(block));
        self.events.stored(&self.nodes, node, Medium::Device, group);
    }

    /// The longest prefix of the first `limit` blocks that need not be computed.
    pub fn matched(&self, sequence: &Sequence<'_>, limit: usize) -> Match {
        let mut nodes = Vec::new();
        let mut parent = NodeId::ROOT;
        while nodes.len() < limit {
            let Some(node) = self.nodes.find(parent, &self.key(sequence, nodes.len())) else { break };
            nodes.push(node);
            parent = node;
        }
        let (all, windows): (Vec<usize>, Vec<usize>) =
            (0..self.groups.len()).partition(|&g| self.groups[g].window.is_none());
        let lacking = nodes.iter().position(|&node| all.iter().any(|&group| !self.can_have(node, group)));
        nodes.truncate(lacking.unwrap_or(nodes.len()));
        let sees_all = |len: usize| {
            let seen = |&group: &usize| &nodes[self.first_shared(group, len)..len];
            windows.iter().all(|group| seen(group).iter().rev().all(|&node| self.can_have(node, *group)))
        };
        let len = (0..=nodes.len()).rev().find(|&len| sees_all(len)).unwrap_or(0);
        nodes.truncate(len);
        let groups = (0..self.groups.len()).map(|group| self.group_match(group, &nodes)).collect();
        Match { nodes, groups }
    }

    fn can_have(&self, node: NodeId, group: usize) -> bool {
        let place = self.nodes.place(node, group);
        place.device.is_some() || (self.copying_pays && place.host.is_some())
    }

    /// The first block that a table which shares `len` blocks needs. The last one is always needed,
    /// because it is the parent of the next.
    fn first_shared(&self, group: usize, len: usize) -> usize {
        self.first_seen(group, len * self.block_tokens).min(len.saturating_sub(1))
    }

    fn group_match(&self, group: usize, nodes: &[NodeId]) -> GroupMatch {
        let first = self.first_shared(group, nodes.len());
        let mut found = GroupMatch { first, ..GroupMatch::default() };
        for &node in &nodes[first..] {
            let Some(block) = self.nodes.place(node, group).device else { continue };
            found.on_device += 1;
            found.free += usize::from(self.groups[group].pool.is_free(block));
        }
        found
    }

    /// Adds the blocks that [`Blocks::matched`] found to empty tables, loading those in the host
    /// tier. Returns the number of tokens of the first group that were loaded. The caller has
    /// checked that there are enough free blocks.
    pub fn share(&mut self, tables: &mut [Table], hit: &Match) -> usize {
        let mut from_host = 0;
        for (group, table) in tables.iter_mut().enumerate() {
            let first = hit.groups[group].first;
            table.skip(first);
            // All blocks of the hit are held before one is taken, because the free block taken
            // could be one of them.
            let held: Vec<_> = hit.nodes[first..].iter().map(|&node| self.hold_found(group, node)).collect();
            for (found, &node) in held.into_iter().zip(&hit.nodes[first..]) {
                let block = match found {
                    Found::Device(block) => block,
                    Found::Host(slot) => {
                        from_host += usize::from(group == 0) * self.block_tokens;
                        self.load(group, slot, node)
                    }
                };
                table.push_shared(block);
            }
        }
        from_host
    }

    fn hold_found(&mut self, group: usize, node: NodeId) -> Found {
        self.nodes.hold(node);
        let place = self.nodes.place(node, group);
        match place.device {
            Some(block) => Found::Device(self.groups[group].pool.share(block, Some(node))),
            None => {
                let slot = place.host.expect("matched in this step");
                Found::Host(self.groups[group].host.share(BlockId(slot.0), None))
            }
        }
    }

    /// Whether `source` still has the blocks that a fork of its first `tokens` tokens needs.
    pub fn can_fork(&self, source: &[Table], tokens: usize) -> bool {
        let full = tokens / self.block_tokens;
        let partial = !tokens.is_multiple_of(self.block_tokens);
        source.iter().enumerate().all(|(group, table)| {
            let first = self.first_seen(group, tokens).min(full.saturating_sub(1));
            table.num_gone() <= first && table.num_sealed() >= full && (!partial || table.id(full).is_some())
        })
    }

    /// Adds the first `tokens` tokens of a running request's tables to empty ones: full blocks are
    /// shared, and the partial one is copied into a block that [`Blocks::grow`] adds. False,
    /// without a change, if a pool has too few free blocks.
    #[must_use]
    pub fn fork(&mut self, source: &[Table], tables: &mut [Table], tokens: usize) -> bool {
        let full = tokens / self.block_tokens;
        for (group, table) in tables.iter_mut().enumerate() {
            let first = self.first_seen(group, tokens).min(full.saturating_sub(1));
            table.skip(first);
            for index in first..full {
                let block = source[group].full(index).expect("`can_fork` looked");
                if let Some(node) = block.node() {
                    self.nodes.hold(node);
                }
                table.push_shared(self.groups[group].pool.share(block.id(), block.node()));
            }
        }
        if !self.grow(tables, tokens) {
            self.release(tables);
            return false;
        }
        if !tokens.is_multiple_of(self.block_tokens) {
            for (group, (from, to)) in source.iter().zip(tables).enumerate() {
                let (from, to) = (from.id(full).expect("`can_fork` looked"), to.id(full).expect("grown above"));
                self.transfers.push(Transfer::Copy { group, from, to });
            }
        }
        true
    }

    /// Removes all published blocks, on the device and in the host tier; held blocks stay with
    /// their holders.
    pub fn forget_all(&mut self) {
        for group in 0..self.groups.len() {
            for id in self.groups[group].pool.ids() {
                if let Some(node) = self.groups[group].pool.forget(id) {
                    self.nodes.set_device(node, group, None);
                }
            }
            for id in self.groups[group].host.ids() {
                if let Some(node) = self.groups[group].host.forget(id) {
                    self.nodes.set_host(node, group, None);
                }
            }
        }
        self.events.cleared();
    }

    /// Drops transfers and stores that no plan has yet, after a failed step whose blocks cannot be
    /// trusted.
    pub fn drop_transfers(&mut self) {
        self.transfers.clear();
        let is_store = |task: &mut DiskTask| task.kind == DiskTaskKind::Store;
        let stores: Vec<DiskTask> = self.disk.iter_mut().flat_map(|disk| disk.tasks.extract_if(.., is_store)).collect();
        for task in stores {
            self.disk_done(task.ticket, false);
        }
    }
}

/// A block of a hit, held so that it is not taken.
enum Found {
    Device(Sealed),
    Host(Sealed),
}
