//! Drafted tokens, shared answers, and forgetting.

use super::{
    super::{mix::random_tokens, rig::known},
    *,
};

const ID: RequestId = RequestId(4);
const OWNER: Owner = Owner { tenant: 1, salt: 9 };

fn proposal(method: &mut Suffix, tokens: &[u32], most: usize) -> Draft {
    proposal_to(method, OWNER.salt, tokens, most)
}

fn proposal_to(method: &mut Suffix, salt: u64, tokens: &[u32], most: usize) -> Draft {
    let mut draft = Draft::default();
    method.propose(Known { id: ID, owner: Owner { tenant: 1, salt }, tokens }, most, &mut draft);
    draft
}

fn children(draft: &Draft, parent: Option<u16>) -> Vec<u32> {
    draft.tokens().iter().zip(draft.parents()).filter(|(_, p)| **p == parent).map(|(&token, _)| token).collect()
}

#[test]
fn a_long_repeat_is_followed_as_a_chain() {
    let mut tokens: Vec<u32> = (0..200).collect();
    tokens.extend(10..40);
    let draft = proposal(&mut Suffix::new(SuffixOptions::default()), &tokens, 16);
    assert_eq!(draft, Draft::chain(40..56));
}

#[test]
fn a_short_context_promises_little() {
    let options = SuffixOptions { min_probability: 0.3, ..SuffixOptions::default() };
    let draft = proposal(&mut Suffix::new(options), &[1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2], 16);
    // 2/3, then 3/4 of that, 4/5, ...: 2 / (2 + depth).
    assert_eq!(draft, Draft::chain([3, 4, 5, 6]));
    assert!(proposal(&mut Suffix::new(options), &[1, 2], 16).is_empty());
}

#[test]
fn what_came_more_often_comes_first() {
    // After 1, 2: three times 7, twice 8, once 9; the text around differs every time.
    let mut tokens = Vec::new();
    for (at, follower) in [7, 8, 7, 9, 8, 7].into_iter().enumerate() {
        tokens.extend([100 + at as u32, 1, 2, follower]);
    }
    tokens.extend([200, 1, 2]);
    let draft = proposal(&mut Suffix::new(SuffixOptions::default()), &tokens, 3);
    assert_eq!(draft.tokens()[0], 7);
    let draft = proposal(&mut Suffix::new(SuffixOptions::default()), &tokens, 20);
    assert_eq!(children(&draft, None), [7, 8, 9]);
    let seven = draft.child(None, 7);
    let mut behind = children(&draft, seven);
    behind.sort_unstable();
    assert_eq!(behind, [101, 103, 200]);
}

/// Compares every node's probability with a search of the text, and that of every token without a
/// node.
#[test]
fn the_tree_is_the_likeliest_there_is() {
    let (most, min_probability, mut num_nodes) = (24, 0.01, 0);
    for seed in 0..40 {
        let alphabet = 2 + seed as u32 % 4;
        let tokens = random_tokens(seed, 120, u64::from(alphabet));
        let options = SuffixOptions { min_probability, shared_bytes: 0, ..SuffixOptions::default() };
        let draft = proposal(&mut Suffix::new(options), &tokens, most);
        // Probabilities of nodes, and of tokens after them without a node.
        let (mut reached, mut left_out): (Vec<f32>, Vec<f32>) = (vec![0.0; draft.len()], Vec::new());
        for parent in std::iter::once(None).chain((0..draft.len() as u16).map(Some)) {
            let up = std::iter::successors(parent, |&node| draft.parents()[usize::from(node)]);
            let mut path: Vec<u32> = up.map(|node| draft.tokens()[usize::from(node)]).collect();
            path.reverse();
            let above = parent.map_or(1.0, |parent| reached[usize::from(parent)]);
            for token in 0..alphabet {
                let probability = above * naive_share(&tokens, &path, token, options.min_match);
                match draft.child(parent, token) {
                    Some(node) => reached[usize::from(node)] = probability,
                    None => left_out.push(probability),
                }
            }
        }
        num_nodes += draft.len();
        assert!(reached.is_sorted_by(|a, b| *a >= *b - 1e-6), "seed {seed}: {reached:?}");
        let least = if draft.len() == most { reached[most - 1] } else { min_probability };
        assert!(least >= min_probability - 1e-6, "seed {seed}: {reached:?}");
        assert!(left_out.iter().all(|&other| other <= least + 1e-6), "seed {seed}: {left_out:?} and {reached:?}");
    }
    assert!(num_nodes > 20 * most, "{num_nodes} nodes");
}

