//! Activations as 8-bit integers: rounded to the nearest of 255 steps over a group, or over a whole
//! row.
//!
//! A row's words of one step are its scale, the start of its integer sums, for weights with
//! minimums the sum of its values, and the codes: four to a word, or their magnitudes and signs in
//! two words. A group that holds a NaN or an infinity gets NaN for its scale, which makes that
//! row's outputs NaN and touches no other row.

use std::ops::Range;

use folio_formats::ActivationScale;

use super::super::Isa;
use super::activations::{BUFFER, Row};

/// Smaller values count as zero: their inverse may be infinite.
const LEAST: f32 = 1e-30;

/// How activations are rounded for one kind of weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rounding {
    /// Values in a step, at most [`BUFFER`].
    pub group: usize,
    pub scale: ActivationScale,
    /// Offset that was added to the kernel's levels; the start of the sums subtracts its effect.
    pub offset: i32,
    /// If given, a word of magnitudes is followed by one of signs: this byte, with all bits flipped
    /// if a code is negative. Kernels flip their levels by it. A level with all bits flipped is its
    /// negative less one, and the start of the sums corrects the difference.
    pub signs: Option<u8>,
    /// Whether the weights have minimums, which are multiplied with the sum of the activations.
    pub affine: bool,
}

impl Rounding {
    /// Words of a step of one row.
    pub fn step_words(&self) -> usize {
        self.header_words() + self.group / 4 * self.quarter_words()
    }

    /// Words of a step before its codes.
    fn header_words(&self) -> usize {
        if self.affine { 3 } else { 2 }
    }

    /// Words that hold four codes.
    fn quarter_words(&self) -> usize {
        if self.signs.is_some() { 2 } else { 1 }
    }

    /// Writes some columns of a row, in whole groups except for the last, to every `stride`-th word
    /// of `target`.
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
        #[cfg(target_arch = "x86_64")]
        if let Some(values) = row.plain_values()
            && matches!(isa, Isa::Avx512 | Isa::Amx)
            && self.signs.is_none()
        {
            // SAFETY: `isa` comes from a `Ctx`, which has only sets that the processor was found to
            // have.
            return unsafe { avx512::pack_groups(self, &values[columns], whole_row, target, stride) };
        }
        let steps = target.chunks_mut(self.step_words() * stride);
        for (start, target) in columns.step_by(self.group).zip(steps) {
            let values = row.read(start, self.group, &mut buffer);
            match isa {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: as above.
                Isa::Avx512 | Isa::Amx if self.signs.is_none() => unsafe {
                    avx512::pack_groups(self, values, whole_row, target, stride)
                },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: as above.
                Isa::Avx2 => unsafe { avx2::pack_group(self, values, whole_row, target, stride) },
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
        let sum = |code: fn(i8) -> i8| codes.iter().map(|&each| i32::from(code(each))).sum();
        self.put_header(scale, sum(|code| code), sum(|code| code.min(0)), target, stride);
        let words = &mut target[self.header_words() * stride..];
        let (codes, _) = codes.as_chunks::<4>();
        for (index, codes) in codes.iter().enumerate() {
            let place = index * self.quarter_words() * stride;
            words[place] = match self.signs {
                None => u32::from_le_bytes(codes.map(|code| code as u8)),
                Some(sign) => {
                    words[place + stride] = u32::from_le_bytes(codes.map(|code| if code < 0 { !sign } else { sign }));
                    u32::from_le_bytes(codes.map(i8::unsigned_abs))
                }
            };
        }
    }

    /// Writes the header before the codes; `sum` is that of all codes, `below_zero` that of the
    /// negative ones.
    #[inline(always)]
    fn put_header(&self, scale: Scale, sum: i32, below_zero: i32, target: &mut [u32], stride: usize) {
        target[0] = scale.step.to_bits();
        target[stride] = if self.signs.is_some() { -below_zero } else { -self.offset * sum } as u32;
        if self.affine {
            target[2 * stride] = (scale.step * sum as f32).to_bits();
        }
    }
}

/// The value of one step, and the factor from values to steps; 0 if all values become zeros.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Scale {
    step: f32,
    inverse: f32,
}

