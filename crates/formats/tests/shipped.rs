//! The models that the repository ships, as files: whole, finite and small enough.

use std::path::PathBuf;

use folio_formats::{Format, Gguf, WeightSource};

fn models() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../models")
}

fn check(name: &str, layers: u32, hidden: usize) {
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
        let expect = if tensor.shape.len() == 1 { Format::F32 } else { Format::Q5_0 };
        assert_eq!(tensor.format, expect, "{name}");
        let values = tensor.to_f32().unwrap();
        let square = values.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>() / values.len() as f64;
        assert!(square.is_finite() && square > 1e-8, "{name}: mean square {square}");
        gguf.release(name);
    }
}

#[test]
fn the_default_model_is_whole() {
    check("folio-rust-42m", 12, 512);
}

#[test]
fn the_draft_model_is_whole() {
    check("folio-rust-7m", 4, 256);
}

#[test]
fn the_folder_is_small_enough_to_ship() {
    let sizes = std::fs::read_dir(models()).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len());
    let total: u64 = sizes.sum();
    assert!(total <= 34 << 20, "models/ has {total} bytes, at most {} may be shipped", 34 << 20);
}
