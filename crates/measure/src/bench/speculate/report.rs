//! The table: what each method gained, and what its own terms said it should.

use serde_json::{Value, json};

use super::super::streams::ms;
use super::{Lane, Options, Totals, repeat};
use crate::stats::{Median, median};
use crate::table;

/// One method against none.
struct Row {
    method: String,
    tokens_per_s: f64,
    gain: f64,
    /// The gains of rounds, each against the same round without drafts.
    paired: Median,
    tokens_per_pass: f64,
    /// The accepted share of drafted tokens.
    accepted: f64,
    /// Milliseconds: a pass as the stream sees it, what its steps took, and of that in drafting.
    pass: f64,
    step: f64,
    drafting: f64,
    /// The gain that the terms predict: tokens a pass, over its steps in plain passes.
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

/// Gains at one number of streams.
pub struct Report {
    options: Options,
    streams: usize,
    /// Answers of rounds that were left out because they repeat themselves.
    dropped: usize,
    all: Vec<Row>,
    /// The same rows, of rounds in which all answers repeat a file as asked.
    repeating: Vec<Row>,
    repeating_rounds: usize,
    /// Tokens of each answer that follow the file.
    followed: Vec<usize>,
}

impl Report {
    pub fn new(args: &Options, streams: usize, lanes: &[Lane], followed: Vec<usize>) -> Self {
        let plain = &lanes[0];
        let repeating = lanes.iter().map(|lane| Row::new(lane, &lane.repeating, &plain.repeating));
        Self {
            options: args.clone(),
            streams,
            dropped: plain.dropped,
            all: lanes.iter().map(|lane| Row::new(lane, &lane.totals, &plain.totals)).collect(),
            repeating: repeating.filter(|_| plain.repeating.tokens > 0).collect(),
            repeating_rounds: plain.repeating.gains.len(),
            followed,
        }
    }

    pub fn json(&self) -> Value {
        let rows = |rows: &[Row]| rows.iter().map(Row::json).collect::<Vec<Value>>();
        json!({
            "streams": self.streams, "temperature": self.options.temperature, "loops": self.dropped,
            "methods": rows(&self.all), "followed_tokens": self.followed,
            "where_files_are_repeated": rows(&self.repeating),
        })
    }

    pub fn text(&self) -> String {
        let Self { options, streams, dropped, followed, .. } = self;
        let mut text = format!(
            "\n{streams} at once, {} in / {} out, temperature {}; {dropped} answers run in circles{}\n",
            options.input_len,
            options.output_len,
            options.temperature,
            if options.keep_loops { ", kept" } else { ", left out" },
        );
        text += &table_of(&self.all);
        if options.repeat.is_some() {
            text += &format!("\ntokens of each answer that follow the file: {followed:?}\n");
            text += &format!(
                "answers that do so for {:.0}% of their tokens: {} of {}\n",
                100.0 * repeat::REPEATS,
                self.repeating_rounds * streams,
                followed.len() + dropped
            );
            text += &table_of(&self.repeating);
        }
        text
    }
}

fn table_of(rows: &[Row]) -> String {
    let headings = HEADINGS.map(str::to_owned).to_vec();
    let rows: Vec<Vec<String>> = std::iter::once(headings).chain(rows.iter().map(Row::cells)).collect();
    table::render(&rows)
}
