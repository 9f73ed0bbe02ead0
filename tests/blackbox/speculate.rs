//! What the binary guesses ahead with by itself: heads and a smaller model for the built-in one. Answers are those without.

use serde_json::{Value, json};

use crate::http::request;
use crate::server::Server;

const SNIPPETS: [&str; 3] = [
    "impl Stack {\n    pub fn new() -> Self {\n        Self { items: Vec::new() }\n    }\n\n    pub fn push(&mut self, item: u32) {",
    "use std::collections::HashMap;\n\nfn count(words: &[&str]) -> HashMap<String, usize> {\n    let mut counts",
    "/// Returns the larger of two numbers.\npub fn max(a: u32, b: u32) -> u32 {\n",
];
const TOKENS: usize = 48;

/// Answers to all snippets, greedy and drawn.
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
    // A fixed number of guesses, so that how many hold is the same everywhere.
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
