//! The length of a context, with scalings of positions in the files or on the command line.

use serde_json::{Value, json};

use crate::{output, scratch, stdout};

/// A folder with a configuration and nothing else.
fn folder(name: &str, extra: Value) -> String {
    let mut config = json!({"model_type": "llama", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 4096});
    for (field, value) in extra.as_object().expect("an object") {
        config[field] = value.clone();
    }
    let folder = scratch("context").join(name);
    std::fs::create_dir_all(&folder).expect("writable");
    std::fs::write(folder.join("config.json"), config.to_string()).expect("writable");
    folder.to_str().expect("UTF-8").to_string()
}

fn planned(flags: &[&str]) -> String {
    let plan = stdout(&[&["plan", "--memory", "1GiB"], flags].concat());
    let (_, rest) = plan.split_once(": context ").expect("a context");
    rest.split(',').next().unwrap_or_default().to_string()
}

#[test]
fn a_scaling_lengthens_the_context() {
    let dummy = ["--load-format", "dummy", "--device", "cpu"];
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096});
    let check = |name: &str, extra: Value, flags: &[&str], expect: &str| {
        let folder = folder(name, extra);
        assert_eq!(planned(&[&[folder.as_str()], &dummy[..], flags].concat()), expect, "{name} {flags:?}");
    };
    check("plain", json!({}), &[], "4096");
    check("yarn", json!({"rope_scaling": yarn}), &[], "16384");
    check("yarn", json!({"rope_scaling": yarn}), &["--max-model-len", "16384"], "16384");
    check("yarn-5", json!({"rope_parameters": yarn}), &[], "16384");
    check("linear", json!({"rope_scaling": {"type": "linear", "factor": 2.5}}), &[], "10240");
    let text = yarn.to_string();
    check("plain", json!({}), &["--rope-scaling", &text], "16384");
    let inside = json!({"rope_parameters": yarn}).to_string();
    check("plain", json!({}), &["--hf-overrides", &inside], "16384");
    check("plain", json!({}), &["--hf-overrides", r#"{"max_position_embeddings": 512}"#], "512");
    check("yarn", json!({"rope_scaling": yarn}), &["--hf-overrides", r#"{"rope_scaling": null}"#], "4096");
    // A GGUF file, and the built-in model is one.
    assert_eq!(planned(&[]), "4096");
    assert_eq!(planned(&["--rope-scaling", &text]), "16384");
}

#[test]
fn what_a_scaling_does_not_reach_is_refused() {
    let folder = folder("too-long", json!({"rope_scaling": {"type": "linear", "factor": 2}}));
    let check = |flags: &[&str], expect: &[&str]| {
        let output = output(&[&["plan", folder.as_str(), "--load-format", "dummy", "--device", "cpu"], flags].concat());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success(), "{flags:?} succeeds");
        assert!(expect.iter().all(|part| said.contains(part)), "{flags:?}: {said}");
    };
    check(&["--max-model-len", "8193"], &["max_position_embeddings is 4096", "reaches 8192", "8193"]);
    check(&["--rope-scaling", "yarn"], &["--rope-scaling", "JSON object", "rope_type"]);
    check(&["--rope-scaling", r#"{"factor": 4}"#], &["rope_type is missing"]);
    check(&["--rope-scaling", r#"{"rope_type": "linear"}"#], &["rope_scaling.factor is missing"]);
    check(&["--hf-overrides", "[]"], &["--hf-overrides", "JSON object"]);
}
