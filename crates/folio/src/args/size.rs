//! Sizes on the command line: `6GiB`, `512M`, `1.5GB`, `1073741824`.

use std::str::FromStr;

/// Bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteSize(pub u64);

/// A letter alone, or one with `iB`, counts in powers of 1024; one with `B` in powers of 1000.
const UNITS: &[(&str, u64)] = &[
    ("", 1),
    ("b", 1),
    ("k", 1 << 10),
    ("kib", 1 << 10),
    ("kb", 1_000),
    ("m", 1 << 20),
    ("mib", 1 << 20),
    ("mb", 1_000_000),
    ("g", 1 << 30),
    ("gib", 1 << 30),
    ("gb", 1_000_000_000),
    ("t", 1 << 40),
    ("tib", 1 << 40),
    ("tb", 1_000_000_000_000),
];

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(split);
        let unit = unit.trim().to_ascii_lowercase();
        let scale = UNITS.iter().find(|(name, _)| *name == unit).map(|(_, scale)| *scale);
        let wrong = || "expected bytes, or a number with a unit such as 512MiB or 6GiB".to_string();
        let scale = scale.ok_or_else(wrong)?;
        // Whole numbers stay exact.
        if let Ok(whole) = number.parse::<u64>() {
            return whole.checked_mul(scale).map(Self).ok_or_else(|| "size does not fit in 64 bits".into());
        }
        let bytes = number.parse::<f64>().map_err(|_| wrong())? * scale as f64;
        if bytes < u64::MAX as f64 { Ok(Self(bytes as u64)) } else { Err("size does not fit in 64 bits".into()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        let check = |text: &str, expect: Option<u64>| {
            assert_eq!(text.parse::<ByteSize>().ok(), expect.map(ByteSize), "{text}");
        };
        check("0", Some(0));
        check("1073741824", Some(1 << 30));
        check("6GiB", Some(6 << 30));
        check("6 gib", Some(6 << 30));
        check("512m", Some(512 << 20));
        check("1.5K", Some(1536));
        check("2GB", Some(2_000_000_000));
        check("18446744073709551615", Some(u64::MAX));
        for bad in ["", "GiB", "-1", "1 parsec", "1.2.3", "99999999999T", "1e3", "."] {
            check(bad, None);
        }
    }
}
