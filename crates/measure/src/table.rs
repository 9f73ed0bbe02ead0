//! Plain tables for people.

/// Columns aligned: the first to the left, the others to the right.
pub fn render(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns)
        .map(|c| rows.iter().filter_map(|row| row.get(c)).map(|cell| cell.chars().count()).max().unwrap_or(0))
        .collect();
    let mut out = String::new();
    for row in rows {
        for (column, cell) in row.iter().enumerate() {
            let pad = " ".repeat(widths[column] - cell.chars().count());
            match column {
                0 => out.push_str(&format!("{cell}{pad}")),
                _ => out.push_str(&format!("  {pad}{cell}")),
            }
        }
        out.truncate(out.trim_end().len());
        out.push('\n');
    }
    out
}

pub use folio_session::units::bytes;

/// Large counts for people: 42.2 M, 1.01 B.
pub fn count(value: u64) -> String {
    match value {
        0..=99_999 => value.to_string(),
        100_000..=999_999_999 => format!("{:.1} M", value as f64 / 1e6),
        _ => format!("{:.2} B", value as f64 / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let cell = |text: &str| text.to_string();
        let table = render(&[vec![cell("a"), cell("10"), cell("x")], vec![cell("long"), cell("9")]]);
        assert_eq!(table, "a     10  x\nlong   9\n");
    }

    #[test]
    fn amounts() {
        assert_eq!(count(42_216_960), "42.2 M");
        assert_eq!(count(1_007_000_000), "1.01 B");
        assert_eq!(count(512), "512");
    }
}
