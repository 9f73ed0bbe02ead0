//! How vocabularies write bytes: the visible alphabet of byte-level BPE, and `<0xNN>` of
//! SentencePiece.

/// The byte that a character of the byte-level alphabet stands for. Printable Latin-1 stands for
/// itself; the other 68 bytes have the characters from U+0100 on, in order.
fn alphabet_byte(character: char) -> Option<u8> {
    let code = u32::from(character);
    match code {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => Some(code as u8),
        0x100..=0x120 => Some((code - 0x100) as u8),
        0x121..=0x142 => Some((code - 0x121 + 0x7f) as u8),
        0x143 => Some(0xad),
        _ => None,
    }
}

/// The bytes of a byte-level token; a token with a character outside the alphabet stands for
/// itself.
pub fn of_byte_level(token: &str) -> Vec<u8> {
    let mapped: Option<Vec<u8>> = token.chars().map(alphabet_byte).collect();
    mapped.unwrap_or_else(|| token.as_bytes().to_vec())
}

/// The byte of a `<0xNN>` token.
pub fn of_fallback(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() == 2 { u8::from_str_radix(digits, 16).ok() } else { None }
}

/// The bytes of a SentencePiece token, with U+2581 for a space.
pub fn of_sentence_piece(token: &str) -> Vec<u8> {
    match of_fallback(token) {
        Some(byte) => vec![byte],
        None => token.replace('\u{2581}', " ").into_bytes(),
    }
}

/// All characters that stand for a byte.
#[cfg(test)]
pub fn alphabet() -> impl Iterator<Item = char> {
    (0..0x400).filter_map(char::from_u32).filter(|&character| alphabet_byte(character).is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_one_character() {
        let mut seen = [false; 256];
        for byte in alphabet().filter_map(alphabet_byte) {
            assert!(!std::mem::replace(&mut seen[usize::from(byte)], true), "two characters for {byte}");
        }
        assert!(seen.iter().all(|seen| *seen));
        assert_eq!(of_byte_level("ĠhiĊ"), b" hi\n");
        assert_eq!(of_byte_level("日"), "日".as_bytes());
        assert_eq!(of_fallback("<0x0A>"), Some(b'\n'));
        assert_eq!(of_fallback("<0xZZ>"), None);
        assert_eq!(of_sentence_piece("▁a▁"), b" a ");
    }
}
