//! Eight-bit floats, with the values that torch gives them.

/// The value of an e4m3 number: a sign, four exponent bits with a bias of 7, three mantissa bits; no infinities, and one
/// bit pattern for what is not a number.
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

/// `2^(code - 127)`; the smallest is subnormal, the largest code is not a number.
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

#[cfg(test)]
mod tests {
    use super::e4m3;

    #[test]
    fn known_values() {
        for (code, value) in [(0, 0.0), (1, 1.0 / 512.0), (8, 1.0 / 64.0), (0x38, 1.0), (0x3a, 1.25), (0x7e, 448.0)] {
            assert_eq!(e4m3(code), value);
            assert_eq!(e4m3(code | 0x80), -value);
        }
        assert!(e4m3(0x7f).is_nan() && e4m3(0xff).is_nan());
    }
}
