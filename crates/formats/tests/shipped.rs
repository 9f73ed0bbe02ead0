//! The models and heads that the repository ships, as files: complete, finite and small enough.

use std::path::PathBuf;

use folio_formats::{Format, Gguf, TensorView, WeightSource};

fn models() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../models")
}

fn check(name: &str, layers: u32, hidden: usize, format: Format) {
    let gguf = Gguf::open(&models().join(format!("{name}.gguf"))).unwrap();
    assert_eq!(gguf.str("general.architecture").unwrap(), "llama");
    assert_eq!(gguf.str("general.name").unwrap(), name);
    assert_eq!(gguf.u32("llama.block_count").unwrap(), layers);
    assert_eq!(gguf.u32("tokenizer.ggml.eos_token_id").unwrap(), 2);
    assert!(gguf.str("tokenizer.chat_template").unwrap().contains("<|im_start|>"));
    let generation: serde_json::Value = serde_json::from_str(gguf.str("folio.generation_config").unwrap()).unwrap();
    assert_eq!(generation["eos_token_id"], serde_json::json!([2, 0]));
    assert_eq!(gguf.names().len() as u32, 2 + 9 * layers);
    assert_eq!(gguf.require("token_embd.weight").unwrap().shape, [16_384, hidden]);
    for name in gguf.names() {
        let tensor = gguf.require(name).unwrap();
        assert_eq!(tensor.format, if tensor.shape.len() == 1 { Format::F32 } else { format }, "{name}");
        check_values(&tensor);
        gguf.release(name);
    }
}

fn check_values(tensor: &TensorView<'_>) {
    let values = tensor.to_f32().unwrap();
    let square = values.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>() / values.len() as f64;
    assert!(square.is_finite() && square > 1e-8, "{}: mean square {square}", tensor.name);
}

fn heads(kind: &str) -> Gguf {
    let gguf = Gguf::open(&models().join(format!("folio-rust-42m.{kind}.gguf"))).unwrap();
    assert_eq!(gguf.str("general.architecture").unwrap(), kind);
    assert_eq!(gguf.str("general.name").unwrap(), format!("folio-rust-42m.{kind}"));
    for name in gguf.names() {
        let tensor = gguf.require(name).unwrap();
        let expect = match (name, tensor.shape.len()) {
            ("d2t", _) => Format::I16,
            (_, 2) => Format::IQ4_NL,
            _ => Format::F32,
        };
        assert_eq!(tensor.format, expect, "{name}");
        check_values(&tensor);
    }
    gguf
}

#[test]
fn the_default_model_is_whole() {
    check("folio-rust-42m", 12, 512, Format::Q5_0);
}

#[test]
fn the_draft_model_is_whole() {
    check("folio-rust-7m", 4, 256, Format::IQ4_NL);
}

#[test]
fn the_medusa_heads_are_whole() {
    let gguf = heads("medusa");
    // Two heads, without an output matrix of their own.
    assert_eq!(gguf.names().len(), 4);
    for head in 0..2 {
        let stem = format!("medusa_head.{head}.0.linear");
        assert_eq!(gguf.require(&format!("{stem}.weight")).unwrap().shape, [512, 512]);
        assert_eq!(gguf.require(&format!("{stem}.bias")).unwrap().shape, [512]);
    }
}

#[test]
fn the_eagle_head_is_whole() {
    let gguf = heads("eagle");
    assert_eq!(gguf.names().len(), 13);
    assert_eq!(gguf.require("fc.weight").unwrap().shape, [512, 3 * 512]);
    assert_eq!(gguf.require("midlayer.self_attn.q_proj.weight").unwrap().shape, [512, 2 * 512]);
    assert!(gguf.tensor("lm_head.weight").is_none(), "its output matrix is the model's");
    let offsets = gguf.require("d2t").unwrap().to_f32().unwrap();
    assert!(offsets.len() <= 4_096);
    let tokens: Vec<i64> = offsets.iter().zip(0i64..).map(|(&offset, id)| id + offset as i64).collect();
    assert!(tokens.is_sorted_by(|one, next| one < next), "draft ids are in the order of tokens, each once");
    assert!(tokens[0] >= 0 && tokens[tokens.len() - 1] < 16_384);
}

#[test]
fn the_heads_are_small_enough_to_ship() {
    let bytes = |kind| std::fs::metadata(models().join(format!("folio-rust-42m.{kind}.gguf"))).unwrap().len();
    let total: u64 = bytes("eagle") + bytes("medusa");
    assert!(total <= 5 << 20, "the heads have {total} bytes, at most {} may be shipped", 5 << 20);
}

#[test]
fn the_folder_is_small_enough_to_ship() {
    let sizes = std::fs::read_dir(models()).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len());
    let total: u64 = sizes.sum();
    assert!(total <= 38 << 20, "models/ has {total} bytes, at most {} may be shipped", 38 << 20);
}
