//! The rows of a matrix as people, pages and programs read them.

use serde_json::{Value, json};

use super::measure::Comparison;
use crate::table;

/// One form of a model and what came of it, or why nothing did.
#[derive(Clone, Debug)]
pub struct Row {
    pub format: String,
    /// How the codes were chosen; none where there is no choice.
    pub method: Option<String>,
    pub outcome: Result<Figures, String>,
}

#[derive(Clone, Copy, Debug)]
pub struct Figures {
    pub size: Size,
    pub compared: Comparison,
}

#[derive(Clone, Copy, Debug)]
pub enum Size {
    Weights {
        bits_per_weight: f64,
        disk_bytes: u64,
        memory_bytes: u64,
        /// To quantize.
        seconds: Option<f64>,
    },
    Kv {
        /// Keys and values of one token in all layers.
        token_bytes: u64,
    },
}

/// All rows of one model.
#[derive(Clone, Debug)]
pub struct Matrix {
    pub model: String,
    pub text: String,
    pub tokens: usize,
    pub window: usize,
    pub weights: Vec<Row>,
    pub kv: Vec<Row>,
}

const SHARED_HEADER: [&str; 5] = ["perplexity", "change", "KL mean", "KL p99", "same token"];
const WEIGHTS_HEADER: [&str; 5] = ["weights", "method", "bits", "on disk", "in memory"];
const KV_HEADER: [&str; 2] = ["keys and values", "a token"];
/// Stands where there is nothing to say.
const NOTHING: &str = "-";

impl Matrix {
    /// For a terminal.
    pub fn text(&self) -> String {
        let mut out = format!("{}, {} tokens of {}\n", self.model, self.tokens, self.text);
        for cells in self.tables() {
            out.push_str(&format!("\n{}", table::render(&cells)));
        }
        for note in self.failures() {
            out.push_str(&format!("\nfailed: {note}"));
        }
        out
    }

    /// For a page.
    pub fn markdown(&self) -> String {
        let mut out = String::new();
        for cells in self.tables() {
            for (number, row) in cells.iter().enumerate() {
                out.push_str(&format!("| {} |\n", row.join(" | ")));
                if number == 0 {
                    out.push_str(&format!("|---|{}\n", "--:|".repeat(row.len() - 1)));
                }
            }
            out.push('\n');
        }
        for note in self.failures() {
            out.push_str(&format!("- failed: {note}\n"));
        }
        out
    }

    /// For a program.
    pub fn json(&self) -> Value {
        let rows = |rows: &[Row]| rows.iter().map(row_json).collect::<Vec<_>>();
        json!({
            "model": self.model, "text": self.text, "tokens": self.tokens, "window": self.window,
            "weights": rows(&self.weights), "kv": rows(&self.kv),
        })
    }

    fn tables(&self) -> impl Iterator<Item = Vec<Vec<String>>> {
        let weights = (&self.weights, [&WEIGHTS_HEADER[..], &SHARED_HEADER, &["seconds"]].concat());
        let kv = (&self.kv, [&KV_HEADER[..], &SHARED_HEADER].concat());
        [weights, kv].into_iter().filter(|(rows, _)| !rows.is_empty()).map(|(rows, header)| {
            let width = header.len();
            let header = header.into_iter().map(str::to_owned).collect();
            [header].into_iter().chain(rows.iter().map(|row| cells(row, width))).collect()
        })
    }

    fn failures(&self) -> impl Iterator<Item = String> {
        let rows = self.weights.iter().chain(&self.kv);
        rows.filter_map(|row| {
            let why = row.outcome.as_ref().err()?;
            // One line, whatever the error says.
            let why = why.split_whitespace().collect::<Vec<_>>().join(" ");
            Some(format!("{} {}: {why}", row.format, row.method.as_deref().unwrap_or("")).replace(" :", ":"))
        })
    }
}

fn cells(row: &Row, width: usize) -> Vec<String> {
    let Ok(Figures { size, compared }) = &row.outcome else {
        let mut cells = vec![row.format.clone(), row.method.clone().unwrap_or_else(|| NOTHING.into()), "failed".into()];
        cells.resize(width, NOTHING.into());
        return cells;
    };
    let mut cells = vec![row.format.clone()];
    let mut last = None;
    match size {
        Size::Weights { bits_per_weight, disk_bytes, memory_bytes, seconds } => {
            cells.push(row.method.clone().unwrap_or_else(|| NOTHING.into()));
            cells.push(format!("{bits_per_weight:.2}"));
            cells.extend([disk_bytes, memory_bytes].map(|&bytes| table::bytes(bytes)));
            last = Some(seconds.map_or(NOTHING.into(), |seconds| format!("{seconds:.1}")));
        }
        Size::Kv { token_bytes } => cells.push(format!("{token_bytes} B")),
    }
    cells.extend([
        format!("{:.4}", compared.model.perplexity()),
        format!("{:+.2}%", 100.0 * compared.perplexity_change()),
        nats(compared.divergence_mean),
        nats(compared.divergence_p99),
        format!("{:.2}%", 100.0 * compared.agreement),
    ]);
    cells.extend(last);
    cells
}

/// Three digits that matter, without an exponent as long as that reads well.
fn nats(value: f64) -> String {
    match value {
        0.0 => "0".into(),
        1e-3.. => {
            let digits = (2.0 - value.log10().floor()).clamp(0.0, 5.0) as usize;
            format!("{value:.digits$}")
        }
        _ => format!("{value:.1e}"),
    }
}

