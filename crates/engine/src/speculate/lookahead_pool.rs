//! The n-grams of lookahead decoding: the window adds those that it found, and drafts take branches
//! to verify.
//!
//! In lookahead decoding (Fu et al., "Break the sequential dependency of LLM inference using
//! lookahead decoding", 2024) a model guesses tokens at several later places at once, again and
//! again. Its tokens at neighbouring places in successive steps form an n-gram of its own. A
//! [`NgramPool`] stores those of one request by their first token. If the last token is the first
//! of some n-grams, the rest of each is a branch of the draft, the most recent first. The oldest
//! n-grams are dropped when there are too many with one first token, or in all.

use std::collections::VecDeque;

use folio_scheduler::RequestId;

use super::{Draft, Known, Propose, mix::Map};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LookaheadOptions {
    /// Tokens of an n-gram, the first included.
    pub size: usize,
    /// Most n-grams with the same first token.
    pub per_token: usize,
    /// Most n-grams of a request.
    pub capacity: usize,
    /// Whether n-grams of prompt and answer are added too.
    pub from_text: bool,
    /// Columns of the window: later places at which the model guesses in every step.
    pub window: usize,
}

impl Default for LookaheadOptions {
    fn default() -> Self {
        Self { size: 5, per_token: 7, capacity: 4096, from_text: true, window: 8 }
    }
}

/// The n-grams of one request.
pub struct NgramPool {
    options: LookaheadOptions,
    /// First token -> continuations, the most recent last, without duplicates.
    by_first: Map<u32, Vec<Entry>>,
    num_entries: usize,
    /// Times of use and the first tokens of the n-grams used, oldest first. A use that is not the
    /// latest of its entry, or has lost its entry, is skipped; there are at most twice as many uses
    /// as n-grams.
    uses: VecDeque<(u64, u32)>,
    clock: u64,
}

struct Entry {
    /// Time of its latest use.
    used: u64,
    rest: Box<[u32]>,
}

impl NgramPool {
    pub fn new(options: LookaheadOptions) -> Self {
        let LookaheadOptions { size, per_token, capacity, .. } = options;
        assert!(size >= 2 && per_token >= 1 && capacity >= 1, "a pool that keeps nothing: {options:?}");
        Self { options, by_first: Map::default(), num_entries: 0, uses: VecDeque::new(), clock: 0 }
    }

    /// Adds an n-gram, or makes it the most recent.
    pub fn insert(&mut self, ngram: &[u32]) {
        assert_eq!(ngram.len(), self.options.size, "tokens of an n-gram");
        self.clock += 1;
        let (first, rest) = (ngram[0], &ngram[1..]);
        let entries = self.by_first.entry(first).or_default();
        let mut entry = match entries.iter().position(|entry| *entry.rest == *rest) {
            Some(known) => entries.remove(known),
            None => {
                self.num_entries += 1;
                Entry { used: 0, rest: rest.into() }
            }
        };
        entry.used = self.clock;
        entries.push(entry);
        if entries.len() > self.options.per_token {
            entries.remove(0);
            self.num_entries -= 1;
        }
        self.uses.push_back((self.clock, first));
        self.shrink();
    }

    /// Continuations of `first`, the most recent first.
    pub fn branches(&self, first: u32) -> impl Iterator<Item = &[u32]> {
        self.by_first.get(&first).into_iter().flatten().rev().map(|entry| &*entry.rest)
    }

    pub fn len(&self) -> usize {
        self.num_entries
    }

    pub fn is_empty(&self) -> bool {
        self.num_entries == 0
    }

    fn shrink(&mut self) {
        while self.num_entries > self.options.capacity {
            // Every entry has its latest use in the queue, so there is one.
            let Some((used, first)) = self.uses.pop_front() else { return };
            if self.is_latest(used, first) {
                self.drop_oldest(first);
            }
        }
        if self.uses.len() > 2 * self.options.capacity {
            let mut uses = std::mem::take(&mut self.uses);
            uses.retain(|&(used, first)| self.is_latest(used, first));
            self.uses = uses;
        }
    }

