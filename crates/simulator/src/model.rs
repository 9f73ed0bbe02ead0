//! A model whose answer shows every wrong block.
//!
//! A row writes a hash of its token, its position and all that it read to the cache, through the
//! block table; its digest is a hash of all that it reads back through it, only the window in
//! groups that have one. A stale, freed, foreign or unwritten block changes the digest exactly, and
//! with it the next token. Rows of one step do not see each other unless they belong to one
//! request: a block is readable when its forward pass is done, not before. A draft sees from its
//! own step only the path from the request's last token to itself; accepted drafts are moved to a
//! chain's slots when the step ends.

use std::collections::BTreeMap;

use folio_scheduler::{Assignment, BlockId, HostSlot, RequestId, RowResult, SchedulerConfig, StepPlan, Transfer};

use crate::{hash, truth::Sampling};

/// Memory that was never written.
pub const UNWRITTEN: u64 = 0xdead_beef_dead_beef;

/// The executor's state of a request between steps.
#[derive(Clone, Copy, Debug)]
struct Kept {
    sampling: Sampling,
    /// The last sampled token, for rows that await it.
    last: Option<u32>,
    /// Hash over every sampled token, in order.
    fold: u64,
}

/// Results of a step's rows.
#[derive(Clone, Debug, Default)]
pub struct Output {
    pub results: Vec<RowResult>,
    /// The read digest of every row, in the plan's order.
    pub digests: Vec<u64>,
    /// The fold of each assignment's request after it.
    pub folds: Vec<u64>,
    /// Rows of accepted drafts that had to be moved.
    pub moved: u64,
    /// A plan that no executor could run.
    pub fault: Option<String>,
}

#[derive(Debug)]
pub struct Model {
    block_tokens: usize,
    windows: Vec<Option<usize>>,
    device: Vec<Vec<u64>>,
    host: Vec<Vec<u64>>,
    requests: BTreeMap<RequestId, Kept>,
    pub tokens_computed: u64,
    scratch: Scratch,
}

#[derive(Debug, Default)]
struct Scratch {
    /// Weighted values of one group that an assignment's rows see, from the first one's window on.
    seen: Vec<Vec<u64>>,
    starts: Vec<usize>,
    sums: Vec<u64>,
    /// (group, slot, value), written when every row of the step has read.
    writes: Vec<(usize, usize, u64)>,
    /// (group, from, to), done in order after the writes.
    moves: Vec<(usize, usize, usize)>,
    /// Contribution of each draft of the assignment to the rows behind it, `[draft][group]`.
    drafts: Vec<Vec<u64>>,
}

impl Model {
    pub fn new(config: &SchedulerConfig) -> Self {
        let slots = |blocks: usize| vec![UNWRITTEN; blocks * config.block_tokens];
        let groups = config.groups.len();
        Self {
            block_tokens: config.block_tokens,
            windows: config.groups.iter().map(|g| g.window).collect(),
            device: config.groups.iter().map(|g| slots(g.blocks)).collect(),
            host: config.groups.iter().map(|g| slots(g.host_slots)).collect(),
            requests: BTreeMap::new(),
            tokens_computed: 0,
            scratch: Scratch {
                seen: vec![Vec::new(); groups],
                starts: vec![0; groups],
                sums: vec![0; groups],
                writes: Vec::new(),
                moves: Vec::new(),
                drafts: Vec::new(),
            },
        }
    }

    pub fn windows(&self) -> &[Option<usize>] {
        &self.windows
    }

    pub fn admit(&mut self, id: RequestId, sampling: Sampling) {
        self.requests.insert(id, Kept { sampling, last: None, fold: 0 });
    }

    pub fn release(&mut self, id: RequestId) {
        self.requests.remove(&id);
    }

    pub fn num_requests(&self) -> usize {
        self.requests.len()
    }

    /// Runs a plan's first half. Reports wrong addresses.
    pub fn run_transfers(&mut self, transfers: &[Transfer]) -> Option<String> {
        let len = self.block_tokens;
        for transfer in transfers {
            let done = match *transfer {
                Transfer::Copy { group, from, to } => {
                    let (from, to) = (from.0 as usize * len, to.0 as usize * len);
                    let device = &mut self.device[group];
                    let fits = from + len <= device.len() && to + len <= device.len();
                    fits.then(|| device.copy_within(from..from + len, to))
                }
                Transfer::Save { group, from, to } => {
                    let source = self.device[group].chunks_exact(len).nth(from.0 as usize);
                    let target = self.host[group].chunks_exact_mut(len).nth(to.0 as usize);
                    source.zip(target).map(|(source, target)| target.copy_from_slice(source))
                }
                Transfer::Load { group, from, to } => {
                    let source = self.host[group].chunks_exact(len).nth(from.0 as usize);
                    let target = self.device[group].chunks_exact_mut(len).nth(to.0 as usize);
                    source.zip(target).map(|(source, target)| target.copy_from_slice(source))
                }
            };
            if done.is_none() {
                return Some(format!("{transfer:?} leads outside the pools"));
            }
        }
        None
    }

