//! The language rule of docs/glossary.md, as far as a machine can see it. Lines of comments and
//! pages that break it are counted in each crate and compared with a committed table, which may
//! only shrink.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use anyhow::{Context, Result, bail};

use crate::process;

/// Relative to the repository's root.
const TABLE: &str = "xtask/src/tidy/language.txt";
/// This page quotes the words that the rule is against.
const GLOSSARY: &str = "docs/glossary.md";
const COLUMNS: usize = 100;

/// A sentence that begins so has no noun for its subject.
const OPENINGS: &[&str] = &["What", "Who", "Whose", "Whom", "Whoever", "Whatever", "Of", "Where", "Such"];
/// Only clients, callers and people are "who".
const PEOPLE: &[&str] = &["who", "whom", "whoever", "nobody", "somebody", "everybody", "anybody"];
/// "A client who ..." is right.
const PERSONS: &[&str] = &["client", "caller", "user", "person", "people", "reader", "author", "attacker", "tester"];
/// "In whose ..." is not; "a block whose keys ..." is.
const PREPOSITIONS: &[&str] = &["of", "in", "to", "for", "by", "with", "from", "on", "at"];
const PHRASES: &[&[&str]] =
    &[&["as", "they", "lie"], &["as", "it", "lies"], &["so", "many"], &["of", "which"], &["of", "whom"]];

/// Lines of one crate that break the rule, by how.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    /// A thing is "who", "nobody", ...
    people: usize,
    /// A sentence begins with "What", "Of", ...
    openings: usize,
    /// One of the phrases that the glossary lists.
    phrases: usize,
    /// A comment of more than 100 columns.
    wide: usize,
}

impl Counts {
    const NAMES: [&str; 4] = ["people", "openings", "phrases", "wide"];

    fn columns(&self) -> [usize; 4] {
        [self.people, self.openings, self.phrases, self.wide]
    }

    fn add(&mut self, line: Self) {
        self.people += line.people;
        self.openings += line.openings;
        self.phrases += line.phrases;
        self.wide += line.wide;
    }
}

type Table = BTreeMap<String, Counts>;

/// Fails if a crate has more lines that break the rule than the table says. With `write` the table
/// takes the new counts, unless there are more in all.
pub fn check(files: &[&str], write: bool) -> Result<()> {
    let found = count(files);
    let path = process::root().join(TABLE);
    let table = std::fs::read_to_string(&path).with_context(|| format!("could not read {TABLE}"))?;
    let table = parse(&table).context(TABLE)?;
    if write {
        let (before, after) = (total(&table), total(&found));
        for (index, name) in Counts::NAMES.iter().enumerate() {
            let (before, after) = (before.columns()[index], after.columns()[index]);
            if after > before {
                bail!("{TABLE} may only shrink, but {name} would grow from {before} to {after} lines");
            }
        }
        return std::fs::write(&path, to_text(&found)).with_context(|| format!("could not write {TABLE}"));
    }
    let (more, fewer) = compare(&table, &found);
    if fewer > 0 {
        eprintln!("language: {fewer} lines fewer than in {TABLE}: cargo xtask tidy --write takes the new counts");
    }
    if !more.is_empty() {
        bail!(
            "language (docs/glossary.md has the rule; cargo xtask tidy --lines CRATE lists the lines):\n  {}\nwhere \
             lines moved between crates: cargo xtask tidy --write",
            more.join("\n  ")
        );
    }
    Ok(())
}

/// Prints every line of a crate that breaks the rule.
pub fn list(files: &[&str], wanted: &str) {
    for file in files.iter().filter(|file| crate_of(file) == Some(wanted)) {
        let Ok(text) = std::fs::read_to_string(process::root().join(file)) else { continue };
        for (number, line, counts) in lines(file, &text) {
            let kinds = Counts::NAMES.iter().zip(counts.columns()).filter(|(_, count)| *count > 0);
            let kinds: Vec<&str> = kinds.map(|(name, _)| *name).collect();
            if !kinds.is_empty() {
                println!("{file}:{number}: {}: {}", kinds.join(", "), line.trim());
            }
        }
    }
}

fn count(files: &[&str]) -> Table {
    let mut table = Table::new();
    for file in files {
        let Some(name) = crate_of(file) else { continue };
        let Ok(text) = std::fs::read_to_string(process::root().join(file)) else { continue };
        let counts = table.entry(name.to_owned()).or_default();
        lines(file, &text).for_each(|(_, _, line)| counts.add(line));
    }
    table
}

