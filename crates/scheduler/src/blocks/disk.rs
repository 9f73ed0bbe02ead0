//! The disk tier's index: chunks of sequences that have a file, and chunks with a task.
//!
//! A chunk is a run of consecutive full blocks. It is stored through host slots when a prompt's
//! blocks are full, and loaded into host slots, where a hit finds it like any other block. Files
//! are not handled here: a chunk is a key, and the reader of a file proves that its contents have
//! that key.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    ops::Range,
};

use super::{Blocks, Sequence, nodes::NodeId, pool::Sealed, table::Table};
use crate::{BlockId, DiskChunk, DiskTask, DiskTaskKind, HostSlot, RequestId};

#[derive(Debug)]
pub(crate) struct DiskTier {
    chunk_blocks: usize,
    /// Chunks that have a file.
    known: HashSet<u128>,
    /// Chunks with a task in flight.
    busy: HashMap<u128, u64>,
    tickets: BTreeMap<u64, Ticket>,
    next_ticket: u64,
    /// Tasks that no plan has yet.
    pub tasks: Vec<DiskTask>,
    pub fetched: u64,
    pub failed: u64,
}

/// A task in flight.
#[derive(Debug)]
pub(crate) struct Ticket {
    key: u128,
    kind: DiskTaskKind,
    /// One for each block, held.
    pub nodes: Vec<NodeId>,
    /// `[group][block]`, held.
    pub slots: Vec<Vec<Sealed>>,
    /// Requests that wait for the chunk to be loaded.
    waiters: Vec<RequestId>,
}

impl DiskTier {
    pub fn new(chunk_blocks: usize) -> Self {
        Self {
            chunk_blocks,
            known: HashSet::new(),
            busy: HashMap::new(),
            tickets: BTreeMap::new(),
            next_ticket: 0,
            tasks: Vec::new(),
            fetched: 0,
            failed: 0,
        }
    }

    pub fn found(&mut self, key: u128) {
        self.known.insert(key);
    }

    pub fn lost(&mut self, key: u128) {
        self.known.remove(&key);
    }

    pub fn tickets(&self) -> impl Iterator<Item = &Ticket> {
        self.tickets.values()
    }

    fn issue(&mut self, kind: DiskTaskKind, chunk: DiskChunk, nodes: Vec<NodeId>, slots: Vec<Vec<Sealed>>) -> u64 {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        self.busy.insert(chunk.key, ticket);
        let ids = |blocks: &Vec<Sealed>| blocks.iter().map(|b| HostSlot(b.id().0)).collect();
        let key = chunk.key;
        self.tasks.push(DiskTask { ticket, kind, chunk, slots: slots.iter().map(ids).collect() });
        self.tickets.insert(ticket, Ticket { key, kind, nodes, slots, waiters: Vec::new() });
        ticket
    }
}

impl Blocks {
    /// Block `index` of a prompt has become full. If it ends a chunk without a file, the chunk is
    /// stored, unless the host tier has no room to copy it through.
    pub fn store_chunk(&mut self, tables: &[Table], sequence: &Sequence<'_>, index: usize) {
        let Some(disk) = &self.disk else { return };
        let key = sequence.hashes[index].0;
        let size = disk.chunk_blocks;
        if !(index + 1).is_multiple_of(size) || disk.known.contains(&key) || disk.busy.contains_key(&key) {
            return;
        }
        let range = index + 1 - size..index + 1;
        let node_of = |index| tables.iter().map(|t| t.full(index)?.node()).collect::<Option<Vec<_>>>();
        // A window may be shorter than a chunk, or another sequence may have the same hash: such
        // chunks are not stored.
        let Some(nodes) = range.clone().map(|i| Some(*node_of(i)?.first()?)).collect::<Option<Vec<_>>>() else {
            return;
        };
        let mut slots: Vec<Vec<Sealed>> = Vec::new();
        for (group, table) in tables.iter().enumerate() {
            slots.push(Vec::new());
            for (index, &node) in range.clone().zip(&nodes) {
                let block = table.full(index).expect("looked at above").id();
                match self.host_copy(group, node, block) {
                    Some(slot) => slots[group].push(slot),
                    None => return self.give_back(slots),
                }
            }
        }
        nodes.iter().for_each(|&node| self.nodes.hold(node));
        let chunk = self.chunk(sequence, range);
        self.disk.as_mut().expect("there is one").issue(DiskTaskKind::Store, chunk, nodes, slots);
    }

    /// A pinned host slot with a copy of `block`.
    fn host_copy(&mut self, group: usize, node: NodeId, block: BlockId) -> Option<Sealed> {
        match self.nodes.place(node, group).host {
            Some(slot) => Some(self.groups[group].host.share(BlockId(slot.0), None)),
            None => {
                let slot = self.take_host(group)?;
                Some(self.save_to(group, node, block, slot))
            }
        }
    }

