//! Encoders for weights that are encoded while a model loads: nearly as good as the fitted ones at
//! a tenth of the time.

use half::f16;

use super::k::{error_through, nearest_through, sum};
use super::{Block, encode, extreme, push};
use crate::quant::simple::LEN;
use crate::{Format, Result};

/// Start of the search for a scale: the block's reach over this number of levels. One refit by
/// least squares follows.
const TRIED: [f32; 5] = [-8.6, -7.9, -7.2, 7.6, 6.9];

/// The bytes of `values` in Q4_0 with a short search for scales; other formats are rounded to
/// nearest.
pub fn encode_quick(format: Format, values: &[f32]) -> Result<Vec<u8>> {
    if format != Format::Q4_0 {
        return encode(format, values);
    }
    let mut out = Vec::with_capacity(format.bytes_for(values.len() as u64)? as usize);
    for x in values.as_chunks::<LEN>().0 {
        push(format, &four_bits(x), &mut out);
    }
    Ok(out)
}

fn four_bits(x: &[f32; LEN]) -> Block {
    const HALF: f32 = 8.0;
    let reach = extreme(x);
    let even = [1.0; LEN];
    let (mut best, mut least) = (0.0, f32::INFINITY);
    for tried in TRIED {
        let levels = nearest_through(x, reach / tried, HALF);
        let cross = sum::<LEN>(|i| x[i] * levels[i]);
        let norm = sum::<LEN>(|i| levels[i] * levels[i]);
        let scale = f16::from_f32(if norm > 0.0 { cross / norm } else { 0.0 }).to_f32();
        let error = error_through(x, &even, scale, HALF);
        if error < least {
            (best, least) = (scale, error);
        }
    }
    let q = nearest_through(x, best, HALF).map(|level| (level + HALF) as u8);
    Block { scale: f16::from_f32(best), minimum: f16::ZERO, q }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::encode_fitted;
    use crate::quant::tests::gaussian;

    fn error(bytes: &[u8], values: &[f32]) -> f64 {
        let mut back = vec![0.0; values.len()];
        Format::Q4_0.decode(bytes, &mut back);
        values.iter().zip(back).map(|(value, back)| f64::from(value - back).powi(2)).sum()
    }

    #[test]
    fn nearly_as_good_as_the_long_search() {
        let values = gaussian(LEN * 400);
        let nearest = error(&encode(Format::Q4_0, &values).unwrap(), &values);
        let fitted = error(&encode_fitted(Format::Q4_0, &values, &vec![1.0; values.len()]).unwrap(), &values);
        let quick = error(&encode_quick(Format::Q4_0, &values).unwrap(), &values);
        assert!(quick < fitted + 0.2 * (nearest - fitted), "{nearest} nearest, {quick} quick, {fitted} fitted");
        for value in [0.0, 1.0, -3.5, 1e-7] {
            let x = [value; LEN];
            assert!(error(&encode_quick(Format::Q4_0, &x).unwrap(), &x) < 1e-4, "{value}");
        }
    }
}
