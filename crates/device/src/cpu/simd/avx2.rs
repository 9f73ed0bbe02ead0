//! AVX2 with FMA and F16C: two registers a vector, the lower eight lanes first.

use std::arch::x86_64::*;

use super::{Kernel, Simd};

#[derive(Clone, Copy)]
pub struct Avx2(());

#[derive(Clone, Copy)]
pub struct Pair(__m256, __m256);

/// # Safety
/// The processor must have the named features.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn enter<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Avx2(()))
}

/// `a * 2^n`, in two steps so that the ends of the range neither overflow nor vanish early.
///
/// # Safety
/// The processor must have AVX2.
#[inline(always)]
unsafe fn scale_half(a: __m256, n: __m256) -> __m256 {
    // SAFETY: the caller vouches for the instructions.
    unsafe {
        let n = _mm256_cvtps_epi32(n);
        let first = _mm256_srai_epi32::<1>(n);
        let second = _mm256_sub_epi32(n, first);
        let bias = _mm256_set1_epi32(127);
        let first = _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(first, bias)));
        let second = _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(second, bias)));
        _mm256_mul_ps(_mm256_mul_ps(a, first), second)
    }
}

/// An f16 has the mantissa of an e4m3 and a larger exponent: only the bias differs, by 2^8. The
/// shift leaves two copies of the sign, and the lower one is cleared.
///
/// # Safety
/// The processor must have AVX2 and F16C, and sixteen bytes must be readable at `from`.
#[inline(always)]
unsafe fn load_e4m3_half(from: *const u8) -> Pair {
    // SAFETY: the caller vouches for the instructions and the memory.
    unsafe {
        let wide = _mm256_slli_epi16::<7>(_mm256_cvtepi8_epi16(_mm_loadu_si128(from.cast())));
        let half = _mm256_and_si256(wide, _mm256_set1_epi16(0xbfff_u16 as i16));
        Pair(_mm256_cvtph_ps(_mm256_castsi256_si128(half)), _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(half)))
    }
}

// SAFETY of every block below that says "present": a value of `Avx2` exists only inside `enter`,
// and its caller vouched for the instructions.
impl Simd for Avx2 {
    type F = Pair;
    const ACCUMULATORS: usize = 4;

    #[inline(always)]
    fn splat(self, value: f32) -> Pair {
        // SAFETY: present.
        let half = unsafe { _mm256_set1_ps(value) };
        Pair(half, half)
    }

    #[inline(always)]
    fn add(self, a: Pair, b: Pair) -> Pair {
        // SAFETY: present.
        unsafe { Pair(_mm256_add_ps(a.0, b.0), _mm256_add_ps(a.1, b.1)) }
    }

    #[inline(always)]
    fn sub(self, a: Pair, b: Pair) -> Pair {
        // SAFETY: present.
        unsafe { Pair(_mm256_sub_ps(a.0, b.0), _mm256_sub_ps(a.1, b.1)) }
    }

    #[inline(always)]
    fn mul(self, a: Pair, b: Pair) -> Pair {
        // SAFETY: present.
        unsafe { Pair(_mm256_mul_ps(a.0, b.0), _mm256_mul_ps(a.1, b.1)) }
    }

    #[inline(always)]
    fn div(self, a: Pair, b: Pair) -> Pair {
        // SAFETY: present.
        unsafe { Pair(_mm256_div_ps(a.0, b.0), _mm256_div_ps(a.1, b.1)) }
    }

    #[inline(always)]
    fn fma(self, a: Pair, b: Pair, c: Pair) -> Pair {
        // SAFETY: present.
        unsafe { Pair(_mm256_fmadd_ps(a.0, b.0, c.0), _mm256_fmadd_ps(a.1, b.1, c.1)) }
    }

    #[inline(always)]
    fn max(self, a: Pair, b: Pair) -> Pair {
        // SAFETY: present.
        unsafe { Pair(_mm256_max_ps(a.0, b.0), _mm256_max_ps(a.1, b.1)) }
    }

    #[inline(always)]
    fn min(self, a: Pair, b: Pair) -> Pair {
        // SAFETY: present.
        unsafe { Pair(_mm256_min_ps(a.0, b.0), _mm256_min_ps(a.1, b.1)) }
    }

    #[inline(always)]
    fn round(self, a: Pair) -> Pair {
        const MODE: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        // SAFETY: present.
        unsafe { Pair(_mm256_round_ps::<MODE>(a.0), _mm256_round_ps::<MODE>(a.1)) }
    }