    /// Runs a plan's second half: every row reads the values from before the step, then all of them
    /// write.
    pub fn run_rows(&mut self, plan: &StepPlan) -> Output {
        let mut output = Output::default();
        self.scratch.writes.clear();
        self.scratch.moves.clear();
        for assignment in &plan.assignments {
            if let Err(fault) = self.run_assignment(assignment, &mut output) {
                output.fault.get_or_insert(format!("request {}: {fault}", assignment.id.0));
            }
        }
        for &(group, slot, value) in &self.scratch.writes {
            self.device[group][slot] = value;
        }
        for &(group, slot, value) in &self.scratch.writes {
            if self.device[group][slot] != value {
                let block = slot / self.block_tokens;
                output.fault.get_or_insert(format!("two rows write the same slot of block {block}, group {group}"));
            }
        }
        for &(group, from, to) in &self.scratch.moves {
            self.device[group][to] = self.device[group][from];
        }
        output
    }

    fn run_assignment(&mut self, a: &Assignment, output: &mut Output) -> Result<(), String> {
        let Some(mut kept) = self.requests.get(&a.id).copied() else { return Err("not known".into()) };
        let awaited = if a.awaits_token { Some(kept.last.ok_or("awaits a token that was never drawn")?) } else { None };
        if a.tables.len() != self.device.len() {
            return Err(format!("{} tables for {} groups", a.tables.len(), self.device.len()));
        }
        if a.parents.len() != a.num_drafts || a.num_rows() <= a.num_drafts {
            return Err(format!("{} drafts with {} parents in {} rows", a.num_drafts, a.parents.len(), a.num_rows()));
        }
        self.read_context(a)?;
        let first_digest = output.digests.len();
        let known = &a.tokens[..a.tokens.len() - a.num_drafts];
        for (row, token) in known.iter().copied().chain(awaited).enumerate() {
            let digest = self.run_row(a, a.first + row, token, kept.sampling.salt)?;
            output.digests.push(digest);
        }
        self.scratch.drafts.clear();
        for draft in 0..a.num_drafts {
            let digest = self.run_draft(a, draft, kept.sampling.salt)?;
            output.digests.push(digest);
        }
        self.tokens_computed += a.num_rows() as u64;
        let mut result = RowResult { id: a.id, accepted: Vec::new(), token: None };
        if a.samples {
            let path = verify(a, &output.digests[first_digest..], &mut kept, &mut result);
            output.moved += self.plan_moves(a, &path)?;
        }
        self.requests.insert(a.id, kept);
        output.folds.push(kept.fold);
        output.results.push(result);
        Ok(())
    }

    /// Plans the moves that put the keys of accepted drafts behind one another; returns how many
    /// must move.
    fn plan_moves(&mut self, a: &Assignment, path: &[usize]) -> Result<u64, String> {
        let first = a.first + a.num_rows() - a.num_drafts;
        let mut moved = 0;
        for (depth, &draft) in path.iter().enumerate().filter(|(depth, draft)| depth != *draft) {
            for (group, device) in self.device.iter().enumerate() {
                let at = |place: usize| slot(&a.tables[group], place, self.block_tokens, device.len(), group);
                self.scratch.moves.push((group, at(first + draft)?, at(first + depth)?));
            }
            moved += 1;
        }
        Ok(moved)
    }

    /// Sums the values that the first row sees before itself, through the tables.
    fn read_context(&mut self, a: &Assignment) -> Result<(), String> {
        for group in 0..self.device.len() {
            let start = self.windows[group].map_or(0, |w| (a.first + 1).saturating_sub(w));
            let seen = &mut self.scratch.seen[group];
            seen.clear();
            self.scratch.starts[group] = start;
            let mut position = start;
            while position < a.first {
                let from = slot(&a.tables[group], position, self.block_tokens, self.device[group].len(), group)?;
                let num = (self.block_tokens - position % self.block_tokens).min(a.first - position);
                for (i, &value) in self.device[group][from..from + num].iter().enumerate() {
                    seen.push(hash::weighted(value, position + i));
                }
                position += num;
            }
            self.scratch.sums[group] = seen.iter().fold(0, |sum, &v| sum.wrapping_add(v));
        }
        Ok(())
    }

    fn run_row(&mut self, a: &Assignment, position: usize, token: u32, salt: u64) -> Result<u64, String> {
        let Scratch { seen, starts, sums, writes, .. } = &mut self.scratch;
        for group in 0..sums.len() {
            if let Some(window) = self.windows[group] {
                // The previous row saw one position that this one does not.
                if position > a.first && position >= window {
                    let left = position - window;
                    sums[group] = sums[group].wrapping_sub(seen[group][left - starts[group]]);
                }
            }
        }
        let context = sums.iter().fold(salt, |sum, &s| hash::mix(sum, s));
        let entry = hash::entry(token, position, context);
        let mut digest = 0;
        for group in 0..sums.len() {
            let value = hash::in_group(entry, group);
            let own = hash::weighted(value, position);
            sums[group] = sums[group].wrapping_add(own);
            seen[group].push(own);
            digest = hash::mix(digest, sums[group]);
            let to = slot(&a.tables[group], position, self.block_tokens, self.device[group].len(), group)?;
            writes.push((group, to, value));
        }
        Ok(digest)
    }