/// As `weigh` with one source. The longest context is the longest suffix of text and path that
/// occurs in the text (before its end, if there is no path); the next is its longest suffix that
/// occurs more often.
fn naive_share(text: &[u32], path: &[u32], token: u32, min_match: usize) -> f32 {
    let whole = [text, path].concat();
    let count = |string: &[u32]| text.windows(string.len()).filter(|window| *window == string).count();
    let least = if path.is_empty() { 2 } else { 1 };
    let end = |n: usize| &whole[whole.len() - n..];
    let Some(longest) = (1..=text.len().min(whole.len())).rev().find(|&n| count(end(n)) >= least) else { return 0.0 };
    let next = (1..longest).rev().find(|&n| count(end(n)) > count(end(longest)));
    let (mut share, mut left) = (0.0, 1.0);
    for n in [Some(longest), next].into_iter().flatten().filter(|&n| n >= min_match) {
        let behind = |token| count(&[end(n), &[token]].concat()).min(255);
        let total: usize = (0..10).map(behind).sum();
        if total > 0 {
            let escape = 1.0 / (total + n) as f32;
            share += left * (1.0 - escape) * behind(token) as f32 / total as f32;
            left *= escape;
        }
    }
    share
}

#[test]
fn fewer_nodes_are_the_first_of_more() {
    for seed in 0..20 {
        let tokens = random_tokens(seed, 300, 3);
        let whole = proposal(&mut Suffix::new(SuffixOptions::default()), &tokens, 63);
        for most in 0..40 {
            let mut expected = whole.clone();
            expected.truncate(most);
            assert_eq!(proposal(&mut Suffix::new(SuffixOptions::default()), &tokens, most), expected);
        }
    }
}

#[test]
fn token_by_token_is_as_all_at_once() {
    let tokens = random_tokens(9, 400, 4);
    let mut method = Suffix::new(SuffixOptions::default());
    for len in 0..=tokens.len() {
        let draft = proposal(&mut method, &tokens[..len], 12);
        if len % 37 == 0 {
            assert_eq!(draft, proposal(&mut Suffix::new(SuffixOptions::default()), &tokens[..len], 12));
        }
    }
    let mut observed = Suffix::new(SuffixOptions::default());
    observed.observe(known(ID, &tokens[..399]));
    assert_eq!(proposal(&mut observed, &tokens, 12), proposal(&mut method, &tokens, 12));
}

#[test]
fn past_answers_help_other_requests() {
    let mut method = Suffix::new(SuffixOptions::default());
    let tokens = [900, 901, 20, 21, 22, 23];
    assert!(proposal(&mut method, &tokens, 8).is_empty());
    method.learn(OWNER, &(0..100).collect::<Vec<_>>());
    assert_eq!(proposal(&mut method, &tokens, 8), Draft::chain(24..32));
    // Its own text is the longer match.
    let own: Vec<u32> = [901, 20, 21, 22, 23, 77, 78].into_iter().chain(tokens).collect();
    method.forget(ID);
    assert_eq!(proposal(&mut method, &own, 2), Draft::chain([77, 78]));
    let mut alone = Suffix::new(SuffixOptions { shared_bytes: 0, ..SuffixOptions::default() });
    alone.learn(OWNER, &(0..100).collect::<Vec<_>>());
    assert!(proposal(&mut alone, &tokens, 8).is_empty());
    assert_eq!(alone.shared_bytes(), 0);
}

#[test]
fn past_answers_are_those_of_the_salt() {
    let mut method = Suffix::new(SuffixOptions::default());
    let tokens = [900, 901, 20, 21, 22, 23];
    method.learn(Owner { tenant: 2, salt: 5 }, &(0..100).collect::<Vec<_>>());
    for salt in [0, 9, 6] {
        assert!(proposal_to(&mut method, salt, &tokens, 8).is_empty(), "salt {salt}");
    }
    assert_eq!(proposal_to(&mut method, 5, &tokens, 8), Draft::chain(24..32), "what belongs to it still helps");
    method.learn(OWNER, &[22, 23, 70, 71]);
    assert_eq!(proposal(&mut method, &tokens, 2), Draft::chain([70, 71]));
    assert_eq!(proposal_to(&mut method, 5, &tokens, 2), Draft::chain([24, 25]));
}

