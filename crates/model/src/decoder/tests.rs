//! The decoder on small random models: replayable steps, refusals that name tensors, equivalent
//! layouts.

mod changed;
mod fingerprint;
mod fused;
mod packed;
mod routing;
mod stage;
mod trees;

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use folio_device::recording::Recording;
use folio_device::reference::Reference;
use folio_device::{BLOCK_TOKENS, Batch, GroupTables, KvFormat, Span};
use folio_formats::{Format, TensorView, WeightSource};

use super::*;
use crate::Error;

type Spoil = fn(&mut Batch);
type Stored = (Format, Vec<usize>, Vec<u8>);

/// Weights in memory.
#[derive(Clone, Default)]
struct Memory(BTreeMap<String, Stored>);

impl Memory {
    fn put(&mut self, name: &str, shape: &[usize], values: &[f32]) {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.0.insert(name.to_owned(), (Format::F32, shape.to_vec(), bytes));
    }

    fn values(&self, name: &str) -> Vec<f32> {
        self.tensor(name).unwrap().to_f32().unwrap()
    }
}

impl WeightSource for Memory {
    fn names(&self) -> Vec<&str> {
        self.0.keys().map(String::as_str).collect()
    }

    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let (name, (format, shape, bytes)) = self.0.get_key_value(name)?;
        Some(TensorView { name, format: *format, shape: shape.clone(), bytes })
    }

    fn release(&self, _: &str) {}
}

fn config(model_type: &str, extra: &str) -> String {
    format!(
        r#"{{"model_type": "{model_type}", "vocab_size": 50, "hidden_size": 64, "intermediate_size": 32,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 64, "sliding_window": 8 {extra}}}"#
    )
}

fn limits(groups: usize) -> DecoderLimits {
    DecoderLimits {
        rows: 32,
        spans: 4,
        outputs: 32,
        table_entries: 16,
        blocks: vec![6; groups],
        kv_format: KvFormat::F32,
    }
}

fn try_load<B: Backend>(backend: B, config: &str, weights: &Memory) -> Result<Decoder<B>> {
    load_model(backend, &OpenModel::from_config(config, Box::new(weights.clone()))?)
}

fn load_model<B: Backend>(backend: B, model: &OpenModel) -> Result<Decoder<B>> {
    let limits = limits(model.spec.kv_groups().len());
    Decoder::load(backend, model, limits, &mut |_| {})
}

/// Random weights for any configuration.
fn invent(config: &str) -> Memory {
    invent_for(|weights| OpenModel::from_config(config, Box::new(weights)).unwrap())
}

