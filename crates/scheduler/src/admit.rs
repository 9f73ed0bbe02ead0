//! Who may start: the next in line, if there are blocks for its prompt beside what those who run will need.
//!
//! A newcomer takes what was computed before, from the cache or from the request it is a fork of, and waits if somebody is
//! computing what it needs next.

use std::collections::HashMap;

use crate::{
    Miss, RequestId, Scheduler,
    blocks::{Match, prefix::ChainHash},
    queue::Place,
    request::{Fetch, Request},
    step::Step,
};

/// Looks at requests that cannot start yet, in a step: a long line of them must not make planning slow, nor hide those
/// behind it.
const MOST_LOOKS: usize = 512;

/// What a search of the cache counts for.
const LOOKS_OF_A_SEARCH: usize = 8;

/// After so many preemptions for want of blocks, a request starts only if nothing can take its blocks again.
const MOST_SETBACKS: u32 = 2;

/// Why a waiting request did not start.
enum Refusal {
    /// It waits for something else than blocks; those behind it may go on.
    Waits,
    /// The same, told at a glance.
    StillWaits,
    /// Not enough blocks for it, and none for those behind it.
    Full,
}

/// Those who run, as a newcomer must reckon with them; kept up as others start.
#[derive(Debug)]
pub(crate) struct Crowd {
    /// Free blocks to leave alone, by group.
    pub headroom: Vec<usize>,
    /// Blocks of everybody's longest sequence, by group.
    longest: Vec<usize>,
    /// Somebody was sent back too often.
    is_cautious: bool,
    /// The first in line whose prompt this step does not finish, and how much of it is left.
    unfinished: Option<(Place, usize)>,
}

/// What a newcomer need not compute.
enum Start {
    Hit(Match),
    /// The first tokens of a running request.
    Fork {
        source: usize,
        tokens: usize,
    },
}

impl Scheduler {
    pub(crate) fn admit_waiting(&mut self, step: &mut Step) {
        if self.waiting.len() == 0 {
            return;
        }
        let mut cursor = self.waiting.cursor();
        let mut looks = 0;
        while step.prompt_left > 0 && self.running.len() < self.config.max_seqs && looks < MOST_LOOKS {
            let Some((tenant, key)) = self.waiting.next(&mut cursor) else { return };
            let mut request = self.waiting.take(tenant, key).expect("just found in line");
            match self.admit(&mut request, step) {
                Ok(()) => self.start(request, step),
                Err(refusal) => {
                    self.waiting.put_back(request);
                    looks += match refusal {
                        Refusal::Waits => LOOKS_OF_A_SEARCH,
                        Refusal::StillWaits => 1,
                        Refusal::Full => {
                            step.is_short = true;
                            return;
                        }
                    };
                    cursor.pass(tenant, key);
                }
            }
        }
    }

    /// Fills the request's tables for its first chunk, or leaves them empty.
    fn admit(&mut self, request: &mut Request, step: &mut Step) -> Result<(), Refusal> {
        if request.pending > 0 || matches!(request.fetch, Fetch::Waits(_)) {
            return Err(Refusal::StillWaits);
        }
        let start = self.find_start(request, step)?;
        self.check_room(request, &start, step)?;
        let cached = match &start {
            Start::Hit(hit) => hit.nodes.len() * self.config.block_tokens,
            Start::Fork { tokens, .. } => *tokens,
        };
        let chunk = self.first_chunk(request, cached, step);
        if chunk == 0 {
            return Err(Refusal::Waits);
        }
        let tables = &mut request.tables;
        let from_host = match start {
            Start::Hit(hit) => Some(self.blocks.share(tables, &hit)),
            Start::Fork { source, tokens } => {
                self.blocks.fork(&self.running[source].tables, tables, tokens).then_some(0)
            }
        };
        let Some(from_host) = from_host.filter(|_| self.blocks.grow(tables, cached + chunk)) else {
            self.blocks.release(tables);
            return Err(Refusal::Full);
        };
        request.computed = cached;
        request.planned = cached;
        if request.hit.is_none() {
            request.hit = Some((cached, self.miss(request, cached)));
            self.counts.hit_tokens += cached as u64;
            self.counts.host_hit_tokens += from_host as u64;
            self.counts.prompt_tokens += request.prompt_len as u64;
        }
        step.give(request, chunk);
        Ok(())
    }

