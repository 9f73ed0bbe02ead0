//! The committed tables: counts when they were written, and the compiler.
//!
//!     # rustc 1.95.0 (59807616e 2026-04-14)
//!     part avx512::Sixteen F32: 1x2=11/128 2x2=13/128

use std::collections::BTreeMap;
use std::fmt::Write;

use anyhow::{Context, Result};

/// Instructions, and their divisor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Count {
    pub instructions: u64,
    pub per: u64,
}

impl Count {
    fn rate(self) -> f64 {
        self.instructions as f64 / self.per.max(1) as f64
    }
}

#[derive(Debug, Default, PartialEq)]
pub struct Table {
    pub compiler: String,
    /// By kernel or program, then by variant.
    rows: BTreeMap<String, BTreeMap<String, Count>>,
}

/// Differences between two tables.
#[derive(Debug, Default, PartialEq)]
pub struct Differences {
    /// More instructions than the margin allows, and missing rows.
    pub losses: Vec<String>,
    /// Fewer instructions, and new rows: the table should be renewed.
    pub news: Vec<String>,
}

impl Table {
    pub fn new(compiler: &str) -> Self {
        Self { compiler: compiler.to_owned(), rows: BTreeMap::new() }
    }

    pub fn insert(&mut self, name: &str, variant: &str, count: Count) {
        self.rows.entry(name.to_owned()).or_default().insert(variant.to_owned(), count);
    }

    pub fn parse(text: &str) -> Result<Self> {
        let (first, rest) = text.split_once('\n').unwrap_or((text, ""));
        let mut table = Self::new(first.strip_prefix("# ").context("a table begins with its compiler")?);
        for line in rest.lines() {
            let wrong = || format!("expected `name: variant=instructions/divisor ...`, found {line}");
            // Names may contain colons, but none followed by a space.
            let (name, entries) = line.rsplit_once(": ").with_context(wrong)?;
            for entry in entries.split(' ') {
                let (variant, count) = entry.split_once('=').with_context(wrong)?;
                let (instructions, per) = count.split_once('/').with_context(wrong)?;
                let (instructions, per) = (instructions.parse(), per.parse());
                table.insert(
                    name,
                    variant,
                    Count { instructions: instructions.with_context(wrong)?, per: per.with_context(wrong)? },
                );
            }
        }
        Ok(table)
    }

    pub fn to_text(&self) -> String {
        let mut text = format!("# {}\n", self.compiler);
        for (name, variants) in &self.rows {
            let entries = variants.iter().map(|(variant, c)| format!("{variant}={}/{}", c.instructions, c.per));
            let _ = writeln!(text, "{name}: {}", entries.collect::<Vec<_>>().join(" "));
        }
        text
    }

    pub fn len(&self) -> usize {
        self.rows.values().map(BTreeMap::len).sum()
    }

    fn get(&self, name: &str, variant: &str) -> Option<Count> {
        self.rows.get(name)?.get(variant).copied()
    }

    fn entries(&self) -> impl Iterator<Item = (&str, &str, Count)> {
        self.rows.iter().flat_map(|(name, variants)| {
            variants.iter().map(move |(variant, count)| (name.as_str(), variant.as_str(), *count))
        })
    }

    /// Compares new counts with this table; a rate may change by the share `margin`.
    pub fn compare(&self, found: &Self, margin: f64) -> Differences {
        let mut differences = Differences::default();
        for (name, variant, known) in self.entries() {
            let Some(count) = found.get(name, variant) else {
                differences.losses.push(format!("{name} {variant} is gone"));
                continue;
            };
            let ratio = count.rate() / known.rate();
            let says = format!(
                "{name} {variant}: {} instructions / {}, was {} / {}: {:+.1}%",
                count.instructions,
                count.per,
                known.instructions,
                known.per,
                100.0 * (ratio - 1.0)
            );
            match ratio {
                ratio if ratio > 1.0 + margin => differences.losses.push(says),
                ratio if ratio < 1.0 - margin => differences.news.push(says),
                _ => {}
            }
        }
        let unknown = found.entries().filter(|(name, variant, _)| self.get(name, variant).is_none());
        differences.news.extend(unknown.map(|(name, variant, _)| format!("{name} {variant} is new")));
        differences
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# rustc 1\npart a::B C: 1x2=50/128 2x2=52/128\nrow: 1=7/64\n";

    #[test]
    fn tables_survive_being_written() {
        let table = Table::parse(TEXT).unwrap();
        assert_eq!((table.compiler.as_str(), table.len()), ("rustc 1", 3));
        assert_eq!(table.to_text(), TEXT);
        for wrong in ["", "rustc 1\n", "# rustc 1\nrow 1=7/64\n", "# rustc 1\nrow: 1=7\n", "# rustc 1\nrow: 1=x/64\n"] {
            assert!(Table::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn losses_and_news() {
        let known = Table::parse(TEXT).unwrap();
        let compare = |text: &str| known.compare(&Table::parse(text).unwrap(), 0.02);
        assert_eq!(compare(TEXT), Differences::default());
        // An unrolled loop has the same rate, and one instruction of fifty is within the margin.
        let fine = TEXT.replace("50/128", "100/256").replace("52/128", "53/128");
        assert_eq!(compare(&fine), Differences::default());
        let slower = compare(&TEXT.replace("50/128", "52/128"));
        assert_eq!(slower.losses, ["part a::B C 1x2: 52 instructions / 128, was 50 / 128: +4.0%"]);
        assert_eq!(
            compare(&TEXT.replace("row: 1", "row: 2")),
            Differences { losses: vec!["row 1 is gone".into()], news: vec!["row 2 is new".into()] }
        );
        assert_eq!(compare(&TEXT.replace("7/64", "6/64")).news.len(), 1);
    }
}