#[test]
fn requests_are_read_as_far_as_there_is_room() {
    let text = |from: u32| -> Vec<u32> { (from..from + 20).chain(from..from + 10).collect() };
    let options = SuffixOptions { request_tokens: 70, ..SuffixOptions::default() };
    let mut method = Suffix::new(options);
    let ids = [1, 2, 3].map(RequestId);
    ids.iter().zip([100, 200, 300]).for_each(|(&id, from)| method.observe(known(id, &text(from))));
    assert_eq!((method.num_tokens, method.requests.len()), (60, 2), "the third has no room");
    assert!(method.request_bytes() <= 70 * SuffixOptions::TOKEN_BYTES);
    let draft = |method: &mut Suffix, id, tokens: &[u32]| {
        let mut draft = Draft::default();
        method.propose(known(id, tokens), 3, &mut draft);
        draft
    };
    assert_eq!(draft(&mut method, ids[0], &text(100)), Draft::chain(110..113));
    assert!(draft(&mut method, ids[2], &text(300)).is_empty());
    // A request that outgrows the room drops its automaton, and others can use the room.
    let grown: Vec<u32> = text(200).into_iter().chain(210..222).collect();
    assert!(draft(&mut method, ids[1], &grown).is_empty());
    assert_eq!(method.num_tokens, 30);
    assert_eq!(draft(&mut method, ids[2], &text(300)), Draft::chain(310..313));
    ids.into_iter().for_each(|id| method.forget(id));
    assert_eq!((method.num_tokens, method.request_bytes()), (0, 0));
}

#[test]
fn answers_do_not_run_into_each_other() {
    let mut method = Suffix::new(SuffixOptions::default());
    method.learn(OWNER, &[1, 2, 3, 4]);
    method.learn(OWNER, &[5, 6, 7, 8]);
    assert_eq!(proposal(&mut method, &[9, 2, 3], 8), Draft::chain([4]));
    method.forget(ID);
    assert!(proposal(&mut method, &[9, 3, 4], 8).is_empty());
}

#[test]
fn past_answers_stay_within_their_bytes() {
    for (alphabet, answer_tokens) in [(2, 50), (1000, 300), (100_000, 2000)] {
        let shared_bytes = 1 << 20;
        let mut method = Suffix::new(SuffixOptions { shared_bytes, ..SuffixOptions::default() });
        let first: Vec<u32> = (200_000..200_050).collect();
        method.learn(OWNER, &first);
        assert!(!proposal(&mut method, &first[..10], 4).is_empty());
        let mut most = 0;
        for answer in 0..20_000 / answer_tokens {
            method.learn(OWNER, &random_tokens(answer, answer_tokens as usize, alphabet));
            most = most.max(method.shared_bytes());
        }
        assert!(most <= shared_bytes, "{most} bytes");
        assert!(most > shared_bytes / 6, "{most} bytes: most of it unused");
        method.forget(ID);
        assert!(proposal(&mut method, &first[..10], 4).is_empty(), "the oldest is forgotten");
        let latest = random_tokens(20_000 / answer_tokens - 1, answer_tokens as usize, alphabet);
        assert!(!proposal(&mut method, &latest[..20], 4).is_empty(), "the latest is not");
    }
}

#[test]
fn requests_are_forgotten() {
    let mut method = Suffix::new(SuffixOptions::default());
    method.observe(known(RequestId(1), &[1, 2, 3, 1, 2]));
    assert!(method.request_bytes() > 0);
    assert!(proposal(&mut method, &[1, 2], 4).is_empty(), "another's text");
    method.forget(ID);
    method.forget(RequestId(1));
    assert_eq!((method.request_bytes(), method.requests.len()), (0, 0));
    assert_eq!(proposal(&mut method, &[8, 9, 7, 8, 9], 1), Draft::chain([7]));
}

#[test]
fn the_draft_before_is_kept_and_counted() {
    let mut tokens: Vec<u32> = (0..50).collect();
    tokens.extend(10..30);
    let mut draft = Draft::chain([30, 99]);
    Suffix::new(SuffixOptions::default()).propose(known(ID, &tokens), 4, &mut draft);
    assert_eq!((draft.tokens(), draft.parents()), (&[30, 99, 31, 32][..], &[None, Some(0), Some(0), Some(2)][..]));
}