impl Scale {
    /// The scale for values with a largest magnitude of these bits.
    #[inline(always)]
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

/// The bits of the largest magnitude; those of a NaN are above all others.
fn largest_bits(values: &[f32]) -> u32 {
    values.iter().map(|value| value.to_bits() & i32::MAX as u32).max().unwrap_or(0)
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use std::arch::x86_64::*;

    use super::{Rounding, Scale};

    /// [`Rounding::pack_group`] for consecutive groups, sixteen values at a time.
    ///
    /// # Safety
    /// The machine has AVX-512.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    pub unsafe fn pack_groups(
        rounding: &Rounding,
        values: &[f32],
        whole_row: Option<Scale>,
        target: &mut [u32],
        stride: usize,
    ) {
        let (step, header) = (rounding.step_words() * stride, rounding.header_words() * stride);
        let num_groups = values.len().div_ceil(rounding.group);
        assert!(rounding.group >= 16 && target.len() + stride > num_groups * step, "too few words");
        for (index, values) in values.chunks(rounding.group).enumerate() {
            // A closure would be compiled without these instructions.
            let scale = match whole_row {
                Some(scale) => scale,
                None => Scale::of(largest_bits(values)),
            };
            let target = &mut target[index * step..];
            let words = &mut target[header..];
            // SAFETY: there is room for the words of all groups, as checked.
            let sum = unsafe {
                if let (32, Some(whole)) = (rounding.group, values.as_array::<32>()) {
                    put_codes([load(whole), load(&whole[16..])], scale, words.as_mut_ptr(), stride)
                } else {
                    let mut sum = 0;
                    for run in 0..rounding.group / 16 {
                        let values = load(values.get(16 * run..).unwrap_or_default());
                        sum += put_codes([values], scale, words.as_mut_ptr().add(4 * run * stride), stride);
                    }
                    sum
                }
            };
            rounding.put_header(scale, sum, 0, target, stride);
        }
    }

