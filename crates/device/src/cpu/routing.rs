//! Chooses a row's experts and their weights, from that row's router logits alone.

use super::Cpu;
use crate::{RouterScore, Routing};

/// One of the experts chosen for a row.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Choice {
    pub expert: u32,
    pub weight: f32,
    /// Row of the expert's output for this row; assigned later.
    pub slot: u32,
}

/// Fills `choices` (`top_k` of them) in ascending order of expert. `scratch` holds twice as many
/// values as there are experts.
pub fn route(logits: &[f32], op: &Routing<'_, Cpu>, scratch: &mut [f32], choices: &mut [Choice]) {
    assert!(op.top_k <= logits.len(), "the best {} of {} experts", op.top_k, logits.len());
    let (scores, ranks) = scratch.split_at_mut(logits.len());
    scores.copy_from_slice(logits);
    match op.score {
        RouterScore::Softmax => softmax(scores),
        RouterScore::SoftmaxOfBest => {}
        RouterScore::Sigmoid => scores.iter_mut().for_each(|score| *score = 1.0 / (1.0 + (-*score).exp())),
    }
    ranks.copy_from_slice(scores);
    if let Some(bias) = op.choice_bias {
        assert_eq!(bias.len(), ranks.len(), "one choice bias an expert");
        ranks.iter_mut().zip(bias.iter()).for_each(|(rank, bias)| *rank += bias);
    }
    if op.groups > 1 {
        drop_groups(ranks, op.groups, op.groups_kept);
    }
    for choice in choices.iter_mut() {
        let expert = take_best(ranks);
        *choice = Choice { expert: expert as u32, weight: scores[expert], slot: 0 };
    }
    choices.sort_unstable_by_key(|choice| choice.expert);
    finish_weights(op, choices);
}

fn finish_weights(op: &Routing<'_, Cpu>, choices: &mut [Choice]) {
    if op.score == RouterScore::SoftmaxOfBest {
        let largest = choices.iter().map(|choice| choice.weight).fold(f32::NEG_INFINITY, f32::max);
        choices.iter_mut().for_each(|choice| choice.weight = (choice.weight - largest).exp());
        let sum: f32 = choices.iter().map(|choice| choice.weight).sum();
        choices.iter_mut().for_each(|choice| choice.weight /= sum);
    }
    if op.normalize {
        // The small term avoids a division by zero.
        let sum = choices.iter().map(|choice| choice.weight).sum::<f32>() + 1e-20;
        choices.iter_mut().for_each(|choice| choice.weight /= sum);
    }
    choices.iter_mut().for_each(|choice| choice.weight *= op.scale);
}

fn softmax(values: &mut [f32]) {
    let largest = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    values.iter_mut().for_each(|value| *value = (*value - largest).exp());
    let sum: f32 = values.iter().sum();
    values.iter_mut().for_each(|value| *value /= sum);
}

/// Marks an expert that was taken or dropped; ranks below every number, minus infinity included.
const GONE: f32 = f32::NAN;

/// Whether `a` ranks strictly before `b`. Numbers rank before NaN marks, so that a row of numbers
/// never takes an expert twice.
fn before(a: f32, b: f32) -> bool {
    a > b || (b.is_nan() && !a.is_nan())
}

/// The index of the largest value, the lowest of equals, which is then marked as gone. If
/// everything is gone (NaN logits) it is the first index.
fn take_best(values: &mut [f32]) -> usize {
    let mut best = 0;
    for index in 1..values.len() {
        if before(values[index], values[best]) {
            best = index;
        }
    }
    values[best] = GONE;
    best
}

