//! Sixteen f32 at a time, on any machine: one small trait of vector operations, one file for each
//! instruction set, and one place that chooses.
//!
//! An algorithm is a [`Kernel`]: a struct of arguments with a `run` that is generic over [`Simd`]
//! and always inlined, so that [`dispatch`] compiles it once under each set's `#[target_feature]`.
//! The vector has sixteen lanes on every machine, because a KV block is sixteen tokens; a set with
//! narrower registers uses several. Sums over lanes run in the same order everywhere. Matrix
//! products are not here, because each instruction set has its own best way.

mod math;
mod scalar;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;

pub use math::{erf, exp, exp2, nearest_bf16, sigmoid, tanh};

use half::bf16;

use super::isa::Isa;

/// Lanes of a vector, on every instruction set.
pub const LANES: usize = 16;

/// Proof that an instruction set is present, and its vector operations.
///
/// A value exists only where the instructions do, so plain arithmetic is safe; operations on
/// pointers are not.
pub trait Simd: Copy {
    /// A vector of sixteen f32.
    type F: Copy;

    /// Number of vectors that a kernel may keep summing into without running out of registers.
    const ACCUMULATORS: usize;
    /// Whether [`Simd::dot_pairs`] is one instruction.
    const PAIR_DOTS: bool = false;

    fn splat(self, value: f32) -> Self::F;
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once where the machine can.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// The larger; `b` if either is NaN.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// The smaller; `b` if either is NaN.
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    /// Rounds to the nearest integer, halves to even; for magnitudes below 2^22.
    fn round(self, a: Self::F) -> Self::F;
    /// `a * 2^n` for integral `n` within -252 ..= 252.
    fn scale(self, a: Self::F, n: Self::F) -> Self::F;
    /// `x` where `a < b`, else `y`.
    fn select_lt(self, a: Self::F, b: Self::F, x: Self::F, y: Self::F) -> Self::F;
    /// The first number of sixteen pairs of bf16, and the second, widened exactly. A lane is a
    /// pair, with the first number in its low bits.
    fn halves(self, pairs: Self::F) -> [Self::F; 2];
    /// The sum of all lanes: halves added to each other until one lane is left.
    fn sum(self, a: Self::F) -> f32;
    /// The largest lane, NaN aside.
    fn largest(self, a: Self::F) -> f32;

    /// # Safety
    /// Sixteen f32 must be readable at `from`.
    unsafe fn load(self, from: *const f32) -> Self::F;
    /// # Safety
    /// Sixteen f32 must be writable at `to`.
    unsafe fn store(self, to: *mut f32, a: Self::F);
    /// Widened exactly.
    ///
    /// # Safety
    /// Sixteen f16 must be readable at `from`.
    unsafe fn load_f16(self, from: *const u16) -> Self::F;

    /// Widened exactly.
    ///
    /// # Safety
    /// Sixteen bytes must be readable at `from`.
    unsafe fn load_i8(self, from: *const i8) -> Self::F;
    /// 32 e4m3 numbers divided by 256, exactly; NaN codes give any number.
    ///
    /// # Safety
    /// 32 bytes must be readable at `from`.
    unsafe fn load_e4m3(self, from: *const u8) -> [Self::F; 2];
    /// The low four bits of each byte, and the high four.
    ///
    /// # Safety
    /// Sixteen bytes must be readable at `from`.
    unsafe fn load_nibbles(self, from: *const u8) -> [Self::F; 2];

    /// Prefetches the cache line at `at`, which need not be readable, into the second-level cache:
    /// the first has no room to spare beside the data in use.
    fn prefetch(self, at: *const u8);

    /// `sum` plus both products of each pair of bf16; a hardware instruction treats subnormal
    /// numbers as zero.
    #[inline(always)]
    fn dot_pairs(self, sum: Self::F, a: Self::F, b: Self::F) -> Self::F {
        let (a, b) = (self.halves(a), self.halves(b));
        self.fma(a[0], b[0], self.fma(a[1], b[1], sum))
    }

    /// Sixteen bf16, rounded to nearest even; subnormal numbers may become zero.
    ///
    /// # Safety
    /// Sixteen bf16 must be writable at `to`.
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut bf16, a: Self::F) {
        let mut lanes = [0.0f32; LANES];
        self.write(&mut lanes, a);
        for (i, lane) in lanes.into_iter().enumerate() {
            // SAFETY: the caller vouches for the memory.
            unsafe { to.add(i).write(bf16::from_f32(lane)) };
        }
    }

    /// The first sixteen values of a slice, with zeros behind a shorter one.
    #[inline(always)]
    fn read(self, from: &[f32]) -> Self::F {
        if from.len() >= LANES {
            // SAFETY: the slice holds at least sixteen values.
            unsafe { self.load(from.as_ptr()) }
        } else {
            let mut lanes = [0.0f32; LANES];
            lanes[..from.len()].copy_from_slice(from);
            // SAFETY: `lanes` holds sixteen values.
            unsafe { self.load(lanes.as_ptr()) }
        }
    }

    /// Writes the first sixteen values of a slice, or all of a shorter one.
    #[inline(always)]
    fn write(self, to: &mut [f32], a: Self::F) {
        if to.len() >= LANES {
            // SAFETY: the slice holds at least sixteen values.
            unsafe { self.store(to.as_mut_ptr(), a) }
        } else {
            let mut lanes = [0.0f32; LANES];
            // SAFETY: `lanes` holds sixteen values.
            unsafe { self.store(lanes.as_mut_ptr(), a) };
            let len = to.len();
            to.copy_from_slice(&lanes[..len]);
        }
    }
}

/// An algorithm for any instruction set. `run` must be `#[inline(always)]`, and so must everything
/// it calls with `simd`: only code that is inlined into [`dispatch`]'s entries is compiled for the
/// set.
pub trait Kernel {
    type Output;
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// Runs a kernel under the instruction set chosen at start.
#[inline]
pub fn dispatch<K: Kernel>(isa: Isa, kernel: K) -> K::Output {
    match isa {
        // SAFETY: `isa` comes from a `Ctx`, which has only sets that the processor was found to
        // have.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Amx => unsafe { avx512::enter(kernel) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { avx2::enter(kernel) },
        // SAFETY: as above.
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => unsafe { neon::enter(kernel) },
        _ => kernel.run(scalar::Scalar),
    }
}

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
