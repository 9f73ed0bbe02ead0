//! Logprobs in the model's own distribution, before any option of a request changes it.

use std::cmp::Ordering;

use crate::executor::Logprobs;

/// The better token first: the larger logit, then the lower id.
fn better_first(logits: &[f32], a: u32, b: u32) -> Ordering {
    logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b))
}

/// The logarithm of the sum of all exponentials. Logits are not NaN and not all minus infinity.
fn log_sum_exp(logits: &[f32]) -> f64 {
    let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from((logit - best).exp())).sum();
    f64::from(best) + sum.ln()
}

/// The logprob and rank of `token`, and the best `count` tokens.
pub fn logprobs(logits: &[f32], token: u32, count: usize) -> Logprobs {
    let whole = log_sum_exp(logits);
    let logprob = |token: u32| (f64::from(logits[token as usize]) - whole) as f32;
    let is_better = |other: &u32| better_first(logits, *other, token) == Ordering::Less;
    let rank = 1 + (0..logits.len() as u32).filter(is_better).count() as u32;
    let top = best_tokens(logits, count).into_iter().map(|token| (token, logprob(token))).collect();
    Logprobs { token, logprob: logprob(token), rank, top }
}

/// The best `count` tokens, best first.
fn best_tokens(logits: &[f32], count: usize) -> Vec<u32> {
    let count = count.min(logits.len());
    if count == 0 {
        return Vec::new();
    }
    let mut tokens: Vec<u32> = (0..logits.len() as u32).collect();
    if count < tokens.len() {
        tokens.select_nth_unstable_by(count, |&a, &b| better_first(logits, a, b));
        tokens.truncate(count);
    }
    tokens.sort_unstable_by(|&a, &b| better_first(logits, a, b));
    tokens
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampling::random::uniform;

    #[test]
    fn ranks_and_best_tokens_equal_sorting() {
        for set in 0..50 {
            let width = 1 + set * 7;
            // Eighths of a logit: ties are common.
            let logits: Vec<f32> =
                (0..width).map(|token| (uniform(set as u64, 0, token) * 40.0).floor() as f32 / 8.0).collect();
            let mut order: Vec<u32> = (0..width as u32).collect();
            order.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b)));
            let total: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
            for (index, &token) in order.iter().enumerate().step_by(5) {
                let count = index.min(20);
                let found = logprobs(&logits, token, count);
                assert_eq!((found.token, found.rank), (token, index as u32 + 1));
                assert_eq!(found.top.iter().map(|top| top.0).collect::<Vec<_>>(), order[..count]);
                for (token, logprob) in found.top.into_iter().chain([(token, found.logprob)]) {
                    let expected = (f64::from(logits[token as usize]).exp() / total).ln();
                    assert!((f64::from(logprob) - expected).abs() < 1e-5, "{logprob} {expected}");
                }
            }
        }
    }

    #[test]
    fn large_logits_do_not_overflow() {
        let found = logprobs(&[1e5, 1e5, -1e5, f32::NEG_INFINITY], 1, 4);
        assert!((found.logprob - 0.5f32.ln()).abs() < 1e-6);
        assert_eq!(found.rank, 2);
        assert_eq!(found.top[3], (3, f32::NEG_INFINITY));
    }
}
