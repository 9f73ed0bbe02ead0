//! A generated mixture of experts with preferences as clear as a trained network's.
//!
//! Logits of a network of random weights are nearly uniform: its first and second token are so
//! close together that any rounding swaps them, and the number of swaps shows nothing. Here every
//! token has two habitual successors, and the output matrix mostly prefers one of them; its lead
//! over the other differs from token to token, and the layers' additions decide the close ones.

use folio_device::{
    KvFormat,
    cpu::{Cpu, CpuConfig},
    reference::Reference,
};
use folio_formats::Format;
use folio_model::OpenModel;

use crate::{
    agreement::{self, Questions},
    file::{Tensor, Weights},
    generator,
};

const SEED: u64 = 29;
const VOCAB: usize = 2048;
const HIDDEN: usize = 256;
const LAYERS: usize = 4;
const HEADS: usize = 8;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 64;
const EXPERTS: usize = 32;
const INTER: usize = 128;
/// Median lead of the first token: similar to this project's trained models.
const DECIDEDNESS: f32 = 0.55;

pub fn experts() -> OpenModel {
    let config = format!(
        r#"{{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": {VOCAB},
        "hidden_size": {HIDDEN}, "num_hidden_layers": {LAYERS}, "num_attention_heads": {HEADS},
        "num_key_value_heads": {KV_HEADS}, "head_dim": {HEAD_DIM}, "intermediate_size": {INTER},
        "moe_intermediate_size": {INTER}, "num_experts": {EXPERTS}, "num_experts_per_tok": 4, "norm_topk_prob": true,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": false, "torch_dtype": "bfloat16"}}"#
    );
    OpenModel::from_config(&config, Box::new(weights())).expect("the model opens")
}

/// Prompts of random tokens.
pub fn questions(count: usize, answer: usize) -> Questions {
    let prompt = |number: usize| {
        let tokens = generator::stream(SEED, &format!("prompt {number}"));
        tokens.take(agreement::length(number)).map(|z| (z >> 32) as u32 % VOCAB as u32).collect()
    };
    Questions { prompts: (0..count).map(prompt).collect(), answer }
}

fn weights() -> Weights {
    let mut weights = Weights::default();
    let embedding = normal("model.embed_tokens.weight", VOCAB * HIDDEN, 1.0, 0.0);
    insert(&mut weights, "lm_head.weight", &[VOCAB, HIDDEN], &head(&embedding));
    insert(&mut weights, "model.embed_tokens.weight", &[VOCAB, HIDDEN], &embedding);
    let mut add = |name: String, shape: &[usize], deviation: f32, mean: f32| {
        let values = normal(&name, shape.iter().product(), deviation, mean);
        insert(&mut weights, &name, shape, &values);
    };
    // A product of this number of inputs of about one has outputs of about `gain`.
    let plain = |inputs: usize, gain: f32| gain / (inputs as f32).sqrt();
    add("model.norm.weight".to_owned(), &[HIDDEN], 0.1, 1.0);
    for layer in 0..LAYERS {
        let mut add = |part: &str, shape: &[usize], gain: f32| {
            let (deviation, mean) = if shape.len() == 1 { (0.1, 1.0) } else { (plain(shape[1], gain), 0.0) };
            add(format!("model.layers.{layer}.{part}.weight"), shape, deviation, mean);
        };
        add("input_layernorm", &[HIDDEN], 1.0);
        add("post_attention_layernorm", &[HIDDEN], 1.0);
        add("self_attn.q_norm", &[HEAD_DIM], 1.0);
        add("self_attn.k_norm", &[HEAD_DIM], 1.0);
        add("self_attn.q_proj", &[HEADS * HEAD_DIM, HIDDEN], 1.0);
        add("self_attn.k_proj", &[KV_HEADS * HEAD_DIM, HIDDEN], 1.0);
        add("self_attn.v_proj", &[KV_HEADS * HEAD_DIM, HIDDEN], 1.0);
        add("self_attn.o_proj", &[HIDDEN, HEADS * HEAD_DIM], 1.0);
        add("mlp.gate", &[EXPERTS, HIDDEN], 2.0);
        for expert in 0..EXPERTS {
            add(&format!("mlp.experts.{expert}.gate_proj"), &[INTER, HIDDEN], 1.0);
            add(&format!("mlp.experts.{expert}.up_proj"), &[INTER, HIDDEN], 1.0);
            add(&format!("mlp.experts.{expert}.down_proj"), &[HIDDEN, INTER], 1.7);
        }
    }
    weights
}

/// Row `t` recognizes the tokens that `t` follows.
fn head(embedding: &[f32]) -> Vec<f32> {
    let first = generator::shuffled(SEED, "first successors", VOCAB as u32);
    let second = generator::shuffled(SEED, "second successors", VOCAB as u32);
    let liking = generator::stream(SEED, "how likely the second is").map(|z| (z >> 40) as f32 / (1 << 24) as f32);
    let mut head = vec![0.0; VOCAB * HIDDEN];
    for (token, liking) in (0..VOCAB).zip(liking) {
        for (successor, weight) in [(first[token], 1.0), (second[token], 0.3 + 0.7 * liking)] {
            let row = &mut head[successor as usize * HIDDEN..][..HIDDEN];
            for (out, value) in row.iter_mut().zip(&embedding[token * HIDDEN..][..HIDDEN]) {
                *out += weight * DECIDEDNESS / (HIDDEN as f32).sqrt() * value;
            }
        }
    }
    head
}

fn normal(name: &str, count: usize, deviation: f32, mean: f32) -> Vec<f32> {
    // The deviation of `generator::normal` at scale one.
    let unit = 65536.0 * (4.0f32 / 3.0).sqrt();
    let bytes = generator::normal(SEED, name, count, deviation / unit, mean);
    bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

/// As bf16, truncated.
fn insert(weights: &mut Weights, name: &str, shape: &[usize], values: &[f32]) {
    let bytes = values.iter().flat_map(|value| ((value.to_bits() >> 16) as u16).to_le_bytes()).collect();
    weights.insert(name, Tensor { format: Format::BF16, shape: shape.to_vec(), bytes });
}

/// The same comparison without a GPU: the CPU's fast kernels round only activations.
#[test]
fn the_fast_cpu_answers_nearly_as_the_reference() {
    let (model, questions) = (experts(), questions(12, 24));
    let cpu = || Cpu::new(CpuConfig { threads: 2, isa: None }).expect("a CPU");
    let guesses = questions.greedy(cpu(), &model, KvFormat::BF16).expect("answers");
    let verdicts = questions.judge(&model, &guesses);
    let figures = questions.forced(cpu(), &model, KvFormat::BF16, &verdicts).expect("figures");
    figures.print("the CPU's fast kernels");
    assert!(verdicts.iter().all(|verdict| verdict.tokens.len() == 24));
    assert!(figures.agreement > 0.95 && figures.clear() == 0, "{figures:?}");
    let again = questions.judge(&model, &verdicts.iter().map(|verdict| verdict.tokens.clone()).collect::<Vec<_>>());
    assert!(again.iter().all(|verdict| verdict.parted.is_none()), "the reference agrees with itself");
    let itself = questions.forced(Reference::new(), &model, KvFormat::F32, &verdicts).expect("figures");
    assert_eq!((itself.agreement, itself.difference), (1.0, 0.0), "and to the bit");
}
