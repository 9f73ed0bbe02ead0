//! Lines of a batch, read one at a time and checked.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;

/// Routes that a batch may use.
const URLS: [&str; 4] = ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"];
/// Maximum bytes of a line beside its body.
const AROUND_BODY_BYTES: usize = 64 << 10;
const CUSTOM_ID_BYTES: usize = 512;

/// One line that is not blank.
#[derive(Debug)]
pub struct Line {
    /// An id made of the line number, so that it is the same in every run.
    pub id: String,
    /// The request, or the custom_id (if there is one) and an error.
    pub parsed: Result<Ask, (Option<String>, String)>,
}

#[derive(Debug, PartialEq)]
pub struct Ask {
    pub custom_id: String,
    pub url: &'static str,
    pub body: Value,
}

pub struct Lines {
    reader: BufReader<File>,
    number: usize,
    most_bytes: usize,
}

impl Lines {
    /// The lines of a file and their number.
    pub fn open(path: &Path, body_bytes: usize) -> Result<(Self, usize)> {
        let open = || File::open(path).with_context(|| format!("could not read {}", path.display()));
        let most_bytes = body_bytes.saturating_add(AROUND_BODY_BYTES);
        let mut lines = Self { reader: BufReader::new(open()?), number: 0, most_bytes };
        let mut total = 0;
        while lines.next_text()?.is_some() {
            total += 1;
        }
        Ok((Self { reader: BufReader::new(open()?), number: 0, most_bytes }, total))
    }

    /// The next line that is not blank; `Some(None)` if it is too long.
    fn next_text(&mut self) -> Result<Option<Option<Vec<u8>>>> {
        loop {
            let mut line = Vec::new();
            let most = self.most_bytes as u64 + 1;
            let read = self.reader.by_ref().take(most).read_until(b'\n', &mut line).context("the input")?;
            if read == 0 {
                return Ok(None);
            }
            self.number += 1;
            if read as u64 == most && line.last() != Some(&b'\n') {
                self.reader.skip_until(b'\n').context("the input")?;
                return Ok(Some(None));
            }
            if !line.trim_ascii().is_empty() {
                return Ok(Some(Some(line)));
            }
        }
    }
}

impl Iterator for Lines {
    type Item = Result<Line>;

    fn next(&mut self) -> Option<Result<Line>> {
        let text = match self.next_text() {
            Ok(text) => text?,
            Err(error) => return Some(Err(error)),
        };
        let number = self.number;
        let parsed = match text {
            None => Err((None, format!("longer than {} bytes", self.most_bytes))),
            Some(text) => parse(&text),
        };
        let parsed = parsed.map_err(|(custom_id, why)| (custom_id, format!("line {number}: {why}")));
        Some(Ok(Line { id: format!("batch_req_{number}"), parsed }))
    }
}

fn parse(line: &[u8]) -> Result<Ask, (Option<String>, String)> {
    let value: Value = serde_json::from_slice(line).map_err(|error| (None, format!("not JSON: {error}")))?;
    let Value::Object(mut fields) = value else {
        return Err((None, "expected an object".into()));
    };
    let custom_id = match fields.remove("custom_id") {
        Some(Value::String(id)) if (1..=CUSTOM_ID_BYTES).contains(&id.len()) => id,
        _ => return Err((None, format!("custom_id: expected a string of 1 to {CUSTOM_ID_BYTES} bytes"))),
    };
    let wrong = |why: String| (Some(custom_id.clone()), why);
    if fields.remove("method") != Some("POST".into()) {
        return Err(wrong("method: expected POST".into()));
    }
    let url = fields.remove("url");
    let url = URLS.into_iter().find(|known| url.as_ref().and_then(Value::as_str) == Some(*known));
    let url = url.ok_or_else(|| wrong(format!("url: expected one of {}", URLS.join(", "))))?;
    let body = fields.remove("body").filter(Value::is_object);
    let body = body.ok_or_else(|| wrong("body: expected an object".into()))?;
    if body.get("stream").is_some_and(|stream| stream != &Value::Bool(false) && !stream.is_null()) {
        return Err(wrong("body.stream: not supported in a batch".into()));
    }
    if let Some((name, _)) = fields.iter().next() {
        return Err(wrong(format!("{name:?}: unknown field; expected custom_id, method, url and body")));
    }
    Ok(Ask { custom_id, url, body })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_requests_or_say_why_not() {
        let good = r#"{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"prompt":"x"}}"#;
        let ask = parse(good.as_bytes()).expect("a request");
        assert_eq!((ask.custom_id.as_str(), ask.url), ("a", "/v1/completions"));
        for (from, to, id, why) in [
            ("\"a\"", "\"\"", None, "custom_id"),
            ("\"a\"", "7", None, "custom_id"),
            ("POST", "GET", Some("a"), "method"),
            ("/v1/completions", "/metrics", Some("a"), "url"),
            ("/v1/completions", "/v1/../v1/completions", Some("a"), "url"),
            (r#"{"prompt":"x"}"#, "[]", Some("a"), "body"),
            (r#"{"prompt":"x"}"#, r#"{"stream":true}"#, Some("a"), "stream"),
            (r#""method""#, r#""more":1,"method""#, Some("a"), "more"),
            ("}}", "}", None, "JSON"),
        ] {
            let (found, text) = parse(good.replacen(from, to, 1).as_bytes()).expect_err(why);
            assert_eq!(found.as_deref(), id, "{text}");
            assert!(text.contains(why), "{why} in {text}");
        }
    }

    #[test]
    fn long_and_blank_lines() {
        let path = std::env::temp_dir().join(format!("folio-batch-lines-{}", std::process::id()));
        let long = "x".repeat(AROUND_BODY_BYTES + 100);
        std::fs::write(&path, format!("\n1\n{long}\n  \n2")).expect("writable");
        let (lines, total) = Lines::open(&path, 10).expect("readable");
        let ids: Vec<_> = lines.map(|line| line.map(|line| (line.id, line.parsed.is_err())).expect("read")).collect();
        std::fs::remove_file(&path).expect("it is there");
        let expect = ["batch_req_2", "batch_req_3", "batch_req_5"].map(|id| (id.to_string(), true));
        assert_eq!((ids.as_slice(), total), (&expect[..], 3));
    }
}
