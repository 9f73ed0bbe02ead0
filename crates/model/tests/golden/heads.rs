//! Heads that draft tokens, against plain PyTorch over transformers' hidden states:
//! `tests/golden/heads/generate.py`.

mod eagle;
mod medusa;
mod shipped;

use folio_device::{
    BLOCK_TOKENS, Backend, Batch, GroupTables, KvFormat, Span,
    cpu::{Cpu, CpuConfig},
    cuda::Cuda,
    reference::Reference,
    tree,
};
use folio_model::{Decoder, DecoderLimits, OpenModel, Tap};
use serde::Deserialize;

use crate::{
    cuda,
    file::{self, TensorGroup, Weights},
    generator,
};

#[derive(Deserialize)]
struct Golden {
    seed: u64,
    head_seed: u64,
    config: serde_json::Value,
    tensors: Vec<TensorGroup>,
    /// The model sees all but the last token, which is the first that only a head gets.
    tokens: Vec<u32>,
    /// States of this row: the inputs of EAGLE-3's fusion, and the state behind the last norm.
    row: usize,
    fused: Vec<f64>,
    #[serde(rename = "final")]
    last: Vec<f64>,
    medusa: Vec<medusa::Expected>,
    eagle: Vec<eagle::Expected>,
}

fn read() -> Golden {
    file::unpack(&file::tree().join("tests/golden/heads/heads.json.lzma"))
}

impl Golden {
    fn prompt(&self) -> &[u32] {
        &self.tokens[..self.tokens.len() - 1]
    }

    fn decoder<B: Backend>(&self, backend: B) -> Decoder<B> {
        let weights = Weights::of(self.seed, &self.tensors);
        let model = OpenModel::from_config(&self.config.to_string(), Box::new(weights)).expect("a model");
        let (rows, table_entries, blocks) = (32, 64, vec![7]);
        let limits =
            DecoderLimits { rows, spans: rows, outputs: rows, table_entries, blocks, kv_format: KvFormat::F32 };
        Decoder::load(backend, &model, limits, &mut |_| ()).expect("a decoder")
    }
}

/// Tokens of one sequence from position `base` on, in blocks of random order; all rows are outputs.
fn batch(tokens: &[u32], base: usize, ancestors: &[u64]) -> Batch {
    let table = generator::shuffled(7, "blocks", 7);
    let context = base + tokens.len();
    let size = BLOCK_TOKENS as u32;
    let places = base as u32..context as u32;
    let positions = match ancestors {
        [] => places.clone().collect(),
        words => {
            let root = (base - tree::rows_before(words)) as u32;
            words.iter().map(|word| root + word.count_ones() - 1).collect()
        }
    };
    let group = GroupTables {
        slots: places.map(|place| table[(place / size) as usize] * size + place % size).collect(),
        blocks: table[..context.div_ceil(BLOCK_TOKENS)].to_vec(),
        first_block: vec![0],
    };
    Batch {
        tokens: tokens.to_vec(),
        positions,
        spans: vec![Span { first_row: 0, num_rows: tokens.len() as u32, context: context as u32 }],
        ancestors: ancestors.to_vec(),
        groups: vec![group],
        outputs: (0..tokens.len() as u32).collect(),
    }
}

/// The largest difference, as a share of the largest value.
fn distance(found: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().map(|value| value.abs()).fold(0.0, f64::max);
    // A NaN counts as infinitely far.
    let far = |(found, expected): (&f32, &f64)| Some((f64::from(*found) - expected).abs()).filter(|far| !far.is_nan());
    found.iter().zip(expected).map(|pair| far(pair).unwrap_or(f64::INFINITY)).fold(0.0, f64::max) / largest
}

const TOLERANCE: f64 = 1e-4;

fn check(what: &str, found: &[f32], expected: &[f64]) {
    check_within(TOLERANCE, what, found, expected);
}

fn check_within(tolerance: f64, what: &str, found: &[f32], expected: &[f64]) {
    let distance = distance(found, expected);
    assert!(distance < tolerance, "{what}: off by {distance:.1e}");
}

fn cpu() -> Cpu {
    Cpu::new(CpuConfig { threads: 2, isa: None }).expect("a CPU")
}

/// A device whose rows do not affect each other.
fn cuda_in_f32() -> Cuda {
    cuda::open(&cuda::f32())
}

fn check_taps<B: Backend>(backend: impl Fn() -> B) {
    let golden = read();
    let hidden = golden.last.len();
    for (tap, expected) in [(Tap::Before(vec![2, 4, 5]), &golden.fused), (Tap::Final, &golden.last)] {
        let mut decoder = golden.decoder(backend());
        let plain = decoder.memory().activations;
        decoder.tap(tap.clone()).expect("a tap");
        assert!(decoder.memory().activations > plain);
        // States of rows without requested logits are copied too.
        let step = Batch { outputs: vec![2], ..batch(golden.prompt(), 0, &[]) };
        decoder.forward(&step).expect("a step");
        let mut states = Vec::new();
        decoder.tapped(&mut states);
        let width = expected.len();
        assert!(width % hidden == 0 && states.len() == width * step.num_rows());
        check(&format!("{tap:?}"), &states[golden.row * width..][..width], expected);
        assert!(distance(&states[(golden.row - 1) * width..][..width], expected) > 0.05, "rows are alike");
    }
    let beyond = golden.decoder(backend()).tap(Tap::Before(vec![8])).expect_err("a layer that is not there");
    assert_eq!(beyond.to_string(), "a tapped layer is 8, but at most 7 fit");
}

#[test]
fn reference_taps_as_transformers_has_it() {
    check_taps(Reference::new);
}

#[test]
fn cpu_taps_as_transformers_has_it() {
    check_taps(cpu);
}

#[test]
fn cuda_taps_as_transformers_has_it() {
    if let Some(_turn) = cuda::turn() {
        check_taps(cuda_in_f32);
    }
}
