//! Bad input gets an error that names the fault, exit code 1, and no panic.

use std::path::Path;

use crate::{refusal, scratch};

fn check(args: &[&str], expect: &[&str]) {
    let text = refusal(args);
    assert!(text.starts_with("error: "), "{args:?}: {text}");
    assert!(!text.contains("panicked"), "{args:?}: {text}");
    for part in expect {
        assert!(text.contains(part), "{args:?} should mention {part:?}: {text}");
    }
}

fn write(folder: &Path, name: &str, bytes: &[u8]) -> String {
    let path = folder.join(name);
    std::fs::write(&path, bytes).expect("writable");
    path.to_str().expect("UTF-8").to_string()
}

#[test]
fn models_that_are_none() {
    let folder = scratch("bad-models");
    let text = write(&folder, "notes.txt", b"hello");
    let empty = write(&folder, "empty.gguf", b"");
    let noise = write(&folder, "noise.gguf", &[0x5a; 4096]);
    let folder = folder.to_str().expect("UTF-8");
    check(&["inspect", "no-such-org/model"], &["folio pull no-such-org/model"]);
    check(&["inspect", "/no/such/model"], &["/no/such/model"]);
    check(&["inspect", &text], &["notes.txt", "not a .gguf"]);
    check(&["inspect", &empty], &["empty.gguf"]);
    check(&["inspect", &noise], &["noise.gguf"]);
    check(&["inspect", folder], &["config.json"]);
}

#[test]
fn a_folder_with_a_wrong_part_names_it() {
    let config = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 8, "hidden_size": 8,
        "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8,
        "intermediate_size": 8, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu"}"#;
    let folder = |name: &str| scratch(name);
    let no_weights = folder("no-weights");
    write(&no_weights, "config.json", config.as_bytes());
    check(&["inspect", no_weights.to_str().expect("UTF-8")], &["safetensors"]);
    let bad_json = folder("bad-json");
    write(&bad_json, "config.json", b"{\"model_type\": ");
    check(&["inspect", bad_json.to_str().expect("UTF-8")], &["config.json"]);
    let unknown = folder("unknown-family");
    write(&unknown, "config.json", config.replace("Llama", "Nobody").replace("\"llama\"", "\"nobody\"").as_bytes());
    check(&["inspect", unknown.to_str().expect("UTF-8")], &["obody"]);
    let bad_heads = folder("bad-heads");
    write(
        &bad_heads,
        "config.json",
        config.replace("\"num_attention_heads\": 1", "\"num_attention_heads\": 0").as_bytes(),
    );
    check(&["inspect", bad_heads.to_str().expect("UTF-8")], &["num_attention_heads"]);
}

#[test]
fn flags_out_of_range() {
    check(&["run", "-p", "x", "--threads", "0"], &["--threads"]);
    check(&["run", "-p", "x", "--max-model-len", "1000000"], &["4096", "context of 1000000"]);
    check(&["run", "-p", "x", "--kv-cache-mib", "1"], &["--max-model-len"]);
    check(&["run", "-p", "x", "--temperature=-1"], &["temperature"]);
    check(&["run", "-p", "x", "--top-p", "NaN"], &["top_p"]);
    check(&["eval", "--text", "/no/such/text"], &["/no/such/text"]);
    let text = scratch("bad-eval").join("text.txt");
    std::fs::write(&text, "fn main() {}").expect("writable");
    let text = text.to_str().expect("UTF-8");
    check(&["eval", "--text", text, "--window", "5000"], &["--window", "4096"]);
    check(&["eval", "--text", text, "--tokens", "1"], &["--tokens"]);
    check(&["eval", "--text", text, "--threads", "0"], &["--threads"]);
    check(&["eval", "--text", text, "--against", "/no/such/base"], &["/no/such/base"]);
    check(&["pull", "nonsense"], &["ORG/NAME"]);
    check(&["serve", "--host", "0.0.0.0"], &["--host"]);
}
