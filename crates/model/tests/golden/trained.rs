//! The trained models against transformers in bf16: perplexity on a text from this project.

use std::path::PathBuf;

use folio_device::cpu::{Cpu, CpuConfig};
use serde::Deserialize;

use crate::{file, run};

#[derive(Deserialize)]
struct Eval {
    window: usize,
    tokens_scored: usize,
    models: std::collections::BTreeMap<String, Expected>,
    ids: Vec<u32>,
}

#[derive(Deserialize)]
struct Expected {
    nats_per_token: f64,
}

/// Rows per step: enough to be fast, few enough that logits of all of them stay small.
const CHUNK: usize = 512;

#[test]
fn perplexity_agrees_with_transformers() {
    let models = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/models");
    let eval: Eval = file::unpack(&file::folder().join("../eval.json.lzma"));
    for (name, expected) in &eval.models {
        let folder = models.join(name);
        if !folder.join("config.json").is_file() {
            folio_testing::skip!(Shared, "models/{name} is not there");
            continue;
        }
        let found = nats_per_token(&folder, &eval);
        let off = (found - expected.nats_per_token).exp() - 1.0;
        println!(
            "{name}: {found:.6} nats per token, transformers {:.6}: perplexity {:+.4}%",
            expected.nats_per_token,
            100.0 * off
        );
        assert!(off.abs() <= 1e-3, "{name}: perplexity differs by {:.3}%", 100.0 * off);
    }
}

fn nats_per_token(folder: &std::path::Path, eval: &Eval) -> f64 {
    let model = folio_model::open(folder).unwrap_or_else(|e| panic!("{e}"));
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(2));
    let (mut total, mut scored) = (0.0, 0);
    for window in eval.ids.chunks(eval.window) {
        let backend = Cpu::new(CpuConfig { threads, isa: None }).expect("a cpu");
        let mut sequence = run::Sequence::new(backend, &model, window.len(), CHUNK).expect("a decoder");
        for (start, tokens) in (0..).step_by(CHUNK).zip(window.chunks(CHUNK)) {
            for (row, logits) in sequence.feed(tokens).expect("a step").iter().enumerate() {
                let Some(next) = window.get(start + row + 1) else { continue };
                total += run::log_sum_exp(logits) - f64::from(logits[*next as usize]);
                scored += 1;
            }
        }
    }
    assert_eq!(scored, eval.tokens_scored);
    total / scored as f64
}