/// The row of the table that a file counts in: its crate, or `docs` for pages.
fn crate_of(file: &str) -> Option<&str> {
    let mut parts = file.split('/');
    let top = parts.next()?;
    match file.rsplit_once('.')?.1 {
        "md" if file != GLOSSARY => Some("docs"),
        "rs" | "cu" | "cuh" if top == "crates" => parts.next(),
        "rs" => Some(top),
        _ => None,
    }
}

/// The lines of a file that hold a comment or, in a page, text: number, line, and how it breaks
/// the rule.
fn lines<'a>(file: &str, text: &'a str) -> impl Iterator<Item = (usize, &'a str, Counts)> {
    let page = file.ends_with(".md");
    let mut in_code = false;
    (1..).zip(text.lines()).filter_map(move |(number, line)| {
        let fence = page && line.trim_start().starts_with("```");
        in_code ^= fence;
        let words =
            if page { (!in_code && !fence && !line.starts_with("    ")).then_some(line) } else { comment(line) };
        words.map(|words| (number, line, judge(line, words, page)))
    })
}

/// The words of a comment: of a whole line, or behind code.
fn comment(line: &str) -> Option<&str> {
    let start = line.trim_start();
    if start.starts_with("//") {
        return Some(start.trim_start_matches(['/', '!']));
    }
    line.split_once(" // ").map(|(_, comment)| comment)
}

fn judge(line: &str, words: &str, page: bool) -> Counts {
    let words = words_of(words);
    let lower: Vec<String> = words.iter().map(|word| word.text.to_lowercase()).collect();
    let after = |index: usize, list: &[&str]| {
        let before = index.checked_sub(1).map(|before| lower[before].trim_end_matches('s'));
        before.is_some_and(|before| list.iter().any(|word| word.trim_end_matches('s') == before))
    };
    let is_person = |(index, word): (usize, &String)| {
        (PEOPLE.contains(&word.as_str()) && !after(index, PERSONS)) || (word == "whose" && after(index, PREPOSITIONS))
    };
    let whole_line = line.trim_start().starts_with("//");
    Counts {
        people: usize::from(lower.iter().enumerate().any(is_person)),
        openings: usize::from(words.iter().any(|word| word.opens && OPENINGS.contains(&word.text))),
        phrases: usize::from(PHRASES.iter().any(|phrase| lower.windows(phrase.len()).any(|found| found == *phrase))),
        wide: usize::from(!page && whole_line && line.chars().count() > COLUMNS),
    }
}

struct Word<'a> {
    text: &'a str,
    /// It is the first of the line or of a sentence.
    opens: bool,
}

/// Words between backticks or quotation marks are not the author's language.
fn words_of(line: &str) -> Vec<Word<'_>> {
    let mut words = Vec::new();
    let mut opens = true;
    for (index, prose) in line.split(['`', '"']).enumerate() {
        if index % 2 == 1 {
            opens = false;
            continue;
        }
        for token in prose.split_whitespace() {
            let text = token.trim_matches(|c: char| !c.is_alphanumeric());
            if !text.is_empty() {
                words.push(Word { text, opens });
                opens = false;
            }
            opens |= token.ends_with(['.', '!', '?', ':', ';', '|']);
        }
    }
    words
}

/// Counts that grew, as sentences, and how many lines fewer there are in all.
fn compare(table: &Table, found: &Table) -> (Vec<String>, usize) {
    let mut more = Vec::new();
    let mut fewer = 0;
    for (name, found) in found {
        let known = table.get(name).copied().unwrap_or_default();
        for ((kind, known), found) in Counts::NAMES.iter().zip(known.columns()).zip(found.columns()) {
            fewer += known.saturating_sub(found);
            if found > known {
                more.push(format!("{name}: {found} lines of `{kind}`, {known} in the table"));
            }
        }
    }
    let gone = table.iter().filter(|(name, _)| !found.contains_key(*name));
    (more, fewer + gone.map(|(_, counts)| counts.columns().iter().sum::<usize>()).sum::<usize>())
}

fn total(table: &Table) -> Counts {
    let mut total = Counts::default();
    table.values().for_each(|counts| total.add(*counts));
    total
}

fn parse(text: &str) -> Result<Table> {
    let rows = text.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
    let row = |line: &str| {
        let mut fields = line.split_whitespace();
        let name = fields.next().with_context(|| format!("a line without a crate: {line}"))?;
        let counts = fields.map(str::parse).collect::<Result<Vec<usize>, _>>().with_context(|| line.to_owned())?;
        let [people, openings, phrases, wide] = counts[..] else { bail!("expected four counts: {line}") };
        Ok((name.to_owned(), Counts { people, openings, phrases, wide }))
    };
    rows.map(row).collect()
}

