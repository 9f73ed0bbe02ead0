//! E4M3 without infinities: a sign, four bits of exponent (bias 7), three of mantissa; 0x7f is NaN.

/// The value of a code.
pub fn decode(code: u8) -> f32 {
    let exponent = i32::from(code >> 3 & 15);
    let mantissa = f32::from(code & 7);
    let size = match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa * 2f32.powi(-9),
        _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
    };
    if code & 0x80 != 0 { -size } else { size }
}

/// The nearest code, ties to even; magnitudes above the largest number, 448, become it.
pub fn encode(x: f32) -> u8 {
    let sign = if x.is_sign_negative() { 0x80 } else { 0 };
    let size = x.abs();
    if size.is_nan() {
        return sign | 0x7f;
    }
    if size >= 448.0 {
        return sign | 0x7e;
    }
    // Numbers below the smallest normal share its spacing.
    let exponent = (((size.to_bits() >> 23) as i32) - 127).max(-6);
    let steps = (size * 2f32.powi(3 - exponent)).round_ties_even() as i32;
    // Eight steps from zero are the first normal, sixteen the next exponent: the sum carries by
    // itself.
    let code = steps + 8 * (exponent + 6);
    sign | code as u8
}

/// The nearest E4M3 number.
pub fn round(x: f32) -> f32 {
    decode(encode(x))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_comes_back() {
        for code in 0..=255u8 {
            if code & 0x7f != 0x7f {
                assert_eq!(encode(decode(code)), code, "{}", decode(code));
            }
        }
        assert!(decode(0x7f).is_nan());
    }

    #[test]
    fn known_values() {
        assert_eq!(decode(0x7e), 448.0);
        assert_eq!(decode(0x38), 1.0);
        assert_eq!(decode(0x01), 2f32.powi(-9));
        assert_eq!(decode(0x08), 2f32.powi(-6));
        assert_eq!(encode(1e9), 0x7e);
        assert_eq!(encode(-1e9), 0xfe);
        // Half-way between 1 and 1.125, and between 1.125 and 1.25: the even mantissa wins.
        assert_eq!(round(1.0625), 1.0);
        assert_eq!(round(1.1875), 1.25);
        assert_eq!(round(1.95), 2.0);
        assert_eq!(round(2f32.powi(-10)), 0.0);
        assert_eq!(round(1.5 * 2f32.powi(-10)), 2f32.powi(-9));
    }
}
