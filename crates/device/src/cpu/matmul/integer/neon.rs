//! Integer dot products for any aarch64: products of bytes have 16 bits, pairs of them are added in
//! 16 bits (2 * 128 * 127 fits) and then widened to 32.

use std::arch::aarch64::*;

use super::super::neon::Four;
use super::super::tile::{Tile, by_rows};
use super::{Bytes, Dots, Five, Nibbles, Quarters, Six};

/// Six rows by two registers of outputs, integer and floating-point sums, leave eight registers for
/// the rest.
pub const MAX_ROWS: usize = 6;

#[derive(Clone, Copy)]
struct Sums(int32x4_t);

// SAFETY: unaligned loads of 4 lanes; every aarch64 has NEON.
unsafe impl Dots for Sums {
    type Floats = Four;
    type Table = int8x16_t;

    #[inline(always)]
    unsafe fn splat(from: *const i32) -> Self {
        // SAFETY: NEON is there; one readable value.
        Sums(unsafe { vdupq_n_s32(*from) })
    }

    #[inline(always)]
    unsafe fn to_floats(self) -> Four {
        // SAFETY: NEON is there.
        Four(unsafe { vcvtq_f32_s32(self.0) })
    }

    #[inline(always)]
    unsafe fn table(table: &[u8; 16]) -> int8x16_t {
        // SAFETY: NEON is there; 16 readable bytes.
        unsafe { vld1q_s8(table.as_ptr().cast()) }
    }
}

// SAFETY: as above.
unsafe impl Quarters for Sums {
    type Levels = int8x16_t;

    #[inline(always)]
    unsafe fn add_dot(self, levels: int8x16_t, activations: *const u32, _: usize) -> Self {
        // SAFETY: NEON is there; one readable word.
        unsafe {
            let activations = vreinterpretq_s8_u32(vdupq_n_u32(*activations));
            let low = vmull_s8(vget_low_s8(levels), vget_low_s8(activations));
            let high = vmull_high_s8(levels, activations);
            Sums(vpadalq_s16(self.0, vpaddq_s16(low, high)))
        }
    }

    #[inline(always)]
    unsafe fn bytes(at: *const u8) -> int8x16_t {
        // SAFETY: NEON is there; 16 readable bytes. Flipping the top bit subtracts 128.
        unsafe { vreinterpretq_s8_u8(veorq_u8(vld1q_u8(at), vdupq_n_u8(128))) }
    }

    #[inline(always)]
    unsafe fn nibbles<const HIGH: bool>(at: *const u8, table: int8x16_t) -> int8x16_t {
        // SAFETY: NEON is there.
        unsafe { vqtbl1q_s8(table, codes::<HIGH>(at)) }
    }

    #[inline(always)]
    unsafe fn five<const HIGH: bool>(at: *const u8, plane: *const u8, table: int8x16_t) -> int8x16_t {
        const BITS: [u8; 16] = [1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128];
        // SAFETY: NEON is there; 16 readable bytes and two of the plane.
        unsafe {
            let plane = vcombine_u8(vdup_n_u8(*plane), vdup_n_u8(*plane.add(1)));
            let fifth = vandq_u8(vtstq_u8(plane, vld1q_u8(BITS.as_ptr())), vdupq_n_u8(16));
            let code = vreinterpretq_s8_u8(vorrq_u8(codes::<HIGH>(at), fifth));
            vsubq_s8(code, vdupq_n_s8(vgetq_lane_s8::<0>(table)))
        }
    }

    #[inline(always)]
    unsafe fn six<const Q: usize>(at: *const u8, plane: *const u8, table: int8x16_t) -> int8x16_t {
        // SAFETY: NEON is there; 16 readable bytes of both.
        unsafe {
            let low = if Q.is_multiple_of(2) { codes::<false>(at) } else { codes::<true>(at) };
            let plane = vld1q_u8(plane);
            let upper = match Q {
                0 => vshlq_n_u8::<4>(plane),
                1 => vshlq_n_u8::<2>(plane),
                2 => plane,
                _ => vshrq_n_u8::<2>(plane),
            };
            let code = vreinterpretq_s8_u8(vorrq_u8(low, vandq_u8(upper, vdupq_n_u8(0x30))));
            vsubq_s8(code, vdupq_n_s8(vgetq_lane_s8::<0>(table)))
        }
    }
}

/// # Safety
/// 16 readable bytes.
#[inline(always)]
unsafe fn codes<const HIGH: bool>(at: *const u8) -> uint8x16_t {
    // SAFETY: NEON is there; the caller's promise.
    unsafe {
        let pairs = vld1q_u8(at);
        if HIGH { vshrq_n_u8::<4>(pairs) } else { vandq_u8(pairs, vdupq_n_u8(15)) }
    }
}

/// Low tiles take all eight registers of a panel in one pass; high ones take fewer and pass again.
macro_rules! kernel {
    ($rows_name:ident, $name:ident, $codes:ty) => {
        unsafe fn $rows_name<const R: usize>(tile: &Tile) {
            // SAFETY: the caller's promise; every aarch64 has NEON.
            unsafe {
                match R {
                    1 => super::tile::<Sums, $codes, R, 8>(tile),
                    2 | 3 => super::tile::<Sums, $codes, R, 4>(tile),
                    _ => super::tile::<Sums, $codes, R, 2>(tile),
                }
            }
        }

        /// # Safety
        /// See [`super::tile`].
        pub unsafe fn $name(tile: &Tile) {
            by_rows!(tile, $rows_name, [1 2 3 4 5 6])
        }
    };
}

kernel!(bytes_rows, bytes_tile, Bytes);
kernel!(nibbles_rows, nibbles_tile, Nibbles);
kernel!(five_rows, five_tile, Five);
kernel!(six_rows, six_tile, Six);

/// # Safety
/// See [`super::expand`].
pub unsafe fn expand(tile: &Tile, code_bytes: usize, out: *mut f32) {
    // SAFETY: the caller's promise.
    unsafe { super::expand::<Four>(tile, code_bytes, out) }
}
