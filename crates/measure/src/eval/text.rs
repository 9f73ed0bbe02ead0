//! The text of an evaluation: windows of tokens, the same for every model that shares the
//! tokenizer.
//!
//! A window never crosses documents. If the number of tokens is limited, they come from documents
//! all over the file, the beginning of each, so that a few thousand tokens stand for the whole.

use std::path::Path;

use anyhow::{Context, Result, bail};
use folio_text::Tokenizer;
use serde_json::Value;

/// Tokens to predict, cut into windows.
#[derive(Debug, Default, PartialEq)]
pub struct Windows {
    pub windows: Vec<Vec<u32>>,
    /// Bytes of the text that these tokens stand for.
    pub text_bytes: f64,
}

/// How much of a text is used.
#[derive(Clone, Copy, Debug)]
pub struct Amount {
    /// Tokens a window.
    pub window: usize,
    /// Most tokens of all windows together.
    pub tokens: usize,
}

impl Windows {
    pub fn read(path: &Path, tokenizer: &Tokenizer, amount: Amount) -> Result<Self> {
        let shown = || path.display().to_string();
        let documents = documents(path).with_context(shown)?;
        let windows = Self::of(&documents, tokenizer, amount).with_context(shown)?;
        if windows.windows.is_empty() {
            bail!("{}: no document has 2 tokens or more, which is what it takes to predict one", shown());
        }
        Ok(windows)
    }

    pub fn of(documents: &[String], tokenizer: &Tokenizer, amount: Amount) -> Result<Self> {
        Self::cut(documents, amount, |text| Ok(tokenizer.encode(text, false)?))
    }

    pub fn num_tokens(&self) -> usize {
        self.windows.iter().map(Vec::len).sum()
    }

    /// The first window of every document, then the second of every document that has one, and so
    /// on.
    fn cut(documents: &[String], amount: Amount, mut encode: impl FnMut(&str) -> Result<Vec<u32>>) -> Result<Self> {
        let mut encoded: Vec<Option<Vec<u32>>> = vec![None; documents.len()];
        let mut cut = Self::default();
        let mut left = amount.tokens;
        for round in 0.. {
            let mut found = false;
            for document in spread(documents.len()) {
                let tokens = match &mut encoded[document] {
                    Some(tokens) => tokens,
                    empty => empty.insert(encode(&documents[document])?),
                };
                let Some(rest) = tokens.get(round * amount.window..).filter(|rest| !rest.is_empty()) else { continue };
                found = true;
                let window = &rest[..rest.len().min(amount.window).min(left)];
                if window.len() < 2 {
                    continue;
                }
                cut.text_bytes += documents[document].len() as f64 * window.len() as f64 / tokens.len() as f64;
                cut.windows.push(window.to_vec());
                left -= window.len();
                if left < 2 {
                    return Ok(cut);
                }
            }
            if !found {
                break;
            }
        }
        Ok(cut)
    }
}

/// All of `0..count`, any first part of it spread evenly: multiples of a step of about the golden
/// section that shares no factor with the count.
fn spread(count: usize) -> impl Iterator<Item = usize> {
    let near = (count as f64 * 0.618) as usize;
    let step = (near.max(1)..).find(|&step| common_divisor(step, count) == 1).unwrap_or(1);
    (0..count).scan(0, move |at, _| {
        let now = *at;
        *at = (*at + step) % count;
        Some(now)
    })
}

fn common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

fn documents(path: &Path) -> Result<Vec<String>> {
    let text = std::fs::read_to_string(path)?;
    if path.extension().is_none_or(|ending| !ending.eq_ignore_ascii_case("jsonl")) {
        return Ok(vec![text]);
    }
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    lines.map(|(number, line)| document(line).with_context(|| format!("line {}", number + 1))).collect()
}

fn document(line: &str) -> Result<String> {
    let value: Value = serde_json::from_str(line)?;
    match value.get("text") {
        Some(Value::String(text)) => Ok(text.clone()),
        _ => bail!("expected an object with a string named \"text\""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(documents: &[&str], window: usize, tokens: usize) -> Windows {
        let documents: Vec<String> = documents.iter().map(ToString::to_string).collect();
        let encode = |text: &str| Ok(text.bytes().map(u32::from).collect());
        Windows::cut(&documents, Amount { window, tokens }, encode).expect("encodes")
    }

    fn texts(windows: &Windows) -> Vec<String> {
        let text = |window: &Vec<u32>| window.iter().map(|&token| token as u8 as char).collect();
        windows.windows.iter().map(text).collect()
    }

    #[test]
    fn one_document_is_cut_in_order() {
        let windows = cut(&["abcdefgh"], 3, usize::MAX);
        assert_eq!(texts(&windows), ["abc", "def", "gh"]);
        assert_eq!((windows.num_tokens(), windows.text_bytes), (8, 8.0));
        assert_eq!(texts(&cut(&["abcdefgh"], 3, 5)), ["abc", "de"]);
        assert_eq!(texts(&cut(&["abcdefgh"], 3, 7)), ["abc", "def"], "one token alone predicts nothing");
    }

    #[test]
    fn every_document_is_heard_before_one_is_heard_twice() {
        let windows = texts(&cut(&["aabb", "c", "dd", "eeff", ""], 2, usize::MAX));
        assert_eq!(windows[..3].iter().collect::<std::collections::HashSet<_>>().len(), 3);
        assert!(windows[..3].iter().all(|text| ["aa", "dd", "ee"].contains(&text.as_str())), "{windows:?}");
        assert!(windows[3..].iter().all(|text| ["bb", "ff"].contains(&text.as_str())), "{windows:?}");
        assert_eq!(windows.len(), 5);
    }

    #[test]
    fn a_spread_visits_all_once() {
        for count in 0..200 {
            let mut visited: Vec<usize> = spread(count).collect();
            visited.sort_unstable();
            assert_eq!(visited, (0..count).collect::<Vec<_>>());
        }
        let first: Vec<usize> = spread(1000).take(10).collect();
        for tenth in 0..10 {
            let near = first.iter().filter(|&&at| at / 100 == tenth).count();
            assert!(near <= 2, "{first:?}");
        }
    }

    #[test]
    fn a_line_without_text_is_named() {
        let folder = std::env::temp_dir().join(format!("folio-eval-text-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let path = folder.join("lines.jsonl");
        std::fs::write(&path, "{\"text\": \"one\"}\n\n{\"words\": 2}\n").expect("writable");
        let error = format!("{:#}", documents(&path).expect_err("the third line has no text"));
        assert!(error.contains("line 3") && error.contains("text"), "{error}");
        std::fs::write(&path, "{\"text\": \"one\"}\n\n{\"text\": \"two\"}\n").expect("writable");
        assert_eq!(documents(&path).expect("readable"), ["one", "two"]);
        std::fs::remove_dir_all(&folder).expect("removable");
    }
}
