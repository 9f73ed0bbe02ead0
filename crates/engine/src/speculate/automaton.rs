//! A suffix automaton that grows by a token at a time and counts: the strings that its texts
//! contain, how often they occur, and the tokens that follow them.
//!
//! A state stands for all strings that end at the same places. The longest string names it, and its
//! link leads to the longest suffix that also ends elsewhere (Blumer et al., "The smallest
//! automaton recognizing the subwords of a text", 1985). Texts of n tokens together make at most 2n
//! states and 3n edges, in amortized O(1) time a token.
//!
//! A new occurrence of a string is one of all its suffixes, too many to count each time: in a run
//! of one token they are as many as its tokens. But a suffix is at least as frequent as the string.
//! Counts therefore stop at [`MOST_COUNTED`], the walk up the links stops at the first such count,
//! and no state is visited more often than that.

use super::mix::Map;

/// Count of a string that is this frequent or more.
pub(super) const MOST_COUNTED: u32 = 255;

/// Most bytes of a token in long texts: two states and three edges with their keys, in tables that
/// may be half empty.
pub(super) const TOKEN_BYTES: usize = 2 * STATE_BYTES * 2 + 3 * (EDGE_BYTES * 2 + KEY_BYTES * 16 / 7 + 1);
const STATE_BYTES: usize = size_of::<State>();
const EDGE_BYTES: usize = size_of::<Edge>();
/// With the byte that the map itself uses.
const KEY_BYTES: usize = size_of::<(u64, u32)>() + 1;

const ROOT: u32 = 0;
const NONE: u32 = u32::MAX;

pub(super) struct Automaton {
    /// The first state is that of the empty string.
    states: Vec<State>,
    edges: Vec<Edge>,
    /// State and token -> edge.
    by_token: Map<u64, u32>,
    /// The state of the whole text so far.
    last: u32,
    num_tokens: usize,
}

#[derive(Clone, Copy)]
struct State {
    /// Length of its longest string. The shortest is one longer than the longest of `link`.
    len: u32,
    /// None for the root.
    link: u32,
    /// Number of occurrences of its strings, at most [`MOST_COUNTED`].
    count: u32,
    first_edge: u32,
}

#[derive(Clone, Copy)]
struct Edge {
    token: u32,
    to: u32,
    /// The next older edge of the same state.
    next: u32,
}

/// A string of the texts: its state and its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    state: u32,
    pub length: usize,
}

impl Place {
    pub const EMPTY: Place = Place { state: ROOT, length: 0 };
}

impl Default for Automaton {
    fn default() -> Self {
        let root = State { len: 0, link: NONE, count: 0, first_edge: NONE };
        Self { states: vec![root], edges: Vec::new(), by_token: Map::default(), last: ROOT, num_tokens: 0 }
    }
}

impl Automaton {
    /// Begins a new text.
    pub fn begin(&mut self) {
        self.last = ROOT;
    }

    /// Adds a token to the text.
    pub fn push(&mut self, token: u32) {
        self.last = match self.edge(self.last, token) {
            Some(edge) => self.behind(self.last, edge),
            None => self.grow(token),
        };
        self.num_tokens += 1;
        let mut state = self.last;
        while state != ROOT && self.states[state as usize].count < MOST_COUNTED {
            self.states[state as usize].count += 1;
            state = self.states[state as usize].link;
        }
    }

    /// Tokens of all texts.
    pub fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    /// Bytes on the heap.
    pub fn bytes(&self) -> usize {
        let keys = (self.by_token.capacity() * 8).div_ceil(7) * KEY_BYTES;
        self.states.capacity() * STATE_BYTES + self.edges.capacity() * EDGE_BYTES + keys
    }

    /// The longest suffix of the text that also occurs elsewhere.
    pub fn repeated(&self) -> Place {
        self.shorter(Place { state: self.last, length: 0 }).unwrap_or(Place::EMPTY)
    }

    /// The longest suffix that occurs at more places.
    pub fn shorter(&self, place: Place) -> Option<Place> {
        let link = self.states[place.state as usize].link;
        (link != NONE).then(|| Place { state: link, length: self.states[link as usize].len as usize })
    }

