use serde_json::{Value, json};

use super::*;
use crate::options::{DeviceOptions, GenerationSource};

/// A folder without weights, of two words and two special tokens.
fn folder(name: &str, files: &[(&str, Value)]) -> std::path::PathBuf {
    let folder = std::env::temp_dir().join(format!("folio-assets-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let special = |id: u32, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
    };
    let tokenizer = json!({
        "version": "1.0", "added_tokens": [special(2, "<|endoftext|>"), special(3, "<|im_end|>")], "normalizer": null,
        "pre_tokenizer": null, "post_processor": null, "decoder": null,
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
    });
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 8, "hidden_size": 8,
        "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8,
        "intermediate_size": 8, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "eos_token_id": 2,
    });
    for (file, text) in [("config.json", config), ("tokenizer.json", tokenizer)].iter().chain(files) {
        std::fs::write(folder.join(file), text.to_string()).expect("written");
    }
    folder
}

fn open(folder: &Path, source: GenerationSource) -> Assets {
    let device = DeviceOptions { load_format: LoadFormat::Dummy, ..DeviceOptions::default() };
    let options = Options { device, ..Options::default() };
    let mut assets = Assets::open(folder.to_str(), &options).expect("sound");
    assets.set_generation(&GenerationOptions { source, overrides: None }).expect("sound");
    assets
}

/// The forms in which tokenizers name the token that ends an answer, beside a config.json that
/// names `<|endoftext|>`, 2.
#[test]
fn the_tokenizers_own_end_ends_answers() {
    let check = |name: &str, files: &[(&str, Value)], expect: &[u32]| {
        assert_eq!(open(&folder(name, files), GenerationSource::Auto).eos, expect, "{name}");
    };
    let config = "tokenizer_config.json";
    let map = "special_tokens_map.json";
    let object = json!({"__type": "AddedToken", "content": "<|im_end|>", "lstrip": false, "special": true});
    check("no-tokenizer-config", &[], &[2]);
    check("string", &[(config, json!({"eos_token": "<|im_end|>"}))], &[2, 3]);
    check("object", &[(config, json!({"eos_token": object}))], &[2, 3]);
    check("same", &[(config, json!({"eos_token": "<|endoftext|>"}))], &[2]);
    check("null", &[(config, json!({"eos_token": null, "bos_token": "a"}))], &[2]);
    check("unknown", &[(config, json!({"eos_token": "<|nowhere|>"}))], &[2]);
    check("map", &[(map, json!({"eos_token": "<|im_end|>"}))], &[2, 3]);
    check("map-of-objects", &[(config, json!({})), (map, json!({"eos_token": object}))], &[2, 3]);
    check("both", &[(config, json!({"eos_token": "<|im_end|>"})), (map, json!({"eos_token": "a"}))], &[2, 3]);
    let own = ("generation_config.json", json!({"eos_token_id": [1]}));
    check("all", &[(config, json!({"eos_token": "<|im_end|>"})), own], &[1, 2, 3]);
}

#[test]
fn the_flags_stand_when_the_context_is_shortened() {
    let files = [
        ("generation_config.json", json!({"temperature": 0.5, "typical_p": 0.9})),
        ("tokenizer_config.json", json!({"chat_template": "own"})),
    ];
    let folder = folder("reopened", &files);
    let own = open(&folder, GenerationSource::Auto);
    assert_eq!(own.defaults.temperature, Some(0.5));
    assert!(own.note.as_deref().is_some_and(|note| note.contains("typical_p 0.9")), "{:?}", own.note);
    let mut other = open(&folder, GenerationSource::Vllm);
    other.set_template("other").expect("sound");
    let template = other.template.clone();
    assert_eq!((other.defaults.temperature, &other.note), (None, &None));
    let other = other.reopen(32).expect("sound");
    assert_eq!((other.defaults.temperature, &other.note), (None, &None));
    assert!(template.zip(other.template).is_some_and(|(before, after)| Arc::ptr_eq(&before, &after)));
}
