//! The encoder for IQ4_NL: 32 values, each one of sixteen uneven levels times the block's scale.
//!
//! The scales tried put the value furthest from zero on or near the outermost level of either side;
//! each is refitted by least squares to the levels it gave, and the one with the smallest error is
//! taken, half-precision rounding included.

use half::f16;

use super::{Block, LEN, extreme, inverse, push as push_block, slope_through};
use crate::Format;
use crate::quant::iq4::TABLE;

/// The scales tried: the block's reach over each of these. The first one wins ties.
const TRIED: [f32; 18] = [
    -127.0, -140.0, -120.0, -113.0, -107.0, -100.0, -92.0, -84.0, -76.0, 125.0, 113.0, 106.0, 100.0, 94.0, 88.0, 81.0,
    74.0, 68.0,
];
const REFITS: usize = 2;

/// Appends whole blocks of `values`; lengths have been checked. `weights` has one number per value.
pub(super) fn push(values: &[f32], weights: &[f32], out: &mut Vec<u8>) {
    for (x, weights) in values.as_chunks::<LEN>().0.iter().zip(weights.as_chunks::<LEN>().0) {
        push_block(Format::IQ4_NL, &fit(x, weights), out);
    }
}

fn fit(x: &[f32; LEN], weights: &[f32; LEN]) -> Block {
    let reach = extreme(x);
    let mut best = Block { scale: f16::ZERO, minimum: f16::ZERO, q: [0; LEN] };
    let mut least = f32::INFINITY;
    for tried in TRIED {
        let mut scale = f16::from_f32(reach / tried);
        for _ in 0..=REFITS {
            let q = nearest(x, scale.to_f32());
            let levels = q.map(|code| f32::from(TABLE[usize::from(code)]));
            let error = (0..LEN).map(|i| weights[i] * (scale.to_f32() * levels[i] - x[i]).powi(2)).sum::<f32>();
            if error < least {
                (best, least) = (Block { scale, minimum: f16::ZERO, q }, error);
            }
            scale = slope_through(x, weights, &levels);
        }
    }
    best
}

/// Codes of the nearest levels; of two equally near the lower one.
fn nearest(x: &[f32; LEN], scale: f32) -> [u8; LEN] {
    let by = inverse(scale);
    x.map(|value| {
        let over = |pair: &&[i8; 2]| value * by > 0.5 * (f32::from(pair[0]) + f32::from(pair[1]));
        TABLE.array_windows().filter(over).count() as u8
    })
}