    /// The longest suffix of a string and one more token that occurs at all.
    pub fn advance(&self, mut place: Place, token: u32) -> Place {
        loop {
            if let Some(edge) = self.edge(place.state, token) {
                return Place { state: self.edges[edge as usize].to, length: place.length + 1 };
            }
            match self.shorter(place) {
                Some(shorter) => place = shorter,
                None => return Place::EMPTY,
            }
        }
    }

    /// Whether the texts contain a string.
    #[cfg(test)]
    pub fn holds(&self, string: &[u32]) -> bool {
        let next = |state: u32, &token: &u32| self.edge(state, token).map(|edge| self.edges[edge as usize].to);
        string.iter().try_fold(ROOT, next).is_some()
    }

    /// The tokens that follow a string, with their counts; the newest edge first.
    pub fn followers(&self, place: Place) -> impl Iterator<Item = (u32, u32)> {
        self.edges_of(place.state).map(|edge| (edge.token, self.states[edge.to as usize].count))
    }

    /// The state of the text with a token that never followed it, nor any of its suffixes that end
    /// elsewhere.
    fn grow(&mut self, token: u32) -> u32 {
        let len = self.states[self.last as usize].len + 1;
        let new = self.add_state(State { len, link: ROOT, count: 0, first_edge: NONE });
        let mut state = self.last;
        while state != NONE {
            if let Some(edge) = self.edge(state, token) {
                self.states[new as usize].link = self.behind(state, edge);
                break;
            }
            self.add_edge(state, token, new);
            state = self.states[state as usize].link;
        }
        new
    }

    /// The state whose longest string is that of `state` followed by the edge's token. If the edge
    /// leads to a state with longer strings, these are split off.
    fn behind(&mut self, mut state: u32, edge: u32) -> u32 {
        let Edge { token, to, .. } = self.edges[edge as usize];
        let len = self.states[state as usize].len + 1;
        if self.states[to as usize].len == len {
            return to;
        }
        let split = self.add_state(State { len, first_edge: NONE, ..self.states[to as usize] });
        let edges: Vec<Edge> = self.edges_of(to).copied().collect();
        edges.iter().rev().for_each(|edge| self.add_edge(split, edge.token, edge.to));
        self.states[to as usize].link = split;
        while state != NONE {
            match self.edge(state, token) {
                Some(edge) if self.edges[edge as usize].to == to => self.edges[edge as usize].to = split,
                _ => break,
            }
            state = self.states[state as usize].link;
        }
        split
    }

    fn edge(&self, state: u32, token: u32) -> Option<u32> {
        self.by_token.get(&key(state, token)).copied()
    }

    fn edges_of(&self, state: u32) -> impl Iterator<Item = &Edge> {
        let at = |edge: u32| self.edges.get(edge as usize);
        std::iter::successors(at(self.states[state as usize].first_edge), move |edge| at(edge.next))
    }

    fn add_state(&mut self, state: State) -> u32 {
        self.states.push(state);
        (self.states.len() - 1) as u32
    }

    fn add_edge(&mut self, state: u32, token: u32, to: u32) {
        let edge = self.edges.len() as u32;
        let first = std::mem::replace(&mut self.states[state as usize].first_edge, edge);
        self.edges.push(Edge { token, to, next: first });
        self.by_token.insert(key(state, token), edge);
    }
}

fn key(state: u32, token: u32) -> u64 {
    u64::from(state) << 32 | u64::from(token)
}

#[cfg(test)]
mod tests {
    use super::{super::mix::random_tokens, *};

    fn of_texts(texts: &[Vec<u32>]) -> Automaton {
        let mut automaton = Automaton::default();
        for text in texts {
            automaton.begin();
            text.iter().for_each(|&token| automaton.push(token));
        }
        automaton
    }

    fn occurrences(texts: &[Vec<u32>], string: &[u32]) -> u32 {
        texts.iter().flat_map(|text| text.windows(string.len())).filter(|window| *window == string).count() as u32
    }

    /// Compares the followers of `string` with a search.
    fn check_followers(automaton: &Automaton, place: Place, texts: &[Vec<u32>], string: &[u32], alphabet: u32) {
        let mut found: Vec<_> = automaton.followers(place).collect();
        found.sort_unstable();
        let counted = |token| (token, occurrences(texts, &[string, &[token]].concat()).min(MOST_COUNTED));
        let expected: Vec<_> = (0..alphabet).map(counted).filter(|&(_, count)| count > 0).collect();
        assert_eq!(found, expected, "behind {string:?}");
    }