    /// Runs the row of a draft, after all other rows. The sums stay those of the row at the tree's
    /// root.
    fn run_draft(&mut self, a: &Assignment, draft: usize, salt: u64) -> Result<u64, String> {
        let last = a.first + a.num_rows() - a.num_drafts - 1;
        let parent = |node: &usize| a.parents[*node].map(usize::from);
        // Nearest first; the draft at depth `i` behind the last token has position `last + i`.
        let path: Vec<usize> = std::iter::successors(parent(&draft), parent).collect();
        let position = last + path.len() + 1;
        let Scratch { seen, starts, sums, writes, drafts, .. } = &mut self.scratch;
        let mut before = Vec::with_capacity(sums.len());
        for (group, window) in self.windows.iter().enumerate() {
            let first_seen = |position: usize| window.map_or(0, |w| (position + 1).saturating_sub(w));
            let from = first_seen(position);
            let left = (first_seen(last)..from.min(last + 1)).map(|p| seen[group][p - starts[group]]);
            let on_path = path.iter().rev().enumerate().filter(|(i, _)| last + 1 + i >= from);
            let on_path = on_path.map(|(_, &node)| drafts[node][group]);
            let sum = left.fold(sums[group], u64::wrapping_sub);
            before.push(on_path.fold(sum, u64::wrapping_add));
        }
        let context = before.iter().fold(salt, |sum, &s| hash::mix(sum, s));
        let entry = hash::entry(a.drafts()[draft], position, context);
        let mut digest = 0;
        let mut values = Vec::with_capacity(before.len());
        for (group, &before) in before.iter().enumerate() {
            let value = hash::in_group(entry, group);
            let own = hash::weighted(value, position);
            values.push(own);
            digest = hash::mix(digest, before.wrapping_add(own));
            let to = slot(&a.tables[group], last + 1 + draft, self.block_tokens, self.device[group].len(), group)?;
            writes.push((group, to, value));
        }
        drafts.push(values);
        Ok(digest)
    }

    /// Whether the two blocks differ in the slots `from..to`.
    pub fn differ(&self, group: usize, blocks: [BlockId; 2], from: usize, to: usize) -> bool {
        let [a, b] = blocks.map(|b| b.0 as usize * self.block_tokens);
        self.device[group][a + from..a + to] != self.device[group][b + from..b + to]
    }

    pub fn host_block(&self, group: usize, slot: HostSlot) -> &[u64] {
        let from = slot.0 as usize * self.block_tokens;
        &self.host[group][from..from + self.block_tokens]
    }

    pub fn set_host_block(&mut self, group: usize, slot: HostSlot, values: &[u64]) {
        let from = slot.0 as usize * self.block_tokens;
        self.host[group][from..from + self.block_tokens].copy_from_slice(values);
    }

    /// Overwrites memory with garbage after a failed step, except for host slots that a disk task
    /// works on.
    pub fn scribble(&mut self, garbage: u64, spared: impl Fn(usize, HostSlot) -> bool) {
        for (i, value) in self.device.iter_mut().flatten().enumerate() {
            *value = hash::mix(garbage, i as u64);
        }
        for (group, slots) in self.host.iter_mut().enumerate() {
            for (slot, block) in slots.chunks_exact_mut(self.block_tokens).enumerate() {
                if !spared(group, HostSlot(slot as u32)) {
                    block.fill(hash::mix(garbage, slot as u64));
                }
            }
        }
    }
}

/// Samples behind the last token, and behind every accepted draft; returns those drafts, from the
/// root.
fn verify(a: &Assignment, digests: &[u64], kept: &mut Kept, result: &mut RowResult) -> Vec<usize> {
    let own = a.num_rows() - a.num_drafts;
    let mut path: Vec<usize> = Vec::new();
    loop {
        let row = path.last().map_or(own - 1, |draft| own + draft);
        let token = hash::sampled(digests[row], kept.sampling.seed, kept.sampling.vocab);
        kept.fold = hash::folded(kept.fold, a.first + own + path.len(), token);
        let follows = |&draft: &usize| a.parents[draft].map(usize::from) == path.last().copied();
        let Some(draft) = (0..a.num_drafts).filter(follows).find(|&draft| a.drafts()[draft] == token) else {
            result.token = Some(token);
            kept.last = Some(token);
            return path;
        };
        result.accepted.push(token);
        path.push(draft);
    }
}

/// The slot of a position, if it has one.
fn slot(table: &[BlockId], position: usize, block_tokens: usize, len: usize, group: usize) -> Result<usize, String> {
    let Some(&block) = table.get(position / block_tokens) else {
        return Err(format!("position {position} is behind a table of {} blocks, group {group}", table.len()));
    };
    if block == BlockId::GONE {
        return Err(format!("position {position} is read or written, but its block is gone, group {group}"));
    }
    let slot = block.0 as usize * block_tokens + position % block_tokens;
    if slot >= len {
        return Err(format!("block {} is not in the pool of group {group}", block.0));
    }
    Ok(slot)
}
