//! Walks by hand: their ends, the rows they read and the state they leave.

use std::sync::Arc;

use folio_engine::{
    SamplingParams, SamplingState,
    speculate::{Draft, Place, Walk, walk},
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

/// Logits that favour one token; for token 99, logits with one that is not a number.
fn logits(favoured: u32) -> Vec<f32> {
    let mut logits: Vec<f32> = (0..VOCAB as u32).map(|token| if token == favoured { 1.0 } else { 0.0 }).collect();
    if favoured == 99 {
        logits[3] = f32::NAN;
    }
    logits
}

/// Verifies a draft on logits that favour these tokens, row by row.
fn verify(draft: &Draft, state: &mut SamplingState, place: Place, favoured: &[u32]) -> Walk {
    walk(draft, state, place, |state, row, position| state.sample(&mut logits(favoured[row]), position))
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
    // Rows: the last token's, then those after 2, 4, 3, 5, 1, 6.
    for (favoured, expected, accepted) in [
        ([4, 0, 5, 0, 6, 0, 3], vec![4, 5, 6, 3], vec![1, 3, 5]),
        ([4, 0, 1, 0, 6, 2, 3], vec![4, 1, 2], vec![1, 4]),
        ([2, 3, 5, 3, 6, 0, 3], vec![2, 3, 3], vec![0, 2]),
        ([3, 3, 5, 3, 6, 0, 3], vec![3], vec![]),
        // Tokens of other branches do not count.
        ([2, 5, 5, 3, 6, 0, 3], vec![2, 5], vec![0]),
    ] {
        let walk = verify(&tree(), &mut state(greedy()), FAR, &favoured);
        assert_eq!((tokens(&walk), &walk.accepted), (expected, &accepted), "{favoured:?}");
        assert!(!walk.has_ended && walk.failure.is_none());
    }
}

#[test]
fn a_row_that_is_not_a_number_fails_only_who_comes_to_it() {
    let spared = verify(&tree(), &mut state(greedy()), FAR, &[4, 99, 1, 99, 99, 2, 99]);
    assert_eq!((tokens(&spared), spared.failure), (vec![4, 1, 2], None));
    let failed = verify(&tree(), &mut state(greedy()), FAR, &[4, 0, 5, 0, 99, 0, 0]);
    assert_eq!((tokens(&failed), &failed.accepted), (vec![4, 5], &vec![1, 3]));
    let failure = failed.failure.expect("a failure").to_string();
    assert_eq!(failure, "the logit of token 3 is NaN, but must be a finite number");
}

#[test]
fn a_stop_token_ends_the_walk_once_it_may() {
    let draft = Draft::chain([2, EOS, 3]);
    let favoured = [2, EOS, 3, 4];
    let walk = verify(&draft, &mut state(greedy()), FAR, &favoured);
    assert_eq!((tokens(&walk), &walk.accepted, walk.has_ended), (vec![2, EOS], &vec![0], true));
    // Before `min_tokens` it is not even sampled: the lowest other token is.
    let early = SamplingParams { min_tokens: 2, ..greedy() };
    let walk = verify(&draft, &mut state(early), FAR, &favoured);
    assert_eq!((tokens(&walk), walk.has_ended), (vec![2, 0], false));
    let ignored = SamplingParams { ignore_eos: true, ..greedy() };
    let walk = verify(&draft, &mut state(ignored.clone()), FAR, &favoured);
    assert_eq!((tokens(&walk), walk.has_ended), (vec![2, EOS, 3, 4], false));
    let own = SamplingParams { stop_token_ids: vec![2], ..ignored };
    let walk = verify(&draft, &mut state(own), FAR, &favoured);
    assert_eq!((tokens(&walk), walk.has_ended), (vec![2], true));
}

#[test]
fn the_longest_length_ends_the_walk() {
    let draft = Draft::chain([2, 3, 4]);
    for (max_len, expected) in [(11, vec![2]), (13, vec![2, 3, 4]), (14, vec![2, 3, 4, 5]), (15, vec![2, 3, 4, 5])] {
        let place = Place { max_len, ..FAR };
        let walk = verify(&draft, &mut state(greedy()), place, &[2, 3, 4, 5]);
        assert_eq!(walk.accepted.len() + 1, expected.len());
        assert_eq!((tokens(&walk), walk.has_ended), (expected, max_len < 15), "{max_len}");
    }
}

/// A penalty counts the tokens of the path, and those alone.
#[test]
fn states_observe_what_is_put_out() {
    let params = SamplingParams { frequency_penalty: 0.6, ..greedy() };
    let mut state = state(params);
    // The second 2 is penalized for the first, and the third would be for two.
    let draft = Draft::chain([2, 2, 2, 2]);
    let walk = verify(&draft, &mut state, FAR, &[2; 5]);
    assert_eq!(tokens(&walk), [2, 2, 0]);
    assert_eq!(state.sample(&mut logits(2), 13).map(|sampled| sampled.token), Ok(1));
}
