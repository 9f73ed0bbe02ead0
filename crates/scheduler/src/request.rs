//! One request's place between nothing computed and everything computed.

use std::{collections::VecDeque, sync::Arc};

use crate::{
    BlockId, Draft, Miss, Nanos, NewRequest, PromptTargets, RequestId,
    blocks::{Sequence, prefix::ChainHash, table::Table},
    queue::{OrderKey, Place},
};

#[derive(Debug)]
pub(crate) struct Request {
    pub id: RequestId,
    /// Kept through preemption.
    pub key: OrderKey,
    /// Its tenant's, while it runs.
    pub rank: u32,
    pub tenant: u64,
    pub deadline: Option<Nanos>,
    pub fork_of: Option<RequestId>,
    /// How many tokens that one, by its place in line, and this one begin with in common, as far as anybody looked.
    pub in_common: Option<(OrderKey, usize)>,
    /// Who was computing what it needs next when it last asked.
    pub leader: Option<RequestId>,
    /// Prompt and answer so far, as far as results have come back.
    pub tokens: Vec<u32>,
    pub prompt_len: usize,
    pub max_len: usize,
    pub salt: u64,
    pub wants_prompt_logits: bool,
    /// Rows of the prompt whose logits have been asked for, in front.
    pub prompt_logits_done: usize,
    /// Tokens whose keys and values are in the tables.
    pub computed: usize,
    /// The same once all steps in flight are done.
    pub planned: usize,
    /// Rows in steps in flight, oldest first.
    pub flights: VecDeque<Flight>,
    /// Tokens that steps in flight sample.
    pub pending: usize,
    /// Tokens in the step being planned.
    pub chunk: usize,
    /// Those of them that its tenant is charged for.
    pub charged: usize,
    /// Tokens, from the first on, that its tenant has been charged for, or that it found computed: what is computed again
    /// is nobody's wish.
    paid: usize,
    /// To be verified behind `tokens`.
    pub drafts: Draft,
    /// Rows behind a token under way are not planned: drafts may come for it.
    pub expects_drafts: bool,
    /// One a layer group; empty while the request waits.
    pub tables: Vec<Table>,
    /// The same as the last plan named them.
    table_ids: Arc<[Vec<BlockId>]>,
    /// Hashes of the full blocks of `tokens`, as far as anybody asked.
    pub hashes: Vec<ChainHash>,
    /// Prefix hit of the first admission, and what ended it.
    pub hit: Option<(usize, Option<Miss>)>,
    pub preemptions: u32,
    /// Preemptions for want of blocks: after two of them nothing is left to chance.
    pub setbacks: u32,
    /// `computed` when the test hook last struck: it must be passed before it strikes again, or nothing would finish.
    pub forced_at: usize,
    pub fetch: Fetch,
    /// When it last began to run.
    pub started: Nanos,
}

/// Rows of a request in a step under way.
#[derive(Debug)]
pub(crate) struct Flight {
    pub rows: usize,
    pub drafts: Draft,
    pub samples: bool,
    /// The blocks it writes to were given up: only its token counts.
    pub lost: bool,
}

/// What a waiting request has asked of the disk tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fetch {
    NotTried,
    /// Tasks still under way.
    Waits(usize),
    Done,
}

impl Request {
    pub fn new(request: NewRequest, key: OrderKey, tables: Vec<Table>) -> Self {
        Self {
            id: request.id,
            key,
            rank: u32::MAX,
            tenant: request.tenant,
            deadline: request.deadline,
            fork_of: request.fork_of,
            in_common: None,
            leader: None,
            prompt_len: request.prompt.len(),
            tokens: request.prompt,
            max_len: request.max_len,
            salt: request.cache_salt,
            wants_prompt_logits: request.wants_prompt_logits,
            prompt_logits_done: 0,
            computed: 0,
            planned: 0,
            flights: VecDeque::new(),
            pending: 0,
            chunk: 0,
            charged: 0,
            paid: 0,
            drafts: Draft::default(),
            expects_drafts: false,
            tables,
            table_ids: Arc::default(),
            hashes: Vec::new(),
            hit: None,
            preemptions: 0,
            setbacks: 0,
            forced_at: 0,
            fetch: Fetch::NotTried,
            started: 0,
        }
    }

    /// Where it stands among those who run.
    pub fn place(&self) -> Place {
        Place::of(self)
    }

