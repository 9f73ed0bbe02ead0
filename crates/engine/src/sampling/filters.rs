//! Turns logits into weights, and the filters that set weights to zero: min-p, top-k, top-p.
//!
//! A weight is a probability up to a common factor; the best token's weight is 1. Filters find a
//! bound by partial selection and clear the weights below it: only a handful of tokens near the
//! bound is sorted. If two weights are equal, that of the lower id counts as better, so that the
//! result of a filter is unique.

use super::lanes::{exp, sum};

/// A weight and its token as one number: the better token has the larger key. Weights are never
/// negative, so their bits have the same order as they.
fn key(token: usize, weight: f32) -> u64 {
    debug_assert!(weight >= 0.0);
    u64::from(weight.to_bits()) << 32 | u64::from(!(token as u32))
}

fn weight_of(key: u64) -> f64 {
    f64::from(f32::from_bits((key >> 32) as u32))
}

fn clear_below(weights: &mut [f32], border: u64) {
    for (token, weight) in weights.iter_mut().enumerate() {
        if key(token, *weight) < border {
            *weight = 0.0;
        }
    }
}

/// Turns logits, none of them NaN and `best` the largest, into weights of `softmax(logits /
/// temperature)`.
pub fn soften(logits: &mut [f32], best: f32, temperature: f32) {
    for logit in logits.iter_mut() {
        *logit = exp((*logit - best) / temperature);
    }
}

/// Keeps tokens at least `min_p` times as likely as the best.
pub fn min_p(weights: &mut [f32], min_p: f32) {
    if min_p > 0.0 {
        weights.iter_mut().filter(|weight| **weight < min_p).for_each(|weight| *weight = 0.0);
    }
}

/// Keeps the best `k` tokens.
pub fn top_k(weights: &mut [f32], k: usize) {
    if k >= weights.len() {
        return;
    }
    // At most 2k keys: when they are full, the worse half is dropped and the bound rises.
    let mut best: Vec<u64> = Vec::with_capacity(2 * k);
    let mut border = 0;
    for (token, &weight) in weights.iter().enumerate() {
        let key = key(token, weight);
        if key > border {
            best.push(key);
            if best.len() == 2 * k {
                border = keep_best(&mut best, k);
            }
        }
    }
    border = keep_best(&mut best, k);
    clear_below(weights, border);
}

/// Keeps the `k` largest keys, in no order; returns the least of them.
fn keep_best(keys: &mut Vec<u64>, k: usize) -> u64 {
    let (_, &mut border, _) = keys.select_nth_unstable_by(k - 1, |a, b| b.cmp(a));
    keys.truncate(k);
    border
}

/// Keeps the fewest best tokens that together have at least `top_p` of all weight.
pub fn top_p(weights: &mut [f32], top_p: f32) {
    if top_p >= 1.0 {
        return;
    }
    let top_p = f64::from(top_p);
    let total = sum(weights);
    // Tokens with less than an equal share of the weight that may be dropped have less than that
    // weight together, so the bound is above them. Half of it leaves room for rounding.
    let least = 0.5 * (1.0 - top_p) * total / weights.len() as f64;
    let candidate = |&(_, &weight): &(usize, &f32)| weight > 0.0 && f64::from(weight) >= least;
    let mut keys: Vec<u64> =
        weights.iter().enumerate().filter(candidate).map(|(token, &weight)| key(token, weight)).collect();
    if let Some(border) = mass_border(&mut keys, top_p * total) {
        clear_below(weights, border);
    }
}

/// The key at which the sum of weights, best first, reaches `target`; the last one if none does.
fn mass_border(keys: &mut [u64], target: f64) -> Option<u64> {
    const FEW: usize = 32;
    let (mut rest, mut before) = (keys, 0.0);
    while rest.len() > FEW {
        let middle = rest.len() / 2;
        rest.select_nth_unstable_by(middle, |a, b| b.cmp(a));
        let (better, worse) = rest.split_at_mut(middle + 1);
        let mass: f64 = better.iter().copied().map(weight_of).sum();
        if before + mass >= target {
            rest = better;
        } else {
            before += mass;
            rest = worse;
        }
    }
    rest.sort_unstable_by(|a, b| b.cmp(a));
    let reached = |&&key: &&u64| {
        before += weight_of(key);
        before >= target
    };
    rest.iter().find(reached).or(rest.last()).copied()
}

/// The token at `uniform`, of [0, 1), when all weights are laid out in order of token.
pub fn draw(weights: &[f32], uniform: f64) -> u32 {
    /// Number of weights that are summed before the sum is compared with the target.
    const RUN: usize = 256;
    let sums = || weights.chunks(RUN).map(sum);
    let target = uniform * sums().sum::<f64>();
    let mut reached = 0.0;
    for (first, (weights, sum)) in (0..).step_by(RUN).zip(weights.chunks(RUN).zip(sums())) {
        if reached + sum <= target {
            reached += sum;
            continue;
        }
        let is_reached = |&weight: &f32| {
            reached += f64::from(weight);
            reached > target
        };
        if let Some(at) = weights.iter().position(is_reached).or_else(|| last_of(weights)) {
            return (first + at) as u32;
        }
    }
    last_of(weights).unwrap_or(0) as u32
}

