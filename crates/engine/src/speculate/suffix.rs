//! Drafts from a suffix automaton: the tokens that followed earlier occurrences of the longest
//! suffix of the text, in this request or in past answers, as a tree in order of frequency.
//!
//! Each request has an automaton of its prompt and answer. All requests of a salt share another
//! one, of answers that have ended ([`Past`]). Automata of requests are bounded too: a request
//! whose tokens have no room does without.
//!
//! The probability of a token follows from its counts after the longest known contexts, as in
//! prediction by partial matching: a context with `total` occurrences leaves 1 / (total + its
//! length) to the shorter ones. A long context is trusted at its first occurrence; a short one must
//! have occurred often. The tree grows best first, so that its first nodes are the best tree of
//! fewer nodes too.

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

/// Last tokens of a request that are searched in past answers.
const MOST_CONTEXT: usize = 32;
/// Contexts that are weighed for one node: in all, and of one automaton.
const MOST_CONTEXTS: usize = 3;
const CONTEXTS_EACH: usize = 2;
/// Followers of a context that are examined, the newest first; and the most frequent of them, which
/// are weighed.
const MOST_SEEN: usize = 64;
const MOST_WEIGHED: usize = 8;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SuffixOptions {
    /// Least length of a context.
    pub min_match: usize,
    /// Least probability of a node.
    pub min_probability: f32,
    /// Most bytes of past answers of all salts together; 0: they are not stored.
    pub shared_bytes: usize,
    /// Most tokens of requests at a time, each of [`SuffixOptions::TOKEN_BYTES`].
    pub request_tokens: usize,
}

impl SuffixOptions {
    /// Most bytes of a request's token.
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
    /// Tokens that requests' automata hold.
    num_tokens: usize,
    past: Past,
    nothing: Automaton,
}

impl Suffix {
    pub fn new(options: SuffixOptions) -> Self {
        let (past, nothing) = (Past::new(options.shared_bytes), Automaton::default());
        Self { options, requests: Map::default(), num_tokens: 0, past, nothing }
    }

    /// Bytes of past answers.
    pub fn shared_bytes(&self) -> usize {
        self.past.bytes()
    }

    /// Bytes of running requests.
    pub fn request_bytes(&self) -> usize {
        self.requests.values().map(Automaton::bytes).sum()
    }

    /// Reads more tokens of a request. If there is no room for all of them, its automaton is
    /// dropped.
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

/// Nodes that may be added next, likeliest first.
struct Search<'a> {
    /// The request's own automaton is first, and wins between contexts of equal length.
    sources: [&'a Automaton; NUM_SOURCES],
    options: SuffixOptions,
    found: BinaryHeap<Candidate>,
}

struct Candidate {
    /// Probability that the node and its ancestors are accepted.
    probability: f32,
    token: u32,
    parent: Option<u16>,
    /// The longest context in each source, without this token.
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

    /// Tokens that may follow a place, with their probabilities.
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
            // Stable: of equally frequent followers the newest is first.
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
    /// If two nodes are equally likely, the shallower one is first: the one with the earlier
    /// parent; then any fixed order.
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
