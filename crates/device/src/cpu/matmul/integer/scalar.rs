//! Integer dot products in plain Rust: they run anywhere, and tests compare the others with them.

use super::super::scalar::Eight;
use super::super::tile::{Tile, by_rows};
use super::{Bytes, Dots, Five, Nibbles, Quarters, Six};

pub const MAX_ROWS: usize = 4;

const WIDTH: usize = 8;

#[derive(Clone, Copy)]
struct Sums([i32; WIDTH]);

// SAFETY: plain loads of 8 lanes.
unsafe impl Dots for Sums {
    type Floats = Eight;
    type Table = [i8; 16];

    #[inline(always)]
    unsafe fn splat(from: *const i32) -> Self {
        // SAFETY: the caller gives one readable value.
        Sums([unsafe { *from }; WIDTH])
    }

    #[inline(always)]
    unsafe fn to_floats(self) -> Eight {
        Eight(self.0.map(|sum| sum as f32))
    }

    #[inline(always)]
    unsafe fn table(table: &[u8; 16]) -> [i8; 16] {
        table.map(|level| level as i8)
    }
}

// SAFETY: as above.
unsafe impl Quarters for Sums {
    type Levels = [[i8; 4]; WIDTH];

    #[inline(always)]
    unsafe fn add_dot(mut self, levels: [[i8; 4]; WIDTH], activations: *const u32, _: usize) -> Self {
        // SAFETY: the caller gives one readable word.
        let activations = unsafe { *activations }.to_le_bytes().map(|byte| byte as i8);
        for (sum, levels) in self.0.iter_mut().zip(levels) {
            for (level, activation) in levels.into_iter().zip(activations) {
                *sum += i32::from(level) * i32::from(activation);
            }
        }
        self
    }

    #[inline(always)]
    unsafe fn bytes(at: *const u8) -> [[i8; 4]; WIDTH] {
        // SAFETY: the caller gives four readable bytes a lane.
        let codes = unsafe { at.cast::<[[u8; 4]; WIDTH]>().read_unaligned() };
        codes.map(|lane| lane.map(|code| (code ^ 128) as i8))
    }

    #[inline(always)]
    unsafe fn nibbles<const HIGH: bool>(at: *const u8, table: [i8; 16]) -> [[i8; 4]; WIDTH] {
        // SAFETY: the caller gives four readable bytes a lane.
        let codes = unsafe { at.cast::<[[u8; 4]; WIDTH]>().read_unaligned() };
        codes.map(|lane| lane.map(|pair| table[usize::from(nibble::<HIGH>(pair))]))
    }

    #[inline(always)]
    unsafe fn five<const HIGH: bool>(at: *const u8, plane: *const u8, table: [i8; 16]) -> [[i8; 4]; WIDTH] {
        // SAFETY: the caller gives four readable bytes and four bits a lane.
        let (codes, plane) = unsafe {
            (
                at.cast::<[[u8; 4]; WIDTH]>().read_unaligned(),
                u32::from_le_bytes(plane.cast::<[u8; 4]>().read_unaligned()),
            )
        };
        let mut levels = [[0; 4]; WIDTH];
        for (lane, (levels, codes)) in levels.iter_mut().zip(codes).enumerate() {
            for (at, (level, code)) in levels.iter_mut().zip(codes).enumerate() {
                let fifth = (plane >> (4 * lane + at) & 1) as u8;
                *level = (nibble::<HIGH>(code) | fifth << 4) as i8 - table[0];
            }
        }
        levels
    }

    #[inline(always)]
    unsafe fn six<const Q: usize>(at: *const u8, plane: *const u8, table: [i8; 16]) -> [[i8; 4]; WIDTH] {
        // SAFETY: the caller gives four readable bytes a lane, of both.
        let (codes, plane) = unsafe {
            (at.cast::<[[u8; 4]; WIDTH]>().read_unaligned(), plane.cast::<[[u8; 4]; WIDTH]>().read_unaligned())
        };
        let mut levels = [[0; 4]; WIDTH];
        for (levels, (codes, plane)) in levels.iter_mut().zip(codes.into_iter().zip(plane)) {
            for (level, (code, bits)) in levels.iter_mut().zip(codes.into_iter().zip(plane)) {
                let low = if Q.is_multiple_of(2) { nibble::<false>(code) } else { nibble::<true>(code) };
                let upper = bits >> (2 * Q) & 3;
                *level = (low | upper << 4) as i8 - table[0];
            }
        }
        levels
    }
}

#[inline(always)]
fn nibble<const HIGH: bool>(pair: u8) -> u8 {
    if HIGH { pair >> 4 } else { pair & 15 }
}

macro_rules! kernel {
    ($rows_name:ident, $name:ident, $codes:ty) => {
        unsafe fn $rows_name<const R: usize>(tile: &Tile) {
            // SAFETY: the caller's promise; plain Rust needs no instruction set.
            unsafe { super::tile::<Sums, $codes, R, 1>(tile) }
        }

        /// # Safety
        /// See [`super::tile`].
        pub unsafe fn $name(tile: &Tile) {
            by_rows!(tile, $rows_name, [1 2 3 4])
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
    unsafe { super::expand::<Eight>(tile, code_bytes, out) }
}