/// The last token with a positive weight.
fn last_of(weights: &[f32]) -> Option<usize> {
    weights.iter().rposition(|&weight| weight > 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampling::random::uniform as random;

    /// Tokens by weight, best first, ties by id.
    fn sorted(weights: &[f32]) -> Vec<usize> {
        let mut order: Vec<usize> = (0..weights.len()).collect();
        order.sort_by(|&a, &b| weights[b].total_cmp(&weights[a]).then(a.cmp(&b)));
        order
    }

    fn keep(weights: &[f32], kept: &[usize]) -> Vec<f32> {
        (0..weights.len()).map(|token| if kept.contains(&token) { weights[token] } else { 0.0 }).collect()
    }

    fn naive_top_k(weights: &[f32], k: usize) -> Vec<f32> {
        let order = sorted(weights);
        keep(weights, &order[..k.min(order.len())])
    }

    fn naive_top_p(weights: &[f32], p: f32) -> Vec<f32> {
        let order = sorted(weights);
        let total: f64 = weights.iter().map(|&weight| f64::from(weight)).sum();
        let mut sum = 0.0;
        let mut count = 0;
        for &token in &order {
            if sum >= f64::from(p) * total {
                break;
            }
            sum += f64::from(weights[token]);
            count += 1;
        }
        keep(weights, &order[..count])
    }

    /// Weights with many ties and zeros in every third set.
    fn weights(set: usize, width: usize) -> Vec<f32> {
        let draw = |token| random(set as u64, 1, token);
        let mut weights: Vec<f32> = (0..width)
            .map(|token| match set % 3 {
                0 => (draw(token) * 4.0).floor() as f32 / 4.0,
                1 => (draw(token) * 12.0 - 12.0).exp() as f32,
                _ => draw(token) as f32,
            })
            .collect();
        let best = weights.iter().copied().fold(f32::MIN_POSITIVE, f32::max);
        weights.iter_mut().for_each(|weight| *weight /= best);
        weights
    }

    #[test]
    fn filters_equal_sorting() {
        for set in 0..300 {
            let width = [1, 2, 5, 33, 64, 500, 3000][set % 7];
            let original = weights(set, width);
            for k in [1, 2, 7, 40, width, width + 3] {
                let mut found = original.clone();
                top_k(&mut found, k);
                assert_eq!(found, naive_top_k(&original, k), "set {set} of {width}, k {k}");
            }
            for p in [1e-6, 0.1, 0.5, 0.9, 0.999, 1.0] {
                let mut found = original.clone();
                top_p(&mut found, p);
                assert_eq!(found, naive_top_p(&original, p), "set {set} of {width}, p {p}");
            }
        }
    }

    #[test]
    fn min_p_is_relative_to_the_best() {
        let mut weights = [1.0, 0.5, 0.49, 0.0];
        min_p(&mut weights, 0.5);
        assert_eq!(weights, [1.0, 0.5, 0.0, 0.0]);
    }

    #[test]
    fn a_tiny_temperature_leaves_the_best_alone() {
        let mut logits = [3.0, 3.5, f32::NEG_INFINITY];
        soften(&mut logits, 3.5, 1e-30);
        assert_eq!(logits, [0.0, 1.0, 0.0]);
    }

    #[test]
    fn draws_fall_where_the_weight_lies() {
        let weights = [0.0, 1.0, 0.0, 3.0, 0.0];
        for (uniform, token) in [(0.0, 1), (0.2499, 1), (0.25, 3), (0.9999999, 3)] {
            assert_eq!(draw(&weights, uniform), token, "{uniform}");
        }
    }

    /// Compares runs of weights, some of them all zeros, with a sum of one weight after the other.
    /// Sums of quarters are exact.
    #[test]
    fn a_wide_draw_is_that_of_one_long_sum() {
        for set in 0..300u64 {
            let width = [1, 255, 256, 257, 700, 3000][set as usize % 6];
            let has_weight = |token: usize| set % 2 == 0 || !(token / 300).is_multiple_of(2);
            let quarter = |token| (random(set, 1, token) * 4.0).floor() as f32 / 4.0;
            let weights: Vec<f32> =
                (0..width).map(|token| if has_weight(token) { quarter(token) } else { 0.0 }).collect();
            let total: f64 = weights.iter().copied().map(f64::from).sum();
            let drawn = random(set, 2, 0);
            for uniform in [0.0, drawn, (drawn * total).floor() / total.max(1.0), 1.0 - f64::EPSILON / 2.0] {
                let target = uniform * total;
                let mut reached = 0.0;
                let passes = |weight: &f32| {
                    reached += f64::from(*weight);
                    reached > target
                };
                let expected = weights.iter().position(passes).unwrap_or(0);
                assert_eq!(draw(&weights, uniform), expected as u32, "set {set} of {width}, {uniform}");
            }
        }
    }
}