    /// A request that `admit` has prepared takes its place among those who run.
    fn start(&mut self, mut request: Box<Request>, step: &mut Step) {
        request.started = self.now;
        request.rank = self.waiting.rank_of(request.tenant);
        let due = request.bill(request.chunk);
        self.waiting.charge(request.tenant, due);
        self.known.get_mut(&request.id).expect("a queued request is known").runs = true;
        self.note_computing(&mut request, step);
        if let Some(crowd) = &mut step.crowd {
            self.join(crowd, &request);
        }
        let index = self.running.partition_point(|r| r.place() < request.place());
        self.running.insert(index, request);
    }

    fn find_start(&mut self, request: &mut Request, step: &mut Step) -> Result<Start, Refusal> {
        let limit_tokens = request.shareable_tokens();
        let limit = if self.config.prefix_caching { limit_tokens / self.config.block_tokens } else { 0 };
        // Many may wait for one prompt: the cache is not searched for all of them in every step.
        let fork = self.fork_source(request, limit_tokens);
        if fork.is_some_and(|(source, tokens)| self.running[source].computed < tokens) {
            return Err(Refusal::StillWaits);
        }
        self.blocks.extend_hashes(&mut request.hashes, request.salt, &request.tokens, limit);
        if self.is_led(request, limit) {
            return Err(Refusal::StillWaits);
        }
        let hit = self.blocks.matched(&request.sequence(), limit);
        if let Some((source, tokens)) = fork
            && tokens > hit.nodes.len() * self.config.block_tokens
            && self.blocks.can_fork(&self.running[source].tables, tokens)
        {
            return Ok(Start::Fork { source, tokens });
        }
        if hit.nodes.len() < limit {
            request.leader = self.computing(request.hashes[hit.nodes.len()], step);
            if request.leader.is_some() {
                return Err(Refusal::Waits);
            }
            if request.fetch == Fetch::NotTried {
                let tickets = self.blocks.fetch_chunks(&request.sequence(), hit.nodes.len(), limit, request.id);
                if !tickets.is_empty() {
                    request.fetch = Fetch::Waits(tickets.len());
                    return Err(Refusal::Waits);
                }
            }
        }
        Ok(Start::Hit(hit))
    }

    /// The running request that this one is a fork of, and how many tokens they have in common.
    fn fork_source(&self, request: &mut Request, limit_tokens: usize) -> Option<(usize, usize)> {
        let index = self.running_index(request.fork_of?)?;
        let source = &self.running[index];
        if source.salt != request.salt {
            return None;
        }
        let known = request.in_common.filter(|&(key, _)| key == source.key).map_or(0, |(_, tokens)| tokens);
        let rest = source.tokens[known..].iter().zip(&request.tokens[known..]);
        let tokens = known + rest.take_while(|(a, b)| a == b).count();
        request.in_common = Some((source.key, tokens));
        Some((index, tokens.min(limit_tokens)))
    }

    /// Whether the request that this one waited for before is still computing what both need.
    fn is_led(&mut self, request: &Request, limit: usize) -> bool {
        let Some(index) = request.leader.and_then(|leader| self.running_index(leader)) else { return false };
        let leader = &mut self.running[index];
        let next = leader.computed / self.config.block_tokens;
        if next >= limit.min(leader.tokens.len() / self.config.block_tokens) {
            return false;
        }
        self.blocks.extend_hashes(&mut leader.hashes, leader.salt, &leader.tokens, next + 1);
        leader.hashes[next] == request.hashes[next]
    }

    /// Who computes the block of this name right now.
    fn computing(&mut self, hash: ChainHash, step: &mut Step) -> Option<RequestId> {
        if step.computing.is_none() {
            step.computing = Some(HashMap::new());
            let mut running = std::mem::take(&mut self.running);
            for request in &mut running {
                self.note_computing(request, step);
            }
            self.running = running;
        }
        step.computing.as_ref()?.get(&hash).copied()
    }

    /// The next full block of known tokens that the request will compute.
    fn note_computing(&self, request: &mut Request, step: &mut Step) {
        let Some(computing) = &mut step.computing else { return };
        let next = request.computed / self.config.block_tokens;
        if self.config.prefix_caching && next < request.tokens.len() / self.config.block_tokens {
            self.blocks.extend_hashes(&mut request.hashes, request.salt, &request.tokens, next + 1);
            computing.entry(request.hashes[next]).or_insert(request.id);
        }
    }

