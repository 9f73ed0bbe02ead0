//! Loops over a whole vocabulary, written so that they compile to vector instructions: several sums
//! or maxima side by side, so that no addition waits for the one before, and no exit within a run.

/// Values of a run; a loop may end between two runs.
const RUN: usize = 64;
const LANES: usize = 16;

/// The first value for which `is` holds.
#[inline(always)]
pub fn position(values: &[f32], is: impl Fn(f32) -> bool) -> Option<usize> {
    let (runs, rest) = values.as_chunks::<RUN>();
    let within = |run: &[f32]| run.iter().position(|&value| is(value));
    for (index, run) in runs.iter().enumerate() {
        if run.iter().fold(false, |any, &value| any | is(value)) {
            return within(run).map(|at| index * RUN + at);
        }
    }
    within(rest).map(|at| runs.len() * RUN + at)
}

/// Index of the first of the largest values, without NaN and minus infinity.
pub fn largest(values: &[f32]) -> Option<usize> {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let (runs, rest) = values.as_chunks::<LANES>();
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for run in runs {
        for (lane, &value) in lanes.iter_mut().zip(run) {
            *lane = larger(*lane, value);
        }
    }
    let largest = lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |a, &b| larger(a, b));
    if largest == f32::NEG_INFINITY {
        return None;
    }
    position(values, |value| value == largest)
}

/// The sum, in an order that depends on the number of values alone.
pub fn sum(values: &[f32]) -> f64 {
    let (runs, rest) = values.as_chunks::<LANES>();
    let mut lanes = [0.0; LANES];
    for run in runs {
        for (lane, &value) in lanes.iter_mut().zip(run) {
            *lane += f64::from(value);
        }
    }
    lanes.into_iter().chain(rest.iter().map(|&value| f64::from(value))).sum()
}

/// `e^x` for `x` of at most 0, to two units in the last place. Exactly 1 at 0, and exactly 0 if the
/// result is no normal number, also for minus infinity.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    const LOWEST: f32 = -87.336_54;
    // ln 2 in two parts; the first has bits to spare, so that its product with an exponent is
    // exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Adding it leaves no bits after the binary point.
    const WHOLE: f32 = 12_582_912.0;
    const TAIL: [f32; 5] = [0.5, 0.166_665_17, 0.041_666_2, 0.008_369_239, 0.001_395_109_7];
    let clamped = if x < LOWEST { LOWEST } else { x };
    let shifted = clamped * std::f32::consts::LOG2_E + WHOLE;
    let n = shifted - WHOLE;
    let r = clamped - n * LN2_HIGH - n * LN2_LOW;
    let tail = TAIL.iter().rev().fold(0.0, |sum, &coefficient| sum * r + coefficient);
    // The exponent is in the last bits of `shifted`.
    let exponent = shifted.to_bits().wrapping_sub(WHOLE.to_bits()).wrapping_add(127) << 23;
    let power = (r * r * tail + r + 1.0) * f32::from_bits(exponent);
    if x < LOWEST { 0.0 } else { power }
}

#[cfg(test)]
mod tests {
    use super::super::random::uniform;
    use super::*;

    fn random(seed: u64, len: usize) -> Vec<f32> {
        (0..len).map(|at| (uniform(seed, 0, at) * 40.0).floor() as f32 / 4.0 - 5.0).collect()
    }

    #[test]
    fn the_first_of_the_largest_is_found() {
        for len in (0..200).chain([1000, 16384]) {
            let mut values = random(len as u64, len);
            for round in 0..3 {
                let mut expected = None;
                for (at, &value) in values.iter().enumerate() {
                    if value > expected.map_or(f32::NEG_INFINITY, |at: usize| values[at]) {
                        expected = Some(at);
                    }
                }
                assert_eq!(largest(&values), expected, "{len} values, round {round}");
                let place = values.len() / 2;
                if let Some(value) = values.get_mut(place) {
                    *value = [f32::NAN, f32::INFINITY, 0.0][round];
                }
            }
            values.fill(f32::NEG_INFINITY);
            assert_eq!(largest(&values), None);
        }
    }

    #[test]
    fn the_first_that_is_wrong_is_found() {
        let is = |value: f32| value > 1e6;
        for len in 0..300 {
            let mut values = random(len as u64, len);
            assert_eq!(position(&values, is), None);
            for at in (0..len).rev() {
                values[at] = 1e7;
                assert_eq!(position(&values, is), Some(at));
            }
        }
    }

    #[test]
    fn sums_are_near_the_true_ones() {
        for len in [0, 1, 15, 16, 17, 500, 16384] {
            let values = random(len as u64, len);
            let expected: f64 = values.iter().map(|&value| f64::from(value)).sum();
            assert!((sum(&values) - expected).abs() < 1e-6, "{len} values");
        }
    }

    #[test]
    fn powers_are_good_to_two_units() {
        assert_eq!((exp(0.0), exp(-0.0), exp(f32::NEG_INFINITY), exp(-1e30)), (1.0, 1.0, 0.0, 0.0));
        let mut worst = 0.0f64;
        for step in 0..400_000 {
            let x = -(step as f32) * (87.3 / 400_000.0);
            let expected = f64::from(x).exp();
            let unit = f64::from(f32::from_bits((expected as f32).to_bits() + 1)) - f64::from(expected as f32);
            worst = worst.max((f64::from(exp(x)) - expected).abs() / unit);
        }
        assert!(worst < 2.0, "{worst} units");
    }
}
