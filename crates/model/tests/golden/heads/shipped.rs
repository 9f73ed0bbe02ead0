//! The heads in `models/` beside the built-in model: `tests/golden/heads/shipped.py`. They have
//! four-bit matrices, a draft vocabulary of 16-bit offsets, and output rows that are the model's.

use std::{fs, path::PathBuf};

use folio_device::{Backend, Batch, KvFormat, cuda::CudaConfig, reference::Reference};
use folio_formats::{Gguf, WeightSource};
use folio_model::heads::{Eagle, EagleLayout, Feature, Medusa};
use folio_model::{Decoder, DecoderLimits};
use serde::Deserialize;

use super::{batch, cpu, cuda, cuda_in_f32, distance};
use crate::file;

#[derive(Deserialize)]
struct Golden {
    /// The model sees all but the last token, as in all these tests.
    tokens: Vec<u32>,
    rows: Vec<usize>,
    /// Logits of each head, row by row.
    medusa: Vec<Vec<Row>>,
    eagle: Expected,
}

#[derive(Deserialize)]
struct Expected {
    rows: Vec<Row>,
    /// Logits behind the last token and behind each draft but the last; the drafts are their best
    /// tokens.
    chain: Vec<Row>,
    drafts: Vec<u32>,
}

/// Some columns of a row of logits, the overall best first.
#[derive(Deserialize)]
struct Row {
    columns: Vec<usize>,
    values: Vec<f64>,
}

impl Row {
    fn check(&self, what: &str, found: &[f32], tolerance: f64) {
        let found: Vec<f32> = self.columns.iter().map(|&column| found[column]).collect();
        let distance = distance(&found, &self.values);
        assert!(distance < tolerance, "{what}: off by {distance:.1e}");
    }
}

fn read() -> Golden {
    let path = file::tree().join("tests/golden/heads/shipped.json");
    let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn shipped(name: &str) -> PathBuf {
    file::tree().join("models").join(name)
}

fn heads(kind: &str) -> Gguf {
    Gguf::open(&shipped(&format!("folio-rust-42m.{kind}.gguf"))).expect("a file of heads")
}

fn decoder<B: Backend>(backend: B, kv_format: KvFormat) -> Decoder<B> {
    let model = folio_model::open(&shipped("folio-rust-42m.gguf")).expect("a model");
    let (rows, table_entries, blocks) = (64, 64, vec![7]);
    let limits = DecoderLimits { rows, spans: 4, outputs: 4, table_entries, blocks, kv_format };
    Decoder::load(backend, &model, limits, &mut |_| ()).expect("a decoder")
}

/// The prompt as one step, with these rows as outputs.
fn prompt(tokens: &[u32], outputs: &[usize]) -> Batch {
    Batch { outputs: outputs.iter().map(|&row| row as u32).collect(), ..batch(tokens, 0, &[]) }
}

/// Both kinds in one decoder, unlike in a server; `tolerance` is a share of the largest logit.
fn agrees<B: Backend>(backend: B, kv_format: KvFormat, tolerance: f64) {
    let golden = read();
    let (seen, next) = (&golden.tokens[..golden.tokens.len() - 1], &golden.tokens[1..]);
    let mut decoder = decoder(backend, kv_format);
    let mut medusa = Medusa::load(&mut decoder, &heads("medusa"), 4).expect("Medusa heads");
    let mut eagle = Eagle::load(&mut decoder, &heads("eagle")).expect("an EAGLE head");
    assert_eq!((eagle.layout(), eagle.vocab_size()), (EagleLayout::Three, 4_096));
    assert_eq!(medusa.num_heads(), golden.medusa.len());
    decoder.forward(&prompt(seen, &golden.rows)).expect("a step");

    let mut logits = Vec::new();
    medusa.start(&mut decoder, &[0, 1, 2]).expect("a start");
    medusa.logits(&mut decoder, golden.medusa.len(), &mut logits).expect("logits");
    let width = decoder.spec().vocab_size;
    assert_eq!(logits.len(), golden.medusa.len() * golden.rows.len() * width);
    for (number, (found, expected)) in logits.chunks_exact(width).zip(golden.medusa.iter().flatten()).enumerate() {
        expected.check(&format!("Medusa, logits {number}"), found, tolerance);
    }

    let features: Vec<_> = (0..seen.len() as u32).map(Feature::Decoder).collect();
    eagle.forward(&mut decoder, &prompt(next, &golden.rows), &features).expect("a step of the head");
    eagle.logits(&mut decoder, &mut logits);
    for (found, (row, expected)) in
        logits.chunks_exact(eagle.vocab_size()).zip(golden.rows.iter().zip(&golden.eagle.rows))
    {
        expected.check(&format!("EAGLE, row {row}"), found, tolerance);
    }
    logits.drain(..(golden.rows.len() - 1) * eagle.vocab_size());
    let mut after = seen.len() as u32 - 1;
    for (depth, (expected, &draft)) in golden.eagle.chain.iter().zip(&golden.eagle.drafts).enumerate() {
        expected.check(&format!("EAGLE, draft {depth}"), &logits, tolerance);
        let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).expect("a column");
        let lead = (expected.values[0] - expected.values[1]) / expected.values[0];
        assert!(eagle.token(best) == draft || lead < 2.0 * tolerance, "draft {depth}: {}", eagle.token(best));
        let step = batch(&[draft], seen.len() + depth, &[]);
        eagle.forward(&mut decoder, &step, &[Feature::After(after)]).expect("a draft");
        eagle.logits(&mut decoder, &mut logits);
        after = 0;
    }
}

#[test]
fn reference_agrees() {
    agrees(Reference::new(), KvFormat::F32, 1e-4);
}

/// Matrices of four and five bits are multiplied with activations of eight bits there.
#[test]
fn cpu_agrees() {
    agrees(cpu(), KvFormat::F32, 0.02);
}

/// The heads on a GPU, with bf16 matrices and activations.
#[test]
fn cuda_agrees() {
    if let Some(_turn) = cuda::turn() {
        agrees(cuda_in_f32(), KvFormat::F32, 1e-3);
        agrees(cuda::open(&CudaConfig::default()), KvFormat::BF16, 0.05);
    }
}

#[test]
fn a_head_for_another_model_is_refused() {
    let model = folio_model::open(&shipped("folio-rust-7m.gguf")).expect("a model");
    let limits =
        DecoderLimits { rows: 16, spans: 4, outputs: 4, table_entries: 4, blocks: vec![1], kv_format: KvFormat::F32 };
    let mut decoder = Decoder::load(cpu(), &model, limits, &mut |_| ()).expect("a decoder");
    let error = Medusa::load(&mut decoder, &heads("medusa"), 4).err().expect("a refusal").to_string();
    assert!(error.contains("medusa_head.0.0.linear.weight") && error.contains("[512, 512]"), "{error}");
    let error = Eagle::load(&mut decoder, &heads("eagle")).err().expect("a refusal").to_string();
    assert!(error.contains("an EAGLE-3 head") && heads("eagle").tensor("d2t").is_some(), "{error}");
}
