//! Kernels in plain Rust: they run anywhere, and tests compare the others with them.

use super::tile::{self, Bf16, F16, F32, Lanes, Tile, by_rows};

pub const MAX_ROWS: usize = 4;

/// Eight values; the compiler vectorizes them for the target. Multiply and add round separately,
/// because a fused operation without hardware is a library call.
#[derive(Clone, Copy)]
pub struct Eight(pub [f32; 8]);

// SAFETY: plain loads and stores of 8 elements.
unsafe impl Lanes for Eight {
    const WIDTH: usize = 8;

    #[inline(always)]
    unsafe fn zero() -> Self {
        Eight([0.0; 8])
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        Eight([value; 8])
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller gives 8 readable values.
        Eight(unsafe { from.cast::<[f32; 8]>().read_unaligned() })
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u8) -> Self {
        // SAFETY: the caller gives 8 readable values of 2 bytes.
        let bits = unsafe { from.cast::<[u16; 8]>().read_unaligned() };
        Eight(bits.map(|bits| half::f16::from_bits(bits).to_f32()))
    }

    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self {
        // SAFETY: the caller gives 8 readable bytes.
        Eight(unsafe { from.cast::<[i8; 8]>().read_unaligned() }.map(f32::from))
    }

    #[inline(always)]
    unsafe fn load_bf16_first(from: *const u8) -> Self {
        // SAFETY: the caller gives 8 readable pairs of 4 bytes.
        let pairs = unsafe { from.cast::<[u32; 8]>().read_unaligned() };
        Eight(pairs.map(|pair| f32::from_bits(pair << 16)))
    }

    #[inline(always)]
    unsafe fn load_bf16_second(from: *const u8) -> Self {
        // SAFETY: the caller gives 8 readable pairs of 4 bytes.
        let pairs = unsafe { from.cast::<[u32; 8]>().read_unaligned() };
        Eight(pairs.map(|pair| f32::from_bits(pair & 0xffff_0000)))
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller gives room for 8 values.
        unsafe { to.cast::<[f32; 8]>().write_unaligned(self.0) }
    }

    #[inline(always)]
    unsafe fn add(mut self, other: Self) -> Self {
        for i in 0..8 {
            self.0[i] += other.0[i];
        }
        self
    }

    #[inline(always)]
    unsafe fn mul(mut self, other: Self) -> Self {
        for i in 0..8 {
            self.0[i] *= other.0[i];
        }
        self
    }

    #[inline(always)]
    unsafe fn add_product(mut self, a: Self, b: Self) -> Self {
        for i in 0..8 {
            self.0[i] += a.0[i] * b.0[i];
        }
        self
    }

    #[inline(always)]
    unsafe fn prefetch(_: *const u8) {}

    #[inline(always)]
    unsafe fn prefetch_far(_: *const u8) {}
}

unsafe fn f32_rows<const R: usize>(tile: &Tile) {
    // SAFETY: the caller's promise; plain Rust needs no instruction set.
    unsafe { tile::tile::<Eight, F32, R, 1>(tile) }
}

unsafe fn f16_rows<const R: usize>(tile: &Tile) {
    // SAFETY: the caller's promise; plain Rust needs no instruction set.
    unsafe { tile::tile::<Eight, F16, R, 1>(tile) }
}

unsafe fn bf16_rows<const R: usize>(tile: &Tile) {
    // SAFETY: the caller's promise; plain Rust needs no instruction set.
    unsafe { tile::tile::<Eight, Bf16, R, 1>(tile) }
}

/// # Safety
/// See [`super::tile::tile`].
pub unsafe fn f32_tile(tile: &Tile) {
    by_rows!(tile, f32_rows, [1 2 3 4])
}

/// # Safety
/// See [`super::tile::tile`].
pub unsafe fn f16_tile(tile: &Tile) {
    by_rows!(tile, f16_rows, [1 2 3 4])
}

/// # Safety
/// See [`super::tile::tile`].
pub unsafe fn bf16_tile(tile: &Tile) {
    by_rows!(tile, bf16_rows, [1 2 3 4])
}
