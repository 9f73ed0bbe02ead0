//! With drafts, good and bad, chains and trees, every request gets the tokens and logprobs that it
//! gets without, ends at the same token, and its sampling state is the same.

use folio_device::{Drawn, Draws};
use folio_engine::{
    Sampled, SamplingState,
    speculate::{Draft, Place, Walk, ancestors, walk},
};

use crate::{
    device::{asked, draw_all},
    exact_cases::{Answer, Case, Manner, draft},
    model::Random,
};

/// Counts over all cases: each situation has to occur.
#[derive(Debug, Default)]
struct Met {
    passes: usize,
    accepted: usize,
    /// Paths that are not the first nodes of their draft.
    scattered: usize,
    stopped: usize,
    stopped_with_drafts_left: usize,
    full: usize,
    failed: usize,
    failed_behind_drafts: usize,
    /// Rows off the path that are not numbers.
    spared: usize,
}

/// The path to each row of a draft, the last token's row first.
fn ways(draft: &Draft) -> Vec<Vec<usize>> {
    let words = ancestors(draft);
    let way = |word: &u64| (1..64).filter(|row| word >> row & 1 == 1).map(|row| row - 1).collect();
    words.iter().map(way).collect()
}

/// Rows of logits of the last token and all nodes.
fn rows(case: &Case, tokens: &[u32], draft: &Draft) -> Vec<Vec<f32>> {
    let behind = |way: Vec<usize>| -> Vec<f32> {
        let way = way.into_iter().map(|node| draft.tokens()[node]);
        case.row(&tokens.iter().copied().chain(way).collect::<Vec<_>>())
    };
    ways(draft).into_iter().map(behind).collect()
}

/// Checks that a walk is consistent.
fn check(walk: &Walk, draft: &Draft) {
    let ways = ways(draft);
    let way: Vec<usize> = walk.accepted.iter().map(|&node| usize::from(node)).collect();
    assert_eq!(way, way.last().map_or(vec![], |&last| ways[last + 1].clone()), "accepted nodes are a path");
    for (node, sampled) in way.iter().zip(&walk.sampled) {
        assert_eq!(draft.tokens()[*node], sampled.token, "an accepted node carries what was sampled");
    }
    assert_eq!(walk.sampled.len(), way.len() + usize::from(walk.failure.is_none()));
    assert!(walk.failure.is_none() || !walk.has_ended);
}

/// Answers a case in passes, on the host or with a device that samples ahead.
fn speculate(case: &Case, manner: Manner, plain: &Answer, on_device: bool, met: &mut Met) -> Answer {
    let mut random = Random(case.seed * 64 + manner.most as u64);
    let expected = plain.tokens();
    let mut tokens = case.prompt.clone();
    let mut answer = Answer { sampled: Vec::new(), failure: None, state: case.state(), is_stopped: false };
    loop {
        let draft = draft(manner, &expected[answer.sampled.len()..], case.vocab, &mut random);
        let rows = rows(case, &tokens, &draft);
        let place = Place { position: tokens.len(), max_len: case.max_len };
        let drawn: Option<Vec<Drawn>> = on_device.then(|| draw_all(&draft, &answer.state, place.position, &rows));
        let walk = walk(&draft, &mut answer.state, place, |state, row, position| match &drawn {
            Some(drawn) => Sampled::try_from(drawn[row].clone()),
            None => state.sample(&mut rows[row].clone(), position),
        });
        check(&walk, &draft);
        met.passes += 1;
        met.accepted += walk.accepted.len();
        met.scattered += usize::from(walk.accepted.iter().enumerate().any(|(i, &node)| usize::from(node) != i));
        let is_wrong = |row: &&Vec<f32>| row.iter().any(|logit| logit.is_nan());
        met.spared += rows.iter().filter(is_wrong).count().saturating_sub(usize::from(walk.failure.is_some()));
        tokens.extend(walk.sampled.iter().map(|sampled| sampled.token));
        answer.sampled.extend(walk.sampled);
        if walk.failure.is_some() {
            met.failed += 1;
            met.failed_behind_drafts += usize::from(!walk.accepted.is_empty());
            answer.failure = walk.failure.map(|failure| failure.to_string());
            return answer;
        }
        if walk.has_ended {
            answer.is_stopped = tokens.len() < case.max_len || plain.is_stopped;
            met.stopped += usize::from(answer.is_stopped);
            met.stopped_with_drafts_left += usize::from(answer.is_stopped && walk.accepted.len() < draft.len());
            met.full += usize::from(!answer.is_stopped);
            return answer;
        }
        assert!(tokens.len() < case.max_len, "an answer goes on behind its end");
    }
}

/// A state's next draw shows all that it has observed.
fn next_asked(state: &SamplingState, case: &Case) -> Draws {
    asked(&Draft::default(), state, 0, case.vocab)
}

#[test]
fn answers_are_those_of_plain_decoding() {
    let mut met = Met::default();
    for seed in 0..600 {
        let case = Case::new(seed);
        let plain = case.plain();
        for (is_tree, most) in [(false, 0), (false, 5), (true, 12), (true, 63)] {
            let good = [0.0, 0.5, 0.9, 1.0][seed as usize % 4];
            let manner = Manner { is_tree, most, good };
            for on_device in [false, true] {
                let found = speculate(&case, manner, &plain, on_device, &mut met);
                let label = format!("case {seed}, {manner:?}, on a device: {on_device}");
                assert_eq!(found.sampled, plain.sampled, "{label}");
                assert_eq!(found.failure, plain.failure, "{label}");
                assert_eq!(found.is_stopped, plain.is_stopped, "{label}");
                assert_eq!(next_asked(&found.state, &case), next_asked(&plain.state, &case), "{label}");
            }
        }
    }
    let Met { passes, accepted, scattered, stopped, stopped_with_drafts_left, full, failed, .. } = met;
    assert!(passes > 10_000 && accepted > 5_000 && scattered > 1_000, "{met:?}");
    assert!(stopped > 200 && stopped_with_drafts_left > 100 && full > 200, "{met:?}");
    assert!(failed > 100 && met.failed_behind_drafts > 50 && met.spared > 100, "{met:?}");
}
