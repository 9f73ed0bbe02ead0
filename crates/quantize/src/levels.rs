//! The levels of codes, before scaling.

use crate::Target;
use crate::float8;

/// E2M1, by code: the high bit is the sign.
pub const E2M1: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Quantiles of a normal distribution, with bitsandbytes' values.
pub const NF4: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Levels {
    /// `code - zero`, codes from 0 to `top`.
    Int {
        top: f32,
    },
    Fp8,
    Fp4,
    Nf4,
}

impl Levels {
    pub fn of(target: Target) -> Self {
        match target {
            Target::Int { bits, .. } => Levels::Int { top: ((1u32 << bits) - 1) as f32 },
            Target::LlmInt8 => Levels::Int { top: 255.0 },
            Target::Fp8 { .. } => Levels::Fp8,
            Target::Mxfp4 | Target::Nvfp4 => Levels::Fp4,
            Target::Nf4 => Levels::Nf4,
        }
    }

    /// The largest level; integers have half a step on top, because their lowest level has no
    /// positive twin.
    pub fn reach(self) -> f32 {
        match self {
            Levels::Int { top } => top / 2.0,
            Levels::Fp8 => 448.0,
            Levels::Fp4 => 6.0,
            Levels::Nf4 => 1.0,
        }
    }

    /// The code of zero if there is no zero point.
    pub fn middle(self) -> u8 {
        match self {
            Levels::Int { top } => ((top + 1.0) / 2.0) as u8,
            Levels::Fp8 | Levels::Fp4 => 0,
            Levels::Nf4 => 7,
        }
    }

    pub fn level(self, code: u8, zero: u8) -> f32 {
        match self {
            Levels::Int { .. } => f32::from(code) - f32::from(zero),
            Levels::Fp8 => float8::decode(code),
            Levels::Fp4 => E2M1[usize::from(code & 15)],
            Levels::Nf4 => NF4[usize::from(code & 15)],
        }
    }

    /// The code with the level nearest to `x`.
    pub fn nearest(self, x: f32, zero: u8) -> u8 {
        match self {
            Levels::Int { top } => (round_ties_even(x) + f32::from(zero)).clamp(0.0, top) as u8,
            Levels::Fp8 => float8::encode(x),
            Levels::Fp4 => nearest_e2m1(x),
            Levels::Nf4 => nearest_nf4(x),
        }
    }
}

/// From this number on floats have no fraction, so that adding it rounds: on machines without a
/// rounding instruction a function would be called for every value.
const NO_FRACTIONS: f32 = 12_582_912.0;

fn round_ties_even(x: f32) -> f32 {
    (x.clamp(-1e6, 1e6) + NO_FRACTIONS) - NO_FRACTIONS
}

/// The nearest code; of two equally near levels the even one, like hardware.
fn nearest_e2m1(x: f32) -> u8 {
    let size = x.abs();
    let code = u8::from(size > 0.25)
        + u8::from(size >= 0.75)
        + u8::from(size > 1.25)
        + u8::from(size >= 1.75)
        + u8::from(size > 2.5)
        + u8::from(size >= 3.5)
        + u8::from(size > 5.0);
    if x.is_sign_negative() && code > 0 { code | 8 } else { code }
}

fn nearest_nf4(x: f32) -> u8 {
    NF4.windows(2).map(|pair| u8::from(x > (pair[0] + pair[1]) / 2.0)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(levels: Levels, codes: impl Iterator<Item = u8>) {
        let zero = levels.middle();
        let values: Vec<(u8, f32)> = codes.map(|code| (code, levels.level(code, zero))).collect();
        let reach = values.iter().fold(0.0f32, |reach, (_, value)| reach.max(value.abs()));
        for step in -3000i32..=3000 {
            let x = step as f32 / 2500.0 * reach;
            let found = levels.level(levels.nearest(x, zero), zero);
            let best = values.iter().map(|(_, value)| (value - x).abs()).fold(f32::INFINITY, f32::min);
            assert!((found - x).abs() <= best * 1.000_01 + 1e-6, "{levels:?}: {x} became {found}, {best} was possible");
        }
    }

    #[test]
    fn the_nearest_code_is_the_nearest() {
        check(Levels::Int { top: 15.0 }, 0..16);
        check(Levels::Int { top: 255.0 }, 0..=255);
        check(Levels::Fp4, 0..16);
        check(Levels::Nf4, 0..16);
        check(Levels::Fp8, (0..=255).filter(|code| code & 0x7f != 0x7f));
    }

    #[test]
    fn rounding_is_rounding() {
        for step in -4000i32..4000 {
            let x = step as f32 / 8.0;
            assert_eq!(round_ties_even(x), x.round_ties_even(), "{x}");
        }
        assert!(round_ties_even(f32::INFINITY) > 255.0);
    }

    #[test]
    fn ties_go_to_even() {
        let halves = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0];
        let found = halves.map(|x| E2M1[usize::from(nearest_e2m1(x))]);
        assert_eq!(found, [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]);
        assert_eq!(Levels::Int { top: 15.0 }.nearest(2.5, 8), 10);
        assert_eq!(Levels::Int { top: 15.0 }.nearest(-7.5, 8), 0);
        assert_eq!(Levels::Int { top: 15.0 }.nearest(7.5, 8), 15);
    }
}
