//! MXFP4: 32 four-bit floats (one sign, two exponent, one mantissa bit) under a shared power of two.
//!
//! The table holds twice each value, so the power is halved to match: that keeps the table whole numbers.

pub(crate) const MXFP4_BYTES: usize = 1 + 16;

const _: () = assert!(MXFP4_BYTES == 17);

/// Twice the sixteen values. Minus zero decodes as zero.
const DOUBLED: [f32; 16] = [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0];

pub(crate) fn mxfp4(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in bytes.chunks_exact(MXFP4_BYTES).zip(out.chunks_exact_mut(32)) {
        let scale = half_power(block[0]);
        for (i, byte) in block[1..].iter().enumerate() {
            out[i] = scale * DOUBLED[usize::from(byte & 15)];
            out[i + 16] = scale * DOUBLED[usize::from(byte >> 4)];
        }
    }
}

/// `2^(exponent - 128)`; the two smallest are subnormal.
fn half_power(exponent: u8) -> f32 {
    let exponent = u32::from(exponent);
    f32::from_bits(if exponent < 2 { 0x0020_0000 << exponent } else { (exponent - 1) << 23 })
}
