//! Drafts from a suffix automaton: what came behind the longest end of the text that came before, in this request or in
//! past answers, as a tree by how often it did.
//!
//! Each request has an automaton of its prompt and answer; one more is shared by all requests of a salt and holds answers
//! that have ended ([`Past`]). Requests' own are bounded too: one whose tokens find no room does without.
//!
//! How likely a token is follows from how often it came behind the longest contexts that are known, as in prediction by
//! partial matching: a context that was seen `total` times leaves 1 / (total + its length) to the shorter ones. A long
//! context is trusted at its first occurrence; a short one must have occurred often. The tree grows best first, so its
//! first nodes are the best tree of fewer nodes too.

mod past;

use std::{
    cmp::{Ordering, Reverse},
    collections::BinaryHeap,
};

use folio_scheduler::RequestId;
use past::Past;

use super::{
    Draft, Known, Owner, Propose,
    automaton::{Automaton, Place, TOKEN_BYTES},
    mix::Map,
};

/// Tokens of a request that are looked for in past answers.
const MOST_CONTEXT: usize = 32;
/// Contexts whose followers are weighed for one node: in all, and of one automaton.
const MOST_CONTEXTS: usize = 3;
const CONTEXTS_EACH: usize = 2;
/// Followers of a context that are looked at, those seen first most lately; and the most frequent of them, which are
/// weighed.
const MOST_SEEN: usize = 64;
const MOST_WEIGHED: usize = 8;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SuffixOptions {
    /// Tokens that a context has at least.
    pub min_match: usize,
    /// Nodes that are reached less probably are left out.
    pub min_probability: f32,
    /// What past answers of all salts take at most, together; 0 where none are to be kept.
    pub shared_bytes: usize,
    /// Tokens of requests that are read at most at a time, each of [`SuffixOptions::TOKEN_BYTES`].
    pub request_tokens: usize,
}

impl SuffixOptions {
    /// What a token of a request takes at most.
    pub const TOKEN_BYTES: usize = TOKEN_BYTES;
}

impl Default for SuffixOptions {
    fn default() -> Self {
        Self { min_match: 2, min_probability: 0.02, shared_bytes: 64 << 20, request_tokens: usize::MAX }
    }
}

pub struct Suffix {
    options: SuffixOptions,
    requests: Map<u64, Automaton>,
    /// Tokens that these have read.
    num_tokens: usize,
    past: Past,
    nothing: Automaton,
}

impl Suffix {
    pub fn new(options: SuffixOptions) -> Self {
        let (past, nothing) = (Past::new(options.shared_bytes), Automaton::default());
        Self { options, requests: Map::default(), num_tokens: 0, past, nothing }
    }

    /// What past answers take.
    pub fn shared_bytes(&self) -> usize {
        self.past.bytes()
    }

    /// What requests take that are not forgotten.
    pub fn request_bytes(&self) -> usize {
        self.requests.values().map(Automaton::bytes).sum()
    }

    /// Reads on in a request. Where there is no room for all of it, what was read of it makes room for others.
    fn extend(&mut self, id: RequestId, tokens: &[u32]) {
        let known = self.requests.get(&id.0).map_or(0, Automaton::num_tokens).min(tokens.len());
        if tokens.len() - known > self.options.request_tokens.saturating_sub(self.num_tokens) {
            return self.forget(id);
        }
        let own = self.requests.entry(id.0).or_default();
        tokens[known..].iter().for_each(|&token| own.push(token));
        self.num_tokens += tokens.len() - known;
    }
}

impl Propose for Suffix {
    fn propose(&mut self, Known { id, owner, tokens }: Known<'_>, most: usize, draft: &mut Draft) {
        self.extend(id, tokens);
        let own = self.requests.get(&id.0).unwrap_or(&self.nothing);
        let last = &tokens[tokens.len().saturating_sub(MOST_CONTEXT)..];
        let matched = |past: &Automaton| last.iter().fold(Place::EMPTY, |place, &token| past.advance(place, token));
        let [young, old] = self.past.of(owner.salt);
        let places = [own.repeated(), matched(young), matched(old)];
        let search = Search { sources: [own, young, old], options: self.options, found: BinaryHeap::new() };
        search.fill(places, most, draft);
    }

