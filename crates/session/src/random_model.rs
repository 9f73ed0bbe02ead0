//! Models of real shapes with random bf16 weights, to measure speed without a download: a folder in
//! Hugging Face's layout, made once in the cache and then loaded like any other. For the largest
//! only config.json is written: their weights are made on the device (`--load-format dummy`).

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use half::bf16;
use serde_json::{Map, json};

/// Shapes of models.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// 16 layers, hidden 2048, ffn 8192, 32 heads, 8 KV heads of 64, vocabulary 16384, tied: 1.007
    /// B parameters.
    OneB,
    /// 28 layers, hidden 3072, ffn 8192, 24 heads, 8 KV heads of 128, vocabulary 128256, tied: 3.21
    /// B parameters.
    ThreeB,
    /// 2 layers of the width of 1b.
    Tiny,
    /// 32 layers, hidden 4096, ffn 14336, 32 heads, 8 KV heads of 128, vocabulary 128256: 8.03 B
    /// parameters.
    EightB,
    /// 48 layers, hidden 2048, 32 heads, 4 KV heads of 128, 128 experts of 768, 8 a token,
    /// vocabulary 151936.
    Moe30B,
}

struct Dimensions {
    name: &'static str,
    layers: usize,
    hidden: usize,
    ffn: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    vocab: usize,
    /// Experts of a layer and the number that a token takes; none for dense models.
    experts: Option<(usize, usize)>,
    /// Whether it is too large to be written.
    on_device: bool,
}

impl Dimensions {
    fn of(shape: Shape) -> Self {
        let one_b = Self {
            name: "random-1b",
            layers: 16,
            hidden: 2048,
            ffn: 8192,
            heads: 32,
            kv_heads: 8,
            head_dim: 64,
            vocab: 16384,
            experts: None,
            on_device: false,
        };
        match shape {
            Shape::OneB => one_b,
            Shape::ThreeB => {
                Self { name: "random-3b", layers: 28, hidden: 3072, heads: 24, head_dim: 128, vocab: 128256, ..one_b }
            }
            Shape::Tiny => Self { name: "random-tiny", layers: 2, ..one_b },
            Shape::EightB => Self {
                name: "random-8b",
                layers: 32,
                hidden: 4096,
                ffn: 14336,
                head_dim: 128,
                vocab: 128256,
                on_device: true,
                ..one_b
            },
            Shape::Moe30B => Self {
                name: "random-moe-30b",
                layers: 48,
                ffn: 768,
                kv_heads: 4,
                head_dim: 128,
                vocab: 151936,
                experts: Some((128, 8)),
                on_device: true,
                ..one_b
            },
        }
    }

    fn config(&self) -> serde_json::Value {
        let mut config = json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": self.vocab,
            "hidden_size": self.hidden, "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim, "intermediate_size": self.ffn,
            "max_position_embeddings": if self.on_device { 32768 } else { 8192 }, "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": !self.on_device,
            "torch_dtype": "bfloat16", "eos_token_id": 0
        });
        if let Some((experts, top_k)) = self.experts {
            config["architectures"] = json!(["Qwen3MoeForCausalLM"]);
            config["model_type"] = json!("qwen3_moe");
            config["num_experts"] = json!(experts);
            config["num_experts_per_tok"] = json!(top_k);
            config["moe_intermediate_size"] = json!(self.ffn);
            config["norm_topk_prob"] = json!(true);
            config["decoder_sparse_step"] = json!(1);
            config["mlp_only_layers"] = json!([]);
        }
        config
    }

    /// Every tensor with its shape, in file order.
    fn tensors(&self) -> Vec<(String, Vec<usize>)> {
        let (h, f) = (self.hidden, self.ffn);
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let mut tensors =
            vec![("model.embed_tokens.weight".into(), vec![self.vocab, h]), ("model.norm.weight".into(), vec![h])];
        for layer in 0..self.layers {
            let parts: [(&str, Vec<usize>); 9] = [
                ("input_layernorm", vec![h]),
                ("self_attn.q_proj", vec![q, h]),
                ("self_attn.k_proj", vec![kv, h]),
                ("self_attn.v_proj", vec![kv, h]),
                ("self_attn.o_proj", vec![h, q]),
                ("post_attention_layernorm", vec![h]),
                ("mlp.gate_proj", vec![f, h]),
                ("mlp.up_proj", vec![f, h]),
                ("mlp.down_proj", vec![h, f]),
            ];
            tensors.extend(parts.map(|(name, shape)| (format!("model.layers.{layer}.{name}.weight"), shape)));
        }
        tensors
    }
}

/// Whether only its configuration is written: then the weights must be made on the device.
pub fn is_made_on_device(shape: Shape) -> bool {
    Dimensions::of(shape).on_device
}

/// The text of its config.json.
#[cfg(test)]
pub(crate) fn config(shape: Shape) -> String {
    Dimensions::of(shape).config().to_string()
}

/// The folder of this model below the cache folder; made on first use.
pub fn folder(shape: Shape, cache: &Path) -> Result<PathBuf> {
    let dimensions = Dimensions::of(shape);
    let folder = cache.join(dimensions.name);
    if !folder.join("config.json").exists() {
        std::fs::create_dir_all(&folder).with_context(|| format!("could not make {}", folder.display()))?;
        if !dimensions.on_device {
            write_weights(&dimensions, &folder.join("model.safetensors"))
                .with_context(|| format!("could not write random weights to {}", folder.display()))?;
        }
        // Written last, so that a folder with a config is complete.
        std::fs::write(folder.join("config.json"), dimensions.config().to_string())?;
    }
    Ok(folder)
}

fn write_weights(dimensions: &Dimensions, path: &Path) -> Result<()> {
    let tensors = dimensions.tensors();
    let mut header = Map::new();
    let mut offset = 0usize;
    for (name, shape) in &tensors {
        let end = offset + 2 * shape.iter().product::<usize>();
        header.insert(name.clone(), json!({"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}));
        offset = end;
    }
    let mut header = serde_json::to_vec(&header)?;
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path)?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(&header)?;
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    for (_, shape) in &tensors {
        let (is_norm, values) = (shape.len() == 1, shape.iter().product::<usize>());
        for _ in 0..values {
            // xorshift64: fast, and good enough for weights without a meaning.
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let uniform = (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
            let value = if is_norm { 1.0 + 0.1 * uniform } else { 0.035 * uniform };
            file.write_all(&bf16::from_f32(value).to_le_bytes())?;
        }
    }
    file.flush()?;
    Ok(())
}
