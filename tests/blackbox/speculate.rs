//! Drafting with the binary's own heads and smaller model for the built-in one. Answers are the
//! same as without.

use std::io::Read;
use std::path::{Path, PathBuf};

use lzma_rust2::LzmaReader;
use serde_json::{Value, json};

use crate::http::request;
use crate::server::Server;
use crate::{refusal, scratch};

const SNIPPETS: [&str; 3] = [
    "impl Stack {\n    pub fn new() -> Self {\n        Self { items: Vec::new() }\n    }\n\n    pub fn push(&mut self, item: u32) {",
    "use std::collections::HashMap;\n\nfn count(words: &[&str]) -> HashMap<String, usize> {\n    let mut counts",
    "/// Returns the larger of two numbers.\npub fn max(a: u32, b: u32) -> u32 {\n",
];
const TOKENS: usize = 48;

/// Answers to all snippets, greedy and sampled.
fn answers(server: &Server) -> Vec<Value> {
    let ask = |prompt: &str, temperature: f64| {
        let body =
            json!({"prompt": prompt, "max_tokens": TOKENS, "temperature": temperature, "seed": 7, "logprobs": 1});
        let (status, answer) = server.post("/v1/completions", body);
        assert_eq!(status, 200, "{answer}");
        answer["choices"].clone()
    };
    [0.0, 0.8].iter().flat_map(|&temperature| SNIPPETS.map(|prompt| ask(prompt, temperature))).collect()
}

fn metric(server: &Server, name: &str) -> f64 {
    let text = request(server.port, "GET", "/metrics", "").body;
    let value = text.lines().find(|line| line.starts_with(name)).and_then(|line| line.rsplit(' ').next());
    value.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("{name} is not among {text}"))
}

#[test]
fn the_built_in_model_has_heads_and_a_sibling() {
    let flags = ["--max-num-seqs", "2", "--max-model-len", "512", "--no-enable-prefix-caching"];
    let plain = answers(&Server::start(&flags));
    assert!(plain.iter().any(|choices| *choices != plain[0]), "answers are alike");
    // A fixed size of drafts, so that the number of accepted tokens is the same everywhere.
    let fixed = [&flags[..], &["--speculate-fixed", "--speculate-tokens", "6", "--speculate"]].concat();
    for (method, said, least) in [
        ("eagle", "an EAGLE head, built in", 2.0),
        ("medusa", "Medusa heads, built in", 1.25),
        ("draft", "the draft model folio-rust-7m", 1.9),
        ("auto", "an EAGLE head, built in", 2.0),
    ] {
        let server = Server::start(&[&fixed[..], &[method]].concat());
        assert!(server.greeting.iter().any(|line| line.contains(said)), "{method}: {:#?}", server.greeting);
        for (number, (found, expected)) in answers(&server).iter().zip(&plain).enumerate() {
            assert_eq!(found, expected, "{method}, answer {number}");
        }
        let drafts = metric(&server, "vllm:spec_decode_num_drafts_total");
        let a_pass = 1.0 + metric(&server, "vllm:spec_decode_num_accepted_tokens_total") / drafts;
        println!("{method}: {a_pass:.2} tokens a pass");
        assert!(drafts > 0.0 && a_pass >= least, "{method}: {a_pass:.2} tokens a pass in {drafts} drafts");
    }
}

/// The small model with a changed tokenizer: it joins fewer letters, and two of its tokens have
/// changed places.
fn in_other_words(name: &str, change: impl FnOnce(&mut Value)) -> PathBuf {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models");
    let folder = scratch(name);
    let model = folder.join("small.gguf");
    std::fs::copy(models.join("folio-rust-7m.gguf"), &model).expect("a model");
    let packed = std::fs::read(models.join("tokenizer.json.lzma")).expect("a tokenizer");
    let mut json = Vec::new();
    let unpacked = LzmaReader::new_mem_limit(&packed[..], 128 << 10, None).expect("packed").read_to_end(&mut json);
    unpacked.expect("a whole file");
    let mut file: Value = serde_json::from_slice(&json).expect("JSON");
    file["model"]["merges"].as_array_mut().expect("merges").truncate(2000);
    let vocab = &mut file["model"]["vocab"];
    (vocab["q"], vocab["z"]) = (vocab["z"].clone(), vocab["q"].clone());
    change(&mut file);
    std::fs::write(folder.join("tokenizer.json"), file.to_string()).expect("a tokenizer");
    model
}

#[test]
fn a_draft_model_of_other_tokens_is_translated() {
    let flags = ["--max-num-seqs", "2", "--max-model-len", "512", "--no-enable-prefix-caching"];
    let plain = answers(&Server::start(&flags));
    let model = in_other_words("translated", |_| ());
    let method = format!("draft:{}", model.display());
    let fixed = ["--speculate-fixed", "--speculate-tokens", "4", "--speculate", &method];
    let server = Server::start(&[&flags[..], &fixed].concat());
    let said = "the draft model small, translated by text";
    assert!(server.greeting.iter().any(|line| line.contains(said)), "{:#?}", server.greeting);
    for (number, (found, expected)) in answers(&server).iter().zip(&plain).enumerate() {
        assert_eq!(found, expected, "answer {number}");
    }
    let drafted = metric(&server, "vllm:spec_decode_num_draft_tokens_total");
    let accepted = metric(&server, "vllm:spec_decode_num_accepted_tokens_total");
    println!("{accepted} of {drafted} drafted tokens");
    assert!(accepted > 50.0 && accepted < drafted, "{accepted} of {drafted}");
}

#[test]
fn a_draft_model_that_loses_text_is_refused() {
    let model = in_other_words("lossy", |file| file["normalizer"] = json!({"type": "Lowercase"}));
    let method = format!("draft:{}", model.display());
    let said = refusal(&["serve", "--port", "0", "--speculate", &method]);
    assert!(said.contains("nor can they be translated") && said.contains("as \"the quick"), "{said}");
}