    #[inline(always)]
    fn scale(self, a: Pair, n: Pair) -> Pair {
        // SAFETY: present.
        unsafe { Pair(scale_half(a.0, n.0), scale_half(a.1, n.1)) }
    }

    #[inline(always)]
    fn select_lt(self, a: Pair, b: Pair, x: Pair, y: Pair) -> Pair {
        // SAFETY: present.
        unsafe {
            let low = _mm256_cmp_ps::<_CMP_LT_OQ>(a.0, b.0);
            let high = _mm256_cmp_ps::<_CMP_LT_OQ>(a.1, b.1);
            Pair(_mm256_blendv_ps(y.0, x.0, low), _mm256_blendv_ps(y.1, x.1, high))
        }
    }

    #[inline(always)]
    fn halves(self, pairs: Pair) -> [Pair; 2] {
        // SAFETY: present.
        unsafe {
            let (low, high) = (_mm256_castps_si256(pairs.0), _mm256_castps_si256(pairs.1));
            let mask = _mm256_set1_epi32(0xffff_0000_u32 as i32);
            let first = [_mm256_slli_epi32::<16>(low), _mm256_slli_epi32::<16>(high)];
            let second = [_mm256_and_si256(low, mask), _mm256_and_si256(high, mask)];
            [
                Pair(_mm256_castsi256_ps(first[0]), _mm256_castsi256_ps(first[1])),
                Pair(_mm256_castsi256_ps(second[0]), _mm256_castsi256_ps(second[1])),
            ]
        }
    }

    #[inline(always)]
    fn sum(self, a: Pair) -> f32 {
        // SAFETY: present.
        unsafe {
            let eight = _mm256_add_ps(a.0, a.1);
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        }
    }

    #[inline(always)]
    fn largest(self, a: Pair) -> f32 {
        // SAFETY: present.
        unsafe {
            let eight = _mm256_max_ps(a.0, a.1);
            let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
        }
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> Pair {
        // SAFETY: present; the caller vouches for the memory.
        unsafe { Pair(_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, a: Pair) {
        // SAFETY: present; the caller vouches for the memory.
        unsafe {
            _mm256_storeu_ps(to, a.0);
            _mm256_storeu_ps(to.add(8), a.1);
        }
    }

    #[inline(always)]
    unsafe fn load_f16(self, from: *const u16) -> Pair {
        // SAFETY: present; the caller vouches for the memory.
        unsafe {
            Pair(_mm256_cvtph_ps(_mm_loadu_si128(from.cast())), _mm256_cvtph_ps(_mm_loadu_si128(from.add(8).cast())))
        }
    }

    #[inline(always)]
    unsafe fn load_i8(self, from: *const i8) -> Pair {
        // SAFETY: present; the caller vouches for the memory.
        unsafe {
            let codes = _mm_loadu_si128(from.cast());
            let low = _mm256_cvtepi8_epi32(codes);
            let high = _mm256_cvtepi8_epi32(_mm_unpackhi_epi64(codes, codes));
            Pair(_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high))
        }
    }

    #[inline(always)]
    unsafe fn load_e4m3(self, from: *const u8) -> [Pair; 2] {
        // SAFETY: present; the caller vouches for the memory.
        unsafe { [load_e4m3_half(from), load_e4m3_half(from.add(16))] }
    }

    #[inline(always)]
    unsafe fn load_nibbles(self, from: *const u8) -> [Pair; 2] {
        // SAFETY: present; the caller vouches for the memory.
        unsafe {
            let codes = _mm_loadu_si128(from.cast());
            let first = _mm256_cvtepu8_epi32(codes);
            let second = _mm256_cvtepu8_epi32(_mm_unpackhi_epi64(codes, codes));
            let mask = _mm256_set1_epi32(15);
            let low = Pair(
                _mm256_cvtepi32_ps(_mm256_and_si256(first, mask)),
                _mm256_cvtepi32_ps(_mm256_and_si256(second, mask)),
            );
            let high = Pair(
                _mm256_cvtepi32_ps(_mm256_srli_epi32::<4>(first)),
                _mm256_cvtepi32_ps(_mm256_srli_epi32::<4>(second)),
            );
            [low, high]
        }
    }

    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        // SAFETY: present; a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
    }
}