    #[test]
    fn the_end_of_a_growing_text_is_found_again() {
        for seed in 0..24 {
            let alphabet = 1 + seed % 4;
            let text = random_tokens(seed, 150, alphabet);
            let mut automaton = Automaton::default();
            for len in 1..=text.len() {
                automaton.push(text[len - 1]);
                let (place, tokens) = (automaton.repeated(), &text[..len]);
                let repeats = |n: &usize| occurrences(&[tokens.to_vec()], &tokens[len - n..]) > 1;
                assert_eq!(place.length, (1..len).take_while(repeats).last().unwrap_or(0), "seed {seed}, {len} tokens");
                if len % 10 == 0 && place.length > 0 {
                    let string = &tokens[len - place.length..];
                    check_followers(&automaton, place, &[tokens.to_vec()], string, alphabet as u32);
                }
            }
        }
    }

    #[test]
    fn several_texts_are_matched_and_counted() {
        for seed in 0..12 {
            let alphabet = 2 + seed % 3;
            let mut texts: Vec<_> = (0..5).map(|text| random_tokens(seed * 10 + text, 60, alphabet)).collect();
            texts.extend([texts[0].clone(), texts[1][..20].to_vec(), Vec::new()]);
            let automaton = of_texts(&texts);
            let query = random_tokens(1000 + seed, 80, alphabet + 1);
            let mut place = Place::EMPTY;
            for len in 1..=query.len() {
                place = automaton.advance(place, query[len - 1]);
                let occurs = |n: &usize| occurrences(&texts, &query[len - n..len]) > 0;
                assert_eq!(place.length, (1..=len).take_while(occurs).last().unwrap_or(0), "seed {seed}, {len} tokens");
                if place.length > 0 {
                    let string = &query[len - place.length..len];
                    check_followers(&automaton, place, &texts, string, alphabet as u32);
                    let shorter = automaton.shorter(place).expect("not the root");
                    if shorter.length > 0 {
                        let string = &query[len - shorter.length..len];
                        check_followers(&automaton, shorter, &texts, string, alphabet as u32);
                    }
                }
            }
        }
    }

    #[test]
    fn counts_are_exact_up_to_the_most() {
        let text = random_tokens(5, 900, 2);
        let automaton = of_texts(std::slice::from_ref(&text));
        for string in [&[0][..], &[1], &[0, 1], &[1, 1, 0], &[0, 0, 0, 1]] {
            let place = string.iter().fold(Place::EMPTY, |place, &token| automaton.advance(place, token));
            check_followers(&automaton, place, std::slice::from_ref(&text), string, 2);
        }
        let run = of_texts(&[vec![3; 1000]]);
        let behind = |length| {
            let place = (0..length).fold(Place::EMPTY, |place, _| run.advance(place, 3));
            run.followers(place).collect::<Vec<_>>()
        };
        assert_eq!(behind(1), [(3, MOST_COUNTED)]);
        assert_eq!((behind(744), behind(745), behind(746)), (vec![(3, 255)], vec![(3, 255)], vec![(3, 254)]));
        assert_eq!((behind(999), behind(1000)), (vec![(3, 1)], vec![]));
    }

    #[test]
    fn size_is_linear_in_tokens() {
        let nasty = (0..4096).map(|at| u32::from(at >= 2048)).collect::<Vec<_>>();
        let alternating = (0..4096).map(|at| (at % 2) * (at / 2 % 7)).collect();
        for text in [nasty, alternating, vec![1; 4096], random_tokens(1, 4096, 3), random_tokens(2, 4096, 30_000)] {
            let automaton = of_texts(&[text]);
            let (states, edges) = (automaton.states.len(), automaton.edges.len());
            assert!(states <= 2 * 4096 && edges <= 3 * 4096, "{states} states, {edges} edges");
            assert_eq!(edges, automaton.by_token.len());
            assert!(automaton.bytes() <= 4096 * TOKEN_BYTES, "{} bytes", automaton.bytes());
        }
    }

    #[test]
    fn an_empty_automaton_says_nothing() {
        let automaton = Automaton::default();
        assert_eq!((automaton.repeated(), automaton.advance(Place::EMPTY, 1)), (Place::EMPTY, Place::EMPTY));
        assert_eq!((automaton.followers(Place::EMPTY).count(), automaton.shorter(Place::EMPTY)), (0, None));
    }
}
