//! The scheduler's invariants, written down as a check. Tests run it in each step.

use std::collections::BTreeMap;

use crate::{BlockId, RequestId, Scheduler, blocks::nodes::NodeId, request::Request};

impl Scheduler {
    /// Returns the invariant that is broken, if one is. A block is free or held and counted right.
    /// The free list has neither duplicates nor held blocks. A block that is being written has one
    /// owner and is not published. A published block is full, has the hash of its tokens, and is
    /// where the tree says. No more is computed than there is room and tokens for. Every request is
    /// in exactly one place, in order.
    pub fn check_integrity(&self) -> Result<(), String> {
        self.requests().try_for_each(|(request, runs)| self.check_request(request, runs))?;
        self.check_lines()?;
        self.check_nodes()?;
        for group in 0..self.blocks.groups.len() {
            self.check_group(group).map_err(|reason| format!("layer group {group}: {reason}"))?;
        }
        Ok(())
    }

    /// All requests, and whether each runs.
    fn requests(&self) -> impl Iterator<Item = (&Request, bool)> {
        self.running.iter().map(|r| (&**r, true)).chain(self.waiting.iter().map(|r| (r, false)))
    }

    fn check_request(&self, r: &Request, runs: bool) -> Result<(), String> {
        let id = r.id.0;
        let in_flight: usize = r.flights.iter().filter(|f| !f.lost).map(|f| f.rows).sum();
        let pending = r.flights.iter().filter(|f| f.samples).count();
        if r.computed + in_flight != r.planned || pending != r.pending || r.chunk != 0 {
            return Err(format!("request {id}: {} computed, {in_flight} in flight, {} planned", r.computed, r.planned));
        }
        let drafts: usize = r.flights.iter().map(|f| f.drafts.len()).sum();
        if r.planned > r.tokens.len() + r.pending + drafts || r.tokens.len() > r.max_len {
            return Err(format!("request {id}: {} planned of {}, at most {}", r.planned, r.tokens.len(), r.max_len));
        }
        let has_root = runs && r.flights.is_empty() && r.planned + 1 == r.tokens.len();
        let has_room = r.tokens.len() + r.drafts.len() < r.max_len;
        if !(r.drafts.is_empty() || has_root && has_room) {
            return Err(format!("request {id}: {} drafts that no step could verify", r.drafts.len()));
        }
        if !runs {
            let holds = r.tables.iter().any(|t| t.num_blocks() > 0);
            return if r.planned > 0 || holds { Err(format!("request {id} waits, but holds blocks")) } else { Ok(()) };
        }
        for table in &r.tables {
            if table.num_blocks() != self.blocks.blocks_for(r.planned) {
                return Err(format!("request {id}: {} blocks for {} tokens", table.num_blocks(), r.planned));
            }
            if table.num_sealed() != r.computed / self.blocks.block_tokens {
                return Err(format!("request {id}: {} blocks sealed", table.num_sealed()));
            }
        }
        Ok(())
    }

    fn check_lines(&self) -> Result<(), String> {
        let has_rank = |r: &Request| self.waiting.rank_of(r.tenant) == r.rank;
        if !self.running.is_sorted_by_key(|r| r.place()) || !self.running.iter().all(|r| has_rank(r)) {
            return Err("running requests are out of order".into());
        }
        if self.running.len() > self.config.max_seqs {
            return Err(format!("{} requests run, at most {} may", self.running.len(), self.config.max_seqs));
        }
        let mut ids: Vec<RequestId> = self.requests().map(|(r, _)| r.id).collect();
        ids.sort_unstable();
        ids.dedup();
        let queued = self.running.len() + self.waiting.len();
        if ids.len() != queued || queued != self.known.len() || !ids.iter().all(|id| self.known.contains_key(id)) {
            return Err(format!("{} requests are known, but {queued} run or wait", self.known.len()));
        }
        if self.requests().any(|(r, runs)| self.known[&r.id].runs != runs || self.known[&r.id].key != r.key) {
            return Err("a request is not where `known` says".into());
        }
        let mut running: BTreeMap<u64, usize> = self.waiting.num_running();
        self.running.iter().for_each(|r| *running.entry(r.tenant).or_default() -= 1);
        if running.values().any(|&left| left != 0) {
            return Err("a tenant's running requests are miscounted".into());
        }
        let waiting_tokens: usize = self.waiting.iter().map(|r| r.tokens.len()).sum();
        if waiting_tokens != self.waiting.num_tokens() {
            return Err(format!("{waiting_tokens} tokens wait, {} are counted", self.waiting.num_tokens()));
        }
        let with_deadline = self.requests().filter(|(r, _)| r.deadline.is_some()).count();
        if with_deadline != self.deadlines.len() {
            return Err(format!("{with_deadline} requests have deadlines, but {} are listed", self.deadlines.len()));
        }
        Ok(())
    }

    fn check_nodes(&self) -> Result<(), String> {
        let mut holds = vec![0; self.blocks.nodes.end()];
        let in_tables = self.running.iter().flat_map(|r| r.tables.iter().flat_map(|t| t.sealed()));
        let in_tasks = self.blocks.disk.iter().flat_map(|disk| disk.tickets().flat_map(|ticket| &ticket.nodes));
        for node in in_tables.filter_map(|block| block.node()).chain(in_tasks.copied()) {
            holds[node.index()] += 1;
        }
        let rehash = |parent, salt, tokens: &[u32]| self.blocks.hasher.hash(parent, salt, tokens);
        self.blocks.nodes.check(&holds, rehash, self.blocks.block_tokens)
    }

    fn check_group(&self, group: usize) -> Result<(), String> {
        let at = &self.blocks.groups[group];
        let mut named: Vec<Option<NodeId>> = vec![None; at.pool.num_blocks()];
        let mut named_host: Vec<Option<NodeId>> = vec![None; at.host.num_blocks()];
        for (place, node) in self.blocks.nodes.places(group) {
            let device = place.device.map(|block| &mut named[block.0 as usize]);
            let host = place.host.map(|slot| &mut named_host[slot.0 as usize]);
            for entry in [device, host].into_iter().flatten() {
                if entry.replace(node).is_some() {
                    return Err(format!("another node has the place of {node:?}"));
                }
            }
        }
        let mut held = vec![0; at.pool.num_blocks()];
        let mut filling: Vec<BlockId> = Vec::new();
        for request in &self.running {
            let table = &request.tables[group];
            table.ids().filter(|&id| id != BlockId::GONE).for_each(|id| held[id.0 as usize] += 1);
            filling.extend(table.filling());
        }
        at.pool.check(&held, &filling, &named)?;
        let mut pinned = vec![0; at.host.num_blocks()];
        let tickets = self.blocks.disk.iter().flat_map(|disk| disk.tickets());
        tickets.flat_map(|ticket| &ticket.slots[group]).for_each(|slot| pinned[slot.id().0 as usize] += 1);
        at.host.check(&pinned, &[], &named_host).map_err(|reason| format!("host tier: {reason}"))
    }
}