    /// Whether a use is the latest of an entry. Entries of one token are in the order of their
    /// uses.
    fn is_latest(&self, used: u64, first: u32) -> bool {
        self.by_first.get(&first).is_some_and(|entries| entries.binary_search_by_key(&used, |entry| entry.used).is_ok())
    }

    fn drop_oldest(&mut self, first: u32) {
        let Some(entries) = self.by_first.get_mut(&first) else { return };
        entries.remove(0);
        self.num_entries -= 1;
        if entries.is_empty() {
            self.by_first.remove(&first);
        }
    }
}

/// The pools of all requests.
pub struct LookaheadPools {
    options: LookaheadOptions,
    requests: Map<u64, Pooled>,
}

struct Pooled {
    pool: NgramPool,
    /// Tokens of the text whose n-grams were added.
    taken: usize,
}

impl LookaheadPools {
    pub fn new(options: LookaheadOptions) -> Self {
        Self { options, requests: Map::default() }
    }

    /// The pool of a request, for its window to fill.
    pub fn pool(&mut self, id: RequestId) -> &mut NgramPool {
        &mut self.pooled(id).pool
    }

    fn pooled(&mut self, id: RequestId) -> &mut Pooled {
        let options = self.options;
        self.requests.entry(id.0).or_insert_with(|| Pooled { pool: NgramPool::new(options), taken: 0 })
    }
}

impl Propose for LookaheadPools {
    fn propose(&mut self, request: Known<'_>, most: usize, draft: &mut Draft) {
        self.observe(request);
        let Known { id, tokens, .. } = request;
        let Some(&last) = tokens.last() else { return };
        for branch in self.pool(id).branches(last) {
            let mut parent = None;
            for &token in branch {
                if draft.room(most) == 0 {
                    return;
                }
                parent = Some(draft.push(token, parent));
            }
        }
    }

    fn observe(&mut self, Known { id, tokens, .. }: Known<'_>) {
        let LookaheadOptions { size, capacity, from_text, .. } = self.options;
        if !from_text {
            return;
        }
        let pooled = self.pooled(id);
        // Only the last tokens of a long prompt, as many as the pool holds.
        let before = pooled.taken.max(tokens.len().saturating_sub(capacity));
        let from = (before + 1).saturating_sub(size).min(tokens.len());
        if tokens.len() > pooled.taken {
            tokens[from..].windows(size).for_each(|ngram| pooled.pool.insert(ngram));
            pooled.taken = tokens.len();
        }
    }

    fn forget(&mut self, id: RequestId) {
        self.requests.remove(&id.0);
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{mix::random_tokens, rig::known},
        *,
    };

    const ID: RequestId = RequestId(3);

    /// A pool as a list of n-grams, the most recent first.
    fn naive_insert(list: &mut Vec<Vec<u32>>, ngram: &[u32], options: LookaheadOptions) {
        list.retain(|known| known != ngram);
        list.insert(0, ngram.to_vec());
        let of_first: Vec<_> = (0..list.len()).filter(|&at| list[at][0] == ngram[0]).collect();
        if let Some(&oldest) = of_first.get(options.per_token) {
            list.remove(oldest);
        }
        list.truncate(options.capacity);
    }

    #[test]
    fn a_pool_is_a_bounded_list_most_recent_first() {
        for seed in 0..40 {
            let size = 2 + seed as usize % 3;
            let options = LookaheadOptions {
                size,
                per_token: 1 + seed as usize % 5,
                capacity: 1 + seed as usize % 17,
                from_text: false,
                window: 0,
            };
            let (mut pool, mut list) = (NgramPool::new(options), Vec::new());
            let tokens = random_tokens(seed, 600, 3 + seed % 5);
            for ngram in tokens.windows(size) {
                pool.insert(ngram);
                naive_insert(&mut list, ngram, options);
                assert_eq!(pool.len(), list.len(), "seed {seed}");
                for first in 0..8 {
                    let expected: Vec<_> = list.iter().filter(|known| known[0] == first).map(|k| &k[1..]).collect();
                    assert_eq!(pool.branches(first).collect::<Vec<_>>(), expected, "seed {seed}");
                }
                assert!(pool.uses.len() <= 2 * options.capacity && pool.len() <= options.capacity);
            }
        }
    }