/// Marks the experts of all but the best groups as gone; groups rank by the sum of their two best
/// experts.
fn drop_groups(ranks: &mut [f32], groups: usize, groups_kept: usize) {
    assert!(ranks.len().is_multiple_of(groups), "{} experts in {groups} groups", ranks.len());
    let size = ranks.len() / groups;
    let sum_of_two = |group: &[f32]| {
        let (mut first, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
        for &value in group {
            if value > first {
                (first, second) = (value, first);
            } else if value > second {
                second = value;
            }
        }
        if size == 1 { first } else { first + second }
    };
    // A group stays if fewer than `groups_kept` groups beat it: strictly, or as equals with a lower
    // index. Ranks are counted, since there is no room to sort in and groups are few. A group is
    // dropped only after every comparison that needs its values, hence the bit set.
    assert!(groups <= 64, "{groups} groups of experts");
    let mut kept = 0u64;
    for group in 0..groups {
        let own = sum_of_two(&ranks[group * size..(group + 1) * size]);
        let beaten_by = (0..groups).filter(|&other| {
            let theirs = sum_of_two(&ranks[other * size..(other + 1) * size]);
            theirs > own || (theirs == own && other < group)
        });
        if beaten_by.count() < groups_kept {
            kept |= 1 << group;
        }
    }
    for (index, group) in ranks.chunks_exact_mut(size).enumerate() {
        if kept >> index & 1 == 0 {
            group.fill(f32::NEG_INFINITY);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Activation;
    use crate::cpu::Vector;

    fn routing(score: RouterScore, top_k: usize) -> Routing<'static, Cpu> {
        Routing {
            score,
            top_k,
            normalize: false,
            scale: 1.0,
            choice_bias: None,
            groups: 1,
            groups_kept: 1,
            activation: Activation::Silu,
        }
    }

    fn check(logits: &[f32], op: &Routing<'_, Cpu>, expected: &[(u32, f32)]) {
        let mut choices = vec![Choice::default(); op.top_k];
        route(logits, op, &mut vec![0.0; 2 * logits.len()], &mut choices);
        for (found, expected) in choices.iter().zip(expected) {
            assert_eq!(found.expert, expected.0, "{choices:?}");
            assert!((found.weight - expected.1).abs() < 1e-6, "{choices:?}");
        }
    }

    const LOGITS: [f32; 4] = [1.0, 3.0, -1.0, 2.0];

    #[test]
    fn scores_before_and_after_the_choice() {
        let all: f32 = LOGITS.iter().map(|x| x.exp()).sum();
        check(&LOGITS, &routing(RouterScore::Softmax, 2), &[(1, 3f32.exp() / all), (3, 2f32.exp() / all)]);
        let share = 1.0 / (1.0 + (-1f32).exp());
        check(&LOGITS, &routing(RouterScore::SoftmaxOfBest, 2), &[(1, share), (3, 1.0 - share)]);
        let normalized = Routing { normalize: true, ..routing(RouterScore::Softmax, 2) };
        check(&LOGITS, &normalized, &[(1, share), (3, 1.0 - share)]);
    }

    #[test]
    fn a_choice_bias_moves_the_choice_and_not_the_weight() {
        let bias = Vector::new(&[0.0, 0.0, 9.0, 0.0]).unwrap();
        let op = Routing { choice_bias: Some(&bias), scale: 2.5, ..routing(RouterScore::Sigmoid, 2) };
        let sigmoid = |x: f32| 1.0 / (1.0 + (-x).exp());
        check(&LOGITS, &op, &[(1, 2.5 * sigmoid(3.0)), (2, 2.5 * sigmoid(-1.0))]);
    }

    #[test]
    fn groups_compete_by_their_two_best() {
        let logits = [4.0, -9.0, 2.0, 2.5, 0.0, 0.0];
        let op = Routing { groups: 3, groups_kept: 1, ..routing(RouterScore::SoftmaxOfBest, 1) };
        check(&logits, &op, &[(3, 1.0)]);
        // With two groups kept, an expert of the dropped one is never taken, even as the last
        // choice.
        let op = Routing { groups: 3, groups_kept: 2, ..routing(RouterScore::SoftmaxOfBest, 4) };
        let mut choices = vec![Choice::default(); 4];
        route(&logits, &op, &mut [0.0; 12], &mut choices);
        assert_eq!(choices.iter().map(|choice| choice.expert).collect::<Vec<_>>(), [2, 3, 4, 5]);
    }

    #[test]
    fn ties_go_to_the_lower_index_and_broken_logits_stay_in_range() {
        check(&[0.0; 5], &routing(RouterScore::SoftmaxOfBest, 2), &[(0, 0.5), (1, 0.5)]);
        let mut choices = vec![Choice::default(); 2];
        route(&[f32::NAN; 3], &routing(RouterScore::Softmax, 2), &mut [0.0; 6], &mut choices);
        assert!(choices.iter().all(|choice| choice.expert < 3));
    }
}
