//! One request as its client and the engine see it: its parameters, its answer so far, and its rows
//! in flight.

use folio_scheduler::{Draft, NewRequest, RequestId};

use crate::{
    hash::Rng,
    truth::{Sampling, Truth},
};

/// A client's sampling, and when it has enough.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wants {
    pub sampling: Sampling,
    /// A token divisible by this is the last; 0: the length alone decides.
    pub stop: u32,
    /// The client reads no more after this number of tokens, and its request is aborted when its
    /// buffer is full.
    pub stalls_after: Option<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Length,
    Stop,
    Aborted,
    Stalled,
    Expired,
    StepFailed,
    RowFailed,
    /// The process crashed.
    Crashed,
}

#[derive(Debug)]
pub struct Client {
    pub id: RequestId,
    pub wants: Wants,
    pub prompt_len: usize,
    pub max_len: usize,
    pub salt: u64,
    /// Order in its tenant's queue: arrival, moved by its priority.
    pub place: i64,
    pub tenant: u64,
    pub deadline: Option<u64>,
    pub wants_prompt_logits: bool,
    pub fork_of: Option<RequestId>,
    /// The tokens so far, and the expected reads of their rows.
    pub truth: Truth,
    /// Whether a row of it failed, so that the expected reads of later rows are unknown.
    pub broken: bool,
    /// Steps in flight with rows of it, and the number of those that sample.
    pub in_flight: usize,
    pub pending: usize,
    pub targets_planned: usize,
    /// Most tokens ever computed of it.
    pub ceiling: usize,
    pub started: bool,
    /// Whether it has no blocks: it never had any, or lost them.
    pub waits: bool,
    pub preemptions: u32,
    /// The newest step when it last lost its blocks.
    pub preempted_at: Option<u64>,
    /// Proposed, and in no plan yet.
    pub drafts: Draft,
    /// Whether nothing may be planned behind a token of it that is in flight.
    pub expects_drafts: bool,
    pub fold: u64,
}

impl Client {
    pub fn new(request: &NewRequest, wants: Wants, windows: &[Option<usize>]) -> Self {
        Self {
            id: request.id,
            wants,
            prompt_len: request.prompt.len(),
            max_len: request.max_len,
            salt: request.cache_salt,
            place: 0,
            tenant: request.tenant,
            deadline: request.deadline,
            wants_prompt_logits: request.wants_prompt_logits,
            fork_of: request.fork_of,
            truth: Truth::new(windows, request.cache_salt, &request.prompt),
            broken: false,
            in_flight: 0,
            pending: 0,
            targets_planned: 0,
            ceiling: 0,
            started: false,
            waits: true,
            preemptions: 0,
            preempted_at: None,
            drafts: Draft::default(),
            expects_drafts: false,
            fold: 0,
        }
    }

    pub fn prompt(&self) -> &[u32] {
        &self.truth.tokens()[..self.prompt_len]
    }

    pub fn answer(&self) -> &[u32] {
        &self.truth.tokens()[self.prompt_len..]
    }

    /// Whether its answer ends with the newest token.
    pub fn end(&self, buffer: usize) -> Option<End> {
        let answer = self.answer();
        let newest = answer.last()?;
        if self.wants.stop > 0 && newest % self.wants.stop == 0 {
            return Some(End::Stop);
        }
        if self.truth.len() >= self.max_len {
            return Some(End::Length);
        }
        self.wants.stalls_after.is_some_and(|after| answer.len() > after + buffer).then_some(End::Stalled)
    }

    /// The real next tokens, wrong from index `wrong_from` on.
    pub fn drafted(&mut self, num: usize, wrong_from: usize) -> Vec<u32> {
        let len = self.truth.len();
        for i in 0..num {
            let next = self.truth.next(self.wants.sampling);
            let spoiled = if i >= wrong_from { (next + 1) % self.wants.sampling.vocab.max(2) } else { next };
            self.truth.push(spoiled);
        }
        let drafts = self.truth.tokens()[len..].to_vec();
        self.truth.truncate(len);
        drafts
    }

    /// A tree of at most `num` nodes with the next `right` tokens among them, others before,
    /// between and behind.
    pub fn drafted_tree(&mut self, num: usize, right: usize, rng: &mut Rng) -> Draft {
        let follows = self.drafted(right + 1, right + 1);
        let vocab = self.wants.sampling.vocab.max(2);
        let mut draft = Draft::default();
        // For each node, the number of right tokens up to it, if all are right.
        let mut right_to: Vec<Option<usize>> = Vec::new();
        let (mut depth, mut tip) = (0, None);
        for guess in 0..num {
            if depth < right && (right - depth >= num - guess || rng.chance(2)) {
                tip = Some(draft.push(follows[depth], tip));
                depth += 1;
                right_to.push(Some(depth));
                continue;
            }
            let parent = rng.below(draft.len() + 1).checked_sub(1);
            let other = rng.below(vocab as usize - 1) as u32;
            // Wrong if its parent is right; if its parent is wrong, any token is.
            let wrong = |depth: usize| (follows[depth] + 1 + other) % vocab;
            let token = parent.map_or(Some(0), |parent| right_to[parent]).map_or(other, wrong);
            draft.push(token, parent.map(|parent| parent as u16));
            // A node that was proposed there before is not added twice.
            right_to.resize(draft.len(), None);
        }
        draft
    }
}
