//! Transcendental functions of a vector: polynomials fitted by least squares reweighted towards the
//! largest error. They are accurate to one or two units in the last place of an f32, and every row
//! runs the same code.

use std::f32::consts::LN_2;

use super::Simd;

/// Horner's rule; coefficients start with the constant term.
#[inline(always)]
fn polynomial<S: Simd>(s: S, x: S::F, coefficients: &[f32]) -> S::F {
    let mut sum = s.splat(coefficients[coefficients.len() - 1]);
    for &coefficient in coefficients[..coefficients.len() - 1].iter().rev() {
        sum = s.fma(sum, x, s.splat(coefficient));
    }
    sum
}

/// `e^x`. Exactly 1 at 0, exactly 0 below the normal numbers (minus infinity included), infinity
/// above the largest.
#[inline(always)]
pub fn exp<S: Simd>(s: S, x: S::F) -> S::F {
    const LOWEST: f32 = -87.336_54;
    // ln 2 in two parts; the first has bits to spare, so that its product with an exponent is
    // exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    const TAIL: [f32; 5] = [0.5, 0.166_665_17, 0.041_666_2, 0.008_369_239, 0.001_395_109_7];
    let clamped = s.min(s.splat(89.0), s.max(s.splat(LOWEST), x));
    let n = s.round(s.mul(clamped, s.splat(std::f32::consts::LOG2_E)));
    let r = s.fma(n, s.splat(-LN2_HIGH), clamped);
    let r = s.fma(n, s.splat(-LN2_LOW), r);
    let p = s.fma(s.mul(r, r), polynomial(s, r, &TAIL), r);
    let power = s.scale(s.add(p, s.splat(1.0)), n);
    s.select_lt(x, s.splat(LOWEST), s.splat(0.0), power)
}

/// `2^x` for `x` up to 127. Exactly 1 at 0, and 0 at minus infinity.
#[inline(always)]
pub fn exp2<S: Simd>(s: S, x: S::F) -> S::F {
    /// Far below all results above zero, and a power that `scale` accepts.
    const LOWEST: f32 = -200.0;
    const FRACTION: [f32; 6] = [1.0, LN_2, 0.240_222_83, 0.055_505_585, 0.009_669_692, 0.001_330_060_8];
    let x = s.max(s.splat(LOWEST), x);
    let n = s.round(x);
    s.scale(polynomial(s, s.sub(x, n), &FRACTION), n)
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub fn sigmoid<S: Simd>(s: S, x: S::F) -> S::F {
    let one = s.splat(1.0);
    s.div(one, s.add(one, exp(s, s.sub(s.splat(0.0), x))))
}

/// A polynomial near zero, where `1 - 2 / (e^2x + 1)` would lose digits.
#[inline(always)]
pub fn tanh<S: Simd>(s: S, x: S::F) -> S::F {
    const SMALL: f32 = 0.625;
    const ODD: [f32; 5] = [-0.333_332_8, 0.133_313_83, -0.053_734, 0.020_618_13, -0.005_679_311_7];
    let (zero, one) = (s.splat(0.0), s.splat(1.0));
    let size = s.max(s.sub(zero, x), x);
    let square = s.mul(x, x);
    let near = s.fma(s.mul(square, x), polynomial(s, square, &ODD), x);
    let far = s.sub(one, s.div(s.splat(2.0), s.add(exp(s, s.add(size, size)), one)));
    let far = s.select_lt(x, zero, s.sub(zero, far), far);
    s.select_lt(size, s.splat(SMALL), near, far)
}

/// The error function: an odd polynomial up to 1, and `1 - e^P(|x|)` beyond it.
#[inline(always)]
pub fn erf<S: Simd>(s: S, x: S::F) -> S::F {
    const NEAR: [f32; 7] = [
        std::f32::consts::FRAC_2_SQRT_PI,
        -0.376_126_26,
        0.112_836,
        -0.026_854_444,
        0.005_189_535_7,
        -0.000_802_084_2,
        7.889_123e-5,
    ];
    const FAR: [f32; 8] = [
        0.000_188_037_05,
        -1.129_578_4,
        -0.633_219_9,
        -0.108_418_55,
        0.025_208_24,
        -0.004_204_556_3,
        0.000_441_335_32,
        -2.168_676_3e-5,
    ];
    let (zero, one) = (s.splat(0.0), s.splat(1.0));
    let size = s.max(s.sub(zero, x), x);
    let near = s.mul(x, polynomial(s, s.mul(x, x), &NEAR));
    // At 4 the f32 result is 1 already, and the fit ends.
    let far = s.sub(one, exp(s, polynomial(s, s.min(s.splat(4.0), size), &FAR)));
    let far = s.select_lt(x, zero, s.sub(zero, far), far);
    s.select_lt(size, one, near, far)
}

/// The nearest bf16, as bits of an f32; without the unpredictable branches of `bf16::from_f32`.
#[inline(always)]
pub fn nearest_bf16(value: f32) -> u32 {
    let bits = value.to_bits();
    let nearest = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
    (if value.is_nan() { bits | 1 << 22 } else { nearest }) & 0xffff_0000
}
