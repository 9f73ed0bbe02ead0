//! AVX-512: one register a vector.

use std::arch::x86_64::*;
use std::mem::transmute;

use half::bf16;

use super::{Kernel, Simd};

#[derive(Clone, Copy)]
pub struct Avx512(());

/// # Safety
/// The processor must have the named features.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
pub unsafe fn enter<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Avx512(()))
}

// SAFETY of every block below that says "present": a value of `Avx512` exists only inside `enter`,
// and its caller vouched for the instructions.
impl Simd for Avx512 {
    type F = __m512;
    const ACCUMULATORS: usize = 16;
    const PAIR_DOTS: bool = true;

    #[inline(always)]
    fn splat(self, value: f32) -> __m512 {
        // SAFETY: present.
        unsafe { _mm512_set1_ps(value) }
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: present.
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: present.
        unsafe { _mm512_sub_ps(a, b) }
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: present.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: present.
        unsafe { _mm512_div_ps(a, b) }
    }

    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: present.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: present.
        unsafe { _mm512_max_ps(a, b) }
    }

    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: present.
        unsafe { _mm512_min_ps(a, b) }
    }

    #[inline(always)]
    fn round(self, a: __m512) -> __m512 {
        // SAFETY: present.
        unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
    }

    #[inline(always)]
    fn scale(self, a: __m512, n: __m512) -> __m512 {
        // SAFETY: present.
        unsafe { _mm512_scalef_ps(a, n) }
    }

    #[inline(always)]
    fn select_lt(self, a: __m512, b: __m512, x: __m512, y: __m512) -> __m512 {
        // SAFETY: present.
        unsafe { _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), y, x) }
    }

    #[inline(always)]
    fn halves(self, pairs: __m512) -> [__m512; 2] {
        // SAFETY: present.
        unsafe {
            let bits = _mm512_castps_si512(pairs);
            let second = _mm512_and_si512(bits, _mm512_set1_epi32(0xffff_0000_u32 as i32));
            [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits)), _mm512_castsi512_ps(second)]
        }
    }

    #[inline(always)]
    fn sum(self, a: __m512) -> f32 {
        // SAFETY: present.
        unsafe {
            let eight = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a));
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        }
    }

    #[inline(always)]
    fn largest(self, a: __m512) -> f32 {
        // SAFETY: present.
        unsafe {
            let eight = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a));
            let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
        }
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> __m512 {
        // SAFETY: present; the caller vouches for the memory.
        unsafe { _mm512_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, a: __m512) {
        // SAFETY: present; the caller vouches for the memory.
        unsafe { _mm512_storeu_ps(to, a) }
    }

    #[inline(always)]
    unsafe fn load_f16(self, from: *const u16) -> __m512 {
        // SAFETY: present; the caller vouches for the memory.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }

    #[inline(always)]
    unsafe fn load_i8(self, from: *const i8) -> __m512 {
        // SAFETY: present; the caller vouches for the memory.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast()))) }
    }

    // An f16 has the same mantissa and a larger exponent: only the bias differs, by 2^8. The shift
    // leaves two copies of the sign, and the lower one is cleared.
    #[inline(always)]
    unsafe fn load_e4m3(self, from: *const u8) -> [__m512; 2] {
        // SAFETY: present; the caller vouches for the memory.
        unsafe {
            let wide = _mm512_slli_epi16::<7>(_mm512_cvtepi8_epi16(_mm256_loadu_si256(from.cast())));
            let half = _mm512_and_si512(wide, _mm512_set1_epi16(0xbfff_u16 as i16));
            let high = _mm512_extracti64x4_epi64::<1>(half);
            [_mm512_cvtph_ps(_mm512_castsi512_si256(half)), _mm512_cvtph_ps(high)]
        }
    }

    // The permutation reads only the last four bits of an index, so the low nibbles need no mask.
    #[inline(always)]
    unsafe fn load_nibbles(self, from: *const u8) -> [__m512; 2] {
        // SAFETY: present; the caller vouches for the memory.
        unsafe {
            let numbers = _mm512_setr_ps(0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.);
            let wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast()));
            let high = _mm512_srli_epi32::<4>(wide);
            [_mm512_permutexvar_ps(wide, numbers), _mm512_permutexvar_ps(high, numbers)]
        }
    }

    #[inline(always)]
    fn dot_pairs(self, sum: __m512, a: __m512, b: __m512) -> __m512 {
        // SAFETY: present; both register types have the same size and any bits.
        unsafe { _mm512_dpbf16_ps(sum, transmute::<__m512, __m512bh>(a), transmute::<__m512, __m512bh>(b)) }
    }

    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut bf16, a: __m512) {
        // SAFETY: present; the caller vouches for the memory.
        unsafe { _mm256_storeu_si256(to.cast(), transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(a))) }
    }

    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        // SAFETY: present; a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
    }
}