fn to_text(table: &Table) -> String {
    let mut text = "\
# Lines that break the language rule of docs/glossary.md, by crate. These counts may only shrink.
# people: a thing is \"who\" or \"nobody\"; openings: a sentence begins with \"What\" or \"Of\";
# phrases: \"as they lie\", \"so many\", \"of which\"; wide: a comment of more than 100 columns.
"
    .to_owned();
    _ = writeln!(text, "# {:<12} {}", "crate", Counts::NAMES.map(|name| format!("{name:>9}")).join(""));
    for (name, counts) in table {
        _ = writeln!(text, "{name:<14} {}", counts.columns().map(|count| format!("{count:>9}")).join(""));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(comment: &str) -> [usize; 4] {
        let line = format!("/// {comment}");
        lines("crates/device/src/a.rs", &line).map(|(_, _, counts)| counts.columns()).next().unwrap_or_default()
    }

    #[test]
    fn the_old_language_is_counted() {
        for (line, expected) in [
            ("Whoever is there takes the parts.", [1, 1, 0, 0]),
            ("Of a row, at first: its request.", [0, 1, 0, 0]),
            ("It is packed. What is packed stays.", [0, 1, 0, 0]),
            ("Tiles of 80 tokens, and nobody waits.", [1, 0, 0, 0]),
            ("A kernel who waits.", [1, 0, 0, 0]),
            ("The worker in whose cache it lies.", [1, 0, 0, 0]),
            ("Codes are multiplied as they lie.", [0, 0, 1, 0]),
            ("Matrices of which that cannot be said, for so many rows.", [0, 0, 1, 0]),
        ] {
            assert_eq!(found(line), expected, "{line}");
        }
        assert_eq!(found(&"a ".repeat(60)), [0, 0, 0, 1]);
    }

    #[test]
    fn plain_sentences_are_not() {
        for line in [
            "Other matrices are converted to BF16.",
            "A block whose forward pass is done is published.",
            "Clients who wait are woken, and so is the caller who asked.",
            "Compares with what is allocated, of any size, where it lies.",
            "`Who` and \"Nobody\" are names here.",
        ] {
            assert_eq!(found(line), [0; 4], "{line}");
        }
    }

    #[test]
    fn only_comments_and_pages_count() {
        let code = format!("let what = \"Of nobody\";\nrun(); {} Who runs\n", "//");
        let counted: Vec<usize> = lines("crates/a/src/b.rs", &code).map(|(_, _, line)| line.openings).collect();
        assert_eq!(counted, [1]);
        let page = "# What it is\n```\nWho\n```\n    Of code\n| Such | it |\n";
        let counted: usize = lines("docs/a.md", page).map(|(_, _, line)| line.openings).sum();
        assert_eq!(counted, 2);
        assert_eq!(crate_of("crates/device/src/cuda/kernels/norm.cu"), Some("device"));
        assert_eq!(crate_of("tests/blackbox/main.rs"), Some("tests"));
        assert_eq!(crate_of("README.md"), Some("docs"));
        assert_eq!(crate_of(GLOSSARY), None);
    }

    #[test]
    fn more_than_the_table_fails_and_fewer_does_not() {
        let row = |people, wide| Counts { people, openings: 2, phrases: 3, wide };
        let table = Table::from([("a".to_owned(), row(4, 5)), ("gone".to_owned(), row(0, 1))]);
        assert_eq!(compare(&table, &Table::from([("a".to_owned(), row(4, 5))])), (vec![], 6));
        assert_eq!(compare(&table, &Table::from([("a".to_owned(), row(1, 5))])), (vec![], 9));
        let (more, _) = compare(&table, &Table::from([("a".to_owned(), row(5, 5)), ("new".to_owned(), row(0, 0))]));
        let expected =
            ["a: 5 lines of `people`, 4 in", "new: 2 lines of `openings`, 0", "new: 3 lines of `phrases`, 0"];
        assert_eq!(more.len(), expected.len());
        assert!(more.iter().zip(expected).all(|(more, expected)| more.starts_with(expected)), "{more:?}");
    }

    #[test]
    fn a_table_reads_as_it_was_written() {
        let counts = Counts { people: 1, openings: 20, phrases: 0, wide: 300 };
        let table = Table::from([("device".to_owned(), counts), ("docs".to_owned(), Counts::default())]);
        assert_eq!(parse(&to_text(&table)).unwrap(), table);
        assert!(parse("device 1 2 3").is_err());
    }
}
