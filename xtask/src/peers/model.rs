//! The model both engines run: a Llama of 1B shape with random weights, as a GGUF file that llama.cpp's tools read.
//!
//! The bf16 file is written here; the quantized ones are what llama.cpp's own tool makes of it, so that they are mixed
//! the way files in the wild are (the tied table of Q4_0 is Q6_K, and Q4_K_M has Q6_K layers).

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use folio_formats::gguf::{Entry, FileWriter, Gguf, Value};
use folio_formats::{Format, WeightSource};

use super::setup::Peer;
use crate::process;

const LAYERS: usize = 16;
const HIDDEN: usize = 2048;
const FFN: usize = 8192;
const HEADS: usize = 32;
const KV_HEADS: usize = 8;
const HEAD_DIM: usize = 64;
const VOCAB: usize = 16384;
const CONTEXT: usize = 8192;

/// The model in one format.
pub struct Model {
    /// As llama.cpp names it: `bf16`, `q8_0`, `q4_0`, `q4_k_m`.
    pub format: String,
    pub path: PathBuf,
    /// All tensors' bytes, each of which a decoded token reads once: the table too, which is the head.
    pub weight_bytes: u64,
}

impl Model {
    /// The file in `folder`; made on first use.
    pub fn prepare(format: &str, folder: &Path, peer: &Peer) -> Result<Self> {
        let bf16 = folder.join("random-1b-bf16.gguf");
        if !bf16.exists() {
            eprintln!("== writing {}", bf16.display());
            write_random(&bf16)?;
        }
        let path = folder.join(format!("random-1b-{format}.gguf"));
        if !path.exists() {
            eprintln!("== writing {}", path.display());
            // Under another name first, so that a file with its own is whole.
            let part = path.with_extension("part");
            let mut quantize = process::command(&peer.quantize, &[]);
            process::output(quantize.arg(&bf16).arg(&part).arg(format.to_uppercase()))?;
            std::fs::rename(part, &path)?;
        }
        let weight_bytes = weight_bytes(&path).with_context(|| path.display().to_string())?;
        Ok(Self { format: format.to_owned(), path, weight_bytes })
    }

    /// Whether its products are of bytes; else of bf16.
    pub fn is_quantized(&self) -> bool {
        self.format != "bf16"
    }
}

/// Operations (two a multiply-add) of a prompt; the head runs on its last token only.
pub fn prompt_operations(tokens: usize) -> f64 {
    let positions = tokens * (tokens + 1) / 2;
    2.0 * (layer_macs() * tokens + HIDDEN * VOCAB + attention_macs() * positions) as f64
}

/// Operations of one decoded token behind `context` others.
pub fn decode_operations(context: usize) -> f64 {
    2.0 * (layer_macs() + HIDDEN * VOCAB + attention_macs() * context) as f64
}

fn layer_macs() -> usize {
    LAYERS * (2 * HIDDEN * (HEADS + KV_HEADS) * HEAD_DIM + 3 * HIDDEN * FFN)
}

/// For every position looked at.
fn attention_macs() -> usize {
    LAYERS * 2 * HEADS * HEAD_DIM
}

fn weight_bytes(path: &Path) -> Result<u64> {
    let gguf = Gguf::open(path)?;
    let sizes = gguf.names().into_iter().map(|name| Ok(gguf.require(name)?.bytes.len() as u64));
    sizes.sum()
}

fn write_random(path: &Path) -> Result<()> {
    let mut random = Random(0x9E37_79B9_7F4A_7C15);
    let tensors = tensors();
    let format = |shape: &[usize]| if shape.len() == 1 { Format::F32 } else { Format::BF16 };
    let entries = tensors.iter().map(|(name, shape)| Entry::new(name, format(shape), shape)).collect();
    let mut file = FileWriter::create(path, &metadata(), entries)?;
    for (name, shape) in &tensors {
        let values = 0..shape.iter().product();
        let bytes: Vec<u8> = match format(shape) {
            Format::F32 => values.flat_map(|_| (1.0 + 0.1 * random.next()).to_le_bytes()).collect(),
            // The upper half of an f32 is a bf16, cut off; which way it rounds is nothing to random weights.
            _ => values.flat_map(|_| (0.035 * random.next()).to_le_bytes().into_iter().skip(2)).collect(),
        };
        file.tensor(name, &bytes)?;
    }
    Ok(file.finish()?)
}

fn metadata() -> Vec<(String, Value)> {
    let texts = [
        ("general.architecture", "llama"),
        ("general.type", "model"),
        ("general.name", "random-1b"),
        // Both engines are given token ids; llama.cpp then wants to be told that there is no vocabulary.
        ("tokenizer.ggml.model", "no_vocab"),
    ];
    let counts = [
        ("vocab_size", VOCAB),
        ("context_length", CONTEXT),
        ("embedding_length", HIDDEN),
        ("block_count", LAYERS),
        ("feed_forward_length", FFN),
        ("attention.head_count", HEADS),
        ("attention.head_count_kv", KV_HEADS),
        ("attention.key_length", HEAD_DIM),
        ("attention.value_length", HEAD_DIM),
        ("rope.dimension_count", HEAD_DIM),
    ];
    let numbers = [("attention.layer_norm_rms_epsilon", 1e-5f32), ("rope.freq_base", 10000.0)];
    let texts = texts.map(|(key, text)| (key.to_owned(), Value::from(text)));
    let counts = counts.map(|(key, count)| (format!("llama.{key}"), Value::from(count as u32)));
    let numbers = numbers.map(|(key, number)| (format!("llama.{key}"), Value::from(number)));
    texts.into_iter().chain(counts).chain(numbers).collect()
}

/// Every tensor with its shape, outermost first.
fn tensors() -> Vec<(String, Vec<usize>)> {
    let (q, kv) = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM);
    let mut tensors =
        vec![("token_embd.weight".to_owned(), vec![VOCAB, HIDDEN]), ("output_norm.weight".to_owned(), vec![HIDDEN])];
    for layer in 0..LAYERS {
        let parts: [(&str, Vec<usize>); 9] = [
            ("attn_norm", vec![HIDDEN]),
            ("attn_q", vec![q, HIDDEN]),
            ("attn_k", vec![kv, HIDDEN]),
            ("attn_v", vec![kv, HIDDEN]),
            ("attn_output", vec![HIDDEN, q]),
            ("ffn_norm", vec![HIDDEN]),
            ("ffn_gate", vec![FFN, HIDDEN]),
            ("ffn_up", vec![FFN, HIDDEN]),
            ("ffn_down", vec![HIDDEN, FFN]),
        ];
        tensors.extend(parts.map(|(name, shape)| (format!("blk.{layer}.{name}.weight"), shape)));
    }
    tensors
}

/// xorshift64: fast, and good enough for weights that nobody will read.
struct Random(u64);

impl Random {
    /// From -1 to 1.
    fn next(&mut self) -> f32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cost_of_a_token_is_that_of_all_weights() {
        let matrices: usize = tensors().iter().filter(|(_, shape)| shape.len() == 2).map(|(_, s)| s[0] * s[1]).sum();
        assert_eq!(layer_macs() + HIDDEN * VOCAB, matrices);
        assert_eq!(decode_operations(0), 2.0 * matrices as f64);
        assert_eq!(prompt_operations(1), decode_operations(1));
    }

    #[test]
    fn random_weights_are_small_and_even() {
        let mut random = Random(7);
        let values: Vec<f32> = (0..10_000).map(|_| random.next()).collect();
        assert!(values.iter().all(|value| value.abs() <= 1.0));
        assert!(values.iter().sum::<f32>().abs() < 200.0);
    }
}
