//! The tile registers of AMX: eight of up to 16 rows of 64 bytes, their shapes, and the
//! instructions on them. The compiler does not know these registers, and uses none of them.

use std::arch::asm;

/// Rows of a tile register.
pub const ROWS: usize = 16;
/// Bytes of a tile register's row.
pub const ROW_BYTES: usize = 64;

/// The shapes of the registers, in `ldtilecfg`'s layout. Setting them costs as much as a dozen
/// products.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct Shapes {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Shapes {
    /// All registers at their full size.
    pub const WHOLE: Self = {
        let (mut row_bytes, mut rows) = ([0; 16], [0; 16]);
        let mut register = 0;
        while register < 8 {
            (row_bytes[register], rows[register]) = (ROW_BYTES as u16, ROWS as u8);
            register += 1;
        }
        Self { palette: 1, start_row: 0, reserved: [0; 14], row_bytes, rows }
    };

    /// Sets these shapes, and all registers to zero.
    ///
    /// # Safety
    /// The machine has AMX.
    pub unsafe fn enter(&self) {
        // SAFETY: 64 readable bytes; the compiler uses no tile register.
        unsafe { asm!("ldtilecfg [{}]", in(reg) self, options(nostack, readonly, preserves_flags)) }
    }
}

/// Releases the registers, so that a thread switch need not save them.
///
/// # Safety
/// The machine has AMX.
pub unsafe fn leave() {
    // SAFETY: the compiler uses no tile register.
    unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) }
}

/// Loads a register from rows at a distance of `$stride` bytes.
macro_rules! load {
    ($register:literal, $from:expr, $stride:expr) => {
        asm!(
            concat!("tileloadd tmm", $register, ", [{} + 1 * {}]"),
            in(reg) $from, in(reg) $stride, options(nostack, readonly, preserves_flags)
        )
    };
}
pub(crate) use load;

/// Stores a tile register.
macro_rules! store {
    ($register:literal, $to:expr, $stride:expr) => {
        asm!(
            concat!("tilestored [{} + 1 * {}], tmm", $register),
            in(reg) $to, in(reg) $stride, options(nostack, preserves_flags)
        )
    };
}
pub(crate) use store;

/// Sets a tile register to zero.
macro_rules! zero {
    ($register:literal) => {
        asm!(concat!("tilezero tmm", $register), options(nostack, nomem, preserves_flags))
    };
}
pub(crate) use zero;

/// An instruction of three registers: sums, activations, weights.
macro_rules! multiply {
    ($instruction:literal, $sums:literal, $activations:literal, $weights:literal) => {
        asm!(
            concat!($instruction, " tmm", $sums, ", tmm", $activations, ", tmm", $weights),
            options(nostack, nomem, preserves_flags)
        )
    };
}
pub(crate) use multiply;
