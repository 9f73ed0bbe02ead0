//! Eight-bit floats, with the values that torch gives them.

/// The value of an e4m3 number: a sign, four exponent bits with a bias of 7, three mantissa bits;
/// no infinities, and one bit pattern for NaN.
pub fn e4m3(code: u8) -> f32 {
    E4M3[usize::from(code)]
}

/// Rows of e4m3 numbers.
pub(crate) fn f8_e4m3(bytes: &[u8], out: &mut [f32]) {
    for (value, code) in out.iter_mut().zip(bytes) {
        *value = e4m3(*code);
    }
}

/// Rows of e5m2 numbers: the upper halves of half-precision ones.
pub(crate) fn f8_e5m2(bytes: &[u8], out: &mut [f32]) {
    for (value, code) in out.iter_mut().zip(bytes) {
        *value = half::f16::from_bits(u16::from(*code) << 8).to_f32();
    }
}

/// Rows of powers of two, for scales.
pub(crate) fn f8_e8m0(bytes: &[u8], out: &mut [f32]) {
    for (value, code) in out.iter_mut().zip(bytes) {
        *value = e8m0(*code);
    }
}

/// `2^(code - 127)`; the smallest is subnormal, the largest code is NaN.
pub(crate) fn e8m0(code: u8) -> f32 {
    match code {
        0 => f32::from_bits(0x0040_0000),
        255 => f32::NAN,
        _ => f32::from_bits(u32::from(code) << 23),
    }
}

static E4M3: [f32; 256] = {
    let mut table = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        table[code] = e4m3_value(code as u8);
        code += 1;
    }
    table
};

const fn e4m3_value(code: u8) -> f32 {
    let (exponent, mantissa) = ((code >> 3 & 15) as u32, (code & 7) as u32);
    let magnitude = if code & 0x7f == 0x7f {
        f32::NAN
    } else if exponent == 0 {
        mantissa as f32 / 512.0
    } else {
        f32::from_bits((exponent + 120) << 23 | mantissa << 20)
    };
    if code < 128 { magnitude } else { -magnitude }
}

/// The nearest e4m3 number, of two equally near the even one; magnitudes above the largest, 448,
/// become the largest.
pub fn to_e4m3(value: f32) -> u8 {
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    let size = value.abs();
    if size.is_nan() {
        return sign | 0x7f;
    }
    // Numbers below the smallest normal one are as far apart as those just above it.
    let exponent = ((size.to_bits() >> 23) as i32 - 127).clamp(-6, 8);
    let steps = size.min(448.0) * f32::from_bits(((130 - exponent) as u32) << 23);
    // From 2^23 on neighbouring floats are integers, so this sum rounds to one, ties to even,
    // without a call.
    let steps = (steps + 8_388_608.0).to_bits() - 8_388_608.0f32.to_bits();
    // Eight steps are the first normal number, sixteen the next exponent: the sum carries by
    // itself.
    sign | (steps as i32 + 8 * (exponent + 6)) as u8
}

#[cfg(test)]
mod tests {
    use super::{e4m3, to_e4m3};

    #[test]
    fn every_number_comes_back_and_others_go_to_the_nearest() {
        for code in (0..=255u8).filter(|code| code & 0x7f != 0x7f) {
            assert_eq!(to_e4m3(e4m3(code)), code);
        }
        for (value, expect) in [(1.0625, 1.0), (1.1875, 1.25), (1.95, 2.0), (1e9, 448.0), (-460.0, -448.0), (1e-4, 0.0)]
        {
            assert_eq!(e4m3(to_e4m3(value)), expect, "{value}");
        }
        assert!(e4m3(to_e4m3(f32::NAN)).is_nan());
    }

    #[test]
    fn known_values() {
        for (code, value) in [(0, 0.0), (1, 1.0 / 512.0), (8, 1.0 / 64.0), (0x38, 1.0), (0x3a, 1.25), (0x7e, 448.0)] {
            assert_eq!(e4m3(code), value);
            assert_eq!(e4m3(code | 0x80), -value);
        }
        assert!(e4m3(0x7f).is_nan() && e4m3(0xff).is_nan());
    }
}
