//! Activations as 8-bit integers: rounded to the nearest of 255 steps over a group, or over a whole row.
//!
//! A row's words of one step are its scale, the start of its integer sums, for weights with minimums the sum of its
//! values, and the codes, four to a word. A group that holds a NaN or an infinity gets NaN for its scale, which makes
//! that row's outputs NaN and touches no other row.

use std::ops::Range;

use folio_formats::ActivationScale;

use super::super::Isa;
use super::activations::{BUFFER, Row};

/// Values below this are taken for zero: their inverse may not be a number.
const LEAST: f32 = 1e-30;

/// How activations are rounded for one kind of weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rounding {
    /// Values in a step, at most [`BUFFER`].
    pub group: usize,
    pub scale: ActivationScale,
    /// What the kernel's levels have been raised by, to be taken back by the start of the sums.
    pub offset: i32,
    /// Whether the weights have minimums, which meet the sum of the activations.
    pub affine: bool,
}

impl Rounding {
    /// Words of a step of one row.
    pub fn step_words(&self) -> usize {
        self.header_words() + self.group / 4
    }

    /// Words before the codes.
    fn header_words(&self) -> usize {
        if self.affine { 3 } else { 2 }
    }

    /// Writes some columns of a row, whole groups but for the last, to every `stride`-th place of `target`.
    pub fn pack_row(&self, isa: Isa, row: &Row<'_>, columns: Range<usize>, target: &mut [u32], stride: usize) {
        let mut buffer = [0.0; BUFFER];
        let whole_row = match self.scale {
            ActivationScale::Group => None,
            ActivationScale::Row => {
                let runs = (0..row.cols()).step_by(BUFFER);
                let largest = runs.map(|start| largest_bits(row.read(start, BUFFER, &mut buffer))).max();
                Some(Scale::of(largest.unwrap_or(0)))
            }
        };
        let steps = target.chunks_mut(self.step_words() * stride);
        for (start, target) in columns.step_by(self.group).zip(steps) {
            let values = row.read(start, self.group, &mut buffer);
            match isa {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: `isa` comes from a `Ctx`, which has only what the processor was found to have.
                Isa::Avx512 => unsafe { avx512::pack_group(self, values, whole_row, target, stride) },
                _ => self.pack_group(values, whole_row, target, stride),
            }
        }
    }

    fn pack_group(&self, values: &[f32], scale: Option<Scale>, target: &mut [u32], stride: usize) {
        let scale = scale.unwrap_or_else(|| Scale::of(largest_bits(values)));
        let mut codes = [0i8; BUFFER];
        if scale.inverse != 0.0 {
            for (value, code) in values.iter().zip(codes.iter_mut()) {
                *code = (value * scale.inverse).round_ties_even() as i8;
            }
        }
        let codes = &codes[..self.group];
        self.put_header(scale, codes.iter().map(|&code| i32::from(code)).sum(), target, stride);
        let words = &mut target[self.header_words() * stride..];
        let (codes, _) = codes.as_chunks::<4>();
        for (index, codes) in codes.iter().enumerate() {
            words[index * stride] = u32::from_le_bytes(codes.map(|code| code as u8));
        }
    }

    /// Writes what stands before the codes.
    #[inline(always)]
    fn put_header(&self, scale: Scale, sum: i32, target: &mut [u32], stride: usize) {
        target[0] = scale.step.to_bits();
        target[stride] = (-self.offset * sum) as u32;
        if self.affine {
            target[2 * stride] = (scale.step * sum as f32).to_bits();
        }
    }
}

/// The value of one step, and what values are multiplied by to become steps; 0 if all of them are to be zeros.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Scale {
    step: f32,
    inverse: f32,
}

impl Scale {
    /// For values whose largest size has these bits.
    fn of(bits: u32) -> Self {
        let largest = f32::from_bits(bits);
        if !largest.is_finite() {
            Self { step: f32::NAN, inverse: 0.0 }
        } else if largest < LEAST {
            Self { step: 0.0, inverse: 0.0 }
        } else {
            Self { step: largest / 127.0, inverse: 127.0 / largest }
        }
    }
}

