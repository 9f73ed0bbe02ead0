//! Prompt lookup: drafts the tokens that followed an earlier occurrence of the last few tokens.
//!
//! The last `n` tokens are searched in the prompt and the answer, from the longest `n` to the
//! shortest, and the tokens after the latest occurrence are the draft. Answers that quote their
//! prompt (edits of a file, summaries) are mostly such copies. For every `n` a map has the latest
//! place of each n-gram, so that a proposal takes one look-up for each `n`, however long the
//! history; each token is added to the maps once.

use folio_scheduler::RequestId;

use super::{
    Draft, Known, Propose,
    mix::{Map, longer},
};

/// Lengths of the n-gram that is searched: at most `max` tokens, and at least `min`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NgramOptions {
    pub min: usize,
    pub max: usize,
}

impl Default for NgramOptions {
    fn default() -> Self {
        Self { min: 2, max: 4 }
    }
}

pub struct Ngram {
    options: NgramOptions,
    requests: Map<u64, Index>,
}

/// The latest places of the n-grams of one request.
#[derive(Default)]
struct Index {
    /// N-grams that end up to this place were added. The one at the very end is not, because it
    /// would find itself.
    indexed: usize,
    /// The hash of an n-gram, read backwards -> the place after it. Tokens are compared, so
    /// collisions do no harm.
    latest: Map<u64, u32>,
}

impl Ngram {
    pub fn new(options: NgramOptions) -> Self {
        let NgramOptions { min, max } = options;
        assert!(1 <= min && min <= max, "n-grams of {min} to {max} tokens");
        Self { options, requests: Map::default() }
    }
}

impl Propose for Ngram {
    fn propose(&mut self, Known { id, tokens, .. }: Known<'_>, most: usize, draft: &mut Draft) {
        let index = self.requests.entry(id.0).or_default();
        index.extend(tokens, self.options);
        let Some(from) = index.find(tokens, self.options) else { return };
        // A copy that reaches the end continues with its own tokens, so that a periodic text
        // repeats.
        let period = tokens.len() - from;
        let (mut parent, mut at) = (None, 0);
        while draft.room(most) > 0 {
            parent = Some(draft.push(tokens[from + at], parent));
            at = (at + 1) % period;
        }
    }

    fn observe(&mut self, Known { id, tokens, .. }: Known<'_>) {
        self.requests.entry(id.0).or_default().extend(tokens, self.options);
    }

    fn forget(&mut self, id: RequestId) {
        self.requests.remove(&id.0);
    }
}

impl Index {
    fn extend(&mut self, tokens: &[u32], options: NgramOptions) {
        for end in self.indexed + 1..tokens.len() {
            for (_, hash) in suffixes(&tokens[..end], options) {
                self.latest.insert(hash, end as u32);
            }
            self.indexed = end;
        }
    }

    /// The place after the latest earlier occurrence of the longest n-gram that ends `tokens`.
    fn find(&self, tokens: &[u32], options: NgramOptions) -> Option<usize> {
        let found = suffixes(tokens, options).filter_map(|(n, hash)| {
            let place = *self.latest.get(&hash)? as usize;
            let is_same = place < tokens.len() && tokens[..place].ends_with(&tokens[tokens.len() - n..]);
            is_same.then_some(place)
        });
        found.last()
    }
}

/// The n-grams at the end of `tokens`, shortest first: length and hash.
fn suffixes(tokens: &[u32], options: NgramOptions) -> impl Iterator<Item = (usize, u64)> {
    let hashes = tokens.iter().rev().take(options.max).scan(0, |hash, &token| {
        *hash = longer(*hash, token);
        Some(*hash)
    });
    (1..).zip(hashes).skip(options.min - 1)
}

#[cfg(test)]
mod tests {
    use super::{
        super::{mix::random_tokens, rig::known},
        *,
    };

    const ID: RequestId = RequestId(1);

    fn naive(tokens: &[u32], options: NgramOptions, most: usize) -> Vec<u32> {
        for n in (options.min..=options.max.min(tokens.len())).rev() {
            let (len, last) = (tokens.len(), &tokens[tokens.len() - n..]);
            if let Some(place) = (n..len).rev().find(|&place| tokens[place - n..place] == *last) {
                let mut text = tokens.to_vec();
                (place..place + most).for_each(|from| text.push(text[from]));
                return text.split_off(len);
            }
        }
        Vec::new()
    }

