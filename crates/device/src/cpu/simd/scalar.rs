//! Plain arrays: the twin that tests compare every other set with, and the fallback of machines
//! without one.

use half::f16;

use super::{LANES, Simd};

#[derive(Clone, Copy)]
pub struct Scalar;

type F = [f32; LANES];

#[inline(always)]
fn each(f: impl Fn(usize) -> f32) -> F {
    let mut lanes = [0.0; LANES];
    for (i, lane) in lanes.iter_mut().enumerate() {
        *lane = f(i);
    }
    lanes
}

/// 2^n for an integral `n` in the exponent range of normal numbers.
#[inline(always)]
fn pow2(n: i32) -> f32 {
    f32::from_bits(((n + 127) as u32) << 23)
}

impl Simd for Scalar {
    type F = F;
    const ACCUMULATORS: usize = 2;

    #[inline(always)]
    fn splat(self, value: f32) -> F {
        [value; LANES]
    }

    #[inline(always)]
    fn add(self, a: F, b: F) -> F {
        each(|i| a[i] + b[i])
    }

    #[inline(always)]
    fn sub(self, a: F, b: F) -> F {
        each(|i| a[i] - b[i])
    }

    #[inline(always)]
    fn mul(self, a: F, b: F) -> F {
        each(|i| a[i] * b[i])
    }

    #[inline(always)]
    fn div(self, a: F, b: F) -> F {
        each(|i| a[i] / b[i])
    }

    // Two roundings: one would be a library call for every lane.
    #[inline(always)]
    fn fma(self, a: F, b: F, c: F) -> F {
        each(|i| a[i] * b[i] + c[i])
    }

    #[inline(always)]
    fn max(self, a: F, b: F) -> F {
        each(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    fn min(self, a: F, b: F) -> F {
        each(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    fn round(self, a: F) -> F {
        // Above 2^23 an f32 has no fraction left, so this sum rounds to units.
        const UNIT: f32 = 12_582_912.0;
        each(|i| (a[i] + UNIT) - UNIT)
    }

    #[inline(always)]
    fn scale(self, a: F, n: F) -> F {
        each(|i| {
            let n = n[i] as i32;
            a[i] * pow2(n >> 1) * pow2(n - (n >> 1))
        })
    }

    #[inline(always)]
    fn select_lt(self, a: F, b: F, x: F, y: F) -> F {
        each(|i| if a[i] < b[i] { x[i] } else { y[i] })
    }

    #[inline(always)]
    fn halves(self, pairs: F) -> [F; 2] {
        let (first, second) = (|bits: u32| bits << 16, |bits: u32| bits & 0xffff_0000);
        [each(|i| f32::from_bits(first(pairs[i].to_bits()))), each(|i| f32::from_bits(second(pairs[i].to_bits())))]
    }

    #[inline(always)]
    fn sum(self, a: F) -> f32 {
        let mut lanes = a;
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                lanes[i] += lanes[i + half];
            }
        }
        lanes[0]
    }

    #[inline(always)]
    fn largest(self, a: F) -> f32 {
        let mut lanes = a;
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                lanes[i] = if lanes[i] > lanes[i + half] { lanes[i] } else { lanes[i + half] };
            }
        }
        lanes[0]
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> F {
        // SAFETY: the caller vouches for sixteen readable values; an array of f32 needs no more
        // alignment than one f32.
        unsafe { from.cast::<F>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, a: F) {
        // SAFETY: the caller vouches for sixteen writable values.
        unsafe { to.cast::<F>().write_unaligned(a) }
    }

    #[inline(always)]
    unsafe fn load_f16(self, from: *const u16) -> F {
        // SAFETY: the caller vouches for sixteen readable values.
        let bits = unsafe { from.cast::<[u16; LANES]>().read_unaligned() };
        each(|i| f16::from_bits(bits[i]).to_f32_const())
    }

    #[inline(always)]
    unsafe fn load_i8(self, from: *const i8) -> F {
        // SAFETY: the caller vouches for sixteen readable bytes.
        let codes = unsafe { from.cast::<[i8; LANES]>().read_unaligned() };
        each(|i| f32::from(codes[i]))
    }

    // An f16 has the same mantissa and a larger exponent: only the bias differs, by 2^8.
    #[inline(always)]
    unsafe fn load_e4m3(self, from: *const u8) -> [F; 2] {
        // SAFETY: the caller vouches for 32 readable bytes.
        let codes = unsafe { from.cast::<[u8; 2 * LANES]>().read_unaligned() };
        let number =
            |code: u8| f16::from_bits(u16::from(code & 0x80) << 8 | u16::from(code & 0x7f) << 7).to_f32_const();
        [each(|i| number(codes[i])), each(|i| number(codes[LANES + i]))]
    }

    #[inline(always)]
    unsafe fn load_nibbles(self, from: *const u8) -> [F; 2] {
        // SAFETY: the caller vouches for sixteen readable bytes.
        let codes = unsafe { from.cast::<[u8; LANES]>().read_unaligned() };
        [each(|i| f32::from(codes[i] & 15)), each(|i| f32::from(codes[i] >> 4))]
    }

    #[inline(always)]
    fn prefetch(self, _at: *const u8) {}
}