/// Random weights for any model: missing tensors are generated until none is missing.
fn invent_for(model: impl Fn(Memory) -> OpenModel) -> Memory {
    let mut weights = Memory::default();
    let mut state = 1u64;
    let mut random = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * 0.4
    };
    loop {
        match load_model(Reference::new(), &model(weights.clone())) {
            Ok(_) => return weights,
            Err(Error::MissingTensor { name, expected, .. }) => {
                let values: Vec<f32> = (0..expected.iter().product()).map(|_| random()).collect();
                weights.put(&name, &expected, &values);
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// One sequence from position `start`, block `i` of the cache holding its block `i`.
fn batch(tokens: &[u32], start: usize, groups: usize) -> Batch {
    let context = start + tokens.len();
    let positions: Vec<u32> = (start as u32..context as u32).collect();
    let blocks = (0..context.div_ceil(BLOCK_TOKENS) as u32).collect();
    let group = GroupTables { slots: positions.clone(), blocks, first_block: vec![0] };
    Batch {
        tokens: tokens.to_vec(),
        positions,
        spans: vec![Span { first_row: 0, num_rows: tokens.len() as u32, context: context as u32 }],
        ancestors: Vec::new(),
        groups: vec![group; groups],
        outputs: (0..tokens.len() as u32).collect(),
    }
}

fn logits<B: Backend>(decoder: &mut Decoder<B>, step: &Batch) -> Vec<f32> {
    decoder.forward(step).unwrap();
    let mut out = Vec::new();
    decoder.logits(&mut out);
    assert_eq!(out.len(), step.outputs.len() * decoder.spec().vocab_size);
    out
}

const TOKENS: [u32; 20] = [3, 14, 15, 9, 2, 6, 5, 35, 8, 9, 7, 9, 32, 3, 8, 46, 26, 43, 38, 32];

#[test]
fn chunked_equals_whole() {
    for (model_type, extra) in
        [("llama", ""), ("gemma2", ""), ("gpt_oss", r#", "num_local_experts": 3, "num_experts_per_tok": 2"#)]
    {
        let config = config(model_type, extra);
        let mut decoder = try_load(Reference::new(), &config, &invent(&config)).unwrap();
        let groups = decoder.spec().kv_groups().len();
        let whole = logits(&mut decoder, &batch(&TOKENS, 0, groups));
        let mut chunked = Vec::new();
        for (start, end) in [(0, 1), (1, 8), (8, 17), (17, 20)] {
            chunked.extend(logits(&mut decoder, &batch(&TOKENS[start..end], start, groups)));
        }
        assert!(whole == chunked, "{model_type}");
        assert!(whole.iter().all(|logit| logit.is_finite()), "{model_type}");
    }
}

/// A sequence is not affected if its first block goes to the host and into another block.
#[test]
fn a_block_that_was_saved_and_loaded_elsewhere_reads_the_same() {
    for model_type in ["llama", "gemma2"] {
        let config = config(model_type, "");
        let mut decoder = try_load(Reference::new(), &config, &invent(&config)).unwrap();
        let groups = decoder.spec().kv_groups().len();
        let whole = logits(&mut decoder, &batch(&TOKENS, 0, groups));
        logits(&mut decoder, &batch(&TOKENS[..17], 0, groups));
        for group in 0..groups {
            let mut bytes = vec![0; decoder.block_bytes(group)];
            decoder.save_block(group, 0, &mut bytes);
            decoder.load_block(group, 5, &bytes);
            bytes.fill(0xff);
            decoder.load_block(group, 0, &bytes);
        }
        let mut rest = batch(&TOKENS[17..], 17, groups);
        rest.groups.iter_mut().for_each(|tables| tables.blocks[0] = 5);
        let vocab = decoder.spec().vocab_size;
        assert!(logits(&mut decoder, &rest) == whole[17 * vocab..], "{model_type}");
        rest.groups.iter_mut().for_each(|tables| tables.blocks[0] = 0);
        assert!(logits(&mut decoder, &rest) != whole[17 * vocab..], "{model_type}: the first block is not read");
    }
}

#[test]
fn two_steps_of_one_size_ask_for_the_same_work() {
    for (model_type, extra) in
        [("gemma3_text", ""), ("olmo2", ""), ("qwen3_moe", r#", "num_experts": 4, "num_experts_per_tok": 2"#)]
    {
        let config = config(model_type, extra);
        let backend = Recording::new(Reference::new());
        let log = backend.log();
        let mut decoder = try_load(backend, &config, &invent(&config)).unwrap();
        let groups = decoder.spec().kv_groups().len();
        let steps = [(&TOKENS[..5], 0), (&TOKENS[5..10], 5), (&TOKENS[10..14], 10)].map(|(tokens, start)| {
            decoder.forward(&batch(tokens, start, groups)).unwrap();
            log.take()
        });
        assert!(steps[0].len() > 20, "{model_type}: {} operations", steps[0].len());
        assert_eq!(steps[0], steps[1], "{model_type}");
        assert_ne!(steps[1], steps[2], "{model_type}: another size is other work");
    }
}

#[test]
fn a_wrong_tensor_is_named() {
    let config = config("llama", "");
    let good = invent(&config);
    let load_error = |weights: &Memory| try_load(Reference::new(), &config, weights).err().unwrap().to_string();

    let mut weights = good.clone();
    weights.0.remove("model.layers.1.mlp.up_proj.weight");
    assert_eq!(
        load_error(&weights),
        "tensor model.layers.1.mlp.up_proj.weight is missing, but llama needs it with shape [32, 64]"
    );
    let mut weights = good.clone();
    weights.put("model.norm.weight", &[63], &[0.0; 63]);
    assert_eq!(load_error(&weights), "tensor model.norm.weight has shape [63], but llama needs [64]");

    let mut weights = good.clone();
    weights.0.insert("model.norm.weight".to_owned(), (Format::I32, vec![64], vec![0; 256]));
    assert!(load_error(&weights).contains("model.norm.weight is stored as"), "{}", load_error(&weights));

    // Every tensor in turn, missing or of another shape: an error that names it.
    for name in good.names() {
        let mut missing = good.clone();
        missing.0.remove(name);
        assert!(load_error(&missing).contains(name), "{name}: {}", load_error(&missing));
        let mut bent = good.clone();
        bent.put(name, &[7, 3], &[0.0; 21]);
        assert!(load_error(&bent).contains(name), "{name}: {}", load_error(&bent));
    }
}

#[test]
fn a_step_that_does_not_fit_is_refused() {
    let config = config("llama", "");
    let mut decoder = try_load(Reference::new(), &config, &invent(&config)).unwrap();
    let good = batch(&TOKENS[..4], 0, 1);
    decoder.forward(&good).unwrap();
    let rows: [(&str, Spoil); 10] = [
        ("a token id is 50", |b| b.tokens[0] = 50),
        ("a position is 64", |b| b.positions[3] = 64),
        ("positions has 3", |b| b.positions.truncate(3)),
        ("groups has 2", |b| b.groups.push(b.groups[0].clone())),
        ("an output row is 4", |b| b.outputs.push(4)),
        ("a slot is 96", |b| b.groups[0].slots[1] = 96),
        ("a block is 6", |b| b.groups[0].blocks[0] = 6),
        ("the end of a span's block table is 2", |b| b.groups[0].first_block[0] = 1),
        ("the number of a span's rows is 4", |b| b.spans[0].context = 2),
        ("spans' rows together has 3", |b| b.spans[0].num_rows = 3),
    ];
    for (expected, spoil) in rows {
        let mut bad = good.clone();
        spoil(&mut bad);
        let error = decoder.forward(&bad).unwrap_err().to_string();
        assert!(error.contains(expected), "{expected}: {error}");
    }
    let too_long = batch(&[1; 33], 0, 1);
    assert!(decoder.forward(&too_long).unwrap_err().to_string().contains("rows is 33, but at most 32"));
}

#[test]
fn experts_mean_the_same_one_by_one_and_fused() {
    let config = config("qwen3_moe", r#", "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24"#);
    let single = invent(&config);
    let mut fused = single.clone();
    fused.0.retain(|name, _| !name.contains(".experts."));
    for layer in 0..3 {
        let name = |rest: &str| format!("model.layers.{layer}.mlp.experts.{rest}");
        let part = |expert: usize, kind: &str| single.values(&name(&format!("{expert}.{kind}.weight")));
        let gate_up: Vec<f32> = (0..3).flat_map(|e| [part(e, "gate_proj"), part(e, "up_proj")].concat()).collect();
        let down: Vec<f32> = (0..3).flat_map(|e| part(e, "down_proj")).collect();
        fused.put(&name("gate_up_proj"), &[3, 48, 64], &gate_up);
        fused.put(&name("down_proj"), &[3, 64, 24], &down);
    }
    let step = batch(&TOKENS[..9], 0, 1);
    let run = |weights| logits(&mut try_load(Reference::new(), &config, weights).unwrap(), &step);
    assert!(run(&single) == run(&fused));
}

/// transformers ties the head only if the checkpoint does not contradict the configuration.
#[test]
fn a_head_of_its_own_is_used_whatever_the_configuration_says() {
    let (tied, untied) = (config("qwen3", r#", "tie_word_embeddings": true"#), config("qwen3", ""));
    let own_head = invent(&untied);
    let mut no_head = own_head.clone();
    no_head.0.remove("lm_head.weight");
    let mut same_head = own_head.clone();
    same_head.put("lm_head.weight", &[50, 64], &own_head.values("model.embed_tokens.weight"));

    let step = batch(&TOKENS[..9], 0, 1);
    let run = |config: &str, weights| {
        let mut decoder = try_load(Reference::new(), config, weights).unwrap();
        (decoder.spec().tied_head, logits(&mut decoder, &step))
    };
    assert!(run(&tied, &no_head) == run(&tied, &same_head));
    assert!(run(&tied, &own_head) == run(&untied, &own_head));
    assert_eq!((run(&tied, &no_head).0, run(&tied, &own_head).0), (true, false));
    let error = try_load(Reference::new(), &untied, &no_head).err().unwrap().to_string();
    assert!(error.contains("lm_head.weight is missing"), "{error}");
}

/// `model.layers.N.mlp.experts.<kind>_blocks` and `_scales` against the same values, transposed and
/// plain.
#[test]
fn mxfp4_experts_mean_what_their_values_mean() {
    let config = config("gpt_oss", r#", "num_local_experts": 2, "num_experts_per_tok": 2"#);
    let plain_names = invent(&config);
    let (mut packed, mut plain) = (plain_names.clone(), plain_names.clone());
    packed.0.retain(|name, _| !name.ends_with("_proj") || !name.contains("experts"));
    let levels = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    for layer in 0..3 {
        for (kind, rows, cols) in [("gate_up_proj", 64, 64), ("down_proj", 64, 32)] {
            let name = format!("model.layers.{layer}.mlp.experts.{kind}");
            let blocks: Vec<u8> = (0..2 * rows * cols / 2).map(|i| (i * 37 + i / 11 + layer) as u8).collect();
            let scales: Vec<u8> = (0..2 * rows * cols / 32).map(|i| 123 + (i % 3) as u8).collect();
            let value = |expert: usize, row: usize, col: usize| {
                let at = (expert * rows + row) * cols + col;
                let nibble = blocks[at / 2] >> (4 * (at % 2)) & 15;
                let level = levels[usize::from(nibble & 7)] * if nibble & 8 != 0 { -1.0 } else { 1.0 };
                level * f32::exp2(f32::from(scales[at / 32]) - 127.0)
            };
            let turned: Vec<f32> =
                (0..2 * rows * cols).map(|i| value(i / (rows * cols), i % rows, i / rows % cols)).collect();
            plain.put(&name, &[2, cols, rows], &turned);
            packed.0.insert(format!("{name}_blocks"), (Format::U8, vec![2, rows, cols / 32, 16], blocks));
            packed.0.insert(format!("{name}_scales"), (Format::U8, vec![2, rows, cols / 32], scales));
        }
    }
    let step = batch(&TOKENS[..9], 0, 2);
    let run = |weights| logits(&mut try_load(Reference::new(), &config, weights).unwrap(), &step);
    let (packed, plain) = (run(&packed), run(&plain));
    assert!(packed == plain);
    assert!(packed != run(&plain_names), "the experts took part");
}

/// Greedy tokens of transformers 5.22.2 in float32 (torch 2.15.0) after
/// `use std::collections::HashMap;`, an empty line and `fn count_words(text: &str) ->`.
#[test]
fn trained_models_continue_as_transformers_does() {
    let prompt = [352, 583, 278, 2275, 278, 2454, 429, 540, 2201, 15206, 90, 8377, 33, 360, 874, 16, 398];
    let expected = HashMap::from([
        ("folio-rust-42m", [898, 303, 266, 2108, 1028, 1787, 518, 957, 3686, 518, 718, 622]),
        ("folio-rust-moe-47m", [898, 303, 266, 331, 543, 7547, 290, 2053, 4780, 278, 469, 499]),
    ]);
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/models");
    for (name, tokens) in expected {
        let folder = models.join(name);
        if !folder.is_dir() {
            folio_testing::skip!(Shared, "models/{name} is not there");
            continue;
        }
        let model = crate::open(&folder).unwrap();
        let mut decoder = Decoder::load(Reference::new(), &model, limits(1), &mut |_| {}).unwrap();
        let mut step = batch(&prompt, 0, 1);
        let (mut found, mut length) = (Vec::new(), prompt.len());
        while found.len() < tokens.len() {
            step.outputs = vec![step.tokens.len() as u32 - 1];
            let out = logits(&mut decoder, &step);
            let best = out.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0 as u32;
            found.push(best);
            step = batch(&[best], length, 1);
            length += 1;
        }
        assert_eq!(found, tokens, "{name}");
    }
}