fn row_json(row: &Row) -> Value {
    let mut value = json!({"format": row.format, "method": row.method});
    let more = match &row.outcome {
        Err(why) => json!({"error": why}),
        Ok(Figures { size, compared }) => {
            let mut figures = json!({
                "tokens_scored": compared.model.scored, "perplexity": compared.model.perplexity(), "perplexity_change": compared.perplexity_change(),
                "nats_change_error": compared.nats_error, "kl_mean": compared.divergence_mean,
                "kl_p99": compared.divergence_p99, "greedy_agreement": compared.agreement,
            });
            extend(
                &mut figures,
                match size {
                    Size::Weights { bits_per_weight, disk_bytes, memory_bytes, seconds } => json!({
                        "bits_per_weight": bits_per_weight, "weight_bytes_on_disk": disk_bytes,
                        "weight_bytes_in_memory": memory_bytes, "seconds": seconds,
                    }),
                    Size::Kv { token_bytes } => json!({"bytes_per_token": token_bytes}),
                },
            );
            figures
        }
    };
    extend(&mut value, more);
    value
}

fn extend(value: &mut Value, more: Value) {
    if let (Value::Object(value), Value::Object(more)) = (value, more) {
        value.extend(more);
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::eval::measure::{Score, Ties};

    pub fn figures(bits: f64, divergence: f64) -> Figures {
        let score = |nats| Score { scored: 100, nats };
        let compared = Comparison {
            base: score(1.5),
            model: score(1.5 + divergence),
            divergence_mean: divergence,
            divergence_p99: 8.0 * divergence,
            agreement: 0.975,
            ties: Ties::default(),
            nats_error: 0.001,
        };
        let bytes = (bits * 5e6) as u64;
        let seconds = (bits < 16.0).then_some(12.34);
        let size = Size::Weights { bits_per_weight: bits, disk_bytes: bytes, memory_bytes: bytes, seconds };
        Figures { size, compared }
    }

    pub fn matrix() -> Matrix {
        let row = |format: &str, method: Option<&str>, outcome| Row {
            format: format.into(),
            method: method.map(Into::into),
            outcome,
        };
        let kv = Figures { size: Size::Kv { token_bytes: 3168 }, ..figures(16.0, 2e-4) };
        Matrix {
            model: "a-model".into(),
            text: "unseen.jsonl".into(),
            tokens: 4096,
            window: 512,
            weights: vec![
                row("bf16", None, Ok(figures(16.0, 0.0))),
                row("int8", Some("rtn"), Ok(figures(8.13, 1.3e-4))),
                row("int4-g128", Some("gptq"), Ok(figures(4.13, 0.0213))),
                row("nf4", Some("awq"), Err("no\n room <here> & now".into())),
            ],
            kv: vec![row("int8", None, Ok(kv))],
        }
    }

    #[test]
    fn every_row_is_as_wide_as_its_header() {
        let tables: Vec<_> = matrix().tables().collect();
        assert_eq!(tables.iter().map(Vec::len).collect::<Vec<_>>(), [5, 2]);
        for table in &tables {
            assert!(table.iter().all(|row| row.len() == table[0].len()), "{table:?}");
        }
    }

    #[test]
    fn markdown_is_a_table() {
        let text = matrix().markdown();
        let bars = |line: &str| line.matches('|').count();
        let lines: Vec<&str> = text.lines().take(6).collect();
        assert!(lines.iter().all(|line| bars(line) == 12 && line.starts_with('|') && line.ends_with('|')), "{text}");
        assert!(lines[1].chars().all(|c| "|-:".contains(c)), "{text}");
        assert!(
            lines[4].contains("| 4.13 | 19.7 MiB | 19.7 MiB | 4.5782 | +2.15% | 0.0213 | 0.170 | 97.50% | 12.3 |"),
            "{text}"
        );
        assert!(text.contains("- failed: nf4 awq: no room <here> & now\n"), "{text}");
        assert!(text.contains("| int8 | 3168 B | "), "{text}");
    }

    #[test]
    fn a_terminal_reads_the_same() {
        let text = matrix().text();
        assert!(text.starts_with("a-model, 4096 tokens of unseen.jsonl\n\nweights"), "{text}");
        for part in ["1.3e-4", "keys and values", "failed: nf4 awq: no room"] {
            assert!(text.contains(part), "{part} is missing:\n{text}");
        }
    }

    #[test]
    fn programs_get_numbers_or_reasons() {
        let value = matrix().json();
        assert_eq!(value["weights"][1]["kl_mean"], 1.3e-4);
        assert_eq!(value["weights"][3]["error"], "no\n room <here> & now");
        assert_eq!(value["kv"][0]["bytes_per_token"], 3168);
        assert!(value["weights"][0]["seconds"].is_null());
    }

    #[test]
    fn nats_keep_three_digits() {
        let shown = [0.0, 4.6e-7, 9.99e-4, 0.00123, 0.0213, 0.17, 1.234, 56.78, 1234.5].map(nats);
        assert_eq!(shown, ["0", "4.6e-7", "1.0e-3", "0.00123", "0.0213", "0.170", "1.23", "56.8", "1234"]);
    }
}
