//! Measurements, stored between runs so that a comparison may be made in several runs, and shown as
//! tables.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use folio_measure::stats::median;
use serde_json::{Value, json};

use super::model::{self, Model};
use super::plot;
use super::question::{Engine, Question};
use super::scale;
use crate::process;

/// The text between these marks in docs/benchmarks.md is generated here.
const BEGIN: &str = "<!-- cargo xtask peers --write: begin -->\n";
const END: &str = "<!-- end -->";
/// With fewer pairs the 95% interval is as wide as all of them.
const LEAST_PAIRS: usize = 6;

/// One question about one model in one format. `rounds` holds an object of every engine's figures
/// for each round, and under `of_read` the shares of the read bandwidth that Folio's decode
/// reached, a list for each case; `bounds` has the machine's limits for each case, `about` the
/// place and time.
#[derive(Clone, Debug, PartialEq)]
pub struct Record(Value);

impl Record {
    pub fn new(question: Question, model: &str, format: &str) -> Self {
        Self(json!({"question": question.name(), "model": model, "format": format, "rounds": []}))
    }

    pub fn put(&mut self, round: usize, engine: Engine, figures: &[f64]) {
        self.round(round)[engine.name()] = json!(figures);
    }

    /// For each case a share for every round of Folio's process.
    pub fn put_of_read(&mut self, round: usize, shares: &[Vec<f64>]) {
        if shares.iter().any(|shares| !shares.is_empty()) {
            self.round(round)["of_read"] = json!(shares);
        }
    }

    fn round(&mut self, round: usize) -> &mut Value {
        let rounds = self.0["rounds"].as_array_mut().expect("made as a list");
        rounds.resize(rounds.len().max(round + 1), json!({}));
        &mut rounds[round]
    }

    pub fn described(&self, about: &str, rate: Option<f64>, bounds: &[(f64, &str)], parameters: f64) -> Self {
        let mut described = self.clone();
        let (about, rate, bounds, parameters) = (json!(about), json!(rate), json!(bounds), json!(parameters));
        for (key, value) in [("about", about), ("rate", rate), ("bounds", bounds), ("parameters", parameters)] {
            described.0[key] = value;
        }
        described
    }

    pub fn is_of(&self, question: Question) -> bool {
        self.0["question"] == question.name()
    }

    pub fn model(&self) -> &str {
        self.text("model")
    }

    pub fn format(&self) -> &str {
        self.text("format")
    }

    /// Parameters that a token is multiplied with.
    pub fn parameters(&self) -> Option<f64> {
        self.0["parameters"].as_f64()
    }

    /// The most that the machine allows, and the limiting resource.
    pub fn bound(&self, case: usize) -> Option<(f64, &str)> {
        let bound = &self.0["bounds"][case];
        Some((bound[0].as_f64().filter(|most| *most > 0.0)?, bound[1].as_str()?))
    }

    fn text(&self, key: &str) -> &str {
        self.0[key].as_str().unwrap_or_default()
    }

    /// `1b q8_0`
    pub fn label(&self) -> String {
        format!("{} {}", self.model(), self.format())
    }

    /// The best of all rounds.
    pub fn best(&self, engine: Engine, question: Question, case: usize) -> Option<f64> {
        let rounds = self.0["rounds"].as_array()?.iter();
        rounds.filter_map(|round| round[engine.name()][case].as_f64()).reduce(better(question, case))
    }

    /// `91% of read (89 to 93)`: the median of all processes' rounds and its 95% interval; none if
    /// the reads beside them are unknown.
    fn of_read(&self, case: usize) -> Option<String> {
        let rounds = self.0["rounds"].as_array()?.iter();
        let shares = rounds.filter_map(|round| round["of_read"][case].as_array()).flatten();
        let shares: Vec<f64> = shares.filter_map(|share| Some(100.0 * share.as_f64()?)).collect();
        let share = median(&shares);
        match shares.len() {
            0 => None,
            LEAST_PAIRS.. => Some(format!("{:.0}% of read ({:.0} to {:.0})", share.middle, share.low, share.high)),
            _ => Some(format!("{:.0}% of read", share.middle)),
        }
    }

