//! Shared by GPTQ and AWQ: codes packed into 32-bit words, and scales per group and output.

use serde_json::Value;

use super::{packed, scheme, tensor};
use crate::{Format, Result, TensorView, WeightSource};

/// The words of a checked tensor, in order.
pub(super) fn words<'a>(view: &TensorView<'a>) -> impl Iterator<Item = u32> + use<'a> {
    let (words, _) = view.bytes.as_chunks::<4>();
    words.iter().map(|word| u32::from_le_bytes(*word))
}

/// Codes of `bits` bits, one after the other from the lowest bit of the first word on; a code may
/// lie across two words.
pub(super) fn unpack(words: impl Iterator<Item = u32>, bits: u32, mut each: impl FnMut(u8)) {
    let (mut held, mut num_held) = (0u64, 0);
    for word in words {
        held |= u64::from(word) << num_held;
        num_held += 32;
        while num_held >= bits {
            each((held & ((1 << bits) - 1)) as u8);
            held >>= bits;
            num_held -= bits;
        }
    }
}

/// Scales `[groups, rows]` as f32; none of them may be zero, infinite or NaN.
pub(super) fn scales(source: &dyn WeightSource, name: &str, groups: usize, rows: usize) -> Result<Vec<f32>> {
    let view = tensor(source, name, &[groups, rows], &[Format::F16, Format::BF16, Format::F32])?;
    let scales = view.to_f32()?;
    match scales.iter().position(|scale| !scale.is_finite() || *scale == 0.0) {
        None => Ok(scales),
        Some(at) => {
            let (group, row, found) = (at / rows, at % rows, scales[at]);
            Err(packed(name, format!("has a scale of {found} for group {group} of output {row}")))
        }
    }
}

/// An integer of the configuration.
pub(super) fn integer(config: &Value, field: &str) -> Result<i64> {
    match config.get(field) {
        None | Some(Value::Null) => Err(scheme(field, "is missing")),
        Some(value) => value.as_i64().ok_or_else(|| scheme(field, "is not a whole number")),
    }
}

/// A group size: `None` for -1, one group per row.
pub(super) fn group_size(field: &str, size: i64) -> Result<Option<usize>> {
    match usize::try_from(size) {
        Ok(size) if size > 0 => Ok(Some(size)),
        _ if size == -1 => Ok(None),
        _ => Err(scheme(field, format!("is {size}, but it must be -1 or positive"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_run_on_across_words() {
        let codes: Vec<u8> = (0..32).map(|i| i * 5 % 8).collect();
        let mut stream = [0u32; 3];
        for (i, code) in codes.iter().enumerate() {
            for bit in 0..3 {
                let at = i * 3 + bit;
                stream[at / 32] |= u32::from(code >> bit & 1) << (at % 32);
            }
        }
        let mut found = Vec::new();
        unpack(stream.into_iter(), 3, |code| found.push(code));
        assert_eq!(found, codes);
        found.clear();
        unpack([0x8765_4321].into_iter(), 4, |code| found.push(code));
        assert_eq!(found, [1, 2, 3, 4, 5, 6, 7, 8]);
    }
}
