//! Shared by the kernels' unit tests: every instruction set and thread count of interest, values,
//! comparisons.

use super::super::{Ctx, Isa, Pool, Tensor, Vector};

/// Runs a check under every instruction set with 1, 2 and 3 threads. Its result must not depend on
/// the threads.
pub fn each_setup(check: impl Fn(Ctx<'_>) -> Vec<u32>) {
    for isa in Isa::available() {
        let mut alone = None;
        for threads in [1, 2, 3] {
            let pool = Pool::new(threads).unwrap();
            let bits = check(Ctx { pool: &pool, isa });
            let alone = alone.get_or_insert_with(|| bits.clone());
            assert!(*alone == bits, "{isa:?}: {threads} threads change the result");
        }
    }
}

/// Values between -1 and 1 that a seed and an index determine.
pub fn filled(len: usize, seed: u64) -> Vec<f32> {
    let mix = |i: u64| {
        let mut z = (i ^ seed.rotate_left(40)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    (0..len as u64).map(|i| (mix(i + 1) >> 40) as f32 / (1u32 << 23) as f32 - 1.0).collect()
}

pub fn tensor(rows: usize, cols: usize, values: &[f32]) -> Tensor {
    let mut tensor = Tensor::new(rows, cols).unwrap();
    tensor.head_mut(rows).copy_from_slice(values);
    tensor
}

pub fn vector(values: &[f32]) -> Vector {
    Vector::new(values).unwrap()
}

/// Asserts that every value is within `tolerance` of the expected one, relative to the larger of 1
/// and its magnitude.
#[track_caller]
pub fn close(found: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(found.len(), expected.len());
    for (i, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        let error = (found - expected).abs();
        assert!(error <= tolerance * expected.abs().max(1.0), "value {i}: {found}, expected {expected}");
    }
}