/// The bits of the largest size; those of a NaN are above all others'.
fn largest_bits(values: &[f32]) -> u32 {
    values.iter().map(|value| value.to_bits() & i32::MAX as u32).max().unwrap_or(0)
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use std::arch::x86_64::*;

    use super::{Rounding, Scale};

    /// [`Rounding::pack_group`], sixteen values at a time.
    ///
    /// # Safety
    /// The machine has AVX-512.
    #[target_feature(enable = "avx512f")]
    pub unsafe fn pack_group(
        rounding: &Rounding,
        values: &[f32],
        scale: Option<Scale>,
        target: &mut [u32],
        stride: usize,
    ) {
        let scale = scale.unwrap_or_else(|| Scale::of(largest_bits(values)));
        let inverse = _mm512_set1_ps(scale.inverse);
        // What is to become zeros may be no numbers.
        let kept = if scale.inverse != 0.0 { u16::MAX } else { 0 };
        let mut sums = _mm512_setzero_si512();
        let words = &mut target[rounding.header_words() * stride..];
        assert!(words.len() > (rounding.group / 4 - 1) * stride);
        for index in 0..rounding.group / 16 {
            let values = load(values.get(16 * index..).unwrap_or_default());
            let rounded = _mm512_maskz_cvtps_epi32(kept, _mm512_mul_ps(values, inverse));
            sums = _mm512_add_epi32(sums, rounded);
            let codes = _mm512_cvtepi32_epi8(rounded);
            // SAFETY: the last of the words written is within the slice, as just checked.
            unsafe {
                let place = words.as_mut_ptr().add(4 * index * stride);
                if stride == 1 {
                    _mm_storeu_si128(place.cast(), codes);
                } else {
                    *place = _mm_extract_epi32::<0>(codes) as u32;
                    *place.add(stride) = _mm_extract_epi32::<1>(codes) as u32;
                    *place.add(2 * stride) = _mm_extract_epi32::<2>(codes) as u32;
                    *place.add(3 * stride) = _mm_extract_epi32::<3>(codes) as u32;
                }
            }
        }
        rounding.put_header(scale, _mm512_reduce_add_epi32(sums), target, stride);
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn largest_bits(values: &[f32]) -> u32 {
        let size = _mm512_set1_epi32(i32::MAX);
        let mut largest = _mm512_setzero_si512();
        for values in values.chunks(16) {
            let bits = _mm512_and_si512(_mm512_castps_si512(load(values)), size);
            largest = _mm512_max_epu32(largest, bits);
        }
        _mm512_reduce_max_epu32(largest)
    }

    /// Up to sixteen of the values, and zeros.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn load(values: &[f32]) -> __m512 {
        if values.len() >= 16 {
            // SAFETY: sixteen readable values.
            unsafe { _mm512_loadu_ps(values.as_ptr()) }
        } else {
            // SAFETY: the mask leaves out what is not there.
            unsafe { _mm512_maskz_loadu_ps(((1u32 << values.len()) - 1) as u16, values.as_ptr()) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounding(scale: ActivationScale) -> Rounding {
        Rounding { group: 16, scale, offset: 128, affine: true }
    }

    fn packed(isa: Isa, rounding: Rounding, values: &[f32]) -> Vec<u32> {
        let mut target = vec![0; values.len().div_ceil(16) * rounding.step_words()];
        rounding.pack_row(isa, &Row::new(values), 0..values.len(), &mut target, 1);
        target
    }

    #[test]
    fn every_isa_rounds_alike_and_to_the_nearest() {
        let values: Vec<f32> = (0..300).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.031 * (1 + i / 16) as f32).collect();
        for scale in [ActivationScale::Group, ActivationScale::Row] {
            for len in [1, 15, 16, 17, 256, 300] {
                let rounding = rounding(scale);
                let plain = packed(Isa::Scalar, rounding, &values[..len]);
                for isa in Isa::available() {
                    assert_eq!(packed(isa, rounding, &values[..len]), plain, "{isa:?} {scale:?} {len}");
                }
                for (group, words) in plain.chunks(rounding.step_words()).enumerate() {
                    let step = f32::from_bits(words[0]);
                    let codes: Vec<i8> =
                        words[3..].iter().flat_map(|word| word.to_le_bytes().map(|b| b as i8)).collect();
                    let sum: i32 = codes.iter().map(|&code| i32::from(code)).sum();
                    assert_eq!(words[1] as i32, -128 * sum);
                    assert_eq!(f32::from_bits(words[2]), step * sum as f32);
                    for (at, code) in codes.into_iter().enumerate() {
                        let value = values[..len].get(16 * group + at).copied().unwrap_or(0.0);
                        assert!((value - step * f32::from(code)).abs() <= 0.5001 * step, "{value} as {code} * {step}");
                    }
                }
            }
        }
    }

    #[test]
    fn zeros_stay_zeros_and_what_is_no_number_marks_its_group() {
        for isa in Isa::available() {
            assert!(packed(isa, rounding(ActivationScale::Group), &[0.0; 32]).iter().all(|&word| word == 0));
            assert!(packed(isa, rounding(ActivationScale::Group), &[1e-38; 16]).iter().all(|&word| word == 0));
            for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut values = [1.0; 48];
                values[20] = bad;
                let steps = |scale| {
                    let rounding = rounding(scale);
                    let words = packed(isa, rounding, &values);
                    words.chunks(rounding.step_words()).map(|step| f32::from_bits(step[0])).collect::<Vec<_>>()
                };
                let nan: Vec<bool> = steps(ActivationScale::Group).into_iter().map(f32::is_nan).collect();
                assert_eq!(nan, [false, true, false], "{isa:?}");
                assert!(steps(ActivationScale::Row).into_iter().all(f32::is_nan), "{isa:?}");
            }
        }
    }
}