    pub fn sequence(&self) -> Sequence<'_> {
        Sequence { tokens: &self.tokens, hashes: &self.hashes, salt: self.salt }
    }

    /// Tokens it has, those still to be heard of included.
    fn total(&self) -> usize {
        self.tokens.len() + self.pending
    }

    /// Tokens that a step may compute now, drafts not counted. The very last token of a full-length sequence is never
    /// computed: nothing follows it. Behind drafts in flight nobody knows where the sequence goes on.
    pub fn remaining(&self) -> usize {
        if self.flights.iter().any(|flight| !flight.drafts.is_empty()) {
            return 0;
        }
        let total = if self.expects_drafts { self.tokens.len() } else { self.total() };
        total.min(self.max_len - 1).saturating_sub(self.planned)
    }

    /// Whether all but its last token is computed or in flight.
    pub fn is_decoding(&self) -> bool {
        self.planned + 1 >= self.total()
    }

    /// Rows of the prompt that predict another token of it.
    fn prompt_rows(&self) -> usize {
        if self.wants_prompt_logits { self.prompt_len - 1 } else { 0 }
    }

    pub fn owes_prompt_logits(&self) -> bool {
        self.prompt_logits_done < self.prompt_rows()
    }

    /// Most tokens a prefix hit may cover: never the last one, whose logits are needed, and no prompt row whose logits
    /// are owed.
    pub fn shareable_tokens(&self) -> usize {
        let most = self.tokens.len() - 1;
        if self.owes_prompt_logits() { most.min(self.prompt_logits_done) } else { most }
    }

    /// Of the step being planned, the rows that owe logits.
    pub fn prompt_targets(&self) -> PromptTargets {
        let first = self.planned.max(self.prompt_logits_done);
        let end = (self.planned + self.chunk).min(self.prompt_rows());
        if first >= end {
            return PromptTargets::default();
        }
        PromptTargets { first, tokens: self.tokens[first + 1..=end].to_vec() }
    }

    /// Its block tables, as a plan names them.
    pub fn table_ids(&mut self) -> Arc<[Vec<BlockId>]> {
        let changed = self.tables.iter_mut().fold(false, |changed, table| table.take_changed() | changed);
        if changed {
            self.table_ids = self.tables.iter().map(|table| table.ids().collect()).collect();
        }
        Arc::clone(&self.table_ids)
    }

    /// `tokens` more have been added to the step being planned: for how many its tenant is to be charged.
    pub fn bill(&mut self, tokens: usize) -> usize {
        let end = self.planned + self.chunk;
        let due = tokens.min(end.saturating_sub(self.paid));
        self.paid = self.paid.max(end);
        self.charged += due;
        due
    }

    /// It has no part in the step being planned after all: for how many tokens its tenant gets back what it was charged.
    pub fn give_back(&mut self) -> usize {
        self.paid -= self.charged;
        std::mem::take(&mut self.charged)
    }

    /// The step being planned is made: its rows are in flight. Whether they sample.
    pub fn depart(&mut self) -> bool {
        let rows = std::mem::take(&mut self.chunk);
        self.charged = 0;
        let drafts = std::mem::take(&mut self.drafts);
        self.planned += rows;
        let samples = self.planned == self.total() + drafts.len();
        self.prompt_logits_done = self.prompt_logits_done.max(self.planned.min(self.prompt_rows()));
        self.pending += usize::from(samples);
        self.flights.push_back(Flight { rows, drafts, samples, lost: false });
        samples
    }

    /// The oldest step in flight is done: of its drafts `path` holds, and `token` follows it.
    pub fn arrive(&mut self, path: &[u32], token: Option<u32>) {
        let flight = self.flights.pop_front().expect("a request of the step has rows in flight");
        let (id, drafts, accepted) = (self.id.0, flight.drafts.len(), path.len());
        assert!(flight.drafts.has_path(path), "request {id}: {path:?} is no path of its drafts {:?}", flight.drafts);
        assert!(flight.samples || token.is_none(), "request {id} sampled too early");
        self.pending -= usize::from(flight.samples);
        self.tokens.extend(path);
        if !flight.lost {
            self.computed += flight.rows - drafts + accepted;
            self.planned -= drafts - accepted;
        }
        if let Some(token) = token {
            assert!(self.tokens.len() < self.max_len, "request {id} outgrew its {} tokens", self.max_len);
            self.tokens.push(token);
        }
    }

    /// Its blocks are gone: nothing is computed, and what is in flight is not either.
    pub fn lose_everything(&mut self) {
        self.computed = 0;
        self.planned = 0;
        self.drafts.clear();
        for flight in &mut self.flights {
            flight.lost = true;
        }
    }

    /// Slots of its blocks that hold nothing and that no step in flight fills, in one group.
    pub fn unused_slots(&self, group: usize, block_tokens: usize) -> usize {
        self.tables[group].num_blocks() * block_tokens - self.planned
    }
}
