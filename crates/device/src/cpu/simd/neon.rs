//! NEON: four registers a vector, in lane order.

use std::arch::aarch64::*;
use std::arch::asm;

use super::{Kernel, Simd};

#[derive(Clone, Copy)]
pub struct Neon(());

type F = [float32x4_t; 4];

/// # Safety
/// The processor must have NEON.
#[target_feature(enable = "neon")]
pub unsafe fn enter<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Neon(()))
}

#[inline(always)]
fn each(f: impl Fn(usize) -> float32x4_t) -> F {
    [f(0), f(1), f(2), f(3)]
}

/// Widens four f16 exactly.
#[inline(always)]
fn widen_f16(narrow: uint16x4_t) -> float32x4_t {
    let wide: float32x4_t;
    // SAFETY: `fcvtl` is in every NEON and touches the two registers only.
    unsafe {
        asm!("fcvtl {wide:v}.4s, {narrow:v}.4h", wide = out(vreg) wide, narrow = in(vreg) narrow,
            options(pure, nomem, nostack, preserves_flags));
    }
    wide
}

/// An f16 has the mantissa of an e4m3 and a larger exponent: only the bias differs, by 2^8. The
/// shift leaves two copies of the sign, and the lower one is cleared.
///
/// # Safety
/// The processor must have NEON, and sixteen bytes must be readable at `from`.
#[inline(always)]
unsafe fn load_e4m3_half(from: *const u8) -> F {
    // SAFETY: the caller vouches for the instructions and the memory.
    let quarters = unsafe {
        let codes = vld1q_s8(from.cast());
        let half = |codes| {
            let wide = vreinterpretq_u16_s16(vshlq_n_s16::<7>(vmovl_s8(codes)));
            vandq_u16(wide, vdupq_n_u16(0xbfff))
        };
        let (low, high) = (half(vget_low_s8(codes)), half(vget_high_s8(codes)));
        [vget_low_u16(low), vget_high_u16(low), vget_low_u16(high), vget_high_u16(high)]
    };
    each(|i| widen_f16(quarters[i]))
}

// SAFETY of every block below that says "present": a value of `Neon` exists only inside `enter`,
// and its caller vouched for the instructions.
impl Simd for Neon {
    type F = F;
    const ACCUMULATORS: usize = 4;

    #[inline(always)]
    fn splat(self, value: f32) -> F {
        // SAFETY: present.
        each(|_| unsafe { vdupq_n_f32(value) })
    }

    #[inline(always)]
    fn add(self, a: F, b: F) -> F {
        // SAFETY: present.
        each(|i| unsafe { vaddq_f32(a[i], b[i]) })
    }

    #[inline(always)]
    fn sub(self, a: F, b: F) -> F {
        // SAFETY: present.
        each(|i| unsafe { vsubq_f32(a[i], b[i]) })
    }

    #[inline(always)]
    fn mul(self, a: F, b: F) -> F {
        // SAFETY: present.
        each(|i| unsafe { vmulq_f32(a[i], b[i]) })
    }

    #[inline(always)]
    fn div(self, a: F, b: F) -> F {
        // SAFETY: present.
        each(|i| unsafe { vdivq_f32(a[i], b[i]) })
    }

    #[inline(always)]
    fn fma(self, a: F, b: F, c: F) -> F {
        // SAFETY: present.
        each(|i| unsafe { vfmaq_f32(c[i], a[i], b[i]) })
    }

    #[inline(always)]
    fn max(self, a: F, b: F) -> F {
        // SAFETY: present.
        each(|i| unsafe { vbslq_f32(vcgtq_f32(a[i], b[i]), a[i], b[i]) })
    }

    #[inline(always)]
    fn min(self, a: F, b: F) -> F {
        // SAFETY: present.
        each(|i| unsafe { vbslq_f32(vcltq_f32(a[i], b[i]), a[i], b[i]) })
    }

    #[inline(always)]
    fn round(self, a: F) -> F {
        // SAFETY: present.
        each(|i| unsafe { vrndnq_f32(a[i]) })
    }