    /// Loads the chunks after the first `hit` blocks of a sequence, up to block `limit`, as far as
    /// they have files and the host tier has room. Returns the tickets to wait for.
    pub fn fetch_chunks(&mut self, sequence: &Sequence<'_>, hit: usize, limit: usize, waiter: RequestId) -> Vec<u64> {
        let mut tickets = Vec::new();
        let Some(size) = self.disk.as_ref().filter(|_| self.copying_pays).map(|disk| disk.chunk_blocks) else {
            return tickets;
        };
        for chunk in hit / size..limit / size {
            let range = chunk * size..(chunk + 1) * size;
            let key = sequence.hashes[range.end - 1].0;
            let disk = self.disk.as_mut().expect("there is one");
            let ticket = match disk.busy.get(&key) {
                Some(&ticket) if disk.tickets[&ticket].kind == DiskTaskKind::Fetch => Some(ticket),
                Some(_) => None,
                None if disk.known.contains(&key) => self.fetch_chunk(sequence, range),
                None => None,
            };
            let Some(ticket) = ticket else { break };
            let disk = self.disk.as_mut().expect("there is one");
            disk.tickets.get_mut(&ticket).expect("just looked up").waiters.push(waiter);
            tickets.push(ticket);
        }
        tickets
    }

    /// Takes host slots only if there are enough: an earlier hit may rely on their contents.
    fn fetch_chunk(&mut self, sequence: &Sequence<'_>, range: Range<usize>) -> Option<u64> {
        if self.groups.iter().any(|group| group.host.num_free() < range.len()) {
            return None;
        }
        let nodes = self.hold_path(sequence, range.clone())?;
        let mut slots: Vec<Vec<Sealed>> = Vec::new();
        for group in 0..self.groups.len() {
            let taken = range.clone().map(|_| {
                let slot = self.take_host(group).expect("counted above");
                self.groups[group].host.seal(slot, None)
            });
            slots.push(taken.collect());
        }
        let chunk = self.chunk(sequence, range);
        Some(self.disk.as_mut().expect("there is one").issue(DiskTaskKind::Fetch, chunk, nodes, slots))
    }

    /// Finds or makes the nodes for the blocks of `range`, and holds them.
    fn hold_path(&mut self, sequence: &Sequence<'_>, range: Range<usize>) -> Option<Vec<NodeId>> {
        let mut held = Vec::new();
        let mut parent = NodeId::ROOT;
        for index in 0..range.end {
            match self.nodes.find_or_make(parent, &self.key(sequence, index)) {
                Some(node) => parent = node,
                None => {
                    held.into_iter().for_each(|node| self.nodes.let_go(node));
                    return None;
                }
            }
            held.push(parent);
        }
        let nodes = held.split_off(range.start);
        // Nodes before the range are held by those in it.
        held.into_iter().for_each(|node| self.nodes.let_go(node));
        Some(nodes)
    }

    /// Ends a task. Returns the requests that waited for it.
    pub fn disk_done(&mut self, number: u64, ok: bool) -> Vec<RequestId> {
        let Some(disk) = &mut self.disk else { return Vec::new() };
        let Some(ticket) = disk.tickets.remove(&number) else { return Vec::new() };
        disk.busy.remove(&ticket.key);
        match (ticket.kind, ok) {
            (DiskTaskKind::Store, true) => disk.found(ticket.key),
            (DiskTaskKind::Store, false) => {}
            (DiskTaskKind::Fetch, true) => disk.fetched += 1,
            (DiskTaskKind::Fetch, false) => {
                disk.failed += 1;
                disk.lost(ticket.key);
            }
        }
        let arrived = ticket.kind == DiskTaskKind::Fetch && ok;
        for (group, slots) in ticket.slots.into_iter().enumerate() {
            for (slot, &node) in slots.into_iter().zip(&ticket.nodes) {
                if arrived && self.nodes.place(node, group).host.is_none() {
                    self.groups[group].host.publish(slot.id(), node);
                    self.nodes.set_host(node, group, Some(HostSlot(slot.id().0)));
                    self.events.stored(&self.nodes, node, crate::Medium::Host, group);
                }
                self.groups[group].host.release(slot);
            }
        }
        ticket.nodes.into_iter().for_each(|node| self.nodes.let_go(node));
        ticket.waiters
    }

    fn chunk(&self, sequence: &Sequence<'_>, range: Range<usize>) -> DiskChunk {
        DiskChunk {
            key: sequence.hashes[range.end - 1].0,
            parent: range.start.checked_sub(1).map_or(0, |before| sequence.hashes[before].0),
            salt: sequence.salt,
            tokens: sequence.tokens[range.start * self.block_tokens..range.end * self.block_tokens].to_vec(),
        }
    }

    fn give_back(&mut self, slots: Vec<Vec<Sealed>>) {
        for (group, slots) in slots.into_iter().enumerate() {
            for slot in slots {
                self.groups[group].host.release(slot);
            }
        }
    }
}
