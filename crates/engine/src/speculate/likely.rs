//! The likeliest tokens of a row of logits and their probabilities, in three passes that compile to
//! vector instructions: a head's logits are copied to the host after every step, and selecting from
//! them there must take next to no time.

/// Writes the likeliest columns and their probabilities to `out`, likeliest first and at most
/// `count` of them, without columns that are not numbers.
pub(super) fn likeliest(logits: &[f32], count: usize, out: &mut Vec<(u32, f32)>) {
    out.clear();
    if count == 0 {
        return;
    }
    let largest = folded(logits, f32::NEG_INFINITY, f32::max, |logit| logit);
    let sum = folded(logits, 0.0, |sum, value| sum + value, |logit| exp(logit - largest));
    let mut least = f32::NEG_INFINITY;
    for (number, chunk) in logits.chunks(LANES).enumerate() {
        // Nearly all chunks have no such value, and each is tested as a whole.
        if !chunk.iter().fold(false, |any, &logit| any | (logit > least)) {
            continue;
        }
        for (column, &logit) in (number * LANES..).zip(chunk) {
            if logit > least {
                let place = out.partition_point(|&(_, other)| other >= logit);
                out.truncate(count - 1);
                out.insert(place, (column as u32, logit));
                if out.len() == count {
                    least = out[count - 1].1;
                }
            }
        }
    }
    for (_, value) in out.iter_mut() {
        *value = exp(*value - largest) / sum;
    }
}

const LANES: usize = 16;

/// Folds lane by lane, and then the lanes.
fn folded(logits: &[f32], start: f32, join: impl Fn(f32, f32) -> f32 + Copy, of: impl Fn(f32) -> f32 + Copy) -> f32 {
    let mut lanes = [start; LANES];
    let chunks = logits.chunks_exact(LANES);
    let rest = chunks.remainder().iter().fold(start, |all, &logit| join(all, of(logit)));
    for chunk in chunks {
        for (lane, &logit) in lanes.iter_mut().zip(chunk) {
            *lane = join(*lane, of(logit));
        }
    }
    lanes.into_iter().fold(rest, join)
}

/// `e^x` for `x` of at most 0, to about six digits: `2^n` by its exponent and the rest by a
/// polynomial.
#[inline(always)]
fn exp(x: f32) -> f32 {
    /// When it is added to a number, the integer part is in the last bits.
    const WHOLE: f32 = 12_582_912.0;
    let x = x.max(-87.0) * std::f32::consts::LOG2_E;
    let whole = x + WHOLE;
    let part = (x - (whole - WHOLE)) * std::f32::consts::LN_2;
    let power = 1.0 + part * (1.0 + part * (0.5 + part * (1.0 / 6.0 + part * (1.0 / 24.0 + part * (1.0 / 120.0)))));
    f32::from_bits(power.to_bits().wrapping_add(whole.to_bits() << 23))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_are_powers() {
        for step in 0..=8600 {
            let x = -0.01 * step as f32;
            let (found, expected) = (exp(x), x.exp());
            assert!((found / expected - 1.0).abs() < 1e-5, "exp({x}) is {expected}, found {found}");
        }
        assert!(exp(f32::NEG_INFINITY) < 1e-37 && exp(0.0) == 1.0);
    }

    #[test]
    fn they_are_those_of_a_plain_softmax() {
        let mut state = 7u32;
        for (len, count) in [(1, 1), (5, 8), (16, 3), (1000, 10), (4096, 1), (777, 777)] {
            let mut random = || {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 8) as f32 / (1 << 20) as f32 - 8.0
            };
            let logits: Vec<f32> = (0..len).map(|_| random()).collect();
            let sum: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
            let mut expected: Vec<(u32, f64)> =
                (0..).zip(&logits).map(|(column, &logit)| (column, f64::from(logit).exp() / sum)).collect();
            expected.sort_by(|a, b| b.1.total_cmp(&a.1));
            let mut found = vec![(9, 9.0)];
            likeliest(&logits, count, &mut found);
            assert_eq!(found.len(), count.min(len));
            for ((column, value), (expected_column, expected)) in found.into_iter().zip(expected) {
                assert_eq!(column, expected_column);
                assert!((f64::from(value) / expected - 1.0).abs() < 2e-5, "{value} and {expected}");
            }
        }
    }

    #[test]
    fn what_is_no_number_is_not_likely() {
        let mut out = Vec::new();
        likeliest(&[f32::NAN, 1.0, f32::NEG_INFINITY, f32::NAN, 2.0], 5, &mut out);
        assert_eq!(out.iter().map(|(column, _)| *column).collect::<Vec<_>>(), [4, 1]);
        assert!((out[0].1 + out[1].1 - 1.0).abs() < 1e-5);
        likeliest(&[f32::NAN; 40], 3, &mut out);
        assert!(out.is_empty());
        likeliest(&[1.0; 40], 0, &mut out);
        assert!(out.is_empty());
    }
}