    // Two steps, so that the ends of the range neither overflow nor vanish early.
    #[inline(always)]
    fn scale(self, a: F, n: F) -> F {
        // SAFETY: present.
        each(|i| unsafe {
            let n = vcvtq_s32_f32(n[i]);
            let first = vshrq_n_s32::<1>(n);
            let second = vsubq_s32(n, first);
            let bias = vdupq_n_s32(127);
            let first = vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(first, bias)));
            let second = vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(second, bias)));
            vmulq_f32(vmulq_f32(a[i], first), second)
        })
    }

    #[inline(always)]
    fn select_lt(self, a: F, b: F, x: F, y: F) -> F {
        // SAFETY: present.
        each(|i| unsafe { vbslq_f32(vcltq_f32(a[i], b[i]), x[i], y[i]) })
    }

    #[inline(always)]
    fn halves(self, pairs: F) -> [F; 2] {
        // SAFETY: present.
        let first = each(|i| unsafe { vreinterpretq_f32_u32(vshlq_n_u32::<16>(vreinterpretq_u32_f32(pairs[i]))) });
        // SAFETY: present.
        let second = each(|i| unsafe {
            vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(pairs[i]), vdupq_n_u32(0xffff_0000)))
        });
        [first, second]
    }

    #[inline(always)]
    fn sum(self, a: F) -> f32 {
        // SAFETY: present.
        unsafe {
            let four = vaddq_f32(vaddq_f32(a[0], a[2]), vaddq_f32(a[1], a[3]));
            let two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
            vget_lane_f32::<0>(two) + vget_lane_f32::<1>(two)
        }
    }

    #[inline(always)]
    fn largest(self, a: F) -> f32 {
        // SAFETY: present.
        unsafe { vmaxvq_f32(vmaxq_f32(vmaxq_f32(a[0], a[2]), vmaxq_f32(a[1], a[3]))) }
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> F {
        // SAFETY: present; the caller vouches for the memory.
        each(|i| unsafe { vld1q_f32(from.add(4 * i)) })
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, a: F) {
        for (i, &quarter) in a.iter().enumerate() {
            // SAFETY: present; the caller vouches for the memory.
            unsafe { vst1q_f32(to.add(4 * i), quarter) };
        }
    }

    #[inline(always)]
    unsafe fn load_f16(self, from: *const u16) -> F {
        // SAFETY: present; the caller vouches for the memory.
        each(|i| widen_f16(unsafe { vld1_u16(from.add(4 * i)) }))
    }

    #[inline(always)]
    unsafe fn load_i8(self, from: *const i8) -> F {
        // SAFETY: present; the caller vouches for the memory.
        unsafe {
            let codes = vld1q_s8(from);
            let (low, high) = (vmovl_s8(vget_low_s8(codes)), vmovl_s8(vget_high_s8(codes)));
            let quarters = [vget_low_s16(low), vget_high_s16(low), vget_low_s16(high), vget_high_s16(high)];
            each(|i| vcvtq_f32_s32(vmovl_s16(quarters[i])))
        }
    }

    #[inline(always)]
    unsafe fn load_e4m3(self, from: *const u8) -> [F; 2] {
        // SAFETY: present; the caller vouches for the memory.
        unsafe { [load_e4m3_half(from), load_e4m3_half(from.add(16))] }
    }

    #[inline(always)]
    unsafe fn load_nibbles(self, from: *const u8) -> [F; 2] {
        // SAFETY: present; the caller vouches for the memory.
        unsafe {
            let codes = vld1q_u8(from);
            let widened = |codes| {
                let (low, high) = (vmovl_u8(vget_low_u8(codes)), vmovl_u8(vget_high_u8(codes)));
                let quarters = [vget_low_u16(low), vget_high_u16(low), vget_low_u16(high), vget_high_u16(high)];
                each(|i| vcvtq_f32_u32(vmovl_u16(quarters[i])))
            };
            [widened(vandq_u8(codes, vdupq_n_u8(15))), widened(vshrq_n_u8::<4>(codes))]
        }
    }

    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        // SAFETY: a prefetch never faults.
        unsafe { asm!("prfm pldl2keep, [{at}]", at = in(reg) at, options(nostack, preserves_flags, readonly)) }
    }
}
