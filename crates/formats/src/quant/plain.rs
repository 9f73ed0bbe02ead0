//! Formats with one number per value: floats of every width, and integers read as numbers.

use half::f16;
use half::slice::HalfFloatSliceExt;

macro_rules! decoder {
    ($name:ident, $type:ty, $bytes:literal) => {
        pub(crate) fn $name(bytes: &[u8], out: &mut [f32]) {
            let (values, _) = bytes.as_chunks::<$bytes>();
            for (value, raw) in out.iter_mut().zip(values) {
                *value = <$type>::from_le_bytes(*raw) as f32;
            }
        }
    };
}

decoder!(f32, f32, 4);
decoder!(f64, f64, 8);
decoder!(i8, i8, 1);
decoder!(u8, u8, 1);
decoder!(i16, i16, 2);
decoder!(i32, i32, 4);
decoder!(i64, i64, 8);

pub(crate) fn bf16(bytes: &[u8], out: &mut [f32]) {
    let (values, _) = bytes.as_chunks::<2>();
    for (value, raw) in out.iter_mut().zip(values) {
        *value = f32::from_bits(u32::from(u16::from_le_bytes(*raw)) << 16);
    }
}

/// Goes through a small aligned buffer, so that `half` can use the processor's own conversion.
pub(crate) fn f16(bytes: &[u8], out: &mut [f32]) {
    const RUN: usize = 64;
    let mut run = [f16::ZERO; RUN];
    for (values, raw) in out.chunks_mut(RUN).zip(bytes.chunks(RUN * 2)) {
        for (half, raw) in run.iter_mut().zip(raw.as_chunks::<2>().0) {
            *half = f16::from_le_bytes(*raw);
        }
        run[..values.len()].convert_to_f32_slice(values);
    }
}
