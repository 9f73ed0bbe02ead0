//! Rows of a matrix kept in a file, so that a long run can be made in pieces: the JSON that
//! `--json` prints.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::measure::{Comparison, Score, Ties};
use super::report::{Figures, Matrix, Row, Size};

/// Adds the rows in the file to `matrix`, which must be of the same model and text. A row that
/// failed is tried again.
pub fn load(path: &Path, matrix: &mut Matrix) -> Result<()> {
    let text = match std::fs::read_to_string(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        text => text.with_context(|| path.display().to_string())?,
    };
    add(&text, matrix).with_context(|| format!("--resume {}", path.display()))
}

pub fn store(path: &Path, matrix: &Matrix) -> Result<()> {
    std::fs::write(path, format!("{:#}\n", matrix.json())).with_context(|| path.display().to_string())
}

fn add(text: &str, matrix: &mut Matrix) -> Result<()> {
    let saved: Value = serde_json::from_str(text)?;
    let now = matrix.json();
    for field in ["model", "text", "tokens", "window"] {
        ensure!(saved[field] == now[field], "its {field} is {}, and now it is {}", saved[field], now[field]);
    }
    let rows = |list: &str| -> Result<Vec<Row>> {
        let rows = saved[list].as_array().with_context(|| format!("expected a list named {list}"))?;
        rows.iter().filter_map(|value| row(value).with_context(|| format!("{list}: {value}")).transpose()).collect()
    };
    matrix.weights.extend(rows("weights")?);
    matrix.kv.extend(rows("kv")?);
    Ok(())
}

fn row(value: &Value) -> Result<Option<Row>> {
    if value.get("error").is_some() {
        return Ok(None);
    }
    let number = |field: &str| value[field].as_f64().with_context(|| format!("expected a number named {field}"));
    let count = |field: &str| value[field].as_u64().with_context(|| format!("expected a count named {field}"));
    let nats = number("perplexity")?.ln();
    let scored = count("tokens_scored")? as usize;
    let compared = Comparison {
        base: Score { scored, nats: nats - number("perplexity_change")?.ln_1p() },
        model: Score { scored, nats },
        divergence_mean: number("kl_mean")?,
        divergence_p99: number("kl_p99")?,
        agreement: number("greedy_agreement")?,
        ties: Ties::default(),
        nats_error: number("nats_change_error")?,
    };
    let size = match value.get("bytes_per_token") {
        Some(_) => Size::Kv { token_bytes: count("bytes_per_token")? },
        None => Size::Weights {
            bits_per_weight: number("bits_per_weight")?,
            disk_bytes: count("weight_bytes_on_disk")?,
            memory_bytes: count("weight_bytes_in_memory")?,
            seconds: value["seconds"].as_f64(),
        },
    };
    let format = value["format"].as_str().context("expected a format")?.to_owned();
    let method = value["method"].as_str().map(str::to_owned);
    Ok(Some(Row { format, method, outcome: Ok(Figures { size, compared }) }))
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::matrix;
    use super::*;

    fn empty() -> Matrix {
        Matrix { weights: Vec::new(), kv: Vec::new(), ..matrix() }
    }

    #[test]
    fn rows_come_back_but_for_those_that_failed() {
        let mut read = empty();
        add(&matrix().json().to_string(), &mut read).expect("what was written");
        let mut whole = matrix();
        whole.weights.retain(|row| row.outcome.is_ok());
        assert_eq!(read.markdown(), whole.markdown());
    }

    #[test]
    fn rows_of_something_else_are_refused() {
        let saved = matrix().json().to_string();
        let mut other = Matrix { tokens: 17, ..empty() };
        let error = add(&saved, &mut other).expect_err("another number of tokens").to_string();
        assert!(error.contains("tokens is 4096, and now it is 17"), "{error}");
        let error = add(&saved.replace("kl_mean", "mean"), &mut empty()).expect_err("a field is missing");
        assert!(format!("{error:#}").contains("a number named kl_mean"), "{error:#}");
    }
}
