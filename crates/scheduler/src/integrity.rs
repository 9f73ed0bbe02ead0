//! What must hold after every call, written down as a check. Tests run it each step.

use crate::{BlockId, RequestId, Scheduler};

impl Scheduler {
    /// Says which invariant is broken, if one is: a block is free or held and counted right; the free list has neither
    /// doubles nor held blocks; what is being written has one owner and cannot be found; what can be found is full and
    /// lies under the hash of its tokens; no more is computed than there is room and tokens for; every request is in
    /// exactly one queue, in order of arrival.
    pub fn check_integrity(&self) -> Result<(), String> {
        self.check_requests()?;
        self.check_queues()?;
        for (group, pool) in self.blocks.pools.iter().enumerate() {
            let mut held = vec![0; pool.num_blocks()];
            let mut filling: Vec<BlockId> = Vec::new();
            for request in &self.running {
                let table = &request.tables[group];
                table.ids().for_each(|id| held[id.0 as usize] += 1);
                filling.extend(table.filling());
            }
            let rehash = |parent, salt, tokens: &[u32]| self.blocks.hasher.hash(parent, salt, tokens);
            pool.check(&held, &filling, rehash, self.blocks.block_tokens)
                .map_err(|reason| format!("layer group {group}: {reason}"))?;
        }
        Ok(())
    }

    fn check_requests(&self) -> Result<(), String> {
        for r in &self.running {
            let (computed, total) = (r.computed + r.in_flight, r.tokens.len());
            if computed > total || total > r.max_len {
                return Err(format!("request {}: {computed} computed of {total}, at most {}", r.id.0, r.max_len));
            }
            for table in &r.tables {
                if table.num_blocks() != self.blocks.blocks_for(computed) {
                    return Err(format!("request {}: {} blocks for {computed} tokens", r.id.0, table.num_blocks()));
                }
                if table.num_sealed() != r.computed / self.blocks.block_tokens {
                    return Err(format!("request {}: {} blocks sealed", r.id.0, table.num_sealed()));
                }
            }
        }
        for r in &self.waiting {
            if r.computed + r.in_flight > 0 || r.tables.iter().any(|t| t.num_blocks() > 0) {
                return Err(format!("request {} waits, but holds something", r.id.0));
            }
        }
        Ok(())
    }

    fn check_queues(&self) -> Result<(), String> {
        if !self.running.is_sorted_by_key(|r| r.arrival) || !self.waiting.iter().is_sorted_by_key(|r| r.arrival) {
            return Err("a queue is not in order of arrival".into());
        }
        let queued = || self.running.iter().chain(&self.waiting);
        if queued().any(|r| self.arrivals.get(&r.id) != Some(&r.arrival)) {
            return Err("a queued request is not known".into());
        }
        let mut ids: Vec<RequestId> = queued().map(|r| r.id).collect();
        ids.sort_unstable();
        ids.dedup();
        if ids.len() != self.arrivals.len() || ids.len() != self.running.len() + self.waiting.len() {
            return Err(format!("{} requests are known, but {} are queued", self.arrivals.len(), ids.len()));
        }
        Ok(())
    }
}