    /// Writes the codes of `N` times sixteen values, and returns their sum.
    ///
    /// # Safety
    /// Room for `4 * N` words, at distances of `stride`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn put_codes<const N: usize>(values: [__m512; N], scale: Scale, words: *mut u32, stride: usize) -> i32 {
        let inverse = _mm512_set1_ps(scale.inverse);
        // Values that become zeros may be NaN or infinite.
        let kept = if scale.inverse != 0.0 { u16::MAX } else { 0 };
        let mut sums = _mm_setzero_si128();
        for run in 0..N {
            let codes = _mm512_cvtepi32_epi8(_mm512_maskz_cvtps_epi32(kept, _mm512_mul_ps(values[run], inverse)));
            // Differences from the lowest code are unsigned bytes; one instruction adds eight of
            // them.
            let raised = _mm_xor_si128(codes, _mm_set1_epi8(i8::MIN));
            sums = _mm_add_epi64(sums, _mm_sad_epu8(raised, _mm_setzero_si128()));
            // SAFETY: the caller's promise.
            unsafe {
                let place = words.add(4 * run * stride);
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
        (_mm_extract_epi64::<0>(sums) + _mm_extract_epi64::<1>(sums)) as i32 + 16 * N as i32 * i32::from(i8::MIN)
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

    /// Up to sixteen of the values, then zeros.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn load(values: &[f32]) -> __m512 {
        if values.len() >= 16 {
            // SAFETY: sixteen readable values.
            unsafe { _mm512_loadu_ps(values.as_ptr()) }
        } else {
            // SAFETY: the mask leaves out the missing values.
            unsafe { _mm512_maskz_loadu_ps(((1u32 << values.len()) - 1) as u16, values.as_ptr()) }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::*;

    use super::{Rounding, Scale};

    /// [`Rounding::pack_group`], sixteen values at a time.
    ///
    /// # Safety
    /// The machine has AVX2.
    #[target_feature(enable = "avx2")]
    pub unsafe fn pack_group(
        rounding: &Rounding,
        values: &[f32],
        scale: Option<Scale>,
        target: &mut [u32],
        stride: usize,
    ) {
        let scale = scale.unwrap_or_else(|| Scale::of(largest_bits(values)));
        let inverse = _mm256_set1_ps(scale.inverse);
        // Values that become zeros may be NaN or infinite.
        let kept = _mm256_set1_epi32(if scale.inverse != 0.0 { -1 } else { 0 });
        let zero = _mm256_setzero_si256();
        let [mut sums, mut below_zero] = [zero; 2];
        let words = &mut target[rounding.header_words() * stride..];
        let step = rounding.quarter_words() * stride;
        for index in 0..rounding.group / 16 {
            let rounded = load(values.get(16 * index..).unwrap_or_default())
                .map(|values| _mm256_and_si256(_mm256_cvtps_epi32(_mm256_mul_ps(values, inverse)), kept));
            for rounded in rounded {
                sums = _mm256_add_epi32(sums, rounded);
                below_zero = _mm256_add_epi32(below_zero, _mm256_min_epi32(rounded, zero));
            }
            // The halves of a register are narrowed separately, and put in order again.
            let shorts = _mm256_packs_epi32(rounded[0], rounded[1]);
            let shorts = _mm256_permute4x64_epi64::<0b_11_01_10_00>(shorts);
            let codes = _mm_packs_epi16(_mm256_castsi256_si128(shorts), _mm256_extracti128_si256::<1>(shorts));
            let words = &mut words[4 * index * step..];
            match rounding.signs {
                None => put(codes, words, step),
                Some(sign) => {
                    let negative = _mm_cmpgt_epi8(_mm_setzero_si128(), codes);
                    put(_mm_abs_epi8(codes), words, step);
                    put(_mm_xor_si128(negative, _mm_set1_epi8(sign as i8)), &mut words[stride..], step);
                }
            }
        }
        rounding.put_header(scale, total(sums), total(below_zero), target, stride);
    }

    /// Four words, `step` apart.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn put(bytes: __m128i, words: &mut [u32], step: usize) {
        words[0] = _mm_extract_epi32::<0>(bytes) as u32;
        words[step] = _mm_extract_epi32::<1>(bytes) as u32;
        words[2 * step] = _mm_extract_epi32::<2>(bytes) as u32;
        words[3 * step] = _mm_extract_epi32::<3>(bytes) as u32;
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn total(lanes: __m256i) -> i32 {
        let lanes = _mm_add_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256::<1>(lanes));
        let lanes = _mm_add_epi32(lanes, _mm_unpackhi_epi64(lanes, lanes));
        _mm_extract_epi32::<0>(lanes) + _mm_extract_epi32::<1>(lanes)
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn largest_bits(values: &[f32]) -> u32 {
        let size = _mm256_set1_epi32(i32::MAX);
        let mut largest = _mm256_setzero_si256();
        for values in values.chunks(16) {
            let bits = load(values).map(|values| _mm256_and_si256(_mm256_castps_si256(values), size));
            largest = _mm256_max_epu32(largest, _mm256_max_epu32(bits[0], bits[1]));
        }
        let largest = _mm_max_epu32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256::<1>(largest));
        let largest = _mm_max_epu32(largest, _mm_unpackhi_epi64(largest, largest));
        (_mm_extract_epi32::<0>(largest) as u32).max(_mm_extract_epi32::<1>(largest) as u32)
    }

    /// Up to sixteen of the values, then zeros.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn load(values: &[f32]) -> [__m256; 2] {
        let mut padded = [0.0; 16];
        let from = match values.first_chunk() {
            Some(values) => values,
            None => {
                padded[..values.len()].copy_from_slice(values);
                &padded
            }
        };
        // SAFETY: sixteen readable values.
        unsafe { [_mm256_loadu_ps(from.as_ptr()), _mm256_loadu_ps(from.as_ptr().add(8))] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounding(scale: ActivationScale) -> Rounding {
        Rounding { group: 16, scale, offset: 128, signs: None, affine: true }
    }

    fn packed(isa: Isa, rounding: Rounding, values: &[f32]) -> Vec<u32> {
        packed_apart(isa, rounding, values, 1)
    }

    /// Words at distances of `stride`, with others between them.
    fn packed_apart(isa: Isa, rounding: Rounding, values: &[f32], stride: usize) -> Vec<u32> {
        let mut target = vec![0; values.len().div_ceil(rounding.group) * rounding.step_words() * stride];
        rounding.pack_row(isa, &Row::new(values), 0..values.len(), &mut target, stride);
        target.into_iter().step_by(stride).collect()
    }

    #[test]
    fn every_isa_rounds_alike_and_to_the_nearest() {
        let values: Vec<f32> = (0..300).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.031 * (1 + i / 16) as f32).collect();
        for (scale, group) in [ActivationScale::Group, ActivationScale::Row]
            .into_iter()
            .flat_map(|scale| [16, 32, 64].map(|group| (scale, group)))
        {
            for len in [1, 15, 16, 17, 32, 96, 256, 300] {
                let rounding = Rounding { group, ..rounding(scale) };
                let plain = packed(Isa::Scalar, rounding, &values[..len]);
                for (isa, stride) in Isa::available().into_iter().flat_map(|isa| [(isa, 1), (isa, 5)]) {
                    let found = packed_apart(isa, rounding, &values[..len], stride);
                    assert_eq!(found, plain, "{isa:?} {scale:?} {group} {len} {stride} apart");
                }
                for (index, words) in plain.chunks(rounding.step_words()).enumerate() {
                    let step = f32::from_bits(words[0]);
                    let codes: Vec<i8> =
                        words[3..].iter().flat_map(|word| word.to_le_bytes().map(|b| b as i8)).collect();
                    let sum: i32 = codes.iter().map(|&code| i32::from(code)).sum();
                    assert_eq!(words[1] as i32, -128 * sum);
                    assert_eq!(f32::from_bits(words[2]), step * sum as f32);
                    for (at, code) in codes.into_iter().enumerate() {
                        let value = values[..len].get(group * index + at).copied().unwrap_or(0.0);
                        assert!((value - step * f32::from(code)).abs() <= 0.5001 * step, "{value} as {code} * {step}");
                    }
                }
            }
        }
    }

    #[test]
    fn sizes_and_signs_are_the_codes() {
        let values: Vec<f32> = (0..256).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.031).collect();
        let whole = rounding(ActivationScale::Group);
        for sign in [0, 128] {
            let apart = Rounding { signs: Some(sign), ..whole };
            for isa in Isa::available() {
                let (whole_words, apart_words) = (packed(isa, whole, &values), packed(isa, apart, &values));
                let groups = whole_words.chunks(whole.step_words()).zip(apart_words.chunks(apart.step_words()));
                for (whole, apart) in groups {
                    assert_eq!((whole[0], whole[2]), (apart[0], apart[2]), "{isa:?}");
                    let mut below_zero = 0;
                    for (codes, words) in whole[3..].iter().zip(apart[3..].chunks(2)) {
                        let [sizes, signs] = [words[0].to_le_bytes(), words[1].to_le_bytes()];
                        for (at, code) in codes.to_le_bytes().map(|byte| byte as i8).into_iter().enumerate() {
                            below_zero += i32::from(code.min(0));
                            let flipped = if code < 0 { !sign } else { sign };
                            assert_eq!((sizes[at], signs[at]), (code.unsigned_abs(), flipped), "{isa:?} {code}");
                        }
                    }
                    assert_eq!(apart[1] as i32, -below_zero, "{isa:?}");
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