    /// `50.4 / 27.5 / - (1.83x), 83% of read`: the factor by which Folio is better than the best of
    /// the others (below 1 it is worse), and its share of the machine's limit.
    fn cell(&self, question: Question, case: usize) -> String {
        let best = Engine::ALL.map(|engine| self.best(engine, question, case));
        let mut text = best.map(|figure| figure.map_or("-".into(), short)).join(" / ");
        let Some(own) = best[0] else { return text };
        if let Some(other) = best[1..].iter().flatten().copied().reduce(better(question, case)) {
            let ratio = if question.is_rate(case) { own / other } else { other / own };
            text += &format!(" (**{ratio:.2}x**)");
        }
        if let Some((most, of)) = self.bound(case) {
            let paired = if of == "read" { self.of_read(case) } else { None };
            text += ", ";
            text += &paired.unwrap_or_else(|| format!("{:.0}% of {of}", 100.0 * own / most));
        }
        text
    }
}

fn better(question: Question, case: usize) -> fn(f64, f64) -> f64 {
    if question.is_rate(case) { f64::max } else { f64::min }
}

/// About three digits.
fn short(figure: f64) -> String {
    let decimals = if figure >= 100.0 { 0 } else { 1 + usize::from(figure < 10.0) };
    format!("{figure:.decimals$}")
}

pub struct Records {
    path: PathBuf,
    all: Vec<Record>,
}

impl Records {
    pub fn open(path: PathBuf) -> Result<Self> {
        let text = if path.exists() { std::fs::read_to_string(&path)? } else { "[]".into() };
        let all: Vec<Value> = serde_json::from_str(&text).with_context(|| path.display().to_string())?;
        Ok(Self { path, all: all.into_iter().map(Record).collect() })
    }

    /// Stores these records in place of earlier ones to the same questions.
    pub fn keep(&mut self, new: &[Record]) -> Result<()> {
        let key = |record: &Record| [record.text("question").to_owned(), record.label()];
        self.all.retain(|old| new.iter().all(|new| key(new) != key(old)));
        self.all.extend_from_slice(new);
        self.all.sort_by_key(|record| model::NAMES.iter().position(|name| *name == record.model()));
        let all: Vec<&Value> = self.all.iter().map(|record| &record.0).collect();
        Ok(std::fs::write(&self.path, serde_json::to_string_pretty(&all)?)?)
    }

    pub fn find(&self, question: Question, model: &Model) -> Option<&Record> {
        let label = Record::new(question, &model.name, &model.format).label();
        self.all.iter().find(|record| record.is_of(question) && record.label() == label)
    }

    /// Writes the tables into the folder's benchmarks.md, and the plots beside it.
    pub fn write(&self, folder: &Path) -> Result<()> {
        let plots = folder.join("benchmarks");
        std::fs::create_dir_all(&plots)?;
        let plot = |name: &str, title: &str, svg: Option<String>| -> Result<String> {
            let Some(svg) = svg else { return Ok(String::new()) };
            std::fs::write(plots.join(format!("{name}.svg")), svg)?;
            Ok(format!("![{title}](benchmarks/{name}.svg)\n\n"))
        };
        let mut text = String::new();
        for question in Question::ALL {
            let records: Vec<&Record> = self.all.iter().filter(|record| record.is_of(question)).collect();
            text += &table(question, &records);
            text += &plot(question.name(), question.title(), plot::of(question, &records))?;
        }
        for growth in scale::all(&self.all) {
            text += &plot(growth.name, growth.title, growth.svg())?;
            text += &growth.caption();
        }
        let page = folder.join("benchmarks.md");
        let new = replaced(&std::fs::read_to_string(&page)?, &text)?;
        Ok(std::fs::write(page, new)?)
    }
}

fn replaced(page: &str, text: &str) -> Result<String> {
    let parts = page.split_once(BEGIN).and_then(|(head, rest)| Some((head, rest.split_once(END)?.1)));
    let (head, tail) = parts.with_context(|| format!("benchmarks.md holds no {BEGIN}...{END}"))?;
    Ok(format!("{head}{BEGIN}\n{text}{END}{tail}"))
}

/// A row for each model and format, a column for each case, and the place of measurement; empty
/// without records.
pub fn table(question: Question, records: &[&Record]) -> String {
    let cases = question.cases();
    let mut text = format!("### {}\n\n| model | weights | {} |\n", question.title(), cases.join(" | "));
    text += &format!("|{}\n", "---|".repeat(cases.len() + 2));
    for record in records {
        let cells: Vec<String> = (0..cases.len()).map(|case| record.cell(question, case)).collect();
        let rate = record.0["rate"].as_f64().map_or(String::new(), |rate| format!(", {} requests/s", short(rate)));
        let (model, format) = (record.model(), record.format());
        text += &format!("| {model} | {format}{rate} | {} |\n", cells.join(" | "));
    }
    let mut about: Vec<&str> = records.iter().map(|record| record.text("about")).collect();
    about.dedup();
    if records.is_empty() { String::new() } else { text + "\n" + &about.join("\n") + "\n\n" }
}

