//! Recorded traffic in Mooncake's format: JSON lines of a timestamp, two lengths and the hashes of
//! the prompt's blocks.
//!
//! The text itself was not recorded. A hash stands for a block of random tokens that it determines,
//! so that requests share prefixes exactly where the recorded ones did.

use std::fs::File;
use std::io::{BufRead, BufReader};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use super::{Ask, MAX_TOKENS, Prompt, Segment};
use crate::load::options::Trace;
use crate::load::rng::Rng;

#[derive(Deserialize)]
struct Row {
    timestamp: f64,
    input_length: usize,
    output_length: usize,
    #[serde(default)]
    hash_ids: Vec<u64>,
}

/// The first rows in order of time, and their times in seconds.
pub fn read(trace: &Trace, count: usize, seed: u64) -> Result<(Vec<Ask>, Vec<f64>)> {
    let shown = || trace.path.display().to_string();
    let file = File::open(&trace.path).with_context(shown)?;
    rows(BufReader::new(file), trace, count, seed).with_context(shown)
}

fn rows(lines: impl BufRead, trace: &Trace, count: usize, seed: u64) -> Result<(Vec<Ask>, Vec<f64>)> {
    if trace.hash_tokens == 0 {
        bail!("--timed-trace-chunk-hash-size is 0, but must be at least 1");
    }
    let mut found: Vec<(f64, Ask)> = Vec::new();
    for (number, line) in lines.lines().enumerate() {
        let line = line?;
        if line.trim().is_empty() {
            continue;
        }
        if found.len() == count {
            break;
        }
        let ask = ask(&line, found.len(), trace, seed).with_context(|| format!("line {}", number + 1))?;
        found.push(ask);
    }
    if found.is_empty() {
        bail!("the trace holds no request");
    }
    found.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (times, asks) = found.into_iter().unzip();
    Ok((asks, times))
}

fn ask(line: &str, number: usize, trace: &Trace, seed: u64) -> Result<(f64, Ask)> {
    let row: Row = serde_json::from_str(line)?;
    if !row.timestamp.is_finite() {
        bail!("timestamp: expected a number, found {}", row.timestamp);
    }
    for (name, tokens) in [("input_length", row.input_length), ("output_length", row.output_length)] {
        if !(1..=MAX_TOKENS).contains(&tokens) {
            bail!("{name}: expected 1 to {MAX_TOKENS}, found {tokens}");
        }
    }
    let segments = segments(&row, number, trace, seed);
    let ask = Ask { prompt: Prompt::Drawn(segments), prompt_len: row.input_length, output_len: row.output_length };
    Ok((row.timestamp * trace.unit_seconds, ask))
}

/// A block for each hash as far as the length goes; tokens without a hash are the request's own.
fn segments(row: &Row, number: usize, trace: &Trace, seed: u64) -> Vec<Segment> {
    let mut left = row.input_length;
    let mut segments = Vec::with_capacity(row.hash_ids.len() + 1);
    for &hash in &row.hash_ids {
        let len = left.min(trace.hash_tokens);
        if len == 0 {
            break;
        }
        segments.push(Segment { seed: Rng::stream(seed, hash).next_u64(), len });
        left -= len;
    }
    if left > 0 {
        segments.push(Segment { seed: Rng::stream(!seed, number as u64).next_u64(), len: left });
    }
    segments
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace(text: &str, hash_tokens: usize, count: usize) -> Result<(Vec<Ask>, Vec<f64>)> {
        rows(text.as_bytes(), &Trace { hash_tokens, ..Trace::new("") }, count, 0)
    }

    fn segments(ask: &Ask) -> &[Segment] {
        let Prompt::Drawn(segments) = &ask.prompt else { panic!("a drawn prompt") };
        segments
    }

    const TRACE: &str = r#"
        {"timestamp": 27482, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 48]}
        {"timestamp": 30535, "input_length": 700, "output_length": 26, "hash_ids": [46, 47], "model": "x"}

        {"timestamp": 27000.5, "input_length": 600, "output_length": 1}
        {"timestamp": 40000, "input_length": 10, "output_length": 3, "hash_ids": [46, 47, 48]}
    "#;

    #[test]
    fn blocks_are_shared_as_recorded() {
        let (asks, times) = trace(TRACE, 512, 1000).expect("a trace");
        assert_eq!(times, [27.0005, 27.482, 30.535, 40.0]);
        let lens = |ask: &Ask| segments(ask).iter().map(|segment| segment.len).collect::<Vec<_>>();
        assert_eq!(
            asks.iter().map(lens).collect::<Vec<_>>(),
            [vec![600], vec![512, 512, 76], vec![512, 188], vec![10]]
        );
        assert_eq!(asks.iter().map(|ask| ask.output_len).collect::<Vec<_>>(), [1, 52, 26, 3]);
        assert_eq!(segments(&asks[1])[0], segments(&asks[2])[0]);
        assert_eq!(segments(&asks[1])[1].seed, segments(&asks[2])[1].seed);
        assert_ne!(segments(&asks[1])[0].seed, segments(&asks[1])[1].seed);
    }

    #[test]
    fn hashes_that_do_not_reach_are_made_up_for() {
        let (asks, _) = trace(TRACE, 16, 1).expect("a trace");
        assert_eq!(asks.len(), 1);
        assert_eq!(segments(&asks[0]).iter().map(|segment| segment.len).collect::<Vec<_>>(), [16, 16, 16, 1052]);
    }

    #[test]
    fn bad_lines_are_named() {
        let row = |fields: &str| format!("{{\"timestamp\": 1, {fields}}}");
        let good = row("\"input_length\": 1, \"output_length\": 1");
        for bad in [
            "{".to_string(),
            row("\"input_length\": 1"),
            row("\"input_length\": -1, \"output_length\": 1"),
            row("\"input_length\": 0, \"output_length\": 1"),
            row("\"input_length\": 1, \"output_length\": 99999999999"),
        ] {
            let error = trace(&format!("{good}\n{bad}"), 512, 1000).expect_err(&bad);
            assert!(format!("{error:#}").contains("line 2"), "{error:#}");
        }
        assert!(trace("\n\n", 512, 1000).is_err());
        assert!(trace(&good, 0, 1000).is_err());
    }
}
