//! Names of a model, and the names that it answers to.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::http::request;
use crate::server::Server;
use crate::{scratch, stdout};

fn tree(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models").join(file)
}

/// The small built-in model as a file of that name, with the files that it needs.
fn model_file(folder: &str, name: &str) -> PathBuf {
    let folder = scratch(folder);
    std::fs::copy(tree("tokenizer.json.lzma"), folder.join("tokenizer.json.lzma")).expect("it can be copied");
    std::fs::copy(tree("folio-rust-7m.gguf"), folder.join(name)).expect("it can be copied");
    folder.join(name)
}

#[test]
fn a_model_answers_to_its_name_and_to_its_path() {
    let file = model_file("names", "Qwen2.5-7M-Instruct-00001-of-00001.gguf");
    let path = file.to_str().expect("UTF-8");
    let server = Server::start(&[path]);
    let get = |route: &str| request(server.port, "GET", route, "").body;
    let listed: Value = serde_json::from_str(&get("/v1/models")).expect("JSON");
    let ids: Vec<&str> =
        listed["data"].as_array().expect("a list").iter().filter_map(|one| one["id"].as_str()).collect();
    assert_eq!(ids, ["Qwen2.5-7M-Instruct"]);
    let ask = |model: &str| {
        let body = json!({"model": model, "prompt": "fn main", "max_tokens": 1, "temperature": 0});
        let (status, answer) = server.post("/v1/completions", body);
        (status, answer["model"].as_str().unwrap_or_default().to_string())
    };
    for name in ["Qwen2.5-7M-Instruct", path] {
        assert_eq!(ask(name), (200, "Qwen2.5-7M-Instruct".into()), "{name}");
    }
    for name in ["Qwen2", "Qwen2.5-7M-Instruct-00001-of-00001", "Qwen2.5-7M-Instruct-00001-of-00001.gguf"] {
        assert_eq!(ask(name).0, 404, "{name}");
    }
    // No route reveals its path.
    for route in ["/v1/models", "/server_info", "/get_model_info", "/openapi.json", "/metrics"] {
        let told = get(route);
        assert!(told.contains("Qwen2.5-7M-Instruct") && !told.contains(path), "{route}: {told}");
    }
    assert!(get("/metrics").contains(r#"model_name="Qwen2.5-7M-Instruct""#), "metrics bear its name");
}

#[test]
fn names_that_are_given_are_the_only_ones() {
    let file = model_file("names-given", "m.gguf");
    let path = file.to_str().expect("UTF-8");
    let server = Server::start(&[path, "--served-model-name", "a", "b"]);
    for (name, expect) in [("a", 200), ("b", 200), ("m", 404), (path, 404)] {
        let body = json!({"model": name, "prompt": "fn main", "max_tokens": 1});
        assert_eq!(server.post("/v1/completions", body).0, expect, "{name}");
    }
}

#[test]
fn a_folder_is_called_by_its_whole_name() {
    let scratch = scratch("names-folder");
    let commit = "fedcba9876543210fedcba9876543210fedcba98";
    let cached = format!("models--org--Other-1.5/snapshots/{commit}");
    let config = json!({"model_type": "llama", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 128});
    for (folder, name) in
        [("Qwen2.5-7B-Instruct/", "Qwen2.5-7B-Instruct"), ("Llama-3.2-1B", "Llama-3.2-1B"), (&cached, "org/Other-1.5")]
    {
        let folder = scratch.join(folder);
        std::fs::create_dir_all(&folder).expect("writable");
        std::fs::write(folder.join("config.json"), config.to_string()).expect("writable");
        let plan = stdout(&["plan", folder.to_str().expect("UTF-8"), "--load-format", "dummy", "--device", "cpu"]);
        assert!(plan.starts_with(&format!("memory plan of {name}: context 128")), "{plan}");
    }
}
