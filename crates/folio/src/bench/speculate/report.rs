//! The table: what each method gained, and what its own terms said it should.

use anyhow::Result;
use folio_measure::stats::{Median, median};
use serde_json::{Value, json};

use super::super::streams::ms;
use super::{Lane, Totals, repeat};
use crate::args::SpeculateBench;
use crate::table;

/// One method against none.
struct Row {
    method: String,
    tokens_per_s: f64,
    gain: f64,
    /// Of rounds, each against the same one without guessing.
    paired: Median,
    tokens_per_pass: f64,
    /// Of drafted tokens.
    accepted: f64,
    /// Milliseconds: a pass as the stream sees it, what its steps took, and of that in drafting.
    pass: f64,
    step: f64,
    drafting: f64,
    /// What the terms say: tokens a pass, over its steps in plain passes.
    expected: f64,
    different: usize,
}

impl Row {
    fn new(lane: &Lane, totals: &Totals, plain: &Totals) -> Self {
        let (own, none) = (Rates::of(totals), Rates::of(plain));
        Self {
            method: lane.method.to_string(),
            tokens_per_s: own.tokens_per_s,
            gain: own.tokens_per_s / none.tokens_per_s,
            paired: median(&totals.gains),
            tokens_per_pass: own.tokens_per_pass,
            accepted: totals.accepted as f64 / totals.drafted.max(1) as f64,
            pass: own.pass,
            step: own.step,
            drafting: own.drafting,
            expected: own.tokens_per_pass / none.tokens_per_pass * none.pass / own.step,
            different: lane.different,
        }
    }

    fn cells(&self) -> Vec<String> {
        vec![
            self.method.clone(),
            format!("{:.1}", self.tokens_per_s),
            format!("{:.2}x", self.gain),
            format!("{:.2}x, {:.2} to {:.2}", self.paired.middle, self.paired.low, self.paired.high),
            format!("{:.2}", self.tokens_per_pass),
            format!("{:.0}%", 100.0 * self.accepted),
            format!("{:.2} ms", self.pass),
            format!("{:.2} ms", self.step),
            format!("{:.2} ms", self.drafting),
            format!("{:.2}x", self.expected),
            format!("{:.0}%", 100.0 * self.gain / self.expected),
            self.different.to_string(),
        ]
    }

    fn json(&self) -> Value {
        json!({
            "method": self.method, "tokens_per_s": self.tokens_per_s, "gain": self.gain,
            "paired_gain": {"median": self.paired.middle, "low": self.paired.low, "high": self.paired.high},
            "tokens_per_pass": self.tokens_per_pass, "accepted": self.accepted, "pass_ms": self.pass,
            "step_ms": self.step, "drafting_ms": self.drafting, "expected_gain": self.expected,
            "different_answers": self.different,
        })
    }
}

/// Means over passes, in milliseconds.
struct Rates {
    tokens_per_s: f64,
    tokens_per_pass: f64,
    pass: f64,
    step: f64,
    drafting: f64,
}

impl Rates {
    fn of(totals: &Totals) -> Self {
        let passes = totals.passes.max(1) as f64;
        Self {
            tokens_per_s: totals.rate(),
            tokens_per_pass: totals.tokens as f64 / passes,
            pass: ms(totals.time) / passes,
            step: ms(totals.steps) / passes,
            drafting: ms(totals.drafting) / passes,
        }
    }
}

const HEADINGS: [&str; 12] = [
    "method",
    "tok/s",
    "gain",
    "median of rounds, 95%",
    "tok/pass",
    "accepted",
    "pass",
    "its steps",
    "drafting",
    "expected",
    "reached",
    "differ",
];

pub fn print(args: &SpeculateBench, streams: usize, lanes: &[Lane], followed: &[usize]) -> Result<()> {
    let all: Vec<Row> = lanes.iter().map(|lane| Row::new(lane, &lane.totals, &lanes[0].totals)).collect();
    let repeating = lanes.iter().map(|lane| Row::new(lane, &lane.repeating, &lanes[0].repeating));
    let repeating: Vec<Row> = repeating.filter(|_| lanes[0].repeating.tokens > 0).collect();
    let dropped = lanes[0].dropped;
    if args.common.json {
        let rows = |rows: &[Row]| rows.iter().map(Row::json).collect::<Vec<Value>>();
        return outln!(
            "{}",
            json!({
                "streams": streams, "temperature": args.temperature, "loops": dropped, "methods": rows(&all),
                "followed_tokens": followed, "where_files_are_repeated": rows(&repeating),
            })
        );
    }
    outln!(
        "\n{} at once, {} in / {} out, temperature {}; {dropped} answers run in circles{}",
        streams,
        args.input_len,
        args.output_len,
        args.temperature,
        if args.keep_loops { ", kept" } else { ", left out" },
    )?;
    print_rows(&all)?;
    if args.repeat.is_some() {
        outln!("\ntokens of each answer that follow the file: {followed:?}")?;
        outln!(
            "answers that do so for {:.0}% of their tokens: {} of {}",
            100.0 * repeat::REPEATS,
            lanes[0].repeating.gains.len() * streams,
            followed.len() + dropped
        )?;
        print_rows(&repeating)?;
    }
    Ok(())
}

fn print_rows(rows: &[Row]) -> Result<()> {
    let headings = HEADINGS.map(str::to_owned).to_vec();
    let rows: Vec<Vec<String>> = std::iter::once(headings).chain(rows.iter().map(Row::cells)).collect();
    out!("{}", table::render(&rows))
}
