//! Byte counts as text.

/// MiB below 10 GiB, GiB above.
pub fn bytes(count: u64) -> String {
    let mib = count as f64 / (1u64 << 20) as f64;
    if mib < 10.0 * 1024.0 { format!("{mib:.1} MiB") } else { format!("{:.1} GiB", mib / 1024.0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts() {
        assert_eq!(bytes(28 << 20), "28.0 MiB");
        assert_eq!(bytes(16 << 30), "16.0 GiB");
    }
}
