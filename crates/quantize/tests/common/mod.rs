//! Small model folders with random weights, generated.
#![allow(dead_code)]

use std::path::Path;

use folio_formats::Format;
use folio_formats::quant::encode;
use folio_formats::safetensors::{SHARD_BYTES, Writer};
use folio_testing::Rng;
use serde_json::{Value, json};

/// Number `index` of stream `seed`, between -1 and 1, heavier in the middle.
pub fn random(seed: u64, index: u64) -> f32 {
    let z = Rng::at(seed, index);
    (0..4).map(|part| (z >> (16 * part) & 0xffff) as i32 - 0x8000).sum::<i32>() as f32 / 131_072.0
}

pub const HIDDEN: usize = 256;
pub const INTER: usize = 384;
pub const LAYERS: usize = 2;
pub const VOCAB: usize = 64;
pub const EXPERTS: usize = 4;

fn config(moe: bool) -> Value {
    let mut config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        "intermediate_size": INTER, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "hidden_act": "silu", "tie_word_embeddings": true, "attention_bias": false, "mlp_bias": false,
        "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": [1, 0],
    });
    if moe {
        config["architectures"] = json!(["Qwen3MoeForCausalLM"]);
        config["model_type"] = json!("qwen3_moe");
        for (field, value) in [("num_experts", EXPERTS), ("num_experts_per_tok", 2), ("moe_intermediate_size", INTER)] {
            config[field] = json!(value);
        }
        config["norm_topk_prob"] = json!(true);
        config["decoder_sparse_step"] = json!(1);
        config["mlp_only_layers"] = json!([]);
    }
    config
}

/// Every tensor's name and shape.
fn tensors(moe: bool) -> Vec<(String, Vec<usize>)> {
    let mut all = vec![("model.embed_tokens.weight".to_owned(), vec![VOCAB, HIDDEN])];
    for layer in 0..LAYERS {
        let mut add = |name: &str, shape: &[usize]| {
            all.push((format!("model.layers.{layer}.{name}.weight"), shape.to_vec()));
        };
        add("input_layernorm", &[HIDDEN]);
        add("self_attn.q_proj", &[256, HIDDEN]);
        add("self_attn.k_proj", &[128, HIDDEN]);
        add("self_attn.v_proj", &[128, HIDDEN]);
        add("self_attn.o_proj", &[HIDDEN, 256]);
        add("post_attention_layernorm", &[HIDDEN]);
        let mlps: Vec<String> = match moe {
            true => (0..EXPERTS).map(|expert| format!("mlp.experts.{expert}")).collect(),
            false => vec!["mlp".to_owned()],
        };
        for mlp in mlps {
            add(&format!("{mlp}.gate_proj"), &[INTER, HIDDEN]);
            add(&format!("{mlp}.up_proj"), &[INTER, HIDDEN]);
            add(&format!("{mlp}.down_proj"), &[HIDDEN, INTER]);
        }
        if moe {
            add("mlp.gate", &[EXPERTS, HIDDEN]);
            add("self_attn.q_norm", &[64]);
            add("self_attn.k_norm", &[64]);
        }
    }
    all.push(("model.norm.weight".to_owned(), vec![HIDDEN]));
    all
}

/// Writes a model of random bf16 weights with a tokenizer of bytes.
pub fn model_folder(folder: &Path, moe: bool) {
    std::fs::create_dir_all(folder).unwrap();
    let mut writer = Writer::create(folder, SHARD_BYTES).unwrap();
    for (seed, (name, shape)) in tensors(moe).into_iter().enumerate() {
        let norm = shape.len() == 1;
        let value = |i| if norm { 1.0 + 0.1 * random(seed as u64, i) } else { 0.1 * random(seed as u64, i) };
        let values: Vec<f32> = (0..shape.iter().product::<usize>() as u64).map(value).collect();
        writer.tensor(&name, "BF16", &shape, &encode(Format::BF16, &values).unwrap()).unwrap();
    }
    writer.finish().unwrap();
    let write = |name: &str, value: Value| std::fs::write(folder.join(name), value.to_string()).unwrap();
    write("config.json", config(moe));
    write("generation_config.json", json!({"bos_token_id": 0, "eos_token_id": [1, 0], "pad_token_id": 0}));
    write("tokenizer_config.json", json!({"add_bos_token": false, "chat_template": "{{ messages[0]['content'] }}"}));
    let vocab: serde_json::Map<String, Value> = (2..VOCAB as u64).map(|id| (format!("t{id}"), json!(id))).collect();
    let special = |id: u32, content: &str| json!({"id": id, "content": content, "special": true});
    write(
        "tokenizer.json",
        json!({
            "version": "1.0", "added_tokens": [special(0, "<|end|>"), special(1, "<|im_end|>")],
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
            "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
            "model": {"type": "BPE", "vocab": vocab, "merges": []},
        }),
    );
}