    /// Whether there are blocks for all the tokens the request has, beside what those who run need for theirs and one
    /// more each. Where somebody was sent back too often, whether everybody's longest fits: then nobody is sent back.
    fn check_room(&self, request: &Request, start: &Start, step: &mut Step) -> Result<(), Refusal> {
        let Crowd { headroom, longest, is_cautious, .. } = step.crowd.get_or_insert_with(|| self.crowd());
        let is_cautious = *is_cautious || request.setbacks >= MOST_SETBACKS;
        for (group, at) in self.blocks.groups.iter().enumerate() {
            let len = request.tokens.len();
            let (first, on_device, free) = match start {
                Start::Hit(hit) => (hit.groups[group].first, hit.groups[group].on_device, hit.groups[group].free),
                Start::Fork { source, tokens } => {
                    let full = tokens / self.config.block_tokens;
                    let first = self.running[*source].tables[group].num_gone();
                    (first, full - first.min(full), 0)
                }
            };
            let all = (self.blocks.blocks_for(len) - first).min(self.config.most_blocks(group, len)).max(on_device);
            if all - on_device + free + headroom[group] > at.pool.num_free() {
                return Err(Refusal::Full);
            }
            let total = longest[group] + self.config.most_blocks(group, request.max_len);
            if is_cautious && total > at.pool.num_blocks() {
                return Err(Refusal::Full);
            }
        }
        Ok(())
    }

    pub(crate) fn crowd(&self) -> Crowd {
        let none = vec![0; self.config.groups.len()];
        let mut crowd = Crowd { headroom: none.clone(), longest: none, is_cautious: false, unfinished: None };
        self.running.iter().for_each(|request| self.join(&mut crowd, request));
        crowd
    }

    fn join(&self, crowd: &mut Crowd, request: &Request) {
        for group in 0..self.config.groups.len() {
            crowd.headroom[group] += self.still_needs(request, group);
            crowd.longest[group] += self.config.most_blocks(group, request.max_len);
        }
        crowd.is_cautious |= request.setbacks >= MOST_SETBACKS;
        let is_first = crowd.unfinished.is_none_or(|(place, _)| request.place() < place);
        if is_first && !request.is_decoding() && request.remaining() > request.chunk {
            crowd.unfinished = Some((request.place(), request.remaining() - request.chunk));
        }
    }

    /// Blocks that a running request still needs for the tokens it has, and one more.
    pub(crate) fn still_needs(&self, request: &Request, group: usize) -> usize {
        let (table, len) = (&request.tables[group], request.tokens.len());
        let to_come = self.blocks.blocks_for(len).saturating_sub(table.num_blocks());
        let most = self.config.most_blocks(group, len).saturating_sub(table.num_held());
        to_come.min(most) + 1
    }

    /// Tokens of a newcomer's first step behind `cached` ones. With more to compute than the first in line, it gets a
    /// place, but only a little of the step.
    fn first_chunk(&self, request: &mut Request, cached: usize, step: &Step) -> usize {
        request.planned = cached;
        let first = step.crowd.as_ref().and_then(|crowd| crowd.unfinished);
        let is_longer = first.is_some_and(|(_, left)| left < request.remaining());
        let most = if is_longer { self.config.block_tokens } else { usize::MAX };
        let chunk = self.chunk(request, most, step);
        request.planned = 0;
        chunk
    }

    /// Why a hit of `cached` tokens did not cover the whole prompt.
    fn miss(&self, request: &Request, cached: usize) -> Option<Miss> {
        let cached_blocks = cached / self.config.block_tokens;
        if !self.config.prefix_caching {
            return Some(Miss::Disabled);
        }
        if cached_blocks >= (request.prompt_len - 1) / self.config.block_tokens {
            return (cached == 0).then_some(Miss::Short);
        }
        if cached_blocks >= request.shareable_tokens() / self.config.block_tokens && request.owes_prompt_logits() {
            return Some(Miss::PromptLogits);
        }
        let next = *request.hashes.get(cached_blocks)?;
        Some(if self.blocks.nodes.was_known(next) { Miss::Evicted } else { Miss::New })
    }
}