/// The commit, the day and the processor.
pub fn place_and_time() -> Result<String> {
    let commit = process::output(&mut process::command("git", &["rev-parse", "--short", "HEAD"]))?;
    let day = process::output(&mut process::command("date", &["-u", "+%F"]))?;
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let model = model.map_or("processor unknown", |(_, name)| name);
    Ok(format!("Commit {}, {}, {model}", commit.trim(), day.trim()))
}

#[cfg(test)]
pub mod tests {
    use folio_testing::Folder;

    use super::*;

    pub fn record(question: Question, model: &str, rounds: &[(Engine, &[f64])]) -> Record {
        let mut record = Record::new(question, model, "q8_0");
        for (round, (engine, figures)) in rounds.iter().enumerate() {
            record.put(round, *engine, figures);
        }
        record
    }

    #[test]
    fn cells_hold_the_best_of_all_rounds_and_the_ratio_to_the_best_peer() {
        let rounds: [(Engine, &[f64]); 4] = [
            (Engine::Folio, &[50.4, 8.0]),
            (Engine::LlamaCpp, &[27.5, 4.0]),
            (Engine::OpenVino, &[25.2, 16.0]),
            (Engine::Folio, &[49.0, 9.0]),
        ];
        let decode =
            record(Question::Decode, "1b", &rounds).described("here", None, &[(60.0, "read"), (0.0, "read")], 1e9);
        assert_eq!(decode.cell(Question::Decode, 0), "50.4 / 27.5 / 25.2 (**1.83x**), 84% of read");
        assert_eq!(decode.cell(Question::Decode, 1), "9.00 / 4.00 / 16.0 (**0.56x**)");
        // Less is better, and one has no answer.
        let start = record(Question::Start, "1b", &[(Engine::Folio, &[4.0]), (Engine::LlamaCpp, &[200.0])]);
        assert_eq!(start.cell(Question::Start, 0), "4.00 / 200 / - (**50.00x**)");
        assert!(table(Question::Decode, &[&decode, &decode]).ends_with("|\n\nhere\n\n"));
    }

    #[test]
    fn shares_of_reads_are_medians_of_all_pairs() {
        let rounds: [(Engine, &[f64]); 2] = [(Engine::Folio, &[50.0, 40.0]), (Engine::Folio, &[51.0, 41.0])];
        let bounded = |of: &str| record(Question::Decode, "1b", &rounds).described("", None, &[(102.0, of); 2], 1e9);
        let mut decode = bounded("read");
        decode.put_of_read(0, &[]);
        assert_eq!(decode, bounded("read"));
        decode.put_of_read(0, &[vec![0.90, 0.93, 0.89], vec![0.8]]);
        decode.put_of_read(1, &[vec![0.91, 0.91, 0.95], vec![0.7]]);
        assert_eq!(decode.cell(Question::Decode, 0), "51.0 / - / -, 91% of read (89 to 95)");
        // Too few for an interval.
        assert_eq!(decode.cell(Question::Decode, 1), "41.0 / - / -, 75% of read");
        // Measured before there were pairs, or with another limit.
        assert_eq!(bounded("read").cell(Question::Decode, 0), "51.0 / - / -, 50% of read");
        let mut decode = bounded("int8 peak");
        decode.put_of_read(0, &[vec![0.9]]);
        assert_eq!(decode.cell(Question::Decode, 0), "51.0 / - / -, 50% of int8 peak");
    }

    #[test]
    fn what_is_measured_again_replaces_what_was_known() {
        let folder = Folder::new("peers");
        let path = folder.join("records.json");
        let one = |rate: f64| record(Question::Http, "1b", &[(Engine::Folio, &[rate])]);
        let mut records = Records::open(path.clone()).unwrap();
        records.keep(&[one(1.0), record(Question::Http, "moe", &[])]).unwrap();
        records.keep(&[one(2.0)]).unwrap();
        assert_eq!(Records::open(path).unwrap().all, [record(Question::Http, "moe", &[]), one(2.0)]);
        let page = replaced(&format!("a\n{BEGIN}old{END}\nb\n"), "new\n").unwrap();
        assert_eq!(page, format!("a\n{BEGIN}\nnew\n{END}\nb\n"));
    }
}
