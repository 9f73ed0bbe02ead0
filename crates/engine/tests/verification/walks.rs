//! Walks by hand: where they end, what they look at and what they leave behind.

use std::sync::Arc;

use folio_device::Drawn;
use folio_engine::{
    SamplingParams, SamplingState,
    speculate::{Draft, Place, Walk, verify, verify_drawn},
};

const VOCAB: usize = 8;
const EOS: u32 = 7;
const FAR: Place = Place { position: 10, max_len: 100 };

fn greedy() -> SamplingParams {
    SamplingParams { temperature: 0.0, ..SamplingParams::default() }
}

fn state(params: SamplingParams) -> SamplingState {
    SamplingState::new(Arc::new(params), &[1], &[EOS], 0)
}

/// Rows that favour one token each; 99 is a row that is not a number.
fn rows(favoured: &[u32]) -> Vec<f32> {
    let row = |&token: &u32| (0..VOCAB as u32).map(move |other| if other == token { 1.0 } else { 0.0 });
    let mut rows: Vec<f32> = favoured.iter().flat_map(row).collect();
    for (row, _) in favoured.iter().enumerate().filter(|(_, token)| **token == 99) {
        rows[row * VOCAB + 3] = f32::NAN;
    }
    rows
}

fn tokens(walk: &Walk) -> Vec<u32> {
    walk.sampled.iter().map(|sampled| sampled.token).collect()
}

/// ```text
/// . - 2 - 3
///   \ 4 - 5 - 6
///       \ 1
/// ```
fn tree() -> Draft {
    let mut draft = Draft::default();
    let [two, four] = [2, 4].map(|token| draft.push(token, None));
    draft.push(3, Some(two));
    let five = draft.push(5, Some(four));
    draft.push(1, Some(four));
    draft.push(6, Some(five));
    draft
}

#[test]
fn walks_follow_what_is_sampled() {
    // Rows: the last token's, then those behind 2, 4, 3, 5, 1, 6.
    for (favoured, expected, accepted) in [
        ([4, 0, 5, 0, 6, 0, 3], vec![4, 5, 6, 3], vec![1, 3, 5]),
        ([4, 0, 1, 0, 6, 2, 3], vec![4, 1, 2], vec![1, 4]),
        ([2, 3, 5, 3, 6, 0, 3], vec![2, 3, 3], vec![0, 2]),
        ([3, 3, 5, 3, 6, 0, 3], vec![3], vec![]),
        // Tokens of other branches do not help.
        ([2, 5, 5, 3, 6, 0, 3], vec![2, 5], vec![0]),
    ] {
        let walk = verify(&tree(), &mut state(greedy()), FAR, &mut rows(&favoured));
        assert_eq!((tokens(&walk), &walk.accepted), (expected, &accepted), "{favoured:?}");
        assert!(!walk.has_ended && walk.failure.is_none());
    }
}

#[test]
fn a_row_that_is_not_a_number_fails_only_who_comes_to_it() {
    let spared = verify(&tree(), &mut state(greedy()), FAR, &mut rows(&[4, 99, 1, 99, 99, 2, 99]));
    assert_eq!((tokens(&spared), spared.failure), (vec![4, 1, 2], None));
    let failed = verify(&tree(), &mut state(greedy()), FAR, &mut rows(&[4, 0, 5, 0, 99, 0, 0]));
    assert_eq!((tokens(&failed), &failed.accepted), (vec![4, 5], &vec![1, 3]));
    let failure = failed.failure.expect("a failure").to_string();
    assert_eq!(failure, "the logit of token 3 is NaN, but must be a finite number");
}

#[test]
fn a_stop_token_ends_the_walk_once_it_may() {
    let draft = Draft::chain([2, EOS, 3]);
    let favoured = [2, EOS, 3, 4];
    let walk = verify(&draft, &mut state(greedy()), FAR, &mut rows(&favoured));
    assert_eq!((tokens(&walk), &walk.accepted, walk.has_ended), (vec![2, EOS], &vec![0], true));
    // Before it may, it is not even sampled: the lowest of the other tokens is.
    let early = SamplingParams { min_tokens: 2, ..greedy() };
    let walk = verify(&draft, &mut state(early), FAR, &mut rows(&favoured));
    assert_eq!((tokens(&walk), walk.has_ended), (vec![2, 0], false));
    let ignored = SamplingParams { ignore_eos: true, ..greedy() };
    let walk = verify(&draft, &mut state(ignored.clone()), FAR, &mut rows(&favoured));
    assert_eq!((tokens(&walk), walk.has_ended), (vec![2, EOS, 3, 4], false));
    let own = SamplingParams { stop_token_ids: vec![2], ..ignored };
    let walk = verify(&draft, &mut state(own), FAR, &mut rows(&favoured));
    assert_eq!((tokens(&walk), walk.has_ended), (vec![2], true));
}

#[test]
fn the_longest_length_ends_the_walk() {
    let draft = Draft::chain([2, 3, 4]);
    for (max_len, expected) in [(11, vec![2]), (13, vec![2, 3, 4]), (14, vec![2, 3, 4, 5]), (15, vec![2, 3, 4, 5])] {
        let place = Place { max_len, ..FAR };
        let walk = verify(&draft, &mut state(greedy()), place, &mut rows(&[2, 3, 4, 5]));
        assert_eq!(walk.accepted.len() + 1, expected.len());
        assert_eq!((tokens(&walk), walk.has_ended), (expected, max_len < 15), "{max_len}");
    }
}

/// A penalty counts the tokens on the way, and those alone.
#[test]
fn states_observe_what_is_put_out() {
    let params = SamplingParams { frequency_penalty: 0.6, ..greedy() };
    let mut state = state(params);
    // The second 2 pays for the first, and the third would for two.
    let draft = Draft::chain([2, 2, 2, 2]);
    let mut logits: Vec<f32> = rows(&[2, 2, 2, 2, 2]);
    let walk = verify(&draft, &mut state, FAR, &mut logits);
    assert_eq!(tokens(&walk), [2, 2, 0]);
    assert_eq!(state.sample(&mut rows(&[2]), 13).map(|sampled| sampled.token), Ok(1));
}

#[test]
fn what_a_device_drew_is_taken_as_far_as_it_is_come_to() {
    let drawn = |token| Drawn { token, failure: None, logprobs: None };
    let mut answers = [4, 0, 5, 0, 9, 0, 6, 77].map(drawn).into_iter();
    let walk = verify_drawn(&tree(), &mut state(greedy()), FAR, &mut answers);
    assert_eq!((tokens(&walk), walk.accepted), (vec![4, 5, 9], vec![1, 3]));
    assert_eq!(answers.next().map(|drawn| drawn.token), Some(0), "those behind are others'");
    // A device that says too little fails the request, and nobody else.
    let walk = verify_drawn(&tree(), &mut state(greedy()), FAR, &mut [4, 0].map(drawn).into_iter());
    assert_eq!((tokens(&walk), walk.accepted.len()), (vec![4], 1));
    assert!(walk.failure.is_some());
    // One that says an end token before it may come has not ended the answer.
    let early = SamplingParams { min_tokens: 2, ..greedy() };
    let mut answers = [EOS, EOS, EOS].map(drawn).into_iter();
    let walk = verify_drawn(&Draft::chain([EOS, EOS, EOS]), &mut state(early), FAR, &mut answers);
    assert_eq!((walk.sampled.len(), walk.accepted.len(), walk.has_ended), (3, 2, true));
}
