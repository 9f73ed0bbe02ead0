//! Admission: the next request in the queue is admitted if there are blocks for its prompt beside
//! those that running requests will need.
//!
//! An admitted request shares computed blocks of the prefix cache, or of the request it is a fork
//! of. It waits while another request computes its next block.

use std::collections::HashMap;

use crate::{
    Miss, RequestId, Scheduler,
    blocks::{Match, prefix::ChainHash},
    queue::Place,
    request::{Fetch, Request},
    step::Step,
};

/// Most waiting requests that are examined in a step: a long queue must not slow planning down, and
/// requests that cannot start must not hide those after them.
const MOST_LOOKS: usize = 512;

/// Cost of a search of the prefix cache, in examined requests.
const LOOKS_OF_A_SEARCH: usize = 8;

/// A request that was preempted this often for blocks is admitted only if no other request can take
/// its blocks again.
const MOST_SETBACKS: u32 = 2;

/// Reason why a waiting request is not admitted.
enum Refusal {
    /// It waits for something other than blocks; requests after it may be admitted.
    Waits,
    /// The same, found without a search.
    StillWaits,
    /// There are not enough blocks for it, and requests after it get none.
    Full,
}

/// The running requests, as far as admission must reckon with them; updated with each admission.
#[derive(Debug)]
pub(crate) struct Crowd {
    /// Free blocks to leave for running requests, by group.
    pub headroom: Vec<usize>,
    /// Blocks of all running requests at their greatest length, by group.
    longest: Vec<usize>,
    /// Whether a running request was preempted too often.
    is_cautious: bool,
    /// The first request in the order whose prompt this step does not finish, and the tokens that
    /// are left of it.
    unfinished: Option<(Place, usize)>,
}

/// The tokens that an admitted request need not compute.
enum Start {
    Hit(Match),
    /// The first tokens of a running request, which this one is a fork of.
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
            let mut request = self.waiting.take(tenant, key).expect("just found in the queue");
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

    /// Fills the request's tables for its first chunk. On a refusal the tables are empty.
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

    /// Moves a request that `admit` has prepared to the running ones.
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
        // Many forks may wait for one prompt: they do not search the cache in every step.
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

    /// Index of the running request that this one is a fork of, and the number of first tokens that
    /// both have in common.
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

    /// Whether the request that this one waits for is still computing a block of both.
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

    /// The running request that computes the block of this hash.
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

    /// Notes the next full block of known tokens that the request will compute.
    fn note_computing(&self, request: &mut Request, step: &mut Step) {
        let Some(computing) = &mut step.computing else { return };
        let next = request.computed / self.config.block_tokens;
        if self.config.prefix_caching && next < request.tokens.len() / self.config.block_tokens {
            self.blocks.extend_hashes(&mut request.hashes, request.salt, &request.tokens, next + 1);
            computing.entry(request.hashes[next]).or_insert(request.id);
        }
    }

    /// Checks that there are blocks for all tokens of the request, beside those that each running
    /// request needs for its tokens and one more. If one of them was preempted too often, checks
    /// instead that all requests fit at their greatest length, so that none is preempted.
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

    /// Blocks that a running request still needs for its tokens, and one more.
    pub(crate) fn still_needs(&self, request: &Request, group: usize) -> usize {
        let (table, len) = (&request.tables[group], request.tokens.len());
        let to_come = self.blocks.blocks_for(len).saturating_sub(table.num_blocks());
        let most = self.config.most_blocks(group, len).saturating_sub(table.num_held());
        to_come.min(most) + 1
    }

    /// Tokens of an admitted request's first step, after `cached` ones. A request with more to
    /// compute than the first unfinished one in the order gets only one block of the step.
    fn first_chunk(&self, request: &mut Request, cached: usize, step: &Step) -> usize {
        request.planned = cached;
        let first = step.crowd.as_ref().and_then(|crowd| crowd.unfinished);
        let is_longer = first.is_some_and(|(_, left)| left < request.remaining());
        let most = if is_longer { self.config.block_tokens } else { usize::MAX };
        let chunk = self.chunk(request, most, step);
        request.planned = 0;
        chunk
    }

    /// Reason why a hit of `cached` tokens does not cover the whole prompt.
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
