//! Formulas over single rows. Inputs and results are f32; everything between is f64, so that the
//! order of a sum does not affect the f32 result.

use crate::Activation;

/// The sum of products. Each product of two f32 is exact in f64. Eight sums at a time, because
/// tests compute whole models with this and an addition waits for the previous one. Elements are
/// read by index: iterators would be calls in the test build.
pub fn dot(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len(), "dot product of unequal lengths");
    let (a, b) = (a.as_chunks::<8>(), b.as_chunks::<8>());
    let mut sums = [0.0; 8];
    for (a, b) in a.0.iter().zip(b.0) {
        for i in 0..8 {
            sums[i] += f64::from(a[i]) * f64::from(b[i]);
        }
    }
    let rest = a.1.iter().zip(b.1).map(|(&x, &y)| f64::from(x) * f64::from(y));
    sums.into_iter().chain(rest).sum()
}

/// `x / sqrt(mean(x^2) + eps) * weight`, in place.
pub fn rms_norm(x: &mut [f32], weight: &[f32], eps: f32) {
    assert_eq!(x.len(), weight.len(), "norm weight as wide as its row");
    let inverse = 1.0 / (dot(x, x) / x.len() as f64 + f64::from(eps)).sqrt();
    for (value, &weight) in x.iter_mut().zip(weight) {
        *value = (f64::from(*value) * inverse * f64::from(weight)) as f32;
    }
}

/// Softmax in two passes, in place: the largest value first, then the sum.
pub fn softmax(values: &mut [f64]) {
    let largest = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    for value in values.iter_mut() {
        *value = (*value - largest).exp();
    }
    let sum: f64 = values.iter().sum();
    for value in values.iter_mut() {
        *value /= sum;
    }
}

pub fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// `act(gate) * up`.
pub fn gated(activation: Activation, gate: f32, up: f32) -> f32 {
    let (gate, up) = (f64::from(gate), f64::from(up));
    let value = match activation {
        Activation::Silu => gate * sigmoid(gate) * up,
        Activation::Gelu => 0.5 * gate * (1.0 + erf(gate * std::f64::consts::FRAC_1_SQRT_2)) * up,
        Activation::GeluTanh => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (gate + 0.044715 * gate.powi(3));
            0.5 * gate * (1.0 + inner.tanh()) * up
        }
        Activation::SwigluClamped { alpha, limit } => {
            let (alpha, limit) = (f64::from(alpha), f64::from(limit));
            // `min` and `max` drop a NaN, and a clamp must keep it.
            let gate = if gate > limit { limit } else { gate };
            (up.clamp(-limit, limit) + 1.0) * gate * sigmoid(alpha * gate)
        }
    };
    value as f32
}

/// `2/sqrt(pi) * exp(-x^2) * sum_n 2^n x^(2n+1) / (1 * 3 * ... * (2n+1))`: every term has the sign
/// of `x`, so nothing cancels. Beyond 6 the result is 1 to the last bit of an f64.
fn erf(x: f64) -> f64 {
    if x.is_nan() || x.abs() > 6.0 {
        return x.signum();
    }
    let (mut term, mut sum, mut n) = (x, x, 0.0);
    while (sum + term) != sum {
        n += 1.0;
        term *= 2.0 * x * x / (2.0 * n + 1.0);
        sum += term;
    }
    2.0 / std::f64::consts::PI.sqrt() * (-x * x).exp() * sum
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of `math.erf` in Python 3.11.
    #[test]
    fn erf_matches_a_library() {
        for (x, expected) in [
            (0.0, 0.0),
            (0.1, 0.1124629160182849),
            (-0.5, -0.5204998778130465),
            (1.0, 0.8427007929497149),
            (2.5, 0.999593047982555),
            (-4.0, -0.9999999845827421),
            (7.0, 1.0),
        ] {
            assert!((erf(x) - expected).abs() < 1e-14, "erf({x}) = {}", erf(x));
        }
        assert!(erf(f64::NAN).is_nan());
    }

    /// Values of torch 2.15: gelu, gelu(approximate="tanh"), silu, and the clamped form of gpt-oss.
    #[test]
    fn activations_match_torch() {
        let clamped = Activation::SwigluClamped { alpha: 1.702, limit: 7.0 };
        for (activation, gate, up, expected) in ACTIVATION_CASES.map(|(kind, gate, up, expected)| {
            ([Activation::Gelu, Activation::GeluTanh, Activation::Silu, clamped][kind], gate, up, expected)
        }) {
            let found = gated(activation, gate, up);
            assert!(
                (found - expected).abs() <= 1e-6 * expected.abs().max(1.0),
                "{activation:?}({gate}, {up}) = {found}"
            );
        }
    }

    const ACTIVATION_CASES: [(usize, f32, f32, f32); 8] = [
        (0, 1.5, -2.0, -2.7995784),
        (1, 1.5, -2.0, -2.799143),
        (2, 1.5, -2.0, -2.4527233),
        (0, -0.7, 3.0, -0.50812364),
        (1, -0.7, 3.0, -0.5082896),
        (2, -0.7, 3.0, -0.69680566),
        (3, 9.0, -8.5, -41.999718),
        (3, -3.0, 0.25, -0.022589138),
    ];

    #[test]
    fn softmax_sums_to_one_and_survives_large_scores() {
        let mut scores = [1000.0, 999.0, -1000.0];
        softmax(&mut scores);
        assert!((scores.iter().sum::<f64>() - 1.0).abs() < 1e-12);
        assert!((scores[0] / scores[1] - std::f64::consts::E).abs() < 1e-9);
    }
}
