//! The state of one request, between nothing computed and everything computed.

use std::{collections::VecDeque, sync::Arc};

use crate::{
    BlockId, Draft, Miss, Nanos, NewRequest, PromptTargets, RequestId,
    blocks::{Sequence, prefix::ChainHash, table::Table},
    queue::{OrderKey, Place},
};

#[derive(Debug)]
pub(crate) struct Request {
    pub id: RequestId,
    /// Unchanged by preemption.
    pub key: OrderKey,
    /// The tenant's rank, while the request runs.
    pub rank: u32,
    pub tenant: u64,
    pub deadline: Option<Nanos>,
    pub fork_of: Option<RequestId>,
    /// Key of the request that this one is a fork of, and the number of first tokens that both have
    /// in common, as far as they were compared.
    pub in_common: Option<(OrderKey, usize)>,
    /// The request that was computing the next block of this one when admission last asked.
    pub leader: Option<RequestId>,
    /// Prompt and answer, as far as results are committed.
    pub tokens: Vec<u32>,
    pub prompt_len: usize,
    pub max_len: usize,
    pub salt: u64,
    pub wants_prompt_logits: bool,
    /// First rows of the prompt whose logits were planned already.
    pub prompt_logits_done: usize,
    /// Tokens whose keys and values are in the tables.
    pub computed: usize,
    /// The same after all steps in flight.
    pub planned: usize,
    /// Rows in steps in flight, oldest step first.
    pub flights: VecDeque<Flight>,
    /// Tokens that steps in flight sample.
    pub pending: usize,
    /// Tokens in the step being planned.
    pub chunk: usize,
    /// Tokens in the step being planned that its tenant is charged for.
    pub charged: usize,
    /// First tokens that its tenant has been charged for, or that a prefix hit gave. A tenant does
    /// not pay for tokens that are computed again.
    paid: usize,
    /// The draft to verify after `tokens`.
    pub drafts: Draft,
    /// Whether a draft may come for a token in flight: then no rows after it are planned.
    pub expects_drafts: bool,
    /// One for each layer group; empty while the request waits.
    pub tables: Vec<Table>,
    /// The block ids of `tables`, as the last plan has them.
    table_ids: Arc<[Vec<BlockId>]>,
    /// Hashes of the full blocks of `tokens`, as far as they were needed.
    pub hashes: Vec<ChainHash>,
    /// Prefix hit of the first admission, and why it was not longer.
    pub hit: Option<(usize, Option<Miss>)>,
    pub preemptions: u32,
    /// Preemptions because blocks ran out. After two, the request is admitted only if it can run to
    /// its end.
    pub setbacks: u32,
    /// `computed` at the last strike of the test hook. The next strike needs more computed tokens,
    /// or no request would ever finish.
    pub forced_at: usize,
    pub fetch: Fetch,
    /// Time at which it last began to run.
    pub started: Nanos,
}

/// Rows of a request in a step in flight.
#[derive(Debug)]
pub(crate) struct Flight {
    pub rows: usize,
    pub drafts: Draft,
    pub samples: bool,
    /// The blocks that the rows write to were released: only the sampled token counts.
    pub lost: bool,
}

/// State of a waiting request's loads from the disk tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fetch {
    NotTried,
    /// Number of tasks that have not ended.
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

    /// Its place among the running requests.
    pub fn place(&self) -> Place {
        Place::of(self)
    }

    pub fn sequence(&self) -> Sequence<'_> {
        Sequence { tokens: &self.tokens, hashes: &self.hashes, salt: self.salt }
    }

    /// Number of its tokens, with those that steps in flight sample.
    fn total(&self) -> usize {
        self.tokens.len() + self.pending
    }

    /// Tokens that a step may compute now, without drafts. The last token of a sequence of full
    /// length is never computed, because no token follows it. After drafts in flight the number of
    /// accepted tokens is unknown, so no token may be computed.
    pub fn remaining(&self) -> usize {
        if self.flights.iter().any(|flight| !flight.drafts.is_empty()) {
            return 0;
        }
        let total = if self.expects_drafts { self.tokens.len() } else { self.total() };
        total.min(self.max_len - 1).saturating_sub(self.planned)
    }

    /// Whether all tokens but the last are computed or in flight.
    pub fn is_decoding(&self) -> bool {
        self.planned + 1 >= self.total()
    }

    /// Rows of the prompt that give logprobs of the next prompt token.
    fn prompt_rows(&self) -> usize {
        if self.wants_prompt_logits { self.prompt_len - 1 } else { 0 }
    }

    pub fn owes_prompt_logits(&self) -> bool {
        self.prompt_logits_done < self.prompt_rows()
    }

    /// Most tokens that a prefix hit may cover: never the last token, whose logits are needed, and
    /// no prompt row whose logits are still owed.
    pub fn shareable_tokens(&self) -> usize {
        let most = self.tokens.len() - 1;
        if self.owes_prompt_logits() { most.min(self.prompt_logits_done) } else { most }
    }

    /// The rows of the step being planned whose logits give prompt logprobs.
    pub fn prompt_targets(&self) -> PromptTargets {
        let first = self.planned.max(self.prompt_logits_done);
        let end = (self.planned + self.chunk).min(self.prompt_rows());
        if first >= end {
            return PromptTargets::default();
        }
        PromptTargets { first, tokens: self.tokens[first + 1..=end].to_vec() }
    }

    /// The block ids of its tables, for a plan.
    pub fn table_ids(&mut self) -> Arc<[Vec<BlockId>]> {
        let changed = self.tables.iter_mut().fold(false, |changed, table| table.take_changed() | changed);
        if changed {
            self.table_ids = self.tables.iter().map(|table| table.ids().collect()).collect();
        }
        Arc::clone(&self.table_ids)
    }

    /// Notes that `tokens` were added to the step being planned. Returns the number of them that
    /// its tenant is charged for.
    pub fn bill(&mut self, tokens: usize) -> usize {
        let end = self.planned + self.chunk;
        let due = tokens.min(end.saturating_sub(self.paid));
        self.paid = self.paid.max(end);
        self.charged += due;
        due
    }

    /// Removes the request from the step being planned. Returns the number of tokens that its
    /// tenant was charged for.
    pub fn give_back(&mut self) -> usize {
        self.paid -= self.charged;
        std::mem::take(&mut self.charged)
    }

    /// Puts the rows of the planned step in flight. Returns whether they sample a token.
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

    /// Takes the result of the oldest step in flight: the accepted tokens of its draft and the
    /// token after them.
    pub fn take_result(&mut self, path: &[u32], token: Option<u32>) {
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

    /// The blocks were released: no token is computed, and the rows in flight count for nothing.
    pub fn lose_everything(&mut self) {
        self.computed = 0;
        self.planned = 0;
        self.drafts.clear();
        for flight in &mut self.flights {
            flight.lost = true;
        }
    }

    /// Slots of its blocks in one group that hold no token and that no step in flight fills.
    pub fn unused_slots(&self, group: usize, block_tokens: usize) -> usize {
        self.tables[group].num_blocks() * block_tokens - self.planned
    }
}