    #[test]
    fn branches_share_what_they_begin_with() {
        let options = LookaheadOptions { size: 4, from_text: false, ..LookaheadOptions::default() };
        let mut pools = LookaheadPools::new(options);
        for ngram in [[1, 2, 3, 4], [9, 2, 3, 4], [1, 2, 5, 6], [1, 7, 8, 9]] {
            pools.pool(ID).insert(&ngram);
        }
        let propose = |pools: &mut LookaheadPools, most| {
            let mut draft = Draft::default();
            pools.propose(known(ID, &[0, 1]), most, &mut draft);
            draft
        };
        let draft = propose(&mut pools, 63);
        assert_eq!(draft.tokens(), [7, 8, 9, 2, 5, 6, 3, 4]);
        assert_eq!(draft.parents(), [None, Some(0), Some(1), None, Some(3), Some(4), Some(3), Some(6)]);
        for most in 0..9 {
            let mut expected = draft.clone();
            expected.truncate(most);
            assert_eq!(propose(&mut pools, most), expected);
        }
    }

    #[test]
    fn text_goes_in_once_and_in_pieces() {
        let options = LookaheadOptions { size: 3, per_token: 100, capacity: 1000, ..LookaheadOptions::default() };
        let tokens = random_tokens(8, 200, 6);
        let (mut whole, mut pieces) = (LookaheadPools::new(options), LookaheadPools::new(options));
        whole.observe(known(ID, &tokens));
        for len in (0..200).step_by(7).chain([200, 200]) {
            pieces.observe(known(ID, &tokens[..len]));
        }
        let (whole, pieces) = (whole.pool(ID), pieces.pool(ID));
        assert_eq!((whole.clock, pieces.clock), (198, 198));
        for first in 0..6 {
            assert!(whole.branches(first).eq(pieces.branches(first)));
        }
        let expected: std::collections::HashSet<_> = tokens.windows(3).collect();
        assert_eq!(whole.len(), expected.len());
    }

    #[test]
    fn of_a_long_prompt_only_the_end_is_read() {
        let options = LookaheadOptions { size: 3, per_token: 2, capacity: 50, ..LookaheadOptions::default() };
        let mut pools = LookaheadPools::new(options);
        pools.observe(known(ID, &random_tokens(1, 100_000, 50_000)));
        let pool = pools.pool(ID);
        assert!(pool.clock <= 50 && pool.len() >= 48, "{} of {}", pool.len(), pool.clock);
    }

    #[test]
    fn requests_are_apart_and_forgotten() {
        let mut pools = LookaheadPools::new(LookaheadOptions { size: 3, ..LookaheadOptions::default() });
        pools.observe(known(RequestId(1), &[1, 2, 3]));
        let mut draft = Draft::default();
        pools.propose(known(ID, &[1]), 8, &mut draft);
        pools.propose(known(ID, &[]), 8, &mut draft);
        assert!(draft.is_empty() && pools.pool(ID).is_empty());
        pools.propose(known(RequestId(1), &[1, 2, 3, 1]), 8, &mut draft);
        assert_eq!(draft, Draft::chain([2, 3]));
        pools.forget(RequestId(1));
        assert!(pools.pool(RequestId(1)).is_empty());
        pools.forget(RequestId(1));
        pools.forget(ID);
        assert!(pools.requests.is_empty());
    }

    #[test]
    #[should_panic(expected = "a pool that keeps nothing")]
    fn options_are_checked() {
        NgramPool::new(LookaheadOptions { size: 1, ..LookaheadOptions::default() });
    }
}