    fn observe(&mut self, Known { id, tokens, .. }: Known<'_>) {
        self.extend(id, tokens);
    }

    fn learn(&mut self, owner: Owner, answer: &[u32]) {
        self.past.learn(owner, answer);
    }

    fn forget(&mut self, id: RequestId) {
        self.num_tokens -= self.requests.remove(&id.0).map_or(0, |own| own.num_tokens());
    }
}

const NUM_SOURCES: usize = 3;

/// The nodes that might come next, likeliest first.
struct Search<'a> {
    /// The request's own comes first, and wins where contexts are of one length.
    sources: [&'a Automaton; NUM_SOURCES],
    options: SuffixOptions,
    found: BinaryHeap<Candidate>,
}

struct Candidate {
    /// That all tokens on the way to it are right, and it too.
    probability: f32,
    token: u32,
    parent: Option<u16>,
    /// The longest context in each source, this token not included.
    places: [Place; NUM_SOURCES],
}

impl Search<'_> {
    fn fill(mut self, places: [Place; NUM_SOURCES], most: usize, draft: &mut Draft) {
        if draft.room(most) == 0 {
            return;
        }
        self.expand(places, 1.0, None);
        while draft.room(most) > 0 {
            let Some(Candidate { probability, token, parent, places }) = self.found.pop() else { return };
            let node = draft.push(token, parent);
            let behind = std::array::from_fn(|source| self.sources[source].advance(places[source], token));
            self.expand(behind, probability, Some(node));
        }
    }

    fn expand(&mut self, places: [Place; NUM_SOURCES], reached: f32, parent: Option<u16>) {
        for (token, share) in self.weigh(places) {
            let probability = reached * share;
            if probability >= self.options.min_probability {
                self.found.push(Candidate { probability, token, parent, places });
            }
        }
    }

    /// Tokens that may come behind a place, each with how likely it is.
    fn weigh(&self, places: [Place; NUM_SOURCES]) -> Vec<(u32, f32)> {
        let mut contexts: Vec<(&Automaton, Place)> = Vec::with_capacity(NUM_SOURCES * CONTEXTS_EACH);
        for (&source, place) in self.sources.iter().zip(places) {
            let chain = std::iter::successors(Some(place), |&place| source.shorter(place)).take(CONTEXTS_EACH);
            let long = chain.filter(|place| place.length >= self.options.min_match.max(1));
            contexts.extend(long.map(|place| (source, place)));
        }
        contexts.sort_by_key(|(_, place)| Reverse(place.length));
        let (mut weighed, mut left): (Vec<(u32, f32)>, f32) = (Vec::new(), 1.0);
        for (source, place) in contexts.into_iter().take(MOST_CONTEXTS) {
            let mut followers: Vec<_> = source.followers(place).take(MOST_SEEN).collect();
            let total: u32 = followers.iter().map(|&(_, count)| count).sum();
            if total == 0 {
                continue;
            }
            // Stable: of equally frequent ones the one that was seen first most lately.
            followers.sort_by_key(|&(_, count)| Reverse(count));
            let escape = 1.0 / (total as f32 + place.length as f32);
            for &(token, count) in followers.iter().take(MOST_WEIGHED) {
                let share = left * (1.0 - escape) * count as f32 / total as f32;
                match weighed.iter_mut().find(|(known, _)| *known == token) {
                    Some((_, known)) => *known += share,
                    None => weighed.push((token, share)),
                }
            }
            left *= escape;
        }
        weighed
    }
}

impl Ord for Candidate {
    /// Of equally likely ones the shallower comes first: the one whose parent is earlier; then any fixed order.
    fn cmp(&self, other: &Self) -> Ordering {
        let rest = |candidate: &Self| Reverse((candidate.parent, candidate.token));
        self.probability.total_cmp(&other.probability).then_with(|| rest(self).cmp(&rest(other)))
    }
}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Candidate {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Candidate {}

#[cfg(test)]
mod tests;