    fn proposal(method: &mut impl Propose, tokens: &[u32], most: usize) -> Vec<u32> {
        let mut draft = Draft::default();
        method.propose(known(ID, tokens), most, &mut draft);
        assert!(draft.is_chain());
        draft.tokens().to_vec()
    }

    #[test]
    fn proposals_are_those_of_a_search() {
        for seed in 0..60 {
            let (min, alphabet) = (1 + seed as usize % 3, 2 + seed % 4);
            let options = NgramOptions { min, max: min + seed as usize % 5 };
            let tokens = random_tokens(seed, 220, alphabet);
            let mut method = Ngram::new(options);
            // Some proposals are skipped: verification may give several tokens at a time.
            for len in (0..=tokens.len()).filter(|len| !(len * 7 + seed as usize).is_multiple_of(3)) {
                let most = len % 12;
                let expected = naive(&tokens[..len], options, most);
                assert_eq!(proposal(&mut method, &tokens[..len], most), expected, "seed {seed}, {len} tokens");
            }
        }
    }

    #[test]
    fn the_longest_match_wins_and_then_the_latest() {
        let options = NgramOptions { min: 1, max: 3 };
        let propose = |tokens: &[u32]| proposal(&mut Ngram::new(options), tokens, 2);
        assert_eq!(propose(&[1, 2, 3, 70, 9, 2, 3, 80, 1, 2, 3]), [70, 9], "three tokens beat two");
        assert_eq!(propose(&[1, 2, 3, 70, 1, 2, 3, 80, 1, 2, 3]), [80, 1]);
        assert_eq!(propose(&[5, 5]), [5, 5], "a period goes on");
        assert!(propose(&[1, 2, 3]).is_empty());
        assert!(propose(&[]).is_empty());
    }

    #[test]
    fn a_token_is_indexed_once_for_each_size() {
        let tokens = random_tokens(1, 100_000, 50_000);
        let options = NgramOptions { min: 2, max: 4 };
        let mut method = Ngram::new(options);
        method.observe(known(ID, &tokens[..99_000]));
        for len in 99_000..=tokens.len() {
            proposal(&mut method, &tokens[..len], 4);
        }
        let index = &method.requests[&ID.0];
        assert_eq!(index.indexed, tokens.len() - 1);
        assert!(index.latest.len() <= 3 * tokens.len());
    }

    #[test]
    fn the_draft_before_is_kept_and_counted() {
        let mut method = Ngram::new(NgramOptions::default());
        let mut draft = Draft::chain([3, 9]);
        method.propose(known(ID, &[1, 2, 3, 4, 5, 1, 2]), 5, &mut draft);
        assert_eq!(draft.tokens(), [3, 9, 4, 5, 1]);
        assert_eq!(draft.parents(), [None, Some(0), Some(0), Some(2), Some(3)]);
        let mut draft = Draft::default();
        method.propose(known(ID, &[1, 2, 3, 4, 5, 1, 2]), 1000, &mut draft);
        assert_eq!(draft.len(), Draft::MOST_NODES);
        method.propose(known(ID, &[1, 2, 3, 4, 5, 1, 2]), 5, &mut draft);
        assert_eq!(draft.len(), Draft::MOST_NODES);
    }

    #[test]
    fn requests_are_apart_and_forgotten() {
        let mut method = Ngram::new(NgramOptions::default());
        method.observe(known(RequestId(2), &[1, 2, 3, 4, 1, 2]));
        assert!(proposal(&mut method, &[9, 1, 2], 3).is_empty());
        method.forget(RequestId(2));
        method.forget(ID);
        assert!(method.requests.is_empty());
        // A request that reuses an id has another text, and none of the old one's n-grams.
        assert_eq!(proposal(&mut method, &[7, 8, 7, 8], 3), [7, 8, 7]);
    }

    #[test]
    #[should_panic(expected = "n-grams of 3 to 2 tokens")]
    fn sizes_are_checked() {
        Ngram::new(NgramOptions { min: 3, max: 2 });
    }
}
