//! Kernels for aarch64: 32 registers of 4 lanes.

use std::arch::aarch64::*;

use super::tile::{self, Bf16, F16, F32, Lanes, Tile, by_rows};

/// Six rows by four registers of outputs leave eight registers for weights and an activation.
pub const MAX_ROWS: usize = 6;

#[derive(Clone, Copy)]
pub struct Four(pub float32x4_t);

// SAFETY: unaligned loads and stores of 4 elements; every aarch64 has NEON.
unsafe impl Lanes for Four {
    const WIDTH: usize = 4;

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: NEON is there.
        Four(unsafe { vdupq_n_f32(0.0) })
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: NEON is there.
        Four(unsafe { vdupq_n_f32(value) })
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: NEON is there; 4 readable values.
        Four(unsafe { vld1q_f32(from) })
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u8) -> Self {
        // SAFETY: the caller gives 4 readable values of 2 bytes.
        let bits = unsafe { from.cast::<[u16; 4]>().read_unaligned() };
        let values = bits.map(|bits| half::f16::from_bits(bits).to_f32());
        // SAFETY: NEON is there; the array has 4 values.
        Four(unsafe { vld1q_f32(values.as_ptr()) })
    }

    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self {
        // SAFETY: the caller gives 4 readable bytes.
        let values = unsafe { from.cast::<[i8; 4]>().read_unaligned() }.map(f32::from);
        // SAFETY: NEON is there; the array has 4 values.
        Four(unsafe { vld1q_f32(values.as_ptr()) })
    }

    #[inline(always)]
    unsafe fn load_bf16_first(from: *const u8) -> Self {
        // SAFETY: NEON is there; 16 readable bytes.
        Four(unsafe { vreinterpretq_f32_u32(vshlq_n_u32::<16>(vld1q_u32(from.cast()))) })
    }

    #[inline(always)]
    unsafe fn load_bf16_second(from: *const u8) -> Self {
        // SAFETY: NEON is there; 16 readable bytes.
        Four(unsafe { vreinterpretq_f32_u32(vandq_u32(vld1q_u32(from.cast()), vdupq_n_u32(0xffff_0000))) })
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: NEON is there; room for 4 values.
        unsafe { vst1q_f32(to, self.0) }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: NEON is there.
        Four(unsafe { vaddq_f32(self.0, other.0) })
    }

    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        // SAFETY: NEON is there.
        Four(unsafe { vmulq_f32(self.0, other.0) })
    }

    #[inline(always)]
    unsafe fn add_product(self, a: Self, b: Self) -> Self {
        // SAFETY: NEON is there.
        Four(unsafe { vfmaq_f32(self.0, a.0, b.0) })
    }

    #[inline(always)]
    unsafe fn prefetch(_: *const u8) {
        // The prefetch intrinsic is not stable; the hardware follows the stream by itself.
    }

    #[inline(always)]
    unsafe fn prefetch_far(_: *const u8) {}
}

/// Low tiles take all eight registers of a panel in one pass; high ones take four and pass twice.
macro_rules! kernel {
    ($rows_name:ident, $name:ident, $source:ty) => {
        unsafe fn $rows_name<const R: usize>(tile: &Tile) {
            // SAFETY: the caller's promise; every aarch64 has NEON.
            unsafe {
                if R <= 2 {
                    tile::tile::<Four, $source, R, 8>(tile)
                } else {
                    tile::tile::<Four, $source, R, 4>(tile)
                }
            }
        }

        /// # Safety
        /// See [`super::tile::tile`].
        pub unsafe fn $name(tile: &Tile) {
            by_rows!(tile, $rows_name, [1 2 3 4 5 6])
        }
    };
}

kernel!(f32_rows, f32_tile, F32);
kernel!(f16_rows, f16_tile, F16);
kernel!(bf16_rows, bf16_tile, Bf16);
